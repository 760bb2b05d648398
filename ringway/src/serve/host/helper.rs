//! The helper process: opens, makes and removes files for a daemon that no longer can. It hears one
//! daemon and nobody else, never touches what is in a file, and ends with the daemon.
//!
//! Until the daemon has started it has the rights that the daemon was started with. After that it
//! acts as the daemon's user, so that a daemon in wrong hands gains nothing by it, with one exception:
//! files that it made before it removes with the rights it made them with.

use super::Duties;
use super::client::Client;
use super::local::{Local, OwnFile, listen, open};
use super::wire::{receive, send};
use super::words::{Answer, Found, Request, Wanted};
use crate::config::Location;
use crate::sandbox::{Account, confine_helper};
use anyhow::{Context, anyhow, bail};
use nix::sys::signal::{SigSet, Signal};
use rustix::fs::{AtFlags, CWD, Gid, Mode, Uid, chmodat, chownat};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// A file that was made.
struct Thing {
    file: OwnFile,
    /// As whom; `None` is as whoever started the daemon.
    made_as: Option<Account>,
}

/// What the helper knows.
struct Helper {
    local: Local,
    duties: Duties,
    started: bool,
    things: Arc<Mutex<Things>>,
}

#[derive(Default)]
struct Things {
    list: BTreeMap<u64, Thing>,
    next: u64,
}

impl Things {
    fn add(&mut self, file: OwnFile, made_as: Option<Account>) -> u64 {
        self.next += 1;
        self.list.insert(self.next, Thing { file, made_as });
        self.next
    }
}

/// Starts the helper. There must be no other thread.
///
/// # Errors
/// What the host says.
pub(super) fn fork(local: &Local, duties: Duties) -> anyhow::Result<Client> {
    let (ours, its) = line().context("cannot make a line to a helper process")?;
    // SAFETY: there is one thread, so the child may do anything the parent may.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()).context("cannot start a helper process"),
        0 => {
            drop(ours);
            settle(&its);
            let local = Local { engines: local.engines.clone(), iopoll: local.iopoll };
            let things = Arc::default();
            Helper { local, duties, started: false, things }.serve(&its);
            // SAFETY: ends the process. What belongs to the daemon is not put in order here.
            unsafe { libc::_exit(0) }
        }
        _ => Ok(Client::new(ours)),
    }
}

fn line() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Lets go of what the daemon has, and gives up what is not needed.
fn settle(line: &OwnedFd) {
    // All best effort: none of it is needed to serve.
    let _ = rustix::thread::set_name(c"ringway-helper");
    // Signals from a terminal or a service manager are for the daemon: it tells when it is over.
    let signals = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGUSR1, Signal::SIGHUP];
    let _ = signals.into_iter().collect::<SigSet>().thread_block();
    if let Ok(null) = std::fs::File::options().read(true).write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
    }
    let line = line.as_raw_fd();
    close_between(3, line - 1);
    close_between(line + 1, RawFd::MAX);
    let _ = rustix::thread::set_no_new_privs(true);
    confine_helper();
}

fn close_between(first: RawFd, last: RawFd) {
    if first <= last {
        // SAFETY: in this process nothing uses these descriptors; their owners are never dropped.
        unsafe {
            libc::syscall(libc::SYS_close_range, first.cast_unsigned(), last.cast_unsigned(), 0u32)
        };
    }
}

impl Helper {
    /// Until the daemon has ended. If it never started, what was made for it goes.
    fn serve(mut self, line: &OwnedFd) {
        while let Ok(Some((request, _))) = receive(line) {
            let (answer, fd) = match self.obey(request) {
                Ok(answer) => answer,
                Err(error) => (Answer::Refused(format!("{error:#}")), None),
            };
            if send(line, &answer, fd.as_ref().map(AsFd::as_fd)).is_err() {
                break;
            }
        }
        if self.started {
            // Sockets stay for the next daemon to replace, as if it had been killed without us.
            std::mem::forget(std::mem::take(&mut *lock(&self.things)));
        } else {
            lock(&self.things).list.clear();
        }
    }

