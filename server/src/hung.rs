//! Files that nobody can look at, because their file system hangs: a daemon starts without the disks that are in them.

use super::host::{LOOK_UP_MAX, hangs, look, settle};
use anyhow::{anyhow, bail};
use ringway_control::config::{DiskSpec, Location};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, read, write};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Looking goes on quietly for that long.
const LOGGED_AFTER: Duration = Duration::from_secs(2);

/// Those of which nothing was heard.
#[derive(Debug, Default)]
pub(crate) struct Hung(BTreeSet<PathBuf>);

/// A disk that the daemon has started without.
pub(crate) struct Absent {
    pub(crate) image: PathBuf,
    pub(crate) why: String,
}

impl Hung {
    /// Looks at the files of all disks at once. There must be no other thread: a process does it that is left behind if
    /// need be, as a thread could not be, which would be in no sandbox.
    ///
    /// # Errors
    /// What the host says to a process.
    pub(crate) fn look_at(disks: &[DiskSpec]) -> anyhow::Result<Self> {
        let paths: Vec<_> = disks.iter().flat_map(DiskSpec::files).collect();
        if paths.is_empty() {
            return Ok(Self::default());
        }
        let (heard, told) = rustix::pipe::pipe()?;
        // SAFETY: there is one thread, so the child may do anything the parent may.
        let child = match unsafe { libc::fork() } {
            -1 => bail!("cannot start a process: {}", std::io::Error::last_os_error()),
            0 => look_and_tell(&paths, &told),
            child => Pid::from_raw(child),
        };
        drop(told);
        let mut left: BTreeSet<_> = (0..paths.len()).collect();
        hear(&heard, &paths, &mut left);
        if let Some(child) = child {
            let how = match left.is_empty() {
                true => WaitOptions::empty(),
                // It may be that nothing ends it but its file system.
                false => WaitOptions::NOHANG,
            };
            let _ = kill_process(child, Signal::KILL);
            let _ = waitpid(Some(child), how);
        }
        Ok(Self(left.into_iter().map(|number| paths[number].to_owned()).collect()))
    }

    /// What a path leads to, unless that is not known.
    pub(crate) fn locate(&self, path: &Path) -> Location {
        if self.0.contains(path) { Location::unknown(path) } else { Location::of(path) }
    }

    /// Takes out the disks that cannot be opened.
    ///
    /// # Errors
    /// That none is left, for a daemon to which none can be added.
    pub(crate) fn part(
        &self,
        disks: &mut Vec<DiskSpec>,
        adds: bool,
    ) -> anyhow::Result<Vec<Absent>> {
        let mut absent = Vec::new();
        disks.retain(|disk| {
            let Some(path) = disk.files().find(|path| self.0.contains(*path)) else { return true };
            let why = format!("{}{}", disk.lead(), hangs(path.display()));
            let image = disk.words.image.clone().unwrap_or_default();
            absent.push(Absent { image, why });
            false
        });
        if let (true, false, Some(first)) = (disks.is_empty(), adds, absent.first()) {
            return Err(anyhow!(first.why.clone()));
        }
        let again = match adds {
            true => "`ringway ctl reload` or `ringway ctl add` serves it once that is over",
            false => "start the daemon anew once that is over",
        };
        for disk in &mut absent {
            disk.why = format!("a disk is not served. {}. {again}", disk.why);
            tracing::error!("{}", disk.why);
        }
        Ok(absent)
    }
}

/// Each on a thread of its own; says which were looked at.
fn look_and_tell(paths: &[&Path], told: &OwnedFd) -> ! {
    settle(&[Some(told.as_raw_fd())], false);
    if let Ok(null) = File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stderr(&null);
    }
    std::thread::scope(|scope| {
        for (number, path) in (0u32..).zip(paths) {
            let look = move || {
                look(path);
                let _ = write(told, &number.to_ne_bytes());
            };
            // One after the other, without threads.
            let begun = std::thread::Builder::new().spawn_scoped(scope, look);
            if begun.is_err() {
                look();
            }
        }
    });
    // SAFETY: ends the process. What belongs to the daemon is not put in order here.
    unsafe { libc::_exit(0) }
}

/// Until there is nothing left, or the time is over. If the process ends by accident nothing is known to hang.
fn hear(heard: &OwnedFd, paths: &[&Path], left: &mut BTreeSet<usize>) {
    let (begun, mut logged) = (Instant::now(), false);
    while !left.is_empty() {
        let most = if logged { LOOK_UP_MAX } else { LOGGED_AFTER };
        let time = Timespec::try_from(most.saturating_sub(begun.elapsed())).ok();
        match poll(&mut [PollFd::new(heard, PollFlags::IN)], time.as_ref()) {
            Err(Errno::INTR) => continue,
            Ok(0) if logged => return,
            Ok(0) => {
                logged = true;
                let seconds = LOOK_UP_MAX.as_secs();
                for number in &*left {
                    let path = paths[*number].display();
                    tracing::warn!(
                        "{path}: waiting up to {seconds} s for it: its file system does not answer"
                    );
                }
                continue;
            }
            _ => {}
        }
        let mut number = [0; 4];
        match read(heard, &mut number) {
            Ok(4) => _ = left.remove(&(u32::from_ne_bytes(number) as usize)),
            Err(Errno::INTR) => {}
            _ => left.clear(),
        }
    }
}
