//! Messages of the vhost-user protocol: reading, judging their form, answering.
//!
//! Every message is checked for its exact payload size and number of descriptors before anything
//! looks at its content. Descriptors are judged as they come (`received.rs`), before all else.

use super::received;
use ringway_export::Quarantine;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{FrontendReq, MAX_ATTACHED_FD_ENTRIES, VhostUserHeaderFlag};

/// Bytes of `struct vhost_iotlb_msg`: three of 8 bytes, two of one. Compilers pad it.
pub(super) const IOTLB_BYTES: usize = 26;
pub(super) const IOTLB_BYTES_PADDED: usize = 32;

/// Bytes of a header: request, flags, size of the payload.
const HEADER_BYTES: usize = 12;
/// Most regions in one memory table: as many as descriptors fit in a message of this protocol.
pub(super) const TABLE_REGIONS_MAX: usize = 8;
/// Most bytes of configuration space in one message.
pub(super) const CONFIG_BYTES_MAX: usize = 256;
/// The longest payload of a message that this back-end accepts, in bytes.
const PAYLOAD_MAX: usize = 12 + CONFIG_BYTES_MAX + 256;
/// How long a peer may take to read a whole answer.
const SEND_MAX: Duration = Duration::from_secs(10);
/// How long a peer may take to send a whole message, from its first byte.
const MESSAGE_MAX: Duration = Duration::from_secs(10);

/// In SET_VRING_KICK, CALL and ERR: there is no descriptor.
pub(super) const VRING_NO_FD: u64 = 1 << 8;

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum MessageError {
    #[error("the peer closed the connection")]
    Closed,
    #[error("told to stop")]
    Stopped,
    #[error("message {request} has {have} bytes of payload where {want} belong")]
    PayloadSize { request: u32, have: usize, want: String },
    #[error("message {request} carries {have} descriptors where {want} belong")]
    DescriptorCount { request: u32, have: usize, want: String },
    #[error("a message header of version {0}, where 1 belongs, or a reply nobody asked for")]
    Version(u32),
    #[error(
        "descriptors got lost: more than a message can carry, or than this process may open \
         (ulimit -n)"
    )]
    TooManyDescriptors,
    #[error(
        "{0} descriptors may wait for another process when they are used or closed, and are left \
         open unused: files of FUSE, network and overlay file systems or btrfs, sockets, pipes, \
         devices. Guest memory has to be memfd, tmpfs, hugetlbfs, or a file of ext4 or XFS"
    )]
    Foreign(usize),
    #[error("the peer took too long in the middle of a message")]
    TooSlow,
    #[error("the socket fails: {0}")]
    Socket(#[from] io::Error),
}

/// One message as it came, with a form that fits its request.
#[derive(Debug)]
pub(super) struct Message {
    /// What the peer wants; `None` for a request this code has no name for.
    pub(super) request: Option<FrontendReq>,
    pub(super) code: u32,
    pub(super) need_reply: bool,
    payload: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

impl Message {
    /// The little-endian u32 at `offset` bytes. The form was checked, so it is there.
    pub(super) fn u32(&self, offset: usize) -> u32 {
        self.payload
            .get(offset..offset + 4)
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(0, u32::from_ne_bytes)
    }

    /// The u16 at `offset` bytes.
    pub(super) fn u16(&self, offset: usize) -> u16 {
        self.payload
            .get(offset..offset + 2)
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(0, u16::from_ne_bytes)
    }

    /// The u64 at `offset` bytes.
    pub(super) fn u64(&self, offset: usize) -> u64 {
        self.payload
            .get(offset..offset + 8)
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(0, u64::from_ne_bytes)
    }

    pub(super) fn payload(&self) -> &[u8] {
        &self.payload
    }

    pub(super) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fds.pop()
    }

    /// Checks payload size and number of descriptors against what the request asks for.
    fn check_form(&self) -> Result<(), MessageError> {
        use FrontendReq as R;
        let Some(request) = self.request else { return Ok(()) };
        let have = self.payload.len();
        let (size_ok, want): (bool, String) = match request {
            R::GET_FEATURES
            | R::SET_OWNER
            | R::RESET_OWNER
            | R::GET_PROTOCOL_FEATURES
            | R::GET_QUEUE_NUM
            | R::RESET_DEVICE
            | R::GET_MAX_MEM_SLOTS
            | R::SET_LOG_FD
            | R::SET_BACKEND_REQ_FD => (have == 0, "0".into()),
            R::SET_FEATURES
            | R::SET_PROTOCOL_FEATURES
            | R::SET_VRING_NUM
            | R::SET_VRING_BASE
            | R::GET_VRING_BASE
            | R::SET_VRING_KICK
            | R::SET_VRING_CALL
            | R::SET_VRING_ERR
            | R::SET_VRING_ENABLE => (have == 8, "8".into()),
            // Size and offset of the log, or its address in a form of old.
            R::SET_LOG_BASE => (have == 16 || have == 8, "16".into()),
            R::SET_VRING_ADDR | R::ADD_MEM_REG | R::REM_MEM_REG => (have == 40, "40".into()),
            R::SET_MEM_TABLE => {
                let count = self.u32(0) as usize;
                let want = 8 + 32 * count;
                (have >= 8 && count <= TABLE_REGIONS_MAX && have == want, want.to_string())
            }
            // struct vhost_iotlb_msg, which compilers pad to 32 bytes.
            R::IOTLB_MSG => {
                (have == IOTLB_BYTES || have == IOTLB_BYTES_PADDED, format!("{IOTLB_BYTES_PADDED}"))
            }
            // struct VhostUserInflight, which compilers pad to 24 bytes.
            R::GET_INFLIGHT_FD | R::SET_INFLIGHT_FD => {
                (have == 20 || have == 24, "20 or 24".into())
            }
            R::GET_CONFIG | R::SET_CONFIG => {
                let want = 12 + self.u32(4) as usize;
                (have >= 12 && have == want, want.to_string())
            }
            // Not offered: the session refuses them whatever they carry.
            _ => return Ok(()),
        };
        if !size_ok {
            return Err(MessageError::PayloadSize { request: self.code, have, want });
        }
        self.check_descriptors(request)
    }

