//! One image, one daemon, and never two generations of one: the lock of an image belongs to the open
//! file, and every operation that the kernel still carries out holds that file. So the lock of a
//! killed daemon is free only when its last write has landed (hazard C10).

use super::holder::Holder;
use super::image_lock::{LockError, lock_image, marked_by_others};
use super::{OpenError, OpenOptions};
use std::fs::{File, OpenOptions as FileOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long to wait without being asked for the last operations of a killed daemon. As long as a
/// running one waits for its disk (`DRAIN_MAX` in `export`).
const LAST_WRITES: Duration = Duration::from_secs(30);

/// How long to wait before looking again: a part of what was waited for, within bounds. Most killed
/// daemons are gone within milliseconds, and a guest waits for this one.
const RETRY_AFTER: (u32, Duration, Duration) =
    (16, Duration::from_micros(250), Duration::from_millis(10));

/// How often a path may lead to another file by the time its lock is ours. Each time somebody has to
/// put a file there in a moment; so often is no accident.
const REPLACED_MAX: u32 = 16;

/// How long a block device may be claimed by nobody that is seen: a process that was killed lets go of its
/// lock a moment before its claim.
const CLAIM_LASTS: Duration = Duration::from_secs(1);

/// How long whoever seems to live is believed to be dying: a process that was killed is seen to be so a
/// moment later, and one that was killed between its two locks has left one without the other.
const MOMENT: Duration = Duration::from_millis(400);

/// Waiting goes on quietly for that long.
const LOGGED_AFTER: Duration = Duration::from_millis(500);

/// How long the name of a holder is believed while waiting: to find it can take a look at every
/// descriptor of every process.
const NAME_LASTS: Duration = Duration::from_millis(500);

/// Who has the image at `path`, and is no daemon of this kind: `process 42 (qemu-system-x86)`.
#[must_use]
pub fn foreign_holder(path: &Path, read_only: bool) -> Option<String> {
    let mut reading = FileOptions::new();
    // A path may have become a pipe that nobody writes to.
    let file = reading.read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let byte = marked_by_others(&file, read_only).ok()??;
    match Holder::of(&LockError::Marked(byte), &file) {
        Holder::Foreign(name) => name,
        _ => None,
    }
}

/// Why an image is not ours.
#[derive(Debug)]
pub(super) enum Fenced {
    /// It cannot be opened.
    Open(OpenError),
    /// Somebody else has it, or has put another one in its place.
    Theirs(OpenError),
}

/// Opens an image and locks it. By the time the lock is ours the path may lead to another file: the
/// lock of one that nobody can find keeps nobody away, so that one is opened instead.
pub(super) fn locked<T>(
    path: &Path,
    options: &OpenOptions,
    mut open: impl FnMut() -> Result<(File, T), OpenError>,
) -> Result<(File, T), Fenced> {
    let mut lock_wait = LockWait::new(path, options, true);
    for _ in 0..REPLACED_MAX {
        let (file, rest) = open().map_err(Fenced::Open)?;
        if !options.incoming {
            lock_wait.lock(&file, options.read_only).map_err(Fenced::Theirs)?;
        }
        if is_at(&file, path).map_err(Fenced::Theirs)? {
            return Ok((file, rest));
        }
        tracing::warn!("{}: it was replaced while it was being locked", path.display());
    }
    Err(Fenced::Theirs(OpenError::Replaced(path.into())))
}

/// True if this is what the path leads to.
fn is_at(file: &File, path: &Path) -> Result<bool, OpenError> {
    let host = |source| OpenError::Host { path: path.into(), what: "look at it", source };
    let there = match path.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(OpenError::Replaced(path.into()));
        }
        there => there.map_err(host)?,
    };
    let here = file.metadata().map_err(host)?;
    // A block device is the same whatever its node is.
    if here.file_type().is_block_device() {
        return Ok(there.file_type().is_block_device() && there.rdev() == here.rdev());
    }
    Ok((there.dev(), there.ino()) == (here.dev(), here.ino()))
}

/// Waiting for one image, with an end.
pub(super) struct LockWait<'a> {
    path: &'a Path,
    /// `--lock-wait`.
    asked: Option<Duration>,
    /// It can be handed over with a guest.
    moves: bool,
    begun: Instant,
    logged: bool,
}

impl<'a> LockWait<'a> {
    pub(super) fn new(path: &'a Path, options: &OpenOptions, moves: bool) -> Self {
        let asked = options.lock_wait;
        Self { path, asked, moves, begun: Instant::now(), logged: false }
    }

    /// A block device is claimed by somebody else: waits for a moment, or gives up.
    pub(super) fn claimed(&mut self) -> Result<(), OpenError> {
        self.wait(Holder::of_device(self.path))
    }

    /// A block device is claimed by a process, not by the host itself.
    pub(super) fn is_claimed_by_a_process(&self) -> bool {
        !matches!(Holder::of_device(self.path), Holder::Host)
    }

    /// Locks the open file: one writer, or any number of readers.
    pub(super) fn lock(&mut self, file: &File, read_only: bool) -> Result<(), OpenError> {
        let mut known: Option<(Instant, Holder)> = None;
        loop {
            let error = match lock_image(file, read_only) {
                Ok(()) => return Ok(()),
                Err(LockError::Host(source)) => {
                    return Err(OpenError::Host {
                        path: self.path.into(),
                        what: "lock it",
                        source,
                    });
                }
                Err(error) => error,
            };
            let holder = match known.take() {
                Some((at, holder))
                    if at.elapsed() < NAME_LASTS && matches!(error, LockError::Marked(_)) =>
                {
                    known = Some((at, holder.clone()));
                    holder
                }
                _ => known.insert((Instant::now(), Holder::of(&error, file))).1.clone(),
            };
            self.wait(holder)?;
        }
    }

    fn wait(&mut self, holder: Holder) -> Result<(), OpenError> {
        let lock_wait = match &holder {
            Holder::Host => CLAIM_LASTS,
            Holder::Living(_) | Holder::Foreign(_) => self.asked.unwrap_or(MOMENT),
            Holder::Dying(_) | Holder::Unseen => self.asked.unwrap_or(LAST_WRITES),
        };
        let waited = self.begun.elapsed();
        if waited >= lock_wait {
            return Err(OpenError::InUse {
                path: self.path.into(),
                holder: holder.name(),
                moves: self.moves,
            });
        }
        if waited >= LOGGED_AFTER && !self.logged {
            self.logged = true;
            tracing::warn!(
                "{}: waiting up to {} s for its lock: it is in use by {}",
                self.path.display(),
                lock_wait.as_secs_f32(),
                holder.name()
            );
        }
        let (part, least, most) = RETRY_AFTER;
        std::thread::sleep((waited / part).clamp(least, most).min(lock_wait - waited));
        Ok(())
    }
}
