//! The helper process: opens, makes and removes files for a daemon that no longer can. It hears one
//! daemon and nobody else, and ends when that is dead, which a pidfd says and no error on the line. It never
//! writes to an image that is served, nor syncs or unlocks it; nor does it remove what is kept of a disk, unless
//! the daemon that has the disk's lock asks for it ([ADR 0066](../../../docs/adr/0066-what-outlives-a-process.md)).
//!
//! Until the daemon has started it has the rights that the daemon was started with. After that, and from its
//! beginning for the process of a disk that was added later, it acts as the daemon's user, so that a daemon in wrong hands gains nothing by it, with three exceptions:
//! files that it made before it removes with the rights it made them with; what is kept of disks is in a folder of
//! whoever started the daemon; and for a daemon with --xen it goes on opening devices and records as whoever
//! started it: the daemon has others of the same kind, which are worth no less.

mod overlays;

use super::super::survive::survive;
use super::addresses::Addresses;
use super::client::Client;
use super::duties::Duties;
use super::forked::{Event, Parent, leave_no_zombie, line, settle};
use super::known_exports;
use super::local::{Local, Opened, OwnFile, configuration, listen, open};
use super::protocol::{Found, HelperAnswer, HelperRequest, Wanted, reason};
use super::state::{NoPlace, StateDir, StateKeeper};
use super::state_name::{StateName, identity};
use super::wire::{SendError, send};
use crate::sandbox::{Account, HelperNeeds, acting_as, confine_helper};
#[cfg(feature = "xen")]
use crate::xen::Access as _;
use anyhow::{Context, anyhow, bail};
use ringway_control::config::{Location, Sandbox};
use ringway_core::panic_point;
use ringway_disk::open::ENDING;
use ringway_disk::{EngineKind, NewOverlay, Source};
use ringway_nbd_client::Target;
use ringway_terminal::logging;
use ringway_terminal::reasons::in_full;
use ringway_vhost_user::Access;
use rustix::fs::OFlags;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What a daemon hears whose wish made the helper panic: this wish failed, the next may not.
const PANICKED: &str = "the process that opens files for this daemon panicked over it; the log says \
                        where";

/// How often to look whether a disk has been left.
const LEAVES_SOON: Duration = Duration::from_millis(1);

/// The most paths that are looked up at a time: those that wait for a file system that hangs.
const LOOK_UPS_MAX: usize = 64;

/// A file that was made.
struct Thing {
    file: OwnFile,
    /// As whom; `None` is as whoever started the daemon.
    made_as: Option<Account>,
    /// Whether it is an image that was made, which is served once it stays.
    is_image: bool,
}

/// What the helper knows.
struct Helper {
    local: Local,
    duties: Duties,
    addresses: Arc<Addresses>,
    started: bool,
    /// Exports that the daemon has had opened, and connects to again when a connection is lost: what each was when it
    /// was connected to. A link may lead elsewhere by now.
    remotes: Arc<Mutex<BTreeMap<Vec<u8>, String>>>,
    things: Arc<Mutex<Things>>,
    /// Each step of a snapshot that is under way has this, too.
    steps: Arc<()>,
    /// Each look-up of a path that is under way has this.
    look_ups: Arc<()>,
}

/// Each is used without the lock of them all: its image may be on a file system that hangs.
type SharedKeeper = Arc<Mutex<StateKeeper>>;

/// One, with what its images are called, which is known whoever waits for them.
type KeptState = (SharedKeeper, Vec<StateName>);

type Answered = anyhow::Result<(HelperAnswer, Option<OwnedFd>)>;

impl Thing {
    /// With the rights that it was made with: who may change its folder gains nothing by that.
    fn remove(self) -> anyhow::Result<()> {
        let Self { file, made_as, .. } = self;
        acting_as(made_as.as_ref(), || file.remove())?
    }
}

#[derive(Default)]
struct Things {
    list: BTreeMap<u64, Thing>,
    states: BTreeMap<u64, KeptState>,
    /// Those that are being left, by what they are called.
    leaving: Vec<(u64, StateName)>,
    overlays: BTreeMap<u64, NewOverlay>,
    next: u64,
    /// The daemon is dead, and what was in these lists is ended.
    ended: bool,
}

