//! The process that looks up hosts of NBD servers while the daemon runs. A resolver reads files, loads
//! libraries and asks servers as the host has it, which no list of system calls foresees. So it is neither
//! the daemon nor the helper that does it, but a process that has nothing else, knows the names that were
//! there at the start, and looks up no others.

use super::super::forked::{line, settle};
use super::super::wire::{ReceiveError, receive, send};
use crate::sandbox::{Account, confine_resolver};
use anyhow::Context;
use ringway_control::config::Sandbox;
use ringway_nbd_client::Target;
use ringway_terminal::reasons::in_full;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// A host is to be looked up: its number at the start.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Question(pub(super) usize);

/// What came of it: addresses, or why there are none.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Answer {
    pub(super) host: usize,
    pub(super) found: Result<Vec<SocketAddr>, String>,
}

/// Starts the process, which looks up the hosts of these exports and ends with whoever has the line. There
/// must be no other thread.
///
/// # Errors
/// What the host says.
pub(super) fn fork(
    mode: Sandbox,
    exports: Vec<Target>,
    account: Option<&Account>,
) -> anyhow::Result<OwnedFd> {
    let (ours, its) = line().context("cannot make a line to a process that looks up hosts")?;
    // SAFETY: there is one thread, so the child may do anything the parent may.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error())
            .context("cannot start a process that looks up hosts"),
        0 => {
            drop(ours);
            settle(&[Some(its.as_raw_fd())], false);
            let _ = rustix::thread::set_name(c"ringway-resolve");
            if confine_resolver(mode, account).is_ok() {
                serve(its, exports);
            }
            // SAFETY: ends the process. What belongs to the daemon is not put in order here.
            unsafe { libc::_exit(0) }
        }
        _ => Ok(ours),
    }
}

/// Until nobody asks any more. Each question has a thread: a resolver may take long about one name.
fn serve(line: OwnedFd, exports: Vec<Target>) {
    let (line, exports) = (Arc::new(line), Arc::new(exports));
    loop {
        let host = match receive::<Question>(&*line) {
            Ok((Question(host), _)) => host,
            // Whoever has asked has a limit to how long it waits.
            Err(ReceiveError::Message(_)) => continue,
            // Nobody asks any more; a helper that does goes on with what it knows.
            Err(ReceiveError::Ended | ReceiveError::Host(_)) => return,
        };
        let (to, exports) = (Arc::clone(&line), Arc::clone(&exports));
        let look_up = move || {
            let found = match exports.get(host) {
                Some(export) => export.look_up().map_err(|error| in_full(&error.into())),
                None => Err("it was not there at the start".to_owned()),
            };
            let _ = send(&*to, &Answer { host, found }, None);
        };
        if let Err(error) = std::thread::Builder::new().name("look-up".into()).spawn(look_up) {
            let _ = send(&*line, &Answer { host, found: Err(error.to_string()) }, None);
        }
    }
}
