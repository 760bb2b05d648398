//! A vhost-user client that keeps no rule: it sends whatever bytes a test wants, and lays out rings
//! by hand. Independent of the project's own front-end on purpose.

mod inflight;
mod layout;
mod packed;
mod packed_state;

pub use inflight::inflight_payload;

use layout::RING_STRIDE;
pub use layout::{DATA, Desc, GUEST_BASE};
use packed_state::Packed;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::collections::HashMap;
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Requests by number (vhost-user protocol, "Front-end message types").
pub mod request {
    #![allow(missing_docs)]
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// Header flag: answer this.
pub const NEED_REPLY: u32 = 8;
/// Feature bits used by tests.
pub const F_VERSION_1: u64 = 1 << 32;
/// VIRTIO_RING_F_INDIRECT_DESC.
pub const F_INDIRECT: u64 = 1 << 28;
/// VIRTIO_RING_F_EVENT_IDX.
pub const F_EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_RING_PACKED.
pub const F_PACKED: u64 = 1 << 34;
/// VHOST_USER_F_PROTOCOL_FEATURES.
pub const F_PROTOCOL: u64 = 1 << 30;
/// VIRTIO_BLK_F_FLUSH.
pub const F_FLUSH: u64 = 1 << 9;

/// User addresses are the guest's plus this.
pub const USER_DELTA: u64 = 0x7000_0000_0000;

/// A connection without manners.
#[derive(Debug)]
pub struct RawClient {
    socket: UnixStream,
}

impl RawClient {
    /// Takes a connection over. Reads give up after ten seconds: a hang is a failure.
    ///
    /// # Panics
    /// If the socket has no timeout.
    #[must_use]
    pub fn new(socket: UnixStream) -> Self {
        socket.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
        Self { socket }
    }

    /// Sends bytes as they are, with descriptors.
    ///
    /// # Errors
    /// What the socket says, for example that the peer has closed it.
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let sent =
            sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Sends a message with these flags beside the version.
    ///
    /// # Errors
    /// As [`RawClient::send_bytes`].
    pub fn send(
        &self,
        request: u32,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let size = u32::try_from(payload.len()).map_err(io::Error::other)?;
        let mut bytes = Vec::new();
        for word in [request, flags | 1, size] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(payload);
        self.send_bytes(&bytes, fds)
    }

    /// Reads one answer: request and payload. End of file is `UnexpectedEof`.
    ///
    /// # Errors
    /// What the socket says; `WouldBlock` after ten seconds of silence.
    pub fn receive(&self) -> io::Result<(u32, Vec<u8>)> {
        let mut header = [0; 12];
        (&self.socket).read_exact(&mut header)?;
        let word =
            |i: usize| u32::from_ne_bytes([header[i], header[i + 1], header[i + 2], header[i + 3]]);
        let mut payload = vec![0; word(8) as usize];
        (&self.socket).read_exact(&mut payload)?;
        Ok((word(0), payload))
    }

    /// Sends a message that is always answered and returns the answer's first u64.
    ///
    /// # Errors
    /// As sending and receiving.
    pub fn ask_u64(&self, request: u32) -> io::Result<u64> {
        self.send(request, 0, &[], &[])?;
        let (_, payload) = self.receive()?;
        Ok(payload.get(..8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes))
    }

    /// Sends a message, asks for an acknowledgement and returns whether it was taken.
    ///
    /// # Errors
    /// As sending and receiving.
    pub fn acked(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
        self.send(request, NEED_REPLY, payload, fds)?;
        let (_, answer) = self.receive()?;
        Ok(answer == 0u64.to_ne_bytes())
    }