impl Things {
    fn add(&mut self, file: OwnFile, made_as: Option<Account>, is_image: bool) -> u64 {
        self.next += 1;
        self.list.insert(self.next, Thing { file, made_as, is_image });
        self.next
    }
}

/// Starts the helper. There must be no other thread.
///
/// # Errors
/// What the host says.
pub(super) fn fork(local: &Local, mode: Sandbox, duties: Duties) -> anyhow::Result<Client> {
    // It is confined from its beginning, and could not ask.
    let is_known = |export: &Target| {
        let dir = duties.state_dir.as_ref();
        let what = identity(export.to_string().as_bytes());
        dir.is_some_and(|dir| known_exports::recall(dir, &what).is_some())
    };
    let account = (duties.account.as_ref(), duties.acts_for_it);
    let addresses = Addresses::look_up(&duties.exports, is_known, mode, account)?;
    let (ours, its) = line().context("cannot make a line to a helper process")?;
    leave_no_zombie();
    let parent = Parent::this();
    // SAFETY: there is one thread, so the child may do anything the parent may.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()).context("cannot start a helper process"),
        0 => {
            drop(ours);
            logging::after_fork();
            let records = duties.xen.as_ref().map(|here| here.records().as_raw_fd());
            let states = duties.state_dir.as_ref().map(|dir| dir.fd().as_raw_fd());
            settle(&[Some(its.as_raw_fd()), parent.fd(), records, states, addresses.line()], false);
            let _ = rustix::thread::set_name(c"ringway-helper");
            let (account, groups) = (duties.account.is_some(), duties.groups || duties.adds);
            let root = rustix::process::geteuid().is_root();
            let gives = groups && (account || !root);
            let clones = duties.clones || duties.adds || duties.changes;
            let (iopoll, nvme) = (duties.iopoll, duties.nvme);
            let network = addresses.network();
            let needs = HelperNeeds { account, iopoll, groups, clones, gives, nvme, network };
            // What it maps may vanish, and it cannot say so later.
            let confined = ringway_export::install_handlers()
                .map_err(anyhow::Error::from)
                .and_then(|()| confine_helper(mode, needs));
            let addresses = Arc::new(addresses);
            let started = confined.and_then(|()| {
                logging::start_thread()?;
                Ok(addresses.listen()?)
            });
            if let Err(error) = started {
                tracing::error!("the helper cannot be confined, so it ends: {}", in_full(&error));
                logging::finish();
                // SAFETY: ends the process.
                unsafe { libc::_exit(1) }
            }
            let (engines, iopoll) = (local.engines.clone(), local.iopoll);
            let local = Local { engines, iopoll, served: Arc::default() };
            let things = Arc::default();
            let (remotes, steps, look_ups) = (Arc::default(), Arc::default(), Arc::default());
            let started = false;
            let helper =
                Helper { local, duties, addresses, started, remotes, things, steps, look_ups };
            helper.serve(&its, parent);
            logging::finish();
            // SAFETY: ends the process. What belongs to the daemon is not put in order here.
            unsafe { libc::_exit(0) }
        }
        _ => Ok(Client::new(ours)),
    }
}

impl Helper {
    /// Until the daemon is dead. If it never started, what was made for it goes.
    fn serve(mut self, line: &OwnedFd, mut parent: Parent) {
        loop {
            let answer = match parent.next(line, None) {
                Event::Request(request, fd) => {
                    let handled = survive("the helper", || self.handle(request, fd));
                    handled.unwrap_or_else(|| Err(anyhow!(PANICKED)))
                }
                Event::Unreadable(error) => Err(error.into()),
                Event::Other => continue,
                Event::Dead => break,
            };
            reply(answer, |answer, fd| parent.answer(line, answer, fd));
        }
        // Who finds a lock of ours waits for its end.
        let _ = CString::new(ENDING).map(|name| rustix::thread::set_name(&name));
        self.end();
        self.await_steps();
    }

