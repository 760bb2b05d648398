//! The folder of what outlives a daemon of its disks, and who looks after it when a daemon dies.
//!
//! Each disk that is written has a file there, named after the image and not after its path. The daemon
//! maps it. It belongs to the daemon that has the image's lock, which alone has it removed, when it leaves
//! the image in order. A helper also holds the image: the daemon's own open file, so that the lock stays
//! until it has looked, and if the disk goes through the page cache a second one, opened before anything
//! could go wrong. The host tells that written data is lost to every open file that was there when it
//! happened, once each. So what it told a daemon that died before it could pass it on, it tells the
//! helper as well.

use super::state_name::{ImageStat, Left, StateName};
use anyhow::{Context, bail};
use ringway_core::mem::Mapping;
use ringway_disk::{
    STATE_BYTES, STATE_EXPORT_AT, STATE_FILE_BYTES, STATE_FLUSH_FAILED, STATE_KEPT, STATE_PAUSED,
};
use ringway_image::{Journal, learn_boot};
use ringway_nbd_client::Counts;
use ringway_terminal::reasons::in_full;
use rustix::fs::{
    AtFlags, CWD, Dir, FallocateFlags, FlockOperation, Mode, OFlags, chmod, flock, linkat, mkdirat,
    openat, statat, unlinkat,
};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Where it stands in the page how the images were left, behind what the daemon keeps there: two of them,
/// for the moment in which a disk goes from one to the other.
const LEFT_AT: usize = 64;
const LEFT_MAX: usize = 2;

/// How often to look, and how long to wait in between, for who takes away the state of an export.
const LAST_ONE_TRIES: u32 = 20;
const LAST_ONE_PAUSE: Duration = Duration::from_millis(1);

/// Nothing is kept of a disk, and there is no place to keep it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct NoPlace(pub(super) String);

impl NoPlace {
    fn of(error: &anyhow::Error) -> Self {
        Self(in_full(error))
    }
}

/// The folder, as it was when the daemon was started.
#[derive(Clone)]
pub(crate) struct StateDir(Arc<OwnedFd>);

impl std::fmt::Debug for StateDir {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StateDir")
    }
}

impl StateDir {
    /// Makes the folder for this user alone and opens it. `None`, logged, if there is no place
    /// for one and none was asked for.
    ///
    /// # Errors
    /// What is wrong with the one that was asked for.
    pub(crate) fn open(asked: Option<&Path>) -> anyhow::Result<Option<Self>> {
        // The helper and the daemon cannot look it up once they are confined.
        learn_boot();
        let without = "a failed flush and a pause will not outlive this daemon";
        let Some(path) = asked.map(Path::to_path_buf).or_else(usual) else { return Ok(None) };
        let made = match asked {
            Some(path) => make(path),
            None => make_inside(&path),
        };
        match (made, asked) {
            (Ok(folder), _) => Ok(Some(Self(Arc::new(folder)))),
            (Err(error), Some(path)) => Err(error).with_context(|| path.display().to_string()),
            (Err(error), None) => {
                tracing::warn!("{}: {}: {without}", path.display(), in_full(&error));
                Ok(None)
            }
        }
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.0
    }