    fn check_descriptors(&self, request: FrontendReq) -> Result<(), MessageError> {
        use FrontendReq as R;
        let have = self.fds.len();
        let (ok, want) = match request {
            R::SET_MEM_TABLE => {
                let count = self.u32(0) as usize;
                (have == count, count.to_string())
            }
            R::SET_VRING_KICK | R::SET_VRING_CALL | R::SET_VRING_ERR => {
                let count = usize::from(self.u64(0) & VRING_NO_FD == 0);
                (have == count, count.to_string())
            }
            R::ADD_MEM_REG | R::SET_BACKEND_REQ_FD | R::SET_LOG_FD | R::SET_INFLIGHT_FD => {
                (have == 1, "1".into())
            }
            R::SET_LOG_BASE => {
                let count = usize::from(self.payload.len() == 16);
                (have == count, count.to_string())
            }
            // QEMU attaches a descriptor although the protocol has no use for it.
            R::REM_MEM_REG => (have <= 1, "0".into()),
            _ => (have == 0, "0".into()),
        };
        if ok {
            Ok(())
        } else {
            Err(MessageError::DescriptorCount { request: self.code, have, want })
        }
    }
}

/// The connection.
#[derive(Debug)]
pub(super) struct Channel {
    socket: UnixStream,
    quarantine: Arc<Quarantine>,
    /// What has come of the next message: header and payload.
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// When its first byte came.
    begun: Option<Instant>,
}

/// What woke [`Channel::wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Message,
    Alarm,
    Stop,
    /// The front-end answers something on the back-end's channel.
    Answer,
    /// Nothing came in time.
    Silence,
}