    /// Ends what a dead daemon has left. Whoever names or removes an image, or is its witness, holds it until that is
    /// over: its lock goes with the last of them.
    fn end(&self) {
        let mut things = lock(&self.things);
        things.ended = true;
        let (states, overlays) =
            (std::mem::take(&mut things.states), std::mem::take(&mut things.overlays));
        let made = std::mem::take(&mut things.list);
        drop(things);
        let started = self.started;
        let mut all: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        for (keeper, _) in states.into_values() {
            all.push(Box::new(move || lock_keeper(&keeper).bear_witness()));
        }
        for overlay in overlays.into_values() {
            // What has its name by now is on top of all that was written.
            all.push(Box::new(move || overlay.keep()));
        }
        for thing in made.into_values() {
            all.push(Box::new(move || {
                if started {
                    // Sockets stay for the next daemon to replace, as if it had been killed without us.
                    thing.file.keep();
                } else if let Err(error) = thing.remove() {
                    tracing::warn!("what was made for the daemon stays: {}", in_full(&error));
                }
            }));
        }
        all_at_once(all);
    }

    /// Refuses what a daemon that has started does not need any more.
    fn may(&self, request: &HelperRequest) -> anyhow::Result<()> {
        let again = match request {
            HelperRequest::Open(wanted) => match wanted.remote() {
                Some(name) => self.has_opened(name),
                None => false,
            },
            HelperRequest::Listen { .. } => false,
            _ => return Ok(()),
        };
        if self.started && !self.duties.adds && !again {
            bail!("this daemon was started without --control: no disks are added to it");
        }
        Ok(())
    }

    fn has_opened(&self, export: &[u8]) -> bool {
        self.opened(export).is_some()
    }

    /// What an export was when the daemon had it opened.
    fn opened(&self, export: &[u8]) -> Option<String> {
        self.remotes.lock().unwrap_or_else(PoisonError::into_inner).get(export).cloned()
    }

    fn handle(&mut self, request: HelperRequest, fd: Option<OwnedFd>) -> Answered {
        panic_point!("helper");
        self.may(&request)?;
        match request {
            HelperRequest::Open(wanted) => {
                let (ours, its) = line()?;
                self.open(*wanted, ours)?;
                Ok((HelperAnswer::Wait, Some(its)))
            }
            HelperRequest::State { cached } => self.state(fd, cached),
            HelperRequest::StateOfExport { name } => {
                let dir = self.state_dir()?;
                let what = self.opened(&name.0).context("this daemon has no such export")?;
                self.beside(move |things| {
                    wait_until_left(things, StateName::of_export(&what));
                    keep(things, StateKeeper::of_export(&dir, &what))
                })
            }
            HelperRequest::Stateless { number } => self.stateless(number),
            HelperRequest::Listen { path, private, mode, group } => {
                self.listen(PathBuf::from(path), private, Access { mode, group })
            }
            HelperRequest::Configuration => {
                let Some(path) = self.duties.configuration.clone() else {
                    bail!("this daemon was started without a configuration file");
                };
                self.look_up(self.account(), move |_| {
                    Ok((HelperAnswer::Configuration, Some(configuration(&path)?.into())))
                })
            }
            HelperRequest::Locate { path } => self.look_up(self.account(), move |_| {
                Ok((HelperAnswer::Located(Location::of(&PathBuf::from(path))), None))
            }),
            HelperRequest::Holder { path, read_only } => self.look_up(self.account(), move |_| {
                let holder = ringway_disk::open::holder(&PathBuf::from(path), read_only);
                Ok((HelperAnswer::Holder(holder), None))
            }),
            HelperRequest::Forget { path } => {
                let dir = self.duties.state_dir.as_ref();
                self.local.served.forget(&PathBuf::from(path), dir);
                Ok((HelperAnswer::Done, None))
            }
            HelperRequest::Keep { number } => {
                let thing = lock(&self.things).list.remove(&number);
                if let Some(Thing { file, is_image, .. }) = thing {
                    if is_image {
                        self.local.served.keep(&file.path, self.duties.state_dir.as_ref());
                    }
                    file.keep();
                }
                Ok((HelperAnswer::Done, None))
            }
            HelperRequest::Remove { number } => {
                // Not before there is room: who is refused finds it once more.
                self.look_up(None, move |things| {
                    let thing = lock(things).list.remove(&number);
                    thing.with_context(|| format!("there is no file {number}"))?.remove()?;
                    Ok((HelperAnswer::Done, None))
                })
            }
            #[cfg(feature = "xen")]
            HelperRequest::Xen(what) => {
                let Some(xen) = &self.duties.xen else {
                    bail!("this daemon serves no guests of Xen");
                };
                let fd = xen.open(what)?;
                Ok((HelperAnswer::Named { there: fd.is_some() }, fd))
            }
            HelperRequest::Started => {
                self.started = true;
                Ok((HelperAnswer::Done, None))
            }
            request => self.handle_overlay(request, fd),
        }
    }

