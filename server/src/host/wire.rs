//! Messages between daemon and helper: one packet each, with at most one descriptor.

use anyhow::{Context, anyhow};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The longest message in bytes: paths are 4096 at most, reasons a few lines.
const LONGEST: usize = 64 << 10;

/// Sends one message.
///
/// # Errors
/// What the host says, such as that nobody is there.
pub(crate) fn send(
    line: impl AsFd,
    message: &impl Serialize,
    fd: Option<BorrowedFd<'_>>,
) -> anyhow::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    loop {
        let sent = sendmsg(&line, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        match sent {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop).context("cannot send to the other process"),
        }
    }
}

/// Waits for one message; `None` if the other side has ended.
///
/// # Errors
/// What the host says, or that it is no such message.
pub(crate) fn receive<T: DeserializeOwned>(
    line: impl AsFd,
) -> anyhow::Result<Option<(T, Option<OwnedFd>)>> {
    let mut bytes = vec![0; LONGEST];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        match recvmsg(&line, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            got => break got.context("cannot hear the other process")?,
        }
    };
    let mut fd = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            fd = fds.next();
        }
    }
    if got.bytes == 0 {
        return Ok(None);
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(anyhow!(
            "a message of the other process is too long, or there are no descriptors left"
        ));
    }
    Ok(Some((serde_json::from_slice(&bytes[..got.bytes])?, fd)))
}