    /// The file of one disk, which is made if there is none.
    ///
    /// # Errors
    /// What the host says: [`NoPlace`] if nothing was kept of the disk. Anything else is that something may have been,
    /// which is as it was.
    pub(super) fn file(&self, name: StateName) -> anyhow::Result<File> {
        let name = name.to_string();
        let cannot = || format!("the state of a disk, {name}");
        let open = |more| {
            let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | more;
            openat(&*self.0, &name, flags, Mode::RUSR | Mode::WUSR)
        };
        let file = match open(OFlags::empty()) {
            Err(Errno::NOENT) => {
                let made = open(OFlags::CREATE).with_context(cannot);
                made.map_err(|error| NoPlace::of(&error))?
            }
            opened => opened.with_context(cannot)?,
        };
        let file = File::from(file);
        let meta = file.metadata().with_context(cannot)?;
        let ours = meta.uid() == rustix::process::geteuid().as_raw();
        if !meta.is_file() || !ours || meta.mode() & 0o077 != 0 {
            bail!("{}: others can write to it", cannot());
        }
        if meta.len() > STATE_FILE_BYTES {
            bail!("{}: it is of a later version, or of something else", cannot());
        }
        // What is stored in the page later cannot fail for want of room.
        let allocate = || rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, STATE_BYTES);
        let grown = file.set_len(STATE_FILE_BYTES).map_err(anyhow::Error::from);
        let promised = grown.and_then(|()| match rustix::io::retry_on_intr(allocate) {
            // Folders of a kind that cannot promise it.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(error) => Err(error.into()),
        });
        match promised.with_context(cannot) {
            Ok(()) => Ok(file),
            // Nothing was ever stored in it.
            Err(error) if meta.blocks() == 0 => Err(NoPlace::of(&error).into()),
            Err(error) => Err(error),
        }
    }
}

/// Where it is unless somebody says otherwise: a place in memory that goes when the host goes down. A
/// folder of its own, because sockets beside it are for other users.
fn usual() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some("/run/ringway/state".into());
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty())?;
    Some(PathBuf::from(runtime).join("ringway/state"))
}

/// As [`make`], with the folder around it, which others may search whatever the umask is. One that is
/// there stays as it is.
fn make_inside(path: &Path) -> anyhow::Result<OwnedFd> {
    if let Some(around) = path.parent() {
        match mkdirat(CWD, around, Mode::RWXU) {
            Ok(()) => chmod(around, Mode::from_raw_mode(0o755))?,
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error).context("cannot make the folder around it"),
        }
    }
    make(path)
}

fn make(path: &Path) -> anyhow::Result<OwnedFd> {
    match mkdirat(CWD, path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error).context("cannot make this folder"),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = File::from(openat(CWD, path, flags, Mode::empty())?);
    let meta = folder.metadata()?;
    if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
        bail!("others can write to it. Give a folder of this user alone");
    }
    Ok(folder.into())
}

/// Looks after the state of one disk.
pub(super) struct StateKeeper {
    folder: Arc<OwnedFd>,
    state: Arc<File>,
    page: Mapping,
    journal: Journal,
    /// What of an export is answered and durable, if it is one.
    counts: Option<Counts>,
    /// In a helper: whether the disk goes through the page cache.
    beside: Option<bool>,
    /// Its image, and while that is being put on top of another one both of them, the new one last.
    images: Vec<Kept>,
}

/// An image whose disk has a state, which is named after it.
struct Kept {
    name: StateName,
    /// The daemon's own open file, with its lock: nobody else is served before this is dropped.
    _image: Option<File>,
    /// The same image, and the file with its data if that is another one, opened by themselves: the host tells each of
    /// lost data on its own account.
    witnesses: Vec<File>,
    /// There is one for each file that is written.
    all_seen: bool,
    /// Where the name could be that of another image.
    stat: Option<ImageStat>,
}

impl Kept {
    /// For a process that has nobody beside it.
    fn here(image: &File) -> anyhow::Result<Self> {
        let name = StateName::of(image)?;
        let (witnesses, stat) = (Vec::new(), ImageStat::at(image, name));
        Ok(Self { name, _image: None, witnesses, all_seen: false, stat })
    }

    fn beside(image: File, cached: bool) -> anyhow::Result<Self> {
        let name = StateName::of(&image)?;
        let (witnesses, stat) = (Vec::new(), ImageStat::at(&image, name));
        let mut kept = Self { name, _image: None, witnesses, all_seen: cached, stat };
        if cached {
            kept.watch(&image);
        }
        kept._image = Some(image);
        Ok(kept)
    }

    fn watch(&mut self, file: &File) {
        // The file itself, whatever has its name by now.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        match openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(witness) => self.witnesses.push(witness.into()),
            Err(error) => {
                self.all_seen = false;
                tracing::warn!(
                    "a flush that fails while its daemon is killed may go unnoticed: {error}"
                );
            }
        }
    }
}