    /// Opens an image on a thread of its own: it may have to wait for a lock.
    fn open(&self, wanted: Wanted, line: OwnedFd) -> anyhow::Result<()> {
        let (clone, again) = (wanted.clone_words(), wanted.is_again());
        let (export, remotes) = (wanted.remote().map(<[u8]>::to_vec), Arc::clone(&self.remotes));
        let mut options = wanted.into_options(|asked| self.local.engines(asked))?;
        if let Source::Nbd(target) = &options.source {
            self.addresses.admit(target)?;
        }
        if options.engine == Some(EngineKind::Nvme) && !self.duties.nvme {
            bail!(
                "this daemon was started without a disk of --engine nvme, so none can be added: in its \
                 sandbox nobody may ask NVMe devices what they are. Start another daemon with it"
            );
        }
        let (iopoll, account, things) =
            (self.local.iopoll, self.account(), Arc::clone(&self.things));
        let (addresses, state_dir) = (Arc::clone(&self.addresses), self.duties.state_dir.clone());
        // At the start they have been looked up just now.
        let (started, served) = (self.started, Arc::clone(&self.local.served));
        std::thread::Builder::new().name("open".into()).spawn(move || {
            let opened = || -> anyhow::Result<_> {
                panic_point!("helper-open");
                let mut what = String::new();
                if let Source::Nbd(target) = &mut options.source {
                    // With the rights of who asks, and once: it is connected to there.
                    let locate = |path: &Path| Location::of(path).real().to_owned();
                    let located = acting_as(account.as_ref(), || target.located(locate))?;
                    what = located.identity(Path::to_owned);
                    *target = addresses.place(&located, started);
                }
                if !started && !again {
                    known_exports::may_be_away(&mut options, &what, state_dir.as_ref());
                }
                let named = served.recall(&mut options, state_dir.as_ref(), |path| {
                    let location = acting_as(account.as_ref(), || Location::of(path));
                    location.unwrap_or_else(|_| Location::unknown(path))
                });
                let act = || open(&options, &clone, iopoll);
                let Opened { disk, new, clone } = acting_as(account.as_ref(), act)??;
                // What is kept of it is for who could open it.
                served.opened(named);
                let mut remotes = remotes.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(export) = export.clone() {
                    // Whoever comes back to it has had it.
                    let kept = again.then(|| remotes.get(&export).cloned()).flatten();
                    remotes.insert(export, kept.unwrap_or_else(|| what.clone()));
                }
                drop(remotes);
                if !again {
                    known_exports::keep(&disk, &what, state_dir.as_ref());
                }
                if let (Source::Path(path), None) = (&options.source, &new) {
                    served.keep(path, state_dir.as_ref());
                }
                // The daemon takes the lock anew, in its own name. What was read of a qcow2 image is
                // only true as long as nobody else can have it.
                if options.qcow2.is_none() && disk.remote().is_none() {
                    disk.hand_over();
                }
                let (found, files) = Found::of(disk.into_parts())?;
                let add = |file, is_image| lock(&things).add(file, account.clone(), is_image);
                // A clone that goes with its disk is both.
                let (new, clone) = (new.map(|it| add(it, true)), clone.map(|it| add(it, false)));
                Ok((HelperAnswer::Opened { found: Box::new(found), new, clone }, files))
            };
            // If the daemon has gone nobody needs the answer.
            let opened = survive("the helper", opened);
            let _ = match opened.unwrap_or_else(|| Err(anyhow!(PANICKED))) {
                Ok((answer, files)) => {
                    let answers =
                        std::iter::once(&answer).chain(std::iter::repeat(&HelperAnswer::Layer));
                    let mut all = answers.zip(&files);
                    all.try_for_each(|(answer, file)| send(&line, answer, Some(file.as_fd())))
                }
                Err(error) => send(&line, &HelperAnswer::refused(&error), None),
            };
        })?;
        Ok(())
    }

