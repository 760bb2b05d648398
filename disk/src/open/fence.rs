//! One image, one daemon, and never two generations of one: the lock of an image belongs to the open
//! file, and every operation that the kernel still carries out holds that file. So the lock of a
//! killed daemon is free only when its last write has landed (hazard C10).

use super::image_lock::{LockError, is_marked, lock_image, marked_by_others};
use super::{BY_HOST, OpenError, OpenOptions, mount};
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
const LOOK_AGAIN: (u32, Duration, Duration) =
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
const TOLD_AFTER: Duration = Duration::from_millis(500);

/// How long the name of a holder is believed while waiting: to find it can take a look at every
/// descriptor of every process.
const NAME_LASTS: Duration = Duration::from_millis(500);

/// Who keeps us from an image.
#[derive(Clone, Debug)]
pub(super) enum Holder {
    /// The host itself: mounted, or part of another device.
    Host,
    /// A process that goes on.
    Living(String),
    /// A process that was killed and is not gone yet.
    Dying(String),
    /// A program that locks as QEMU does and not as we do; its name, if it can be seen.
    Foreign(Option<String>),
    /// The kernel names no process: it is gone but for its last operations, or cannot be seen from
    /// here.
    Unseen,
}

impl Holder {
    /// Who it was that kept us from locking `file`.
    pub(super) fn of(error: &LockError, file: &File) -> Self {
        match error {
            LockError::Marked(byte) if is_foreign(file, *byte) => {
                Self::Foreign(mount::marker(file, *byte).map(mount::process))
            }
            _ => Self::of_lock(file),
        }
    }

    fn of_lock(file: &File) -> Self {
        Self::of_pid(mount::Locks::on(file).pid)
    }

    fn of_pid(pid: Option<u32>) -> Self {
        match pid.map(|pid| (pid, mount::process(pid))) {
            Some((pid, name)) if mount::is_dying(pid) => Self::Dying(name),
            // The table goes on naming it until its last operation is over.
            Some((pid, _)) if !mount::is_here(pid) => Self::Unseen,
            Some((_, name)) => Self::Living(name),
            None => Self::Unseen,
        }
    }

    /// Who has a block device to itself.
    fn of_device(path: &Path) -> Self {
        // Reading without claiming it is allowed.
        let Ok(file) = File::open(path) else { return Self::Host };
        match Self::of_lock(&file) {
            // A mount has the device, but no lock on it.
            Self::Unseen if file.try_lock_shared().is_ok() => Self::Host,
            holder => holder,
        }
    }

    pub(super) fn name(self) -> String {
        match self {
            Self::Host => BY_HOST.into(),
            Self::Living(name) | Self::Foreign(Some(name)) => name,
            Self::Foreign(None) => {
                "a program of QEMU, by its locks, that cannot be seen from here (from the sandbox, \
                 or of another user, container or host)"
                    .into()
            }
            Self::Dying(name) => format!("{name}, killed, whose last writes have not landed yet"),
            Self::Unseen => "a process that cannot be seen from here (of another container or \
                             host), or by the last writes of one that was killed"
                .into(),
        }
    }
}

/// True if whoever has marked this byte has no `flock`, which daemons of this kind hold as long, even
/// dead ones whose last writes have not landed.
fn is_foreign(file: &File, byte: i64) -> bool {
    // A table would do, but does not show what other containers hold.
    let free = file.try_lock().is_ok_and(|()| file.unlock().is_ok());
    // Still there: so whoever it is did not let go of both meanwhile.
    free && is_marked(file, byte).unwrap_or(false)
}

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
    let mut patience = Patience::new(path, options);
    for _ in 0..REPLACED_MAX {
        let (file, rest) = open().map_err(Fenced::Open)?;
        if !options.incoming {
            patience.lock(&file, options.read_only).map_err(Fenced::Theirs)?;
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
pub(super) struct Patience<'a> {
    path: &'a Path,
    /// `--lock-wait`.
    asked: Option<Duration>,
    begun: Instant,
    told: bool,
}

impl<'a> Patience<'a> {
    pub(super) fn new(path: &'a Path, options: &OpenOptions) -> Self {
        Self { path, asked: options.lock_wait, begun: Instant::now(), told: false }
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
    fn lock(&mut self, file: &File, read_only: bool) -> Result<(), OpenError> {
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
        let patience = match &holder {
            Holder::Host => CLAIM_LASTS,
            Holder::Living(_) | Holder::Foreign(_) => self.asked.unwrap_or(MOMENT),
            Holder::Dying(_) | Holder::Unseen => self.asked.unwrap_or(LAST_WRITES),
        };
        let waited = self.begun.elapsed();
        if waited >= patience {
            return Err(OpenError::InUse { path: self.path.into(), holder: holder.name() });
        }
        if waited >= TOLD_AFTER && !self.told {
            self.told = true;
            tracing::warn!(
                "{}: waiting up to {} s for its lock: it is in use by {}",
                self.path.display(),
                patience.as_secs_f32(),
                holder.name()
            );
        }
        let (part, least, most) = LOOK_AGAIN;
        std::thread::sleep((waited / part).clamp(least, most).min(patience - waited));
        Ok(())
    }
}