    /// Closes the connection in both directions.
    pub fn hang_up(&self) {
        // Closed already is closed.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    /// True once the peer has closed the connection; waits up to ten seconds for it.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let mut byte = [0; 64];
        loop {
            match (&self.socket).read(&mut byte) {
                Ok(0) => return true,
                Ok(_) => {}
                // A read with a timeout does not begin again after SIGCONT (signal(7)).
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return e.kind() == io::ErrorKind::ConnectionReset,
            }
        }
    }
}

/// Joins words to a payload.
#[must_use]
pub fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// Joins half words to a payload.
#[must_use]
pub fn halves(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// Bytes of a [`RawGuest`]'s memory.
pub const MEMORY: u64 = 8 << 20;
/// A connected client with memory and queues whose rings it writes by hand.
#[derive(Debug)]
pub struct RawGuest {
    /// The connection.
    pub client: RawClient,
    /// The shared memory.
    pub memory: std::fs::File,
    /// Queue size, which holds from the next start of a queue on.
    pub size: u16,
    is_packed: bool,
    packed: Vec<Packed>,
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    avail: Vec<u16>,
    used_seen: Vec<u16>,
    moved: HashMap<u64, u64>,
}

impl RawGuest {
    /// Connects, shares memory and starts `queues` rings of `size` descriptors with `features`.
    ///
    /// # Panics
    /// If the back-end refuses any of it.
    #[must_use]
    pub fn start(socket: UnixStream, queues: u32, size: u16, features: u64) -> Self {
        let mut guest = Self::connect(socket, features);
        guest.size = size;
        for queue in 0..queues {
            assert!(guest.start_queue(queue).unwrap(), "queue {queue} starts");
        }
        guest
    }

    /// Connects and shares memory; starts no queue. Rings have 64 descriptors.
    ///
    /// # Panics
    /// If the back-end refuses any of it.
    #[must_use]
    pub fn connect(socket: UnixStream, features: u64) -> Self {
        let client = RawClient::new(socket);
        let memory = memfd_create("raw-guest", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&memory, MEMORY).expect("memory");
        let offered = client.ask_u64(request::GET_FEATURES).expect("features");
        assert_eq!(features & !offered, 0, "the test wants features that are not offered");
        client.send(request::SET_OWNER, 0, &[], &[]).expect("sent");
        client.ask_u64(request::GET_PROTOCOL_FEATURES).expect("protocol features");
        // MQ, REPLY_ACK, CONFIG, RESET_DEVICE, CONFIGURE_MEM_SLOTS.
        let protocol = 1 | 1 << 3 | 1 << 9 | 1 << 13 | 1 << 15;
        client.send(request::SET_PROTOCOL_FEATURES, 0, &words(&[protocol]), &[]).expect("sent");
        let guest = Self {
            client,
            memory: memory.into(),
            size: 64,
            is_packed: features & F_PACKED != 0,
            packed: (0..16).map(|_| Packed::default()).collect(),
            kicks: Vec::new(),
            calls: Vec::new(),
            avail: vec![0; 16],
            used_seen: vec![0; 16],
            moved: HashMap::new(),
        };
        let features = features | F_PROTOCOL;
        assert!(guest.client.acked(request::SET_FEATURES, &words(&[features]), &[]).unwrap());
        assert!(guest.set_mem_table().unwrap());
        guest
    }

    /// Sends the memory table.
    ///
    /// # Errors
    /// As the connection.
    pub fn set_mem_table(&self) -> io::Result<bool> {
        let mut payload = halves(&[1, 0]);
        payload.extend(words(&[GUEST_BASE, MEMORY, GUEST_BASE + USER_DELTA, 0]));
        self.client.acked(request::SET_MEM_TABLE, &payload, &[self.memory.as_fd()])
    }

    /// Sends all that a queue needs to start.
    ///
    /// # Errors
    /// As the connection.
    ///
    /// # Panics
    /// If the host has no eventfds.
    pub fn start_queue(&mut self, queue: u32) -> io::Result<bool> {
        let new = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd");
        let (kick, call) = (new(), new());
        let c = &self.client;
        let (desc, avail, used) = self.rings(queue);
        let mut addr = halves(&[queue, 0]);
        addr.extend(words(&[desc + USER_DELTA, used + USER_DELTA, avail + USER_DELTA, 0]));
        let index = words(&[u64::from(queue)]);
        let base = self.base(queue);
        let ok = c.acked(request::SET_VRING_NUM, &halves(&[queue, u32::from(self.size)]), &[])?
            && c.acked(request::SET_VRING_BASE, &halves(&[queue, base]), &[])?
            && c.acked(request::SET_VRING_ADDR, &addr, &[])?
            && c.acked(request::SET_VRING_CALL, &index, &[call.as_fd()])?
            && c.acked(request::SET_VRING_KICK, &index, &[kick.as_fd()])?
            && c.acked(request::SET_VRING_ENABLE, &halves(&[queue, 1]), &[])?;
        let at = queue as usize;
        if at < self.kicks.len() {
            self.kicks[at] = kick;
            self.calls[at] = call;
        } else {
            self.kicks.push(kick);
            self.calls.push(call);
        }
        Ok(ok)
    }

    /// Stops a queue and returns where it got to, as SET_VRING_BASE puts it.
    ///
    /// # Errors
    /// As the connection.
    pub fn stop_queue(&mut self, queue: u32) -> io::Result<u32> {
        self.client.send(request::GET_VRING_BASE, 0, &halves(&[queue, 0]), &[])?;
        let (_, payload) = self.client.receive()?;
        Ok(u32::from_ne_bytes([payload[4], payload[5], payload[6], payload[7]]))
    }

    /// Where a queue is that has done all it was offered, as SET_VRING_BASE puts it.
    #[must_use]
    pub fn base(&self, queue: u32) -> u32 {
        let at = queue as usize;
        if self.is_packed { self.packed[at].base(self.size) } else { self.avail[at].into() }
    }

    /// What the device had not taken when it stopped at `base` is not offered any more.
    ///
    /// # Panics
    /// If the device cannot have been there.
    pub fn rewind(&mut self, queue: u32, base: u32) {
        if self.is_packed {
            return self.rewind_packed(queue, base);
        }
        self.set_avail_index(queue, u16::try_from(base).expect("an index of a split ring"));
    }

    /// Forgets all about a queue that is stopped and starts over with empty rings.
    pub fn reset_queue(&mut self, queue: u32) {
        let (at, (table, _, used)) = (queue as usize, self.rings(queue));
        self.poke(table, &vec![0; usize::try_from(used - table + 0x8000).unwrap_or(0)]);
        self.packed[at] = Packed::default();
        self.avail[at] = 0;
        self.used_seen[at] = 0;
    }

    /// Guest addresses of a queue's descriptor table, available and used ring.
    #[must_use]
    pub fn rings(&self, queue: u32) -> (u64, u64, u64) {
        let base = GUEST_BASE + RING_STRIDE * u64::from(queue);
        (base, base + 0x6000, base + 0x8000)
    }

    /// From now on the guest's own addresses of this page mean the physical page `to`, where its content goes.
    pub fn move_page(&mut self, page: u64, to: u64) {
        let content = self.peek(page, 4096);
        self.moved.insert(page, to);
        self.poke(page, &content);
    }

    /// Where in the file the byte at `addr` is, and how many of `len` are there.
    fn place(&self, addr: u64, len: usize) -> (u64, usize) {
        let (page, offset) = (addr & !4095, addr & 4095);
        let here = len.min(usize::try_from(4096 - offset).unwrap_or(0));
        (self.moved.get(&page).unwrap_or(&page) + offset - GUEST_BASE, here)
    }

    /// Writes guest memory.
    ///
    /// # Panics
    /// If the address is not in the guest's memory.
    pub fn poke(&self, mut addr: u64, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (at, here) = self.place(addr, bytes.len());
            let (now, rest) = bytes.split_at(here);
            self.memory.write_all_at(now, at).expect("guest memory");
            (addr, bytes) = (addr + here as u64, rest);
        }
    }

    /// Reads guest memory.
    ///
    /// # Panics
    /// If the address is not in the guest's memory.
    #[must_use]
    pub fn peek(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            let (at, here) = self.place(addr + done as u64, len - done);
            self.memory.read_exact_at(&mut bytes[done..done + here], at).expect("guest memory");
            done += here;
        }
        bytes
    }