    fn listen(&self, path: PathBuf, private: bool, access: Access) -> Answered {
        let made_as = self.account();
        // What connects to the daemon's disks has its rights, not those of who started it.
        let owner = self.duties.account.clone().filter(|_| made_as.is_none() && !private);
        self.look_up(made_as.clone(), move |things| {
            let (listener, file) = match &owner {
                Some(owner) => for_account(owner, &path, access)?,
                None => listen(&path, access)?,
            };
            let path = file.path.as_path().into();
            let number = lock(things).add(file, made_as, false);
            Ok((HelperAnswer::Listening { number, path }, Some(listener.into())))
        })
    }

    /// Does what names a path on a thread of its own, with the rights of `account`, or of whoever started the daemon: a
    /// file system that hangs keeps nobody else waiting.
    fn look_up(
        &self,
        account: Option<Account>,
        act: impl FnOnce(&Mutex<Things>) -> Answered + Send + 'static,
    ) -> Answered {
        if Arc::strong_count(&self.look_ups) > LOOK_UPS_MAX {
            bail!(
                "{LOOK_UPS_MAX} paths are being looked up, and there is no answer to any: a file system of \
                 this host hangs"
            );
        }
        self.on_thread(("look-up", &self.look_ups), account, act)
    }

    /// Does something on a thread, with the rights of `account`, and answers on a line of its own.
    fn on_thread(
        &self,
        (name, counted): (&str, &Arc<()>),
        account: Option<Account>,
        act: impl FnOnce(&Mutex<Things>) -> Answered + Send + 'static,
    ) -> Answered {
        let (ours, its) = line()?;
        let (things, under_way) = (Arc::clone(&self.things), Arc::clone(counted));
        std::thread::Builder::new().name(name.into()).spawn(move || {
            let carried_out = survive("the helper", || {
                account.iter().try_for_each(|account| account.become_it())?;
                act(&things)
            });
            // What it has made is known by now, or gone.
            drop(under_way);
            let carried_out = carried_out.unwrap_or_else(|| Err(anyhow!(PANICKED)));
            let state = match &carried_out {
                Ok((HelperAnswer::State { number }, _)) => Some(*number),
                _ => None,
            };
            let sent = reply(carried_out, |answer, fd| send(&ours, answer, fd));
            if let (Some(number), false) = (state, sent) {
                // Nobody knows of it, and it has an image with its lock.
                let keeper = lock(&things).states.remove(&number);
                drop(keeper);
            }
        })?;
        Ok((HelperAnswer::Wait, Some(its)))
    }

    fn state_dir(&self) -> anyhow::Result<StateDir> {
        self.duties.state_dir.clone().context("this daemon keeps no state of its disks")
    }

    /// Looks after the state of a disk, with the rights of whoever started the daemon: it names
    /// nothing, and reaches its own folder only.
    fn state(&self, image: Option<OwnedFd>, cached: bool) -> Answered {
        let (dir, image) = (self.state_dir()?, written(image)?);
        self.beside(move |things| {
            wait_until_left(things, StateName::of(&image)?);
            keep(things, StateKeeper::beside(&dir, image, cached))
        })
    }

    /// The disk is left in order. Without a thread to do it, others wait for its file system. Without a line, as long as
    /// that is under way, the daemon asks again.
    fn stateless(&self, number: u64) -> Answered {
        let mut things = lock(&self.things);
        if things.leaving.iter().any(|(leaving, _)| *leaving == number) {
            return Ok((HelperAnswer::Wait, None));
        }
        let (keeper, names) = things.states.remove(&number).context("there is no such state")?;
        things.leaving.extend(names.iter().map(|name| (number, *name)));
        drop(things);
        let leaving = Arc::new(Mutex::new(Some(keeper)));
        let its = Arc::clone(&leaving);
        let left = self.beside(move |things| Ok(leave(things, number, &its)));
        left.or_else(|_| Ok(leave(&self.things, number, &leaving)))
    }

    /// Does what may wait for the file system of an image on a thread, with the rights of whoever started the daemon.
    fn beside(&self, act: impl FnOnce(&Mutex<Things>) -> Answered + Send + 'static) -> Answered {
        self.on_thread(("state", &Arc::default()), None, act)
    }

