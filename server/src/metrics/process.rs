//! The figures of this process, by the names that all exporters use. What has to be opened for them is
//! opened before the sandbox.

use crate::clock::clock;
use rustix::io::{IoSliceMut, ReadWriteFlags, preadv2};
use rustix::process::{Resource, getrlimit};
use std::fs::File;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What is asked for them.
pub(super) struct ProcessFigures {
    statm: Option<File>,
    fds: Option<File>,
    page: u64,
    max_fds: Option<u64>,
    started: Duration,
}

/// What they are now; `None` where the host does not tell.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Process {
    pub(super) cpu: Duration,
    pub(super) open_fds: Option<u64>,
    pub(super) max_fds: Option<u64>,
    pub(super) virtual_bytes: Option<u64>,
    pub(super) resident_bytes: Option<u64>,
    pub(super) started: Duration,
}

impl ProcessFigures {
    /// Opens what they are read from.
    pub(super) fn open() -> Self {
        Self {
            statm: File::open("/proc/self/statm").ok(),
            fds: File::open("/proc/self/fd").ok(),
            page: ringway_core::mem::page_size() as u64,
            max_fds: getrlimit(Resource::Nofile).current,
            started: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
        }
    }

    pub(super) fn now(&self) -> Process {
        let [virtual_bytes, resident_bytes] = self.memory().unwrap_or_default();
        // Since Linux 6.2 the size of this folder is the number of its entries.
        let open_fds = self.fds.as_ref().and_then(|fds| rustix::fs::fstat(fds).ok());
        let open_fds = open_fds.and_then(|stat| u64::try_from(stat.st_size).ok());
        Process {
            cpu: process_cpu_time(),
            open_fds: open_fds.filter(|&count| count > 0),
            max_fds: self.max_fds,
            virtual_bytes,
            resident_bytes,
            started: self.started,
        }
    }

    /// proc(5): size and resident, in pages.
    fn memory(&self) -> Option<[Option<u64>; 2]> {
        let mut text = [0; 256];
        let mut into = [IoSliceMut::new(&mut text)];
        let got = preadv2(self.statm.as_ref()?, &mut into, 0, ReadWriteFlags::empty()).ok()?;
        let text = std::str::from_utf8(&text[..got]).ok()?;
        let mut words = text.split_ascii_whitespace();
        let mut bytes = || words.next()?.parse::<u64>().ok()?.checked_mul(self.page);
        Some([bytes(), bytes()])
    }
}

fn process_cpu_time() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_memory_and_descriptors_and_has_begun() {
        let figures = ProcessFigures::open();
        let now = figures.now();
        assert!(now.virtual_bytes > now.resident_bytes && now.resident_bytes > Some(1 << 20));
        assert!(now.started > Duration::from_secs(1_700_000_000) && now.cpu > Duration::ZERO);
        let list = || std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        // Other tests of this process open and close theirs meanwhile: it is between two lists soon.
        let between = || {
            let (before, now, after) = (list(), figures.now().open_fds, list());
            now.is_none_or(|count| (before.min(after)..=before.max(after)).contains(&(count + 1)))
        };
        assert!((0..1000).any(|_| between()), "{now:?}, {}", list());
        assert!(now.max_fds.is_some_and(|max| max >= list()));
    }
}
