//! The end in order has a bound: what a front-end, a disk or a process keeps from ending does not keep
//! the daemon.

use crate::disks::Disks;
use crate::served::Served;
use ringway_terminal::logging;
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the end of a daemon may take. A disk has 30 seconds for what is in flight, a process of
/// its own a minute; systemd kills after 90.
const DAEMON_MAX: Duration = Duration::from_secs(75);
/// How long the end of a disk's own process may take, so that the daemon still hears of it.
const INSIDE_MAX: Duration = Duration::from_secs(50);
/// How long the helper may take after that to let go what is kept of disks that have ended.
const LET_GO_MAX: Duration = Duration::from_secs(2);

/// From now on the process ends in time: with status 1 and a line for each disk that has not, if it
/// has not ended by itself.
///
/// # Errors
/// What the host says to a thread.
pub(crate) fn begin(disks: &Arc<Disks>, inside: bool) -> io::Result<()> {
    let limit = shortened(if inside { INSIDE_MAX } else { DAEMON_MAX });
    // What has ended is closed meanwhile.
    let served: Vec<_> = disks.list().iter().map(Arc::downgrade).collect();
    let isolated = disks.isolated();
    std::thread::Builder::new().name("deadline".into()).spawn(move || {
        let begun = Instant::now();
        while let Some(left) = limit.checked_sub(begun.elapsed()) {
            // Nobody unparks this thread.
            std::thread::park_timeout(left);
        }
        let served: Vec<_> = served.iter().filter_map(Weak::upgrade).collect();
        for disk in &served {
            let name = disk.export.disk().name();
            if !disk.ended.load(SeqCst) || !disk.export.is_clear() {
                tracing::error!(disk = name, "does not end: the daemon ends without it");
            }
        }
        let_go(served);
        for disk in isolated.into_iter().filter(|disk| !disk.has_ended()) {
            let (name, process) = (disk.image(), disk.facts(None).process);
            tracing::error!(disk = name, process, "its process does not end: it is left behind");
        }
        tracing::error!("the end took longer than {limit:?}: ending at once");
        logging::finish();
        // SAFETY: ends the process; nothing of it has to be put in order any more.
        unsafe { libc::_exit(1) }
    })?;
    Ok(())
}

/// Lets others have what nothing can land on any more, as what else is open may close late. Tables that were not left
/// may be written until this process ends, so that image's lock goes then. Beside each other: storage that hangs, and a
/// helper that does not answer, are not waited for.
fn let_go(served: Vec<Arc<Served>>) {
    let (done, all) = sync_channel::<()>(0);
    for disk in served {
        let done = done.clone();
        let leave = move || {
            disk.let_go();
            drop(done);
        };
        // Without one its lock goes with this process.
        let _ = std::thread::Builder::new().name("let-go".into()).spawn(leave);
    }
    drop(done);
    let _ = all.recv_timeout(LET_GO_MAX);
}

/// `limit`, or the part of it that a test wants: `RINGWAY_END=25` ends three times as early as 75 seconds.
#[cfg(any(feature = "kill-points", debug_assertions))]
fn shortened(limit: Duration) -> Duration {
    let seconds = std::env::var("RINGWAY_END").ok().and_then(|word| word.parse::<u32>().ok());
    seconds.map_or(limit, |seconds| limit * seconds / 75)
}

#[cfg(not(any(feature = "kill-points", debug_assertions)))]
fn shortened(limit: Duration) -> Duration {
    limit
}