    /// Whom to act for.
    fn account(&self) -> Option<Account> {
        self.duties.account.clone().filter(|_| self.started || self.duties.acts_for_it)
    }
}

/// Does all of it at a time: each may have to wait for its file system.
fn all_at_once(all: Vec<Box<dyn FnOnce() + Send>>) {
    let count = all.len();
    let all = Mutex::new(all);
    let next = || all.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let one = || next().and_then(|act| survive("the helper", act)).unwrap_or_default();
    std::thread::scope(|scope| {
        for _ in 0..count {
            let thread = std::thread::Builder::new().name("end".into());
            if thread.spawn_scoped(scope, one).is_err() {
                // One after another, then.
                one();
            }
        }
    });
}

fn lock_keeper(keeper: &Mutex<StateKeeper>) -> MutexGuard<'_, StateKeeper> {
    keeper.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Leaves a disk in order, once.
fn leave(
    things: &Mutex<Things>,
    number: u64,
    leaving: &Mutex<Option<SharedKeeper>>,
) -> (HelperAnswer, Option<OwnedFd>) {
    let taken = leaving.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(keeper) = taken {
        survive("the helper", || lock_keeper(&keeper).leave());
        lock(things).leaving.retain(|(leaving, _)| *leaving != number);
        // Each descriptor that is closed here may be waited for.
        drop(keeper);
    }
    (HelperAnswer::Done, None)
}

/// What is kept of a disk is not taken up while it is being left by who had it before.
fn wait_until_left(things: &Mutex<Things>, name: StateName) {
    while lock(things).leaving.iter().any(|(_, leaving)| *leaving == name) {
        std::thread::sleep(LEAVES_SOON);
    }
}

/// Looks after the state of a disk from now on.
fn keep(things: &Mutex<Things>, keeper: anyhow::Result<StateKeeper>) -> Answered {
    let keeper = match keeper {
        Err(error) if error.is::<NoPlace>() => {
            return Ok((HelperAnswer::NoPlace { why: reason(&error) }, None));
        }
        keeper => keeper?,
    };
    let (file, names) = (keeper.file().try_clone()?, keeper.names());
    let mut things = lock(things);
    things.next += 1;
    let number = things.next;
    things.states.insert(number, (Arc::new(Mutex::new(keeper)), names));
    Ok((HelperAnswer::State { number }, Some(file.into())))
}

/// Answers one request. A daemon that does not take the answer is dead, or about to be, and the pidfd says so; or it
/// had no descriptor left for the line. True if it has taken it.
fn reply(
    answer: Answered,
    send: impl Fn(&HelperAnswer, Option<BorrowedFd<'_>>) -> Result<(), SendError>,
) -> bool {
    let (answer, fd) = match answer {
        Ok(answer) => answer,
        Err(error) => (HelperAnswer::refused(&error), None),
    };
    let sent = send(&answer, fd.as_ref().map(AsFd::as_fd));
    let is_sent = sent.is_ok();
    if let Err(error @ (SendError::TooLong(_) | SendError::Words(_))) = sent {
        let _ = send(&HelperAnswer::refused(&error.into()), None);
    }
    is_sent
}

/// The image that comes with a request, which is open for writing: who asks may write it, and gains nothing by
/// what is done here with other rights than its own. A descriptor that only names a file (`O_PATH`) anybody can have.
fn written(image: Option<OwnedFd>) -> anyhow::Result<File> {
    let image =
        image.context("the image does not come with it; or its descriptor is lost (ulimit -n)")?;
    let flags = rustix::fs::fcntl_getfl(&image)?;
    let writes = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
    if !writes || flags.contains(OFlags::PATH) {
        bail!("the image that comes with it is not open for writing");
    }
    Ok(image.into())
}

/// Listens on a socket that belongs to another user and group.
fn for_account(
    account: &Account,
    path: &Path,
    access: Access,
) -> anyhow::Result<(UnixListener, OwnFile)> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            account.with_group(access.group).own_what_is_made()?;
            listen(path, access)
        });
        thread.join().map_err(|_| anyhow!("the helper's thread panicked"))?
    })
}

fn lock(things: &Mutex<Things>) -> MutexGuard<'_, Things> {
    things.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests;