impl StateKeeper {
    /// For the process that serves the disk itself: there is nobody to be a witness after its death.
    pub(super) fn here(dir: &StateDir, image: &File) -> anyhow::Result<Self> {
        Self::new(dir, Kept::here(image)?, None)
    }

    /// For the helper of a daemon, whose disk goes through the page cache if it is `cached`.
    pub(super) fn beside(dir: &StateDir, image: File, cached: bool) -> anyhow::Result<Self> {
        Self::new(dir, Kept::beside(image, cached)?, Some(cached))
    }

    /// Of an export, whoever serves it: there is no file that anybody could be a witness of.
    ///
    /// Nor is there a lock that keeps a successor away until the helper of a daemon that was killed is through. So the
    /// file itself is locked by all who use it, and taken away by the last one only.
    pub(super) fn of_export(dir: &StateDir, identity: &str) -> anyhow::Result<Self> {
        let name = StateName::of_export(identity);
        let mut tries = 0;
        let state = loop {
            let state = dir.file(name)?;
            match flock(&state, FlockOperation::NonBlockingLockShared) {
                // The last one may have taken it away meanwhile.
                Ok(()) if state.metadata()?.nlink() > 0 => break state,
                Ok(()) => {}
                // The last one has it for itself, for the moment in which it takes it away. Who has it for longer is
                // not waited for: other disks need whoever does this.
                Err(Errno::WOULDBLOCK) if tries < LAST_ONE_TRIES => {
                    tries += 1;
                    std::thread::sleep(LAST_ONE_PAUSE);
                }
                // Nor is it taken for what was kept: whoever may lock it would keep others from being served.
                Err(Errno::WOULDBLOCK) => {
                    bail!(NoPlace(format!("somebody has locked the state of this export, {name}")))
                }
                Err(error) => Err(error)?,
            }
        };
        let (witnesses, all_seen) = (Vec::new(), false);
        let kept = Kept { name, _image: None, witnesses, all_seen, stat: None };
        Self::of_file(dir, state, kept, None)
    }

    fn new(dir: &StateDir, kept: Kept, beside: Option<bool>) -> anyhow::Result<Self> {
        Self::of_file(dir, dir.file(kept.name)?, kept, beside)
    }

    fn of_file(
        dir: &StateDir,
        state: File,
        kept: Kept,
        beside: Option<bool>,
    ) -> anyhow::Result<Self> {
        let folder = Arc::clone(&dir.0);
        let page = Mapping::of_file(&state, 0, STATE_BYTES)?;
        let state = Arc::new(state);
        let journal = Journal::map(Arc::clone(&state), STATE_BYTES)?;
        let is_export = matches!(kept.name, StateName::Export(_));
        let counts = is_export.then(|| Counts::map(&state, STATE_EXPORT_AT)).transpose()?;
        let keeper = Self { folder, state, page, journal, counts, beside, images: vec![kept] };
        keeper.doubt();
        Ok(keeper)
    }

    /// What was kept may be of an image that was deleted, whose number this one has got. If it does not look
    /// as that one was left, it is not taken for it: it is not paused, which would keep its guest waiting for
    /// nothing. A failed flush stays known all the same: to believe it loses nothing.
    fn doubt(&self) {
        let ambiguous = |kept: &&Kept| kept.name.is_ambiguous();
        let Some(Kept { name, stat, .. }) = self.images.iter().find(ambiguous) else { return };
        let now = stat.as_ref().and_then(ImageStat::left);
        let known = now.is_some_and(|now| (0..LEFT_MAX).any(|at| self.left(at) == now));
        if !known && self.word().fetch_and(!STATE_PAUSED, SeqCst) & STATE_PAUSED != 0 {
            tracing::warn!(
                "{name}: an image with this number was paused. Its file system does not tell when files \
                 were made, and this one is not as that one was left: it is taken for another one and not \
                 paused. If it is the same, say \"ringway ctl pause\""
            );
        }
        self.remember();
    }

