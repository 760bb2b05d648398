//! The CPU that a worker is on.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Has this thread run on another of the CPUs that it may use, if it may use more than one. It may use as
/// many afterwards as before, this one among them. Whatever the kernel refuses is left as it is.
#[cold]
pub(crate) fn leave_cpu() {
    let Ok(all) = sched_getaffinity(None) else { return };
    let Some(cpu) = here() else { return };
    let mut others = all;
    others.unset(cpu);
    // A thread does not stay where it must not be; once it has gone it may come back, but is not sent.
    if others.count() > 0 && sched_setaffinity(None, &others).is_ok() {
        // What was allowed before is allowed again, unless somebody has taken it away meanwhile.
        let _back = sched_setaffinity(None, &all);
    }
}

/// The CPU that this thread is on, if it is one that a set can name. The C library knows without a system call.
fn here() -> Option<usize> {
    // SAFETY: it takes nothing and touches no memory of ours.
    let cpu = unsafe { libc::sched_getcpu() };
    usize::try_from(cpu).ok().filter(|&cpu| cpu < CpuSet::MAX_CPU)
}

/// Whether guests sleep until they are called, going by how often they were.
#[derive(Debug, Default)]
pub(crate) struct GuestCalls {
    /// When it was last asked: calls of all guests, and sleeps of the worker.
    calls: u64,
    sleeps: u64,
}

impl GuestCalls {
    /// True if there was less than one call in four sleeps since this was last asked.
    pub(crate) fn were_few(&mut self, calls: u64, sleeps: u64) -> bool {
        // Queues that have gone have taken their calls along.
        let new = Self { calls, sleeps };
        let before = std::mem::replace(self, new);
        calls.saturating_sub(before.calls) < sleeps.saturating_sub(before.sleeps) / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_is_called_after_each_sleep_sleeps() {
        let mut calls = GuestCalls::default();
        assert!(calls.were_few(1_000, 16_000));
        assert!(!calls.were_few(1_064, 16_064), "one each");
        assert!(!calls.were_few(1_080, 16_128), "one in four");
        assert!(calls.were_few(1_095, 16_192));
        assert!(calls.were_few(1_095, 16_256), "none");
        assert!(calls.were_few(10, 16_320), "a queue has gone");
        assert!(!calls.were_few(80, 16_384));
    }

    #[test]
    fn a_thread_leaves_its_cpu_and_keeps_all_it_may_use() {
        let all = sched_getaffinity(None).unwrap();
        if all.count() < 2 {
            return;
        }
        // The kernel may send it back in between, but hardly each time.
        let left = (0..100).filter(|_| {
            let before = here();
            leave_cpu();
            here() != before
        });
        assert!(left.count() > 0);
        assert_eq!(sched_getaffinity(None).unwrap(), all);
    }

    #[test]
    fn a_thread_with_one_cpu_stays() {
        std::thread::spawn(|| {
            let mut one = sched_getaffinity(None).unwrap();
            let cpu = here();
            one.clear();
            one.set(cpu.unwrap());
            sched_setaffinity(None, &one).unwrap();
            leave_cpu();
            assert_eq!((here(), sched_getaffinity(None).unwrap()), (cpu, one));
        })
        .join()
        .unwrap();
    }
}
