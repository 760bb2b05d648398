//! Descriptors as a peer sends them: judged before anything is done with them, closing included.
//!
//! A file of a FUSE file system asks the process behind it when it is closed, mapped or looked at,
//! and that process may be the peer, who never answers: the thread then sleeps unkillably. A socket
//! may linger when it is closed. So only descriptors that are known to do neither are used and
//! closed. All others are put aside, open, until the process ends, and cost their sender the
//! connection.

use ringway_core::file::NO_PATH;
use ringway_export::Quarantine;
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, fcntl_get_seals, statx};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, Shutdown, SocketType,
    recvmsg, shutdown,
};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Most descriptors that the kernel lets one send pass on (SCM_MAX_FD). With room for all of them
/// it never closes one by itself.
const SENT_MAX: usize = 253;

/// What a descriptor is, as far as it can be told without asking its file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DescriptorKind {
    /// Memory, a file of a local disk, or one of the kernel's own such as an eventfd: none of them
    /// waits for anybody.
    Plain,
    /// A connected Unix socket: closed only once nothing is left in it that could linger.
    Channel,
    Foreign,
}

/// None of these questions is passed on to a file system.
fn kind(fd: BorrowedFd<'_>) -> DescriptorKind {
    // Files of tmpfs, hugetlbfs and memfd have seals, and no other file has.
    if fcntl_get_seals(fd).is_ok() {
        return DescriptorKind::Plain;
    }
    match socket_domain(fd) {
        Err(Errno::NOTSOCK) => {}
        Ok(AddressFamily::UNIX)
            if socket_type(fd) == Ok(SocketType::STREAM) && socket_acceptconn(fd) == Ok(false) =>
        {
            return DescriptorKind::Channel;
        }
        _ => return DescriptorKind::Foreign,
    }
    let Some((device, attributes)) = identify(fd) else { return DescriptorKind::Foreign };
    // What has no device number of its own is on no disk of this host. FUSE can have one, if it was
    // mounted by root, but knows none of these attributes.
    let on_a_disk = device.0 != 0 && attributes.contains(StatxAttributes::APPEND);
    if on_a_disk || anonymous_device() == Some(device) {
        DescriptorKind::Plain
    } else {
        DescriptorKind::Foreign
    }
}

/// Device and known attributes, from what the kernel has in memory.
fn identify(fd: BorrowedFd<'_>) -> Option<((u32, u32), StatxAttributes)> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = statx(fd, NO_PATH, flags, StatxFlags::TYPE).ok()?;
    Some(((stat.stx_dev_major, stat.stx_dev_minor), stat.stx_attributes_mask))
}

/// Where eventfds are, and all other descriptors of the kernel's own.
fn anonymous_device() -> Option<(u32, u32)> {
    use rustix::event::{EventfdFlags, eventfd};
    let own = eventfd(0, EventfdFlags::CLOEXEC).ok()?;
    identify(own.as_fd()).map(|(device, _)| device)
}

/// Sorts what has come into those that may be used (`kept`) and those that are put aside: how many.
pub(super) fn judge(
    came: impl IntoIterator<Item = OwnedFd>,
    kept: &mut Vec<OwnedFd>,
    quarantine: &Quarantine,
) -> usize {
    let mut foreign = 0;
    for fd in came {
        if kind(fd.as_fd()) == DescriptorKind::Foreign {
            quarantine.put(fd);
            foreign += 1;
        } else {
            kept.push(fd);
        }
    }
    foreign
}

/// Puts aside what is a socket: how many.
pub(super) fn without_sockets(fds: &mut Vec<OwnedFd>, quarantine: &Quarantine) -> usize {
    let is_socket = |fd: &OwnedFd| socket_domain(fd) != Err(Errno::NOTSOCK);
    let (sockets, rest): (Vec<_>, _) = std::mem::take(fds).into_iter().partition(is_socket);
    *fds = rest;
    sockets.into_iter().map(|fd| quarantine.put(fd)).count()
}

/// One part of a message, with the descriptors of it, unjudged.
pub(super) struct MessagePart {
    pub(super) bytes: usize,
    pub(super) fds: Vec<OwnedFd>,
    /// Some got lost: this process may open no more.
    pub(super) lost: bool,
}

/// Reads as much as there is. All descriptors that come with it are handed out.
pub(super) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<MessagePart, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SENT_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(buffer)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = recvmsg(socket, &mut parts, &mut control, flags)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    let lost = got.flags.contains(rustix::net::ReturnFlags::CTRUNC);
    Ok(MessagePart { bytes: got.bytes, fds, lost })
}