    /// Stores how the images are left.
    fn remember(&self) {
        for (at, kept) in self.images.iter().take(LEFT_MAX).enumerate() {
            let Some(left) = kept.stat.as_ref().and_then(ImageStat::left) else { continue };
            self.left_words(at)
                .into_iter()
                .zip(left)
                .for_each(|(word, now)| word.store(now, SeqCst));
        }
    }

    fn left(&self, at: usize) -> Left {
        self.left_words(at).map(|word| word.load(SeqCst))
    }

    fn left_words(&self, at: usize) -> [&AtomicU64; 3] {
        [0, 1, 2].map(|word| self.word_at(LEFT_AT + (at * 3 + word) * 8))
    }

    /// The disk is about to be served from this image: the state has the name of both until
    /// [`StateKeeper::settle`], so that whoever serves either of them finds it.
    pub(super) fn follow(&mut self, image: File) -> anyhow::Result<()> {
        let kept = match self.beside {
            Some(cached) => Kept::beside(image, cached)?,
            None => Kept::here(&image)?,
        };
        let Some(Kept { name, .. }) = self.images.last() else { return Ok(()) };
        let (old, new) = (name.to_string(), kept.name.to_string());
        let _ = unlinkat(&*self.folder, &new, AtFlags::empty());
        linkat(&*self.folder, &old, &*self.folder, &new, AtFlags::empty())
            .with_context(|| format!("the state of a disk, {new}"))?;
        self.images.push(kept);
        self.remember();
        Ok(())
    }

    /// The disk is served from the image that was to follow, or is not.
    pub(super) fn settle(&mut self, follows: bool) {
        if self.images.len() > 1 {
            let gone = self.images.remove(if follows { 0 } else { self.images.len() - 1 });
            let _ = unlinkat(&*self.folder, gone.name.to_string(), AtFlags::empty());
        }
    }

    /// The data of its image are in this file.
    pub(super) fn watch(&mut self, data: &File) {
        if let (Some(true), Some(kept)) = (self.beside, self.images.last_mut()) {
            kept.watch(data);
        }
    }

    pub(super) fn file(&self) -> &File {
        &self.state
    }

    /// What its images are called.
    pub(super) fn names(&self) -> Vec<StateName> {
        self.images.iter().map(|kept| kept.name).collect()
    }

    fn word(&self) -> &AtomicU64 {
        self.word_at(0)
    }

    /// A multiple of 8, within the page.
    fn word_at(&self, offset: usize) -> &AtomicU64 {
        assert!(offset % 8 == 0 && offset < self.page.len());
        // SAFETY: within the mapping, as was just asserted, and aligned, because that begins with a page;
        // it lives as long as `self` and is only touched atomically.
        #[allow(clippy::cast_ptr_alignment)]
        unsafe {
            AtomicU64::from_ptr(self.page.at(offset).cast())
        }
    }

    /// The daemon is dead: asks the host what that was told last, and keeps it. Then its lock goes.
    pub(super) fn bear_witness(&self) {
        self.ask_witnesses();
        if self.images.iter().all(|kept| kept.all_seen) {
            // Of flushes that were under way the outcome is known.
            self.word().fetch_and(STATE_KEPT, SeqCst);
        }
        self.remember();
    }

    /// Keeps that the host has lost data, if it says so: it may have told nobody else.
    fn ask_witnesses(&self) {
        for Kept { name, witnesses, .. } in &self.images {
            for error in witnesses.iter().filter_map(|witness| lost_data(witness).err()) {
                tracing::error!("{name}: written data was lost when its daemon ended: {error}");
                self.word().fetch_or(STATE_FLUSH_FAILED, SeqCst);
                // What its entries lead to may be lost, and what the image held before is not.
                self.journal.end();
            }
        }
    }