    fn obey(&mut self, request: Request) -> anyhow::Result<(Answer, Option<OwnedFd>)> {
        if self.started
            && !self.duties.adds
            && matches!(request, Request::Open(_) | Request::Listen { .. })
        {
            bail!("this daemon was started without --control: no disks are added to it");
        }
        match request {
            Request::Open(wanted) => {
                let (ours, its) = line()?;
                self.open(wanted, ours)?;
                Ok((Answer::Wait, Some(its)))
            }
            Request::Listen { path, private } => self.listen(&PathBuf::from(path), private),
            Request::Locate { path } => {
                let path = PathBuf::from(path);
                let location = self.as_account(|| Location::of(&path))?;
                Ok((Answer::Located(location), None))
            }
            Request::Keep { number } => {
                let thing = lock(&self.things).list.remove(&number);
                thing.into_iter().for_each(|thing| thing.file.keep());
                Ok((Answer::Done, None))
            }
            Request::Remove { number } => {
                let Some(thing) = lock(&self.things).list.remove(&number) else {
                    bail!("there is no file {number}");
                };
                acting_as(thing.made_as.as_ref(), || drop(thing.file))?;
                Ok((Answer::Done, None))
            }
            Request::Started => {
                self.started = true;
                Ok((Answer::Done, None))
            }
        }
    }

    /// Opens an image on a thread of its own: it may have to wait for a lock.
    fn open(&self, wanted: Wanted, line: OwnedFd) -> anyhow::Result<()> {
        let options = wanted.into_options(|asked| self.local.engines(asked))?;
        let (iopoll, account, things) =
            (self.local.iopoll, self.account(), Arc::clone(&self.things));
        std::thread::Builder::new().name("open".into()).spawn(move || {
            let opened = || -> anyhow::Result<_> {
                account.iter().try_for_each(Account::become_it)?;
                let (disk, new) = open(&options, iopoll)?;
                // The daemon takes the lock anew, in its own name.
                disk.unlock();
                let (found, file) = Found::of(disk.into_parts());
                let new = new.map(|file| lock(&things).add(file, account.clone()));
                Ok((Answer::Opened { found: Box::new(found), new }, file))
            };
            // If the daemon has gone nobody needs the answer.
            let _ = match opened() {
                Ok((answer, file)) => send(line, &answer, Some(file.as_fd())),
                Err(error) => send(line, &Answer::Refused(format!("{error:#}")), None),
            };
        })?;
        Ok(())
    }

    fn listen(&self, path: &Path, private: bool) -> anyhow::Result<(Answer, Option<OwnedFd>)> {
        let (listener, file) = self.as_account(|| listen(path, private))??;
        if !self.started
            && !private
            && let Some(account) = &self.duties.account
        {
            // What connects to the daemon's disks has its rights, not those of who started it.
            let (user, group) = account.numbers();
            let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
            chownat(CWD, &file.path, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)
                .with_context(|| format!("{}: cannot give it to {account}", path.display()))?;
            // To connect takes the right to write.
            chmodat(CWD, &file.path, Mode::from_raw_mode(0o660), AtFlags::empty())
                .with_context(|| format!("{}: cannot let its group in", path.display()))?;
        }
        let path = file.path.as_path().into();
        let number = lock(&self.things).add(file, self.account());
        Ok((Answer::Listening { number, path }, Some(listener.into())))
    }

    /// Whom to act for.
    fn account(&self) -> Option<Account> {
        self.duties.account.clone().filter(|_| self.started)
    }

    fn as_account<T: Send>(&self, act: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        acting_as(self.account().as_ref(), act)
    }
}

/// Does something with the rights of another user: on a thread that gives its own up.
fn acting_as<T: Send>(
    account: Option<&Account>,
    act: impl FnOnce() -> T + Send,
) -> anyhow::Result<T> {
    let Some(account) = account else { return Ok(act()) };
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| account.become_it().map(|()| act()));
        thread.join().map_err(|_| anyhow!("the helper's thread panicked"))?
    })
}

fn lock(things: &Mutex<Things>) -> MutexGuard<'_, Things> {
    things.lock().unwrap_or_else(|e| e.into_inner())
}
