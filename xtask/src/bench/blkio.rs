//! The same load through an independent client: libblkio's own Rust core.

use crate::bench::lab::Lab;
use crate::bench::load::{Load, Outcome};
use crate::bench::options::Waiting;
use crate::bench::phases::{Counting, Next, measure};
use anyhow::{Context, Result, bail};
use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::atomic::AtomicU8;

/// One queue with the buffers of its slots, one after another from `base`.
struct QueueLoad {
    queue: Blkioq,
    base: usize,
    load: Load,
    units: u64,
    random: fastrand::Rng,
    next: u64,
}

/// As [`crate::bench::client::attack_by`]; no latencies, no mixed sizes, no counts of kicks.
pub(crate) fn attack(
    lab: &Lab,
    socket: &Path,
    queues: u16,
    load: &Load,
    boundary: &mut dyn FnMut() -> Result<()>,
) -> Result<Outcome> {
    if load.timed || !load.mix.is_empty() {
        bail!("the client blkio takes no latencies: use --client ringway");
    }
    let mut device = Blkio::new("virtio-blk-vhost-user")?;
    device.set_str("path", socket.to_str().context("a path in UTF-8")?)?;
    device.connect()?;
    device.set_i32("num-queues", queues.into())?;
    device.set_i32("queue-size", lab.common.queue_size.into())?;
    let capacity = device.get_u64("capacity")?;
    let started = device.start()?;
    let len = load.depth as usize * load.size as usize;
    let mut queues = Vec::new();
    for (index, queue) in started.queues.into_iter().enumerate() {
        let region = device.alloc_mem_region(len.next_multiple_of(1 << 21))?;
        device.map_mem_region(&region)?;
        let units = (capacity / u64::from(load.size)).max(1);
        let random = fastrand::Rng::with_seed(index as u64);
        queues.push(QueueLoad { queue, base: region.addr, load: *load, units, random, next: 0 });
    }
    let cpus = lab.common.client_cpus.len();
    let threads = if load.waiting == Waiting::Polling { cpus } else { queues.len() };
    let mut threads: Vec<Vec<QueueLoad>> =
        (0..threads.min(queues.len())).map(|_| Vec::new()).collect();
    let count = threads.len();
    for (index, queue) in queues.into_iter().enumerate() {
        threads[index % count].push(queue);
    }
    measure(lab, threads, boundary, work)
}

fn work(mut queues: Vec<QueueLoad>, phase: &AtomicU8) -> Result<Outcome> {
    let load = queues[0].load;
    let least = usize::from(load.waiting == Waiting::Sleeping);
    let mut found: Vec<MaybeUninit<Completion>> = Vec::new();
    found.resize_with(load.depth as usize, MaybeUninit::uninit);
    for queue in &mut queues {
        (0..load.depth as usize).for_each(|slot| queue.start(slot));
    }
    let (mut counting, mut outcome) = (Counting::default(), Outcome::default());
    loop {
        for queue in &mut queues {
            let count = queue.queue.do_io(&mut found, least, None, None)?;
            for one in &found[..count] {
                // SAFETY: do_io has written the first `count`.
                let one = unsafe { one.assume_init_ref() };
                outcome.errors += u64::from(one.ret != 0);
                outcome.done += 1;
                queue.start(one.user_data);
            }
        }
        match counting.look(phase) {
            Next::GoOn => {}
            Next::Begin => outcome = Outcome { errors: outcome.errors, ..Outcome::default() },
            Next::End(took, cpu) => {
                outcome.seconds = took.as_secs_f64();
                outcome.cpu_ns = u64::try_from(cpu.as_nanos())?;
                outcome.bytes = outcome.done * u64::from(load.size);
                break;
            }
        }
    }
    // Sends what is queued and takes all that is in flight.
    for queue in &mut queues {
        let all = found.len();
        queue.queue.do_io(&mut found, all, None, None)?;
    }
    Ok(outcome)
}

impl QueueLoad {
    #[inline]
    fn start(&mut self, slot: usize) {
        let Load { size, write, sequential, .. } = self.load;
        let unit = if sequential {
            self.next = if self.next + 1 < self.units { self.next + 1 } else { 0 };
            self.next
        } else {
            self.random.u64(..self.units)
        };
        let (offset, len) = (unit * u64::from(size), size as usize);
        let buffer = (self.base + slot * len) as *mut u8;
        if write {
            self.queue.write(offset, buffer, len, slot, ReqFlags::empty());
        } else {
            self.queue.read(offset, buffer, len, slot, ReqFlags::empty());
        }
    }
}
