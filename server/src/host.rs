//! The part of the host that has names: images, sockets. The daemon reaches it through here only.
//!
//! Without a sandbox the daemon does such things itself. With one it cannot, so a helper process that
//! was forked before does them and hands over descriptors:
//!
//! ```text
//! daemon (nothing by name)                       helper (no guest)
//!   host.open(disk)    ── Open {path, …} ──▶       probes, locks, judges
//!                      ◀── Opened {facts} + fd ──
//!   host.listen(path)  ── Listen {path} ────▶      makes the socket file
//!                      ◀── Listening {n} + fd ──
//!   drop(SocketFile)   ── Remove {n} ───────▶      removes what it made itself
//!   xen().open(what)   ── Xen(what) ────────▶      opens a device, the store, a record
//!                      ◀── Named {…} + fd ──
//! ```

mod addresses;
mod client;
mod duties;
mod facts_message;
mod forked;
mod helper;
mod image_message;
mod known_exports;
mod local;
mod names;
mod overlay;
mod parcel_message;
mod path_message;
mod protocol;
mod remote;
mod remote_message;
mod served_images;
mod state;
mod state_name;
mod states;
pub(super) mod wire;
mod writable;

use crate::xen::Access;
use anyhow::{Context, bail};
use client::{Client, EphemeralFile, HelpersFile};
pub(crate) use client::{LOOK_UP_MAX, hangs};
pub(crate) use duties::Duties;
pub(super) use forked::{Event, Parent, leave_no_zombie, settle};
pub(super) use local::look;
use local::{CloneWords, Local, Opened, OwnFile};
use names::{PATHS, PathNames};
pub(crate) use protocol::{is_socket_busy, reason};
use ringway_control::config::{DiskSpec, Location, Sandbox};
use ringway_disk::open::foreign_holder;
use ringway_disk::{Disk, LockError, OpenError, OpenOptions, Source};
use ringway_export::{Names, WarningLimit};
use ringway_image::Bases;
use ringway_terminal::reasons::in_full;
use ringway_vhost_user::Access as SocketAccess;
pub(crate) use state::StateDir;
use state_name::identity;
use states::States;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, LazyLock, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
pub(crate) use writable::NamedBase;

/// How often a lock may be snatched away, or the file replaced, between the helper's probing and our
/// taking it.
const SNATCHED_MAX: u32 = 16;

/// The longest configuration that is read again.
const CONFIGURATION_MAX: usize = 16 << 20;

/// Where names are looked up.
pub(crate) struct Host {
    local: Local,
    helper: Option<Arc<Client>>,
    /// In the sandbox: from now on nothing is looked at but by the helper.
    confined: AtomicBool,
    xen: Option<Arc<dyn Access>>,
    states: States,
    configuration: Option<PathBuf>,
    /// For how long first flushes were waited for.
    first_flushes: Mutex<Duration>,
    /// What images are based on, shared.
    pub(super) bases: Arc<Bases>,
}

impl Host {
    /// For a daemon with or without a sandbox. There must be no other thread.
    ///
    /// # Errors
    /// What the host says to a process.
    pub(crate) fn start(mode: Sandbox, duties: Duties) -> anyhow::Result<Self> {
        let local = Local::new(duties.iopoll);
        let (configuration, confined) = (duties.configuration.clone(), AtomicBool::new(false));
        // Another user could not come back to what was made as root.
        if mode == Sandbox::Off && duties.account.is_none() {
            let xen = duties.xen.map(|here| Arc::new(here) as Arc<dyn Access>);
            let states = duties.state_dir.map_or(States::Nowhere, States::Here);
            return Ok(Self {
                local,
                helper: None,
                confined,
                xen,
                states,
                configuration,
                first_flushes: Mutex::default(),
                bases: Arc::default(),
            });
        }
        let (serves_xen, keeps_state) = (duties.xen.is_some(), duties.state_dir.is_some());
        let helper = Arc::new(helper::fork(&local, mode, duties)?);
        let xen = serves_xen.then(|| Arc::clone(&helper) as Arc<dyn Access>);
        let states = match keeps_state {
            true => States::Helper(Arc::clone(&helper)),
            false => States::Nowhere,
        };
        Ok(Self {
            local,
            helper: Some(helper),
            confined,
            xen,
            states,
            configuration,
            first_flushes: Mutex::default(),
            bases: Arc::default(),
        })
    }

    /// What guests of this Xen host need, for a daemon that serves them.
    pub(crate) fn xen(&self) -> Option<Arc<dyn Access>> {
        self.xen.clone()
    }

    /// True if io_uring works here.
    pub(crate) fn has_io_uring(&self) -> bool {
        self.local.has_io_uring()
    }