    /// The daemon that has the lock of the image leaves it in order. If nothing is left to be kept, neither is
    /// the file; the outcome of a flush that is still under way is.
    pub(super) fn leave(&self) {
        self.ask_witnesses();
        let used = self.journal.is_used() || self.counts.as_ref().is_some_and(Counts::may_be_lost);
        // An export has no lock: others may use it.
        let alone = || {
            let exclusive = FlockOperation::NonBlockingLockExclusive;
            self.counts.is_none() || flock(&*self.state, exclusive).is_ok()
        };
        if self.word().load(SeqCst) == 0 && !used && alone() {
            for kept in &self.images {
                let _ = unlinkat(self.folder.as_fd(), kept.name.to_string(), AtFlags::empty());
            }
            // Best effort: a name that stays costs a file.
            let _ = self.remove_other_names();
        } else {
            self.remember();
        }
    }

    /// A daemon that died with its helper while its disk was put on top of another image ([`StateKeeper::follow`]) has
    /// left the state with the names of both. Nothing is left to be kept of either.
    fn remove_other_names(&self) -> anyhow::Result<()> {
        let state = self.state.metadata()?;
        if state.nlink() == 0 {
            return Ok(());
        }
        for entry in Dir::read_from(&*self.folder)? {
            let entry = entry?;
            let stat = statat(&*self.folder, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
            if (stat.st_ino, stat.st_dev) == (state.ino(), state.dev()) {
                unlinkat(&*self.folder, entry.file_name(), AtFlags::empty())?;
            }
        }
        Ok(())
    }
}

/// A disk's state in the process that serves it, which leaves it in order when this is dropped.
pub(super) struct OwnState(pub(super) Mutex<StateKeeper>);

impl Drop for OwnState {
    fn drop(&mut self) {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).leave();
    }
}

/// An offset at which no file has a page.
const BEYOND: i64 = 1 << 62;