impl Channel {
    pub(super) fn new(socket: UnixStream, quarantine: Arc<Quarantine>) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, quarantine, bytes: Vec::new(), fds: Vec::new(), begun: None })
    }

    /// How long the peer has for the rest of a message that it has begun.
    pub(super) fn time_left(&self) -> Result<Option<Duration>, MessageError> {
        let Some(begun) = self.begun else { return Ok(None) };
        MESSAGE_MAX.checked_sub(begun.elapsed()).map(Some).ok_or(MessageError::TooSlow)
    }

    /// When it has had its time for that.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.begun.map(|begun| begun + MESSAGE_MAX)
    }

    /// Waits for a message, an alarm, the order to stop, or an answer on another channel, no longer than
    /// `timeout`. Unless it `reads`, a message is that the peer has gone.
    pub(super) fn wait(
        &self,
        reads: bool,
        stop: BorrowedFd<'_>,
        alarm: BorrowedFd<'_>,
        answers: Option<BorrowedFd<'_>>,
        timeout: Option<&Timespec>,
    ) -> io::Result<Event> {
        let mut fds = [
            PollFd::new(&stop, PollFlags::IN),
            PollFd::new(&alarm, PollFlags::IN),
            PollFd::new(&self.socket, if reads { PollFlags::IN } else { PollFlags::RDHUP }),
            // A descriptor that is asked for nothing stands for none.
            answers.as_ref().map_or_else(
                || PollFd::from_borrowed_fd(stop, PollFlags::empty()),
                |answers| PollFd::new(answers, PollFlags::IN),
            ),
        ];
        loop {
            match poll(&mut fds, timeout) {
                Ok(0) => return Ok(Event::Silence),
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(match fds.map(|fd| !fd.revents().is_empty()) {
            [true, ..] => Event::Stop,
            [_, true, ..] => Event::Alarm,
            [_, _, true, _] => Event::Message,
            _ => Event::Answer,
        })
    }

    /// True once the peer has closed it.
    pub(super) fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
    }

    /// Reads what is there of a message, and checks the form of one that is whole. It never waits:
    /// `None` if more is to come.
    pub(super) fn receive(&mut self) -> Result<Option<Message>, MessageError> {
        loop {
            let whole = self.whole_bytes()?;
            if self.bytes.len() == whole {
                return self.take_message().map(Some);
            }
            let have = self.bytes.len();
            let mut room = [0; HEADER_BYTES + PAYLOAD_MAX];
            let got = match received::receive(self.socket.as_fd(), &mut room[have..whole]) {
                Ok(got) => got,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::CONNRESET) => return Err(MessageError::Closed),
                Err(e) => return Err(io::Error::from(e).into()),
            };
            self.bytes.extend_from_slice(&room[have..have + got.bytes]);
            let foreign = received::judge(got.fds, &mut self.fds, &self.quarantine);
            if foreign > 0 {
                return Err(MessageError::Foreign(foreign));
            }
            if got.lost || self.fds.len() > MAX_ATTACHED_FD_ENTRIES {
                return Err(MessageError::TooManyDescriptors);
            }
            if got.bytes == 0 {
                return Err(MessageError::Closed);
            }
            self.begun.get_or_insert_with(Instant::now);
        }
    }

    fn word(&self, at: usize) -> u32 {
        let bytes = self.bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u32::from_ne_bytes)
    }

    /// Length of the message with its header, as far as that is known.
    fn whole_bytes(&self) -> Result<usize, MessageError> {
        if self.bytes.len() < HEADER_BYTES {
            return Ok(HEADER_BYTES);
        }
        let (request, flags, size) = (self.word(0), self.word(4), self.word(8) as usize);
        let version = flags & VhostUserHeaderFlag::VERSION.bits();
        if version != 1 || flags & VhostUserHeaderFlag::REPLY.bits() != 0 {
            return Err(MessageError::Version(version));
        }
        if size > PAYLOAD_MAX {
            let want = format!("at most {PAYLOAD_MAX}");
            return Err(MessageError::PayloadSize { request, have: size, want });
        }
        Ok(HEADER_BYTES + size)
    }

    fn take_message(&mut self) -> Result<Message, MessageError> {
        let code = self.word(0);
        let request = FrontendReq::try_from(code).ok();
        // Nothing else has a use for a socket, and only there one is closed with care.
        if request != Some(FrontendReq::SET_BACKEND_REQ_FD) {
            let foreign = received::without_sockets(&mut self.fds, &self.quarantine);
            if foreign > 0 {
                return Err(MessageError::Foreign(foreign));
            }
        }
        let need_reply = self.word(4) & VhostUserHeaderFlag::NEED_REPLY.bits() != 0;
        let payload = self.bytes.split_off(HEADER_BYTES);
        self.bytes.clear();
        self.begun = None;
        let mut message = Message { request, code, need_reply, payload, fds: Vec::new() };
        std::mem::swap(&mut message.fds, &mut self.fds);
        if let Err(error) = message.check_form() {
            // Closed with care.
            self.fds = message.fds;
            return Err(error);
        }
        Ok(message)
    }

    /// Waits until the socket is ready, but not when told to stop and not for ever.
    fn wait_for(
        &self,
        ready: PollFlags,
        stop: BorrowedFd<'_>,
        deadline: Instant,
    ) -> Result<(), MessageError> {
        let left = deadline.checked_duration_since(Instant::now()).ok_or(MessageError::TooSlow)?;
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        let mut fds = [PollFd::new(&stop, PollFlags::IN), PollFd::new(&self.socket, ready)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => Err(MessageError::TooSlow),
            Ok(_) if !fds[0].revents().is_empty() => Err(MessageError::Stopped),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(io::Error::from(e).into()),
        }
    }

    /// Answers `code` with `payload` and perhaps a descriptor.
    pub(super) fn reply(
        &self,
        code: u32,
        payload: &[u8],
        fd: Option<BorrowedFd<'_>>,
        stop: BorrowedFd<'_>,
    ) -> Result<(), MessageError> {
        let flags = 1 | VhostUserHeaderFlag::REPLY.bits();
        self.send(code, flags, payload, fd, stop)
    }

    pub(super) fn send(
        &self,
        code: u32,
        flags: u32,
        payload: &[u8],
        fd: Option<BorrowedFd<'_>>,
        stop: BorrowedFd<'_>,
    ) -> Result<(), MessageError> {
        let size = u32::try_from(payload.len()).map_err(io::Error::other)?;
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        for word in [code, flags, size] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(payload);
        let mut rest = &bytes[..];
        let deadline = Instant::now() + SEND_MAX;
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        while !rest.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && rest.len() == bytes.len() {
                control.push(SendAncillaryMessage::ScmRights(&fds));
            }
            match sendmsg(
                self.socket.as_fd(),
                &[IoSlice::new(rest)],
                &mut control,
                SendFlags::NOSIGNAL,
            ) {
                Ok(sent) => rest = &rest[sent..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait_for(PollFlags::OUT, stop, deadline)?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(MessageError::Closed),
                Err(e) => return Err(io::Error::from(e).into()),
            }
        }
        Ok(())
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        for fd in self.fds.drain(..) {
            received::close(fd, &self.quarantine);
        }
        received::empty(self.socket.as_fd(), &self.quarantine);
    }
}

#[cfg(test)]
mod tests;
