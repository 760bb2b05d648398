//! Whether the daemon does what it is there for, as systemd is told ([`crate::notify`]).
//!
//! A worker that owes the watchdog an answer for long is either held by the kernel, for a disk that does
//! not answer, or it loops. Only of a loop a new daemon would be the cure, and only a loop uses CPU time.

use super::clock::clock;
use super::notify::Notify;
use rustix::event::Timespec;
use rustix::thread::Pid;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// What the watchdog has found, for the thread that tells systemd.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pulse(Arc<AtomicBool>);

impl Pulse {
    /// False if a worker loops without end.
    fn beats(&self) -> bool {
        !self.0.load(Relaxed)
    }

    /// Tells systemd if it is time to, and when it is next, if ever. Whatever wakes the caller in between
    /// makes it a little earlier.
    pub(crate) fn tell(&self, notify: &Notify) -> Option<Timespec> {
        let every = notify.every()?;
        if self.beats() {
            notify.alive();
        }
        // What systemd may ask for is far below the largest number.
        Timespec::try_from(every).ok()
    }

    /// What the watchdog says: whether a worker loops.
    pub(crate) fn set(&self, loops: bool) {
        self.0.store(loops, Relaxed);
    }
}

/// The CPU time of a thread of this process, if it is there.
pub(crate) fn cpu_time(thread: Pid) -> Option<Duration> {
    // CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED, include/uapi/linux/time.h and clock_getcpuclockid(3).
    clock((!thread.as_raw_nonzero().get() << 3) | 4 | 2)
}

/// Workers that do not answer, and what CPU time each had used when that was first seen.
#[derive(Debug, Default)]
pub(crate) struct Silent(BTreeMap<String, (Duration, Duration)>);

impl Silent {
    /// A worker owes an answer at `now` and has used `cpu` so far: true if it has done so for `limit`
    /// and was busy for half of that.
    pub(crate) fn loops(
        &mut self,
        worker: &str,
        now: Duration,
        cpu: Duration,
        limit: Duration,
    ) -> bool {
        let (since, used) = *self.0.entry(worker.to_owned()).or_insert((now, cpu));
        let silent = now.saturating_sub(since);
        silent >= limit && cpu.saturating_sub(used) * 2 >= silent
    }

    /// It has answered, or has ended.
    pub(crate) fn forget(&mut self, worker: &str) {
        self.0.remove(worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn the_time_of_another_thread_grows_only_while_it_works() {
        let (tell, received) = std::sync::mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let loops = Arc::clone(&stop);
        let busy = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            while !loops.load(Relaxed) {
                std::hint::spin_loop();
            }
        });
        let thread = received.recv().unwrap();
        let first = cpu_time(thread).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while cpu_time(thread).unwrap() < first + Duration::from_millis(5) {
            assert!(Instant::now() < deadline, "it loops, and its time does not grow");
        }
        stop.store(true, Relaxed);
        busy.join().unwrap();
    }

    #[test]
    fn a_worker_that_loops_is_told_from_one_that_the_kernel_holds() {
        let s = Duration::from_secs;
        let mut silent = Silent::default();
        for now in 0..30 {
            assert!(!silent.loops("busy", s(now), s(now), s(30)), "not yet");
            assert!(!silent.loops("held", s(now), s(7), s(30)));
        }
        assert!(silent.loops("busy", s(31), s(29), s(30)));
        assert!(!silent.loops("held", s(3600), s(8), s(30)), "it waits for its disk");
        silent.forget("busy");
        assert!(!silent.loops("busy", s(32), s(30), s(30)), "it has answered meanwhile");
    }
}
