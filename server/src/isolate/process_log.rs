//! What the log is told of a disk's process: its guest may be able to end it, again and again, and in
//! wrong hands it may say anything.

use ringway_export::WarningLimit;
use ringway_terminal::reasons::in_full;

/// Tells the log, and not too often.
pub(super) struct ProcessLog {
    disk: String,
    ended: WarningLimit,
    retried: WarningLimit,
    again: WarningLimit,
    odd: WarningLimit,
}

impl ProcessLog {
    pub(super) fn new(disk: &str) -> Self {
        Self {
            disk: disk.to_owned(),
            ended: WarningLimit::warnings(Some(disk), "ends of its process"),
            retried: WarningLimit::warnings(Some(disk), "why it cannot be served again yet"),
            again: WarningLimit::notes(Some(disk), "processes that serve it again"),
            odd: WarningLimit::warnings(Some(disk), "what its process should not say"),
        }
    }

    pub(super) fn ended(&self, process: u32, why: &str) {
        let (disk, Some(pass)) = (&self.disk, self.ended.pass()) else { return };
        let suppressed = pass.suppressed;
        tracing::error!(
            disk,
            process,
            suppressed,
            "its process has ended ({why}). It is started again; its guest waits, and goes on"
        );
    }

    pub(super) fn not_yet(&self, error: &anyhow::Error) {
        let (disk, Some(pass)) = (&self.disk, self.retried.pass()) else { return };
        let (suppressed, why) = (pass.suppressed, in_full(error));
        tracing::error!(disk, suppressed, "it cannot be served again yet: {why}");
    }

    pub(super) fn again(&self, process: u32) {
        let (disk, Some(pass)) = (&self.disk, self.again.pass()) else { return };
        tracing::info!(disk, process, suppressed = pass.suppressed, "it is served again");
    }

    pub(super) fn odd(&self, what: &str) {
        let (disk, Some(pass)) = (&self.disk, self.odd.pass()) else { return };
        tracing::warn!(disk, suppressed = pass.suppressed, "its process is not understood: {what}");
    }
}

#[cfg(test)]
mod tests {
    use super::super::process::Process;
    use super::*;
    use crate::departure::Departure;
    use crate::heard::heard;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    /// In wrong hands it may say anything, as often as it likes, and be started again.
    #[test]
    fn e04_a_process_that_talks_nonsense_is_told_ten_times() {
        let log = ProcessLog::new("disk.img");
        let ended = Departure { clear: true, held: 2, unsaved: false };
        let live = || {
            let (ours, mut its) = UnixStream::pair().unwrap();
            let process = Process::new(1, ours).unwrap();
            std::thread::spawn(move || {
                let nonsense = ["{\"Failed\":\"again\"}\n", "nonsense\n"].repeat(500).concat();
                its.write_all(nonsense.as_bytes()).unwrap();
                its.write_all(b"{\"Stopped\":{\"clear\":true,\"held\":2}}\n").unwrap();
            });
            assert_eq!(process.hear(|what| log.odd(what), drop, drop), Some(ended));
        };
        let lines = heard(|| (0..3).for_each(|_| live()));
        assert_eq!(lines.len(), 10, "{lines:?}");
        assert!(lines[0].contains("it says twice that it has started"), "{lines:?}");
    }
}