    fn peek_u16(&self, addr: u64) -> u16 {
        let bytes = self.peek(addr, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    /// Writes a descriptor into a table at a guest address. Those of packed rings have an id where
    /// others have flags, and flags where others have `next`.
    pub fn put_desc(&self, table: u64, index: u16, desc: Desc) {
        let mut bytes = desc.addr.to_le_bytes().to_vec();
        let tail = if self.is_packed { [0, desc.flags] } else { [desc.flags, desc.next] };
        bytes.extend_from_slice(&desc.len.to_le_bytes());
        bytes.extend_from_slice(&tail[0].to_le_bytes());
        bytes.extend_from_slice(&tail[1].to_le_bytes());
        self.poke(table + 16 * u64::from(index), &bytes);
    }

    /// Writes a request's header (`struct virtio_blk_req`).
    pub fn put_header(&self, addr: u64, kind: u32, sector: u64) {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&sector.to_le_bytes());
        self.poke(addr, &bytes);
    }

    /// Writes descriptors `first..` of `queue`, chained in order. In packed rings `first` is the
    /// number of the chain, which goes into the ring when it is offered.
    ///
    /// # Panics
    /// If there are too many.
    pub fn put_chain(&self, queue: u32, first: u16, descs: &[Desc]) {
        if self.is_packed {
            return self.packed[queue as usize].put_chain(first, descs.to_vec());
        }
        let (table, _, _) = self.rings(queue);
        for (i, &desc) in descs.iter().enumerate() {
            let index = first + u16::try_from(i).expect("a short chain");
            let mut desc = desc;
            if i + 1 < descs.len() {
                desc.flags |= 1;
                desc.next = index + 1;
            }
            self.put_desc(table, index, desc);
        }
    }

    /// Makes a head available and kicks.
    pub fn offer(&mut self, queue: u32, head: u16) {
        self.offer_quietly(queue, head);
        self.kick(queue);
    }

    /// Makes a head available without a kick.
    pub fn offer_quietly(&mut self, queue: u32, head: u16) {
        if self.is_packed {
            return self.offer_packed(queue, head);
        }
        let (_, avail, _) = self.rings(queue);
        let at = self.avail[queue as usize];
        let entry = u64::from(at % self.size);
        self.poke(avail + 4 + 2 * entry, &head.to_le_bytes());
        self.set_avail_index(queue, at.wrapping_add(1));
    }

    /// Makes a head available twice at once, without a kick.
    pub fn offer_twice(&mut self, queue: u32, head: u16) {
        if self.is_packed {
            return self.offer_packed_twice(queue, head);
        }
        let (_, avail, _) = self.rings(queue);
        let at = self.avail[queue as usize];
        for entry in [at, at.wrapping_add(1)] {
            self.poke(avail + 4 + 2 * u64::from(entry % self.size), &head.to_le_bytes());
        }
        self.set_avail_index(queue, at.wrapping_add(2));
    }

    /// Writes the available index of a split ring.
    pub fn set_avail_index(&mut self, queue: u32, index: u16) {
        let (_, avail, _) = self.rings(queue);
        self.avail[queue as usize] = index;
        self.poke(avail + 2, &index.to_le_bytes());
    }

    /// Rings the doorbell.
    ///
    /// # Panics
    /// If the eventfd is broken.
    pub fn kick(&self, queue: u32) {
        rustix::io::write(&self.kicks[queue as usize], &1u64.to_ne_bytes()).expect("a kick");
    }

    /// Waits for the next returned chain: its head and the bytes written. `None` after `timeout`.
    ///
    /// # Panics
    /// If the eventfd is broken.
    pub fn next_used(&mut self, queue: u32, timeout: Duration) -> Option<(u32, u32)> {
        let end = std::time::Instant::now() + timeout;
        loop {
            let used =
                if self.is_packed { self.used_packed(queue) } else { self.used_split(queue) };
            if used.is_some() {
                return used;
            }
            let left = end.checked_duration_since(std::time::Instant::now())?;
            // Polls now and then as well, in case the call was suppressed.
            let wait = left.min(Duration::from_millis(20));
            let wait = Timespec::try_from(wait).expect("a short time");
            let mut fds = [PollFd::new(&self.calls[queue as usize], PollFlags::IN)];
            poll(&mut fds, Some(&wait)).expect("poll");
        }
    }

    fn used_split(&mut self, queue: u32) -> Option<(u32, u32)> {
        let (_, _, used) = self.rings(queue);
        let at = queue as usize;
        if self.peek_u16(used + 2) == self.used_seen[at] {
            return None;
        }
        let entry = u64::from(self.used_seen[at] % self.size);
        self.used_seen[at] = self.used_seen[at].wrapping_add(1);
        let bytes = self.peek(used + 4 + 8 * entry, 8);
        let word =
            |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        Some((word(0), word(4)))
    }

    /// A plain request of one data buffer, done: status byte and bytes written.
    ///
    /// # Panics
    /// If it is not answered within ten seconds.
    pub fn simple(&mut self, queue: u32, kind: u32, sector: u64, data: u64, len: u32) -> (u8, u32) {
        let header = DATA - 0x1000;
        let status = header + 64;
        self.put_header(header, kind, sector);
        self.poke(status, &[0xee]);
        let flags = if matches!(kind, 0 | 8) { 2 } else { 0 };
        let mut descs = vec![Desc { addr: header, len: 16, ..Desc::default() }];
        if len > 0 {
            descs.push(Desc { addr: data, len, flags, next: 0 });
        }
        descs.push(Desc { addr: status, len: 1, flags: 2, next: 0 });
        self.put_chain(queue, 0, &descs);
        self.offer(queue, 0);
        let (_, written) =
            self.next_used(queue, Duration::from_secs(30)).expect("the request is answered");
        (self.peek(status, 1)[0], written)
    }
}