/// Closes a descriptor that was [judged](judge).
pub(super) fn close(fd: OwnedFd, quarantine: &Quarantine) {
    if socket_domain(&fd) == Ok(AddressFamily::UNIX) {
        empty(fd.as_fd(), quarantine);
    }
}

/// Closes those that nobody expects, but for all that is not known to be harmless. A socket within a
/// socket is not looked into.
pub(super) fn put_aside_or_close(fds: Vec<OwnedFd>, quarantine: &Quarantine) {
    for fd in fds {
        match kind(fd.as_fd()) {
            DescriptorKind::Plain => drop(fd),
            DescriptorKind::Channel | DescriptorKind::Foreign => quarantine.put(fd),
        }
    }
}

/// Takes what is left in a connected Unix socket that is about to be closed: the kernel would close
/// the descriptors in it, and wait for one that lingers.
pub(super) fn empty(socket: BorrowedFd<'_>, quarantine: &Quarantine) {
    // From now on nothing is added, so that there is an end.
    if shutdown(socket, Shutdown::Both).is_err() {
        return;
    }
    let mut buffer = [0; 4096];
    loop {
        match receive(socket, &mut buffer) {
            Ok(part) if part.bytes > 0 || !part.fds.is_empty() => {
                put_aside_or_close(part.fds, quarantine);
            }
            Err(Errno::INTR) => {}
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::io::IoSlice;
    use std::net::UdpSocket;
    use std::os::unix::net::UnixStream;

    /// As many as make a quarantine full.
    const MANY: usize = 128;

    fn foreign() -> OwnedFd {
        UdpSocket::bind("127.0.0.1:0").unwrap().into()
    }

    /// A connected socket in which so many messages wait, each with descriptors of `fd`.
    fn filled(messages: usize, fd: &OwnedFd, each: usize) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let fds = vec![fd.as_fd(); each];
        // And before all that bytes without any, more than are read at once: two reads.
        std::io::Write::write_all(&mut &theirs, &[0; 8192]).unwrap();
        for _ in 0..messages {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SENT_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            let sent = sendmsg(&theirs, &[IoSlice::new(b"x")], &mut control, SendFlags::empty());
            assert_eq!(sent, Ok(1));
        }
        ours
    }

    fn is_open(fd: i32) -> bool {
        // SAFETY: it only asks.
        unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
    }

    #[test]
    fn b22_what_is_left_in_a_socket_is_put_aside_before_it_is_closed() {
        let fd = foreign();
        for (messages, each) in [(1, MANY), (4, MANY / 4)] {
            let quarantine = Quarantine::default();
            let socket = filled(messages, &fd, each);
            empty(socket.as_fd(), &quarantine);
            assert!(quarantine.is_full(), "{messages} messages");
        }
        let quarantine = Quarantine::default();
        close(filled(1, &fd, MANY).into(), &quarantine);
        assert!(quarantine.is_full(), "closed with care");
        let quarantine = Quarantine::default();
        let file = tempfile::tempfile().unwrap();
        empty(filled(1, &file.into(), MANY).as_fd(), &quarantine);
        assert!(!quarantine.is_full(), "files are closed");
    }

    #[test]
    fn b22_descriptors_that_nobody_expects_are_closed_only_if_that_is_harmless() {
        let quarantine = Quarantine::default();
        let harmless = tempfile::tempfile().unwrap();
        let (channel, _other) = UnixStream::pair().unwrap();
        let fds: [OwnedFd; 3] = [harmless.into(), channel.into(), foreign()];
        let numbers = fds.each_ref().map(std::os::fd::AsRawFd::as_raw_fd);
        put_aside_or_close(fds.into(), &quarantine);
        assert!(is_open(numbers[1]) && is_open(numbers[2]));
        put_aside_or_close((2..MANY).map(|_| foreign()).collect(), &quarantine);
        assert!(quarantine.is_full(), "two and the rest");
    }

    #[test]
    fn b22_sockets_are_taken_out_and_counted() {
        let quarantine = Quarantine::default();
        let (channel, _other) = UnixStream::pair().unwrap();
        let mut fds = vec![channel.into(), tempfile::tempfile().unwrap().into(), foreign()];
        assert_eq!(without_sockets(&mut fds, &quarantine), 2);
        assert_eq!((fds.len(), kind(fds[0].as_fd())), (1, DescriptorKind::Plain));
    }
}