    /// Begins to connect to the export of a plan, or to that of its base; `None` if there is none. Servers that are
    /// silent are waited for beside each other this way.
    ///
    /// # Errors
    /// What the helper says, or the host to a thread.
    pub(crate) fn connect(&self, spec: &DiskSpec) -> anyhow::Result<Option<Connecting>> {
        let mut options = match &spec.base_export {
            Some(base) => self.base_options(base),
            None => self.local.options(spec),
        };
        let Source::Nbd(target) = options.source.clone() else { return Ok(None) };
        if let Some(helper) = &self.helper {
            return Ok(Some(Connecting(By::There(
                helper.begin(&options, &CloneWords::default())?,
            ))));
        }
        if !self.confined.load(SeqCst) {
            let what = identity(target.to_string().as_bytes());
            known_exports::may_be_away(&mut options, &what, self.states.here());
        }
        let iopoll = self.local.iopoll;
        let thread = std::thread::Builder::new().name("open".into());
        let open = move || local::open(&options, &CloneWords::default(), iopoll);
        Ok(Some(Connecting(By::Here(thread.spawn(open)?))))
    }

    /// Waits for the connection, and opens the image that is based on the export, if there is one.
    ///
    /// # Errors
    /// What is wrong with either.
    pub(crate) fn connected(
        &self,
        connecting: Connecting,
        spec: &DiskSpec,
    ) -> anyhow::Result<OpenDisk> {
        let mut disk = match (connecting.0, &self.helper) {
            (By::There(line), Some(helper)) => helper.opened(&line)?.disk,
            (By::There(_), None) => bail!("there is no helper"),
            (By::Here(thread), _) => {
                let opened = thread.join().unwrap_or_else(|_| bail!("connecting to it panicked"));
                let Opened { disk, .. } = opened?;
                known_exports::keep(&disk, &identity(disk.name().as_bytes()), self.states.here());
                disk
            }
        };
        if spec.base_export.is_some() {
            Self::warn_of_away(&disk);
            return self.open_on(Some(disk), spec);
        }
        self.make_ours(&mut disk)?;
        self.flush_first(&disk, spec)?;
        Ok(OpenDisk { disk, new: None, clone: None })
    }

    /// Opens the disk of a plan, and says what its user should know. What was made for it goes again
    /// unless it is kept.
    ///
    /// # Errors
    /// What is wrong with it; nothing was created or changed then.
    pub(crate) fn open(&self, spec: &DiskSpec) -> anyhow::Result<OpenDisk> {
        match self.connect(spec)? {
            Some(connecting) => self.connected(connecting, spec),
            None => self.open_on(None, spec),
        }
    }

    /// Opens a disk, and has its image read the export that it is based on, if it is.
    fn open_on(&self, base: Option<Disk>, spec: &DiskSpec) -> anyhow::Result<OpenDisk> {
        let mut options = self.local.options(spec);
        if let Some(its) = options.qcow2.as_mut().and_then(|qcow2| qcow2.base.as_mut()) {
            its.export = base.as_ref().and_then(Disk::base_export);
        }
        let (helper, path) = match (&self.helper, &options.source) {
            (Some(helper), Source::Path(path)) => (helper, path),
            _ => {
                let served = &self.local.served;
                let named = served.recall(&mut options, self.states.here(), Location::of);
                let Opened { mut disk, new, clone } =
                    self.local.open(&options, &CloneWords::of(spec))?;
                served.opened(named);
                let clone = clone.map(|file| EphemeralClone(Clone::Here(Some(file))));
                base.iter().try_for_each(|base| disk.stand_on(base))?;
                self.make_ours(&mut disk)?;
                let note = self.note(&options);
                let new = match new {
                    Some(file) => Some(NewImage { made: Made::Here(file), note: Some(note) }),
                    None => {
                        note();
                        None
                    }
                };
                return Ok(OpenDisk { disk, new, clone });
            }
        };
        self.refuse_if_qemu_serves(path, &options)?;
        for _ in 0..SNATCHED_MAX {
            let opened = helper.open(&options, &CloneWords::of(spec))?;
            let clone = opened.clone.map(|file| EphemeralClone(Clone::There(Some(file))));
            let (mut disk, new) = (opened.disk, opened.new);
            let new = new.map(|file| NewImage { made: Made::There(file), note: None });
            base.iter().try_for_each(|base| disk.stand_on(base))?;
            if disk.is_incoming() {
                self.make_ours(&mut disk)?;
                return Ok(OpenDisk { disk, new, clone });
            }
            // The kernel names as its holder who has taken it, and that has to be us: whoever comes
            // after us waits as long as we live.
            match disk.lock() {
                Ok(()) if helper.locate(path)?.leads_to(&disk.file()) => {
                    self.make_ours(&mut disk)?;
                    return Ok(OpenDisk { disk, new, clone });
                }
                // Another file has its name by now, whose lock somebody else may have.
                Ok(()) => {}
                // Who has it serves the new image: it is not ours to remove any more.
                Err(LockError::Locked | LockError::Marked(_)) => {
                    new.into_iter().for_each(NewImage::keep);
                }
                Err(LockError::Host(error)) => {
                    return Err(error).with_context(|| format!("{}: cannot lock it", disk.name()));
                }
            }
        }
        bail!("{}: others lock it, or replace it, all the time", path.display())
    }

