//! GET_INFLIGHT_FD and SET_INFLIGHT_FD by hand.

use super::{RawClient, halves, request, words};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// `struct VhostUserInflight`, with the padding of a C compiler.
#[must_use]
pub fn inflight_payload(bytes: u64, offset: u64, queues: u16, size: u16) -> Vec<u8> {
    let shape = u32::from(queues) | u32::from(size) << 16;
    [words(&[bytes, offset]), halves(&[shape, 0])].concat()
}

impl RawClient {
    /// Asks for an inflight region: its size and its file.
    ///
    /// # Errors
    /// As sending and receiving; `InvalidData` if the answer has another form.
    pub fn get_inflight(&self, queues: u16, size: u16) -> io::Result<(u64, OwnedFd)> {
        let payload = inflight_payload(0, 0, queues, size);
        self.send(request::GET_INFLIGHT_FD, 0, &payload, &[])?;
        let mut answer = [0; 12 + 24];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut answer)];
        let got = recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let mut fds: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        let bytes = answer[12..20].try_into().map_or(0, u64::from_ne_bytes);
        match fds.pop() {
            _ if got.bytes == 0 => Err(io::ErrorKind::UnexpectedEof.into()),
            Some(fd) if got.bytes == answer.len() && answer[20..] == payload[8..] => {
                Ok((bytes, fd))
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Hands an inflight region to the back-end; true if it was taken.
    ///
    /// # Errors
    /// As sending and receiving.
    pub fn set_inflight(&self, payload: &[u8], fd: BorrowedFd<'_>) -> io::Result<bool> {
        self.acked(request::SET_INFLIGHT_FD, payload, &[fd])
    }
}
