//! One disk's thread: front-ends come and go, one at a time.

use super::endpoint::Endpoint;
use ringway_core::panic_point;
use ringway_vhost_user::{Ended, Export, Session};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};

/// How long to leave the host alone when it has no descriptor for a new connection.
const BREATH: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Serves front-ends until `stop` is readable, or until the only one there can be has gone.
///
/// # Errors
/// What the host says to polling.
pub(crate) fn serve(export: &Export, endpoint: &Endpoint, stop: BorrowedFd<'_>) -> io::Result<()> {
    let listener = match endpoint {
        Endpoint::Listener(listener, _) => listener,
        // Served over its own transport.
        Endpoint::Nbd(_) => return Ok(()),
        #[cfg(feature = "xen")]
        Endpoint::Xen(_) => return Ok(()),
        Endpoint::Connected(stream) => {
            attend(export, stream.try_clone()?, None, stop)?;
            return Ok(());
        }
    };
    while let Some(stream) = next(export, listener, stop)? {
        if attend(export, stream, Some(listener.as_fd()), stop)? == Ended::ByOrder {
            break;
        }
    }
    Ok(())
}

/// Waits for a front-end; `None` if told to stop.
fn next(
    export: &Export,
    listener: &UnixListener,
    stop: BorrowedFd<'_>,
) -> io::Result<Option<UnixStream>> {
    if export.is_closed() {
        tracing::error!(
            disk = export.disk().name(),
            "its front-ends have sent too many descriptors that can neither be used nor closed \
             without waiting for others: no more front-ends are served. Remove the disk and add it \
             anew, or restart the daemon"
        );
        while !wait(&[stop], None)?[0] {}
        return Ok(None);
    }
    // Those who connect meanwhile wait with it.
    let mut pause = export.pause_before_next();
    while !pause.is_zero() {
        if wait(&[stop], Timespec::try_from(pause).ok().as_ref())?[0] {
            return Ok(None);
        }
        pause = export.pause_before_next();
    }
    loop {
        if wait(&[stop, listener.as_fd()], None)?[0] {
            return Ok(None);
        }
        panic_point!("disk");
        match listener.accept() {
            Ok((stream, _)) => return Ok(Some(stream)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                if let Some(pass) = export.limits().retried.pass() {
                    let (disk, suppressed) = (export.disk().name(), pass.suppressed);
                    tracing::warn!(disk, suppressed, "no connection accepted: {error}");
                }
                if wait(&[stop], Some(&BREATH))?[0] {
                    return Ok(None);
                }
            }
        }
    }
}

fn attend(
    export: &Export,
    stream: UnixStream,
    others: Option<BorrowedFd<'_>>,
    stop: BorrowedFd<'_>,
) -> io::Result<Ended> {
    let disk = export.disk().name();
    // Accepted sockets block or not as they like; an inherited one comes as it was.
    stream.set_nonblocking(false)?;
    if let Some(pass) = export.limits().connected.pass() {
        tracing::info!(disk, suppressed = pass.suppressed, "front-end connected");
    }
    match Session::new(export, stream, stop) {
        Ok(session) => match others {
            Some(others) => Ok(session.with_others(others).run()),
            None => Ok(session.run()),
        },
        Err(error) => {
            if let Some(pass) = export.limits().ended.pass() {
                tracing::warn!(disk, suppressed = pass.suppressed, "connection refused: {error}");
            }
            Ok(Ended::ByPeer)
        }
    }
}

/// Waits until a descriptor is readable, or for `timeout`: which ones are.
fn wait<const N: usize>(
    fds: &[BorrowedFd<'_>; N],
    timeout: Option<&Timespec>,
) -> io::Result<[bool; N]> {
    let mut polled = fds.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
    match poll(&mut polled, timeout) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(polled.map(|fd| !fd.revents().is_empty()))
}