    /// Notes of what was opened here, if it is an image, that it is served.
    fn note(&self, options: &OpenOptions) -> Note {
        let (served, dir) = (Arc::clone(&self.local.served), self.states.here().cloned());
        let source = options.source.clone();
        Box::new(move || {
            if let Source::Path(path) = &source {
                served.keep(path, dir.as_ref());
            }
        })
    }

    /// The disk of this image was removed for good: if the image is missing next time, it may be made anew.
    pub(crate) fn forget_image(&self, path: &Path) {
        match &self.states {
            States::Nowhere => {}
            States::Here(dir) => self.local.served.forget(path, Some(dir)),
            States::Helper(helper) => helper.forget_image(path),
        }
    }

    /// Whether there is a folder for what must outlive the daemon.
    pub(crate) fn keeps_state(&self) -> bool {
        !matches!(self.states, States::Nowhere)
    }

    /// What is to be done before a disk is served, now that its image is ours, unless it is incoming: what must
    /// outlive the daemon has its place, and of an image that is not raw what is needed to serve it is read.
    fn make_ours(&self, disk: &mut Disk) -> anyhow::Result<()> {
        if !disk.is_incoming() {
            self.states.keep(disk)?;
        }
        let mapped = disk.map_image_beside(&self.bases);
        mapped.with_context(|| format!("{}: cannot read its tables", disk.name()))
    }

    /// The helper is confined from its start, and does not see whose QEMU's locks are; this process does
    /// as long as it is not confined itself.
    fn refuse_if_qemu_serves(&self, path: &Path, options: &OpenOptions) -> anyhow::Result<()> {
        if options.incoming || self.confined.load(SeqCst) {
            return Ok(());
        }
        let Some(holder) = foreign_holder(path, options.read_only) else { return Ok(()) };
        match options.lock_wait {
            None => Err(OpenError::InUse { path: path.into(), holder, moves: true }.into()),
            Some(_) => {
                tracing::warn!("{}: it is in use by {holder}", path.display());
                Ok(())
            }
        }
    }

    /// This process is about to be confined.
    pub(crate) fn confine(&self) {
        self.confined.store(true, SeqCst);
    }

    /// Listens on a socket file; a private one stays with whoever started the daemon.
    ///
    /// # Errors
    /// What is wrong with the path.
    pub(crate) fn listen(
        &self,
        path: &Path,
        private: bool,
        access: SocketAccess,
    ) -> anyhow::Result<(UnixListener, SocketFile)> {
        match &self.helper {
            Some(helper) => {
                let (listener, file, path) = helper.listen(path, private, access)?;
                Ok((listener, SocketFile { path, _made: Made::There(file) }))
            }
            None => {
                let (listener, file) = local::listen(path, access)?;
                let path = file.path.clone();
                Ok((listener, SocketFile { path, _made: Made::Here(file) }))
            }
        }
    }

