//! Who has an image's lock, as it is noted beside the image: so that the successor of a process that was
//! killed on this host knows at once that it is dead, and does not wait until the cluster misses it.

use std::fs;
use std::process;

/// The key of the image's metadata under which the holder of its lock is noted.
pub(crate) const KEY: &std::ffi::CStr = c"ringway.owner";

/// The process, as others on this host can find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Myself {
    /// This boot of this kernel.
    boot: String,
    /// Whose numbers of processes are meant.
    namespace: String,
    pid: u32,
}

impl Myself {
    /// Reads files of /proc; without them nobody is ever known to be dead.
    pub(crate) fn new() -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let namespace = namespace.to_string_lossy().into_owned();
        Self { boot: boot.trim().to_owned(), namespace, pid: process::id() }
    }

    /// What is noted once the lock is had, at `address`.
    pub(crate) fn note(&self, address: &str) -> String {
        format!("1 {} {} {} {address}", self.boot, self.namespace, self.pid)
    }

    /// True if a note is of whoever has the lock at `address`, who was a process of this host and is
    /// none any more.
    pub(crate) fn knows_dead(&self, note: &str, address: &str) -> bool {
        let parts: Vec<&str> = note.split(' ').collect();
        let ["1", boot, namespace, pid, noted] = parts[..] else { return false };
        let Ok(pid) = pid.parse::<libc::pid_t>() else { return false };
        let here = !boot.is_empty() && boot == self.boot && namespace == self.namespace;
        // Whoever has the number by now may be another process: then nothing is known.
        here && !namespace.is_empty() && noted == address && pid > 0 && is_gone(pid)
    }
}

/// True if no process of this number is there. One that may not be reached is.
fn is_gone(pid: libc::pid_t) -> bool {
    // SAFETY: the signal 0 is none.
    let rc = unsafe { libc::kill(pid, 0) };
    rc == -1 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_of_this_host_that_has_ended_is_known_to_be_dead() {
        let me = Myself::new();
        let mut child = process::Command::new("true").spawn().unwrap();
        let dead = Myself { pid: child.id(), ..me.clone() };
        child.wait().unwrap();
        let note = dead.note("10.0.0.1:0/7");
        assert!(me.knows_dead(&note, "10.0.0.1:0/7"), "{note}");
        assert!(!me.knows_dead(&note, "10.0.0.1:0/8"), "somebody else has the lock");
        assert!(!me.knows_dead(&me.note("a"), "a"), "it lives");
        for other in [
            Myself { boot: "another".into(), ..dead.clone() },
            Myself { boot: String::new(), ..dead.clone() },
            Myself { namespace: "pid:[1]".into(), ..dead },
        ] {
            assert!(!me.knows_dead(&other.note("a"), "a"), "{other:?}");
        }
        assert!(!me.knows_dead("", "") && !me.knows_dead("1 a b c d e", "e"));
    }
}
