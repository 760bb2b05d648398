//! The loop with a queue of the test's own.

use super::*;
use crate::command::command_channel;
use crate::polling::Polling;
use crate::queue::Pop;
use ringway_aio::Null;
use ringway_core::mem::{GuestMap, Mapping};
use ringway_core::{Request, Status};
use ringway_disk::{EngineKind, OpenOptions, Source, open};
use rustix::event::{EventfdFlags, eventfd};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::sync_channel;

/// An empty ring whose memory vanishes at the worst moment: after the last look, before the sleep.
struct Vanishing {
    file: File,
    memory: Mapping,
    map: Arc<GuestMap>,
    kick: Arc<OwnedFd>,
    now: Arc<AtomicBool>,
}

impl RequestQueue for Vanishing {
    type Token = ();

    fn pop(&mut self, _: &mut Request) -> Result<Pop<()>, Broken> {
        Ok(Pop::Empty)
    }

    fn has_work(&self) -> bool {
        false
    }

    fn complete(&mut self, (): (), _: Status, _: u32) {}

    fn publish(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        if !self.now.load(SeqCst) {
            return Ok(Armed::Quiet);
        }
        self.file.set_len(0).expect("a memfd");
        // SAFETY: the mapping is longer than one byte; what was behind it is replaced by zeroes.
        unsafe { self.memory.at(0).write_volatile(1) };
        Ok(Armed::Quiet)
    }

    fn disarm(&mut self) {}

    fn doorbell(&self) -> RawFd {
        self.kick.as_raw_fd()
    }

    fn memory(&self) -> &Arc<GuestMap> {
        &self.map
    }

    fn memory_gone(&self) -> bool {
        self.memory.is_poisoned()
    }

    fn depth(&self) -> u16 {
        4
    }
}

/// Nobody kicks again: the worker must not sleep over it.
#[test]
fn b03_memory_that_vanishes_just_before_the_sleep_is_noticed() {
    let (handle, inbox) = command_channel().unwrap();
    let worker = std::thread::spawn(move || {
        let options = PoolOptions {
            engine: EngineKind::Null,
            workers: 1,
            polling: Polling::Never,
            harvest_at_once: true,
            pin_memory: false,
            iopoll: false,
            sample_latency: false,
        };
        Worker::new(Null::new(16).unwrap(), inbox, &options).unwrap().run()
    });
    let fd = rustix::fs::memfd_create("vanishing", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(8192).unwrap();
    let kick = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let now = Arc::new(AtomicBool::new(false));
    let queue = Vanishing {
        memory: Mapping::of_file(&file, 0, 8192).unwrap(),
        file,
        map: Arc::new(GuestMap::default()),
        kick: Arc::clone(&kick),
        now: Arc::clone(&now),
    };
    let disk = open(&OpenOptions::new(Source::Null { bytes: 1 << 20, latency_us: 0 })).unwrap();
    let (raise, raised) = sync_channel(16);
    let alarm = Box::new(move |broken| {
        // Told often enough if it is full.
        let _ = raise.try_send(broken);
    });
    handle.add(queue, Arc::new(disk), false, alarm).unwrap();
    // By now it sleeps, and no bell of its own is on its way. One kick, and nothing after it.
    std::thread::sleep(Duration::from_millis(200));
    now.store(true, SeqCst);
    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
    let broken = raised.recv_timeout(Duration::from_secs(10));
    assert_eq!(broken, Ok(Alarm::Broken(Broken::MEMORY_GONE)), "slept over");
    handle.exit().unwrap();
    worker.join().unwrap().unwrap();
}