    /// What hangs up when what has a name cannot be reached any more; `None` if this process reaches it itself.
    pub(crate) fn end_of_helper(&self) -> Option<BorrowedFd<'_>> {
        self.helper.as_ref().and_then(|helper| helper.end())
    }

    /// Whether there is a configuration file that may be read again.
    pub(crate) fn has_configuration(&self) -> bool {
        self.configuration.is_some()
    }

    /// What the configuration file says now.
    ///
    /// # Errors
    /// That it cannot be read, or is too long for one.
    pub(crate) fn configuration(&self) -> anyhow::Result<String> {
        let file = match (&self.helper, &self.configuration) {
            (Some(helper), _) => helper.configuration()?,
            (None, Some(path)) => local::configuration(path)?,
            (None, None) => bail!("there is no configuration file"),
        };
        let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
        // Not by the standard library, which asks for the size by a call that takes paths as well.
        loop {
            match rustix::io::read(&file, &mut part) {
                Ok(0) => break,
                Ok(got) => bytes.extend_from_slice(&part[..got]),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot read the configuration"),
            }
            if bytes.len() > CONFIGURATION_MAX {
                bail!("a configuration has {CONFIGURATION_MAX} bytes at most");
            }
        }
        String::from_utf8(bytes).context("the configuration is not UTF-8")
    }

    /// What a path leads to.
    pub(crate) fn locate(&self, path: &Path) -> Location {
        match &self.helper {
            Some(helper) => helper.locate(path).unwrap_or_else(|error| {
                static WARNINGS: LazyLock<WarningLimit> =
                    LazyLock::new(|| WarningLimit::warnings(None, PATHS));
                if let Some(pass) = WARNINGS.pass() {
                    let suppressed = pass.suppressed;
                    tracing::warn!(suppressed, "{}: {}", path.display(), in_full(&error));
                }
                Location::unknown(path)
            }),
            None => Location::of(path),
        }
    }

    /// Looks at the files of a disk that is to be opened: that would wait for a file system that hangs.
    ///
    /// # Errors
    /// That there was no answer.
    pub(crate) fn look_at(&self, spec: &DiskSpec) -> anyhow::Result<()> {
        spec.files().try_for_each(|path| {
            if let Some(helper) = &self.helper {
                return helper.holder(path, true).map(drop);
            }
            let (looked, heard) = sync_channel(1);
            let file = path.to_path_buf();
            let look = move || {
                look(&file);
                let _ = looked.send(());
            };
            std::thread::Builder::new().name("look-up".into()).spawn(look)?;
            heard.recv_timeout(LOOK_UP_MAX).map_err(|_| hangs(path.display()))
        })
    }

    /// Whom an export asks about the path of its disk; nobody if it has none.
    pub(crate) fn names(&self, source: &Source) -> Option<Arc<dyn Names>> {
        let Source::Path(path) = source else { return None };
        let (helper, states, path) = (self.helper.clone(), self.states.clone(), path.clone());
        let warnings = WarningLimit::warnings(path.to_str(), PATHS);
        Some(Arc::new(PathNames { helper, states, path, warnings }))
    }

    /// The daemon has started: from now on the helper has no more rights than it.
    ///
    /// # Errors
    /// That the helper is gone.
    pub(crate) fn started(&self) -> anyhow::Result<()> {
        self.helper.as_ref().map_or(Ok(()), |helper| helper.started())
    }
}

/// An export that is being connected to.
pub(crate) struct Connecting(By);

enum By {
    /// By this process.
    Here(JoinHandle<anyhow::Result<Opened>>),
    /// By the helper, which answers on this line.
    There(OwnedFd),
}

/// A disk that was opened.
pub(crate) struct OpenDisk {
    pub(crate) disk: Disk,
    /// Its image, if that was made just now.
    pub(crate) new: Option<NewImage>,
    /// Its image, if that is a clone that goes with it.
    pub(crate) clone: Option<EphemeralClone>,
}

/// A clone that is deleted with its disk. Dropping this leaves it there.
pub(crate) struct EphemeralClone(Clone);

enum Clone {
    Here(Option<OwnFile>),
    There(Option<EphemeralFile>),
}

impl EphemeralClone {
    /// Deletes it.
    ///
    /// # Errors
    /// That it is still there.
    pub(crate) fn remove(mut self) -> anyhow::Result<()> {
        match &mut self.0 {
            Clone::Here(file) => file.take().map_or(Ok(()), OwnFile::remove),
            Clone::There(file) => file.take().map_or(Ok(()), EphemeralFile::remove),
        }
    }
}

impl Drop for EphemeralClone {
    fn drop(&mut self) {
        if let Clone::Here(file) = &mut self.0 {
            file.take().into_iter().for_each(OwnFile::keep);
        }
    }
}

/// A socket file that was made for us and goes at the end.
pub(crate) struct SocketFile {
    path: PathBuf,
    _made: Made,
}

impl SocketFile {
    /// Where it is, from the root.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// An image that was made just now and goes again unless it is kept.
pub(crate) struct NewImage {
    made: Made,
    /// Notes that it is served, unless the helper does.
    note: Option<Note>,
}

type Note = Box<dyn FnOnce() + Send>;

impl NewImage {
    /// The daemon has started, or the disk is served.
    pub(crate) fn keep(self) {
        self.note.into_iter().for_each(|note| note());
        match self.made {
            Made::Here(file) => file.keep(),
            Made::There(file) => file.keep(),
        }
    }
}

/// A file that goes when this is dropped.
enum Made {
    Here(OwnFile),
    There(HelpersFile),
}