/// `Err` if the host has lost data since the file was opened. Writes nothing and waits for nothing: a page that is
/// on its way to storage that hangs is waited for where it is asked after, and the host tells what it has lost of the
/// whole file wherever it is asked.
fn lost_data(file: &File) -> std::io::Result<()> {
    let wait = libc::SYNC_FILE_RANGE_WAIT_BEFORE;
    // SAFETY: no memory is involved.
    let rc = unsafe { libc::sync_file_range(file.as_raw_fd(), BEYOND, 1, wait) };
    if rc == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    // A character device (an NVMe namespace) has no page cache that could lose anything.
    if error.raw_os_error() == Some(libc::ESPIPE) { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::super::state_name::identity;
    use super::*;
    use ringway_disk::STATE_FLUSHING;
    use ringway_testkit::{LoopDevice, Mounted};
    use std::os::unix::fs::{FileExt, symlink};

    fn dir(path: &Path) -> StateDir {
        StateDir::open(Some(path)).unwrap().unwrap()
    }

    #[test]
    fn b30_a_character_device_has_lost_nothing() {
        assert!(lost_data(&File::options().write(true).open("/dev/null").unwrap()).is_ok());
    }

    #[test]
    fn a_file_is_there_as_long_as_something_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let dir = dir(&path);
        let image = File::create_new(folder.path().join("image")).unwrap();
        let files = || std::fs::read_dir(&path).unwrap().count();
        let keeper = StateKeeper::here(&dir, &image).unwrap();
        assert_eq!(files(), 1);
        keeper.word().store(STATE_FLUSH_FAILED, SeqCst);
        keeper.leave();
        assert_eq!(files(), 1);
        let keeper = StateKeeper::here(&dir, &image).unwrap();
        assert_eq!(keeper.word().swap(0, SeqCst), STATE_FLUSH_FAILED);
        keeper.leave();
        assert_eq!(files(), 0);
    }

    /// Neither whoever dies nor its helper removes what another daemon may have found by then.
    #[test]
    fn c39_only_who_leaves_in_order_takes_the_file_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let dir = dir(&path);
        let image = File::create_new(folder.path().join("image")).unwrap();
        let files = || std::fs::read_dir(&path).unwrap().count();
        for cached in [false, true] {
            let keeper = StateKeeper::beside(&dir, image.try_clone().unwrap(), cached).unwrap();
            keeper.word().fetch_add(STATE_FLUSHING, SeqCst);
            keeper.bear_witness();
            let flushing = if cached { 0 } else { STATE_FLUSHING };
            assert_eq!(keeper.word().swap(0, SeqCst), flushing, "it is known only to a witness");
            drop(keeper);
            drop(StateKeeper::here(&dir, &image).unwrap());
            assert_eq!(files(), 1);
        }
    }

    #[test]
    fn f17_what_an_export_owes_is_there_as_long_as_it_may_be_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let dir = dir(&path);
        let files = || std::fs::read_dir(&path).unwrap().count();
        let of = |name: &str| StateKeeper::of_export(&dir, &identity(name.as_bytes())).unwrap();
        let leave = |keeper: StateKeeper| keeper.leave();
        let at = usize::try_from(STATE_EXPORT_AT).unwrap();
        let written = |keeper: &StateKeeper| keeper.word_at(at).load(SeqCst);
        let keeper = of("nbd:unix:/n.sock");
        keeper.word_at(at).store(3, SeqCst);
        leave(keeper);
        assert_eq!(files(), 1);
        let other = of("nbd:unix:/n.sock:other");
        assert_eq!((files(), written(&other)), (2, 0));
        leave(other);
        // However it is spelled.
        let keeper = of("nbd+unix:///?socket=/./n.sock");
        assert_eq!((files(), written(&keeper)), (1, 3));
        drop(keeper);
        let run = folder.path().join("run");
        symlink("/", &run).unwrap();
        let keeper = of(&format!("nbd:unix:{}/n.sock", run.display()));
        assert_eq!((files(), written(&keeper)), (1, 3));
        // A successor uses it already.
        let successor = of("nbd:unix:/n.sock");
        keeper.word_at(at + 8).store(3, SeqCst);
        leave(keeper);
        assert_eq!(files(), 1);
        let keeper = successor;
        // All of it was flushed.
        keeper.word_at(at + 8).store(3, SeqCst);
        leave(keeper);
        assert_eq!(files(), 0);
    }

    /// A daemon in wrong hands has the page of its export, and could have others wait for it.
    #[test]
    fn e32_nobody_waits_for_who_has_locked_the_state_of_an_export() {
        let folder = tempfile::tempdir().unwrap();
        let dir = dir(&folder.path().join("state"));
        let name = "nbd:unix:/n.sock";
        let held = dir.file(StateName::of_export(name)).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        let error = StateKeeper::of_export(&dir, name).err().expect("it is locked");
        assert!(error.to_string().contains("somebody has locked"), "{error}");
        drop(held);
        assert!(StateKeeper::of_export(&dir, name).is_ok());
    }

    #[test]
    fn c15_what_is_kept_follows_a_disk_to_another_image() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let dir = dir(&path);
        let image = |name| File::create_new(folder.path().join(name)).unwrap();
        let (old, new, none) = (image("old"), image("new"), image("none"));
        let files = || std::fs::read_dir(&path).unwrap().count();
        let kept = |image: &File| {
            let keeper = StateKeeper::here(&dir, image).unwrap();
            keeper.leave();
            keeper.word().load(SeqCst)
        };
        let mut keeper = StateKeeper::here(&dir, &old).unwrap();
        keeper.word().store(STATE_FLUSH_FAILED, SeqCst);
        keeper.follow(none).unwrap();
        keeper.settle(false);
        assert_eq!(files(), 1);
        keeper.follow(new.try_clone().unwrap()).unwrap();
        // Until it is known which of them is served, both tell the same.
        assert_eq!((files(), kept(&old), kept(&new)), (2, STATE_FLUSH_FAILED, STATE_FLUSH_FAILED));
        keeper.settle(true);
        keeper.leave();
        assert_eq!((files(), kept(&new)), (1, STATE_FLUSH_FAILED));
        assert_eq!(kept(&old), 0, "it is an image like any other");
    }

    #[test]
    fn what_others_could_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let dir = dir(&path);
        let image = File::create_new(folder.path().join("image")).unwrap();
        std::fs::write(folder.path().join("precious"), "data").unwrap();
        let name = StateName::of(&image).unwrap().to_string();
        symlink("../precious", path.join(&name)).unwrap();
        assert!(StateKeeper::here(&dir, &image).is_err());
        assert_eq!(std::fs::read(folder.path().join("precious")).unwrap(), b"data");
        let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(&path, everybody).unwrap();
        let error = format!("{:#}", StateDir::open(Some(&path)).unwrap_err());
        assert!(error.contains("others can write"), "{error}");
    }

    /// A file system that does not tell when files were made, and gives their numbers again at once.
    #[test]
    fn e26_an_image_does_not_inherit_the_pause_of_a_deleted_one() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("small");
        let small = match Mounted::on_file(at, "ext4", &["-q", "-I", "128"], 16 << 20) {
            Ok(small) => small,
            Err(lack) => return lack.skip(),
        };
        let dir = dir(&folder.path().join("state"));
        let path = small.path().join("image");
        for beside in [false, true] {
            let keep = |image: &File| match beside {
                true => StateKeeper::beside(&dir, image.try_clone().unwrap(), true).unwrap(),
                false => StateKeeper::here(&dir, image).unwrap(),
            };
            let kept = STATE_PAUSED | STATE_FLUSH_FAILED;
            let image = File::create_new(&path).unwrap();
            let name = StateName::of(&image).unwrap();
            assert!(name.is_ambiguous(), "{name}: it tells a birth");
            let keeper = keep(&image);
            image.write_all_at(&[1; 4096], 0).unwrap();
            keeper.word().store(kept, SeqCst);
            keeper.leave();
            drop((keeper, image));
            let image = File::options().read(true).write(true).open(&path).unwrap();
            let keeper = keep(&image);
            assert_eq!(keeper.word().load(SeqCst), kept, "it is the same image");
            keeper.bear_witness();
            drop((keeper, image));
            // Deleted, and one of the next ones gets its number.
            std::fs::remove_file(&path).unwrap();
            let mut others = (0..64).map(|at| {
                File::create_new(small.path().join(format!("other-{beside}-{at}"))).unwrap()
            });
            let image = others.find(|image| StateName::of(image).unwrap() == name);
            let keeper = keep(&image.expect("no number is given again"));
            assert_eq!(
                keeper.word().swap(0, SeqCst),
                STATE_FLUSH_FAILED,
                "not paused, but durable"
            );
        }
    }

    /// A device on a file system that is full: written data is lost, and whoever syncs first hears it. The image is there,
    /// or the file with its data.
    #[test]
    fn c04_what_a_dying_daemon_was_told_its_helper_hears_too() {
        let folder = tempfile::tempdir().unwrap();
        let small = match Mounted::in_memory(folder.path().join("small"), 64 << 10) {
            Ok(small) => small,
            Err(lack) => return lack.skip(),
        };
        let other = File::create_new(folder.path().join("image")).unwrap();
        for (flushing, apart) in [(0, false), (2, false), (2, true)] {
            let device = match LoopDevice::new(small.path(), 1 << 20, 512) {
                Ok(device) => device,
                Err(lack) => return lack.skip(),
            };
            let open = || File::options().read(true).write(true).open(device.path()).unwrap();
            let (daemons, state) = (open(), dir(&folder.path().join("state")));
            let image = if apart { &other } else { &daemons };
            let mut keeper = StateKeeper::beside(&state, image.try_clone().unwrap(), true).unwrap();
            if apart {
                keeper.watch(&daemons);
            }
            daemons.write_all_at(&vec![1; 1 << 20], 0).unwrap();
            keeper.word().fetch_add(flushing * STATE_FLUSHING, SeqCst);
            assert!(daemons.sync_data().is_err(), "there is room for it");
            // Who comes later hears nothing, which is what all this is for.
            assert!(open().sync_data().is_ok());
            keeper.bear_witness();
            assert_eq!(keeper.word().swap(0, SeqCst), STATE_FLUSH_FAILED);
            drop(keeper);
            drop(daemons);
            std::fs::remove_file(device.backing()).unwrap();
        }
    }
}
