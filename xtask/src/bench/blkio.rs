//! The same load through an independent client: libblkio's own Rust core.

use crate::bench::lab::Lab;
use anyhow::{Context, Result};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use ringway_bench::{Ask, Backend, Effort, Load, Opened, Outcome, QueueSet, Server, measure};
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

/// As [`crate::bench::load::measure_server`]; no counts of kicks.
pub(crate) fn measure_server(
    lab: &Lab,
    socket: &Path,
    load: &Load,
    boundary: &mut dyn FnMut() -> Result<()>,
) -> Result<Outcome> {
    let mut device = Blkio::new("virtio-blk-vhost-user")?;
    device.set_str("path", socket.to_str().context("a path in UTF-8")?)?;
    device.connect()?;
    device.set_i32("num-queues", (load.jobs * load.queues).into())?;
    device.set_i32("queue-size", lab.common.queue_size.into())?;
    let capacity = device.get_u64("capacity")?;
    let started = device.start()?;
    let (slots, room) = (load.depth as usize, load.sizes.most() as usize);
    let mut queues = Vec::new();
    for queue in started.queues {
        let region = device.alloc_mem_region((slots * room).next_multiple_of(1 << 21))?;
        device.map_mem_region(&region)?;
        let base = region.addr;
        queues.push(BlkioBackend::new(queue, base, slots, room));
    }
    let (depth, mut queues) = (load.depth, queues.into_iter());
    let backends = (0..load.jobs).map(|_| {
        let its: Vec<_> = queues.by_ref().take(load.queues.into()).collect();
        move || Ok(QueueSet::new(its, depth))
    });
    let opened = Opened::custom(capacity, 512, Server::Unknown, backends);
    measure(opened, load, boundary)
}

/// One queue with the memory of its slots.
///
/// # Invariants
/// 1. `room` bytes at `base + slot * room` belong to that slot alone, as long as the device lives, which is
///    longer than this does.
struct BlkioBackend {
    queue: Blkioq,
    base: usize,
    room: usize,
    found: Vec<MaybeUninit<Completion>>,
    /// Those of `found` that have been taken, and that there are.
    taken: usize,
    count: usize,
    /// They have all been taken, and who takes them was not told that there are no more.
    drained: bool,
    failed: i32,
}

impl BlkioBackend {
    fn new(queue: Blkioq, base: usize, slots: usize, room: usize) -> Self {
        let mut found = Vec::new();
        found.resize_with(slots, MaybeUninit::uninit);
        Self { queue, base, room, found, taken: 0, count: 0, drained: false, failed: 0 }
    }

    /// Shows what is queued and takes what is done, which is one call for this client.
    #[inline]
    fn turn(&mut self, least: usize, mut timeout: Option<Duration>) -> Result<()> {
        (self.taken, self.count, self.drained) = (0, 0, false);
        match self.queue.do_io(&mut self.found, least, timeout.as_mut(), None) {
            Ok(count) => self.count = count,
            Err(error) if error.errno().raw_os_error() == libc::ETIME => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

impl Backend for BlkioBackend {
    #[inline]
    fn start(&mut self, slot: u32, ask: &Ask) -> Result<()> {
        let (len, slot) = (ask.len as usize, slot as usize);
        let buffer = (self.base + slot * self.room) as *mut u8;
        if ask.write {
            self.queue.write(ask.offset, buffer, len, slot, ReqFlags::empty());
        } else {
            self.queue.read(ask.offset, buffer, len, slot, ReqFlags::empty());
        }
        Ok(())
    }

    /// The next call of `pop` that has nothing left to give does it.
    #[inline]
    fn submit(&mut self) -> Result<()> {
        Ok(())
    }

    #[inline]
    fn pop(&mut self) -> Result<Option<(u32, bool)>> {
        if self.taken == self.count {
            // One call a turn: what has been taken is to be asked for again first.
            if std::mem::take(&mut self.drained) {
                return Ok(None);
            }
            self.turn(0, None)?;
            if self.count == 0 {
                return Ok(None);
            }
        }
        // SAFETY: do_io has written the first `count`.
        let one = unsafe { self.found[self.taken].assume_init_ref() };
        self.taken += 1;
        self.drained = self.taken == self.count;
        if one.ret != 0 {
            self.failed = one.ret;
        }
        Ok(Some((u32::try_from(one.user_data)?, one.ret == 0)))
    }

    #[cold]
    fn complaint(&self) -> String {
        std::io::Error::from_raw_os_error(self.failed.saturating_neg()).to_string()
    }

    fn wait(&mut self, timeout: Duration) -> Result<()> {
        if self.taken == self.count { self.turn(1, Some(timeout)) } else { Ok(()) }
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    #[inline]
    fn memory(&mut self, slot: u32) -> &mut [u8] {
        let base = (self.base + slot as usize * self.room) as *mut u8;
        // SAFETY: invariant 1; the slot is not in flight, says the trait.
        unsafe { std::slice::from_raw_parts_mut(base, self.room) }
    }

    fn counted(&self) -> Option<Effort> {
        None
    }
}
