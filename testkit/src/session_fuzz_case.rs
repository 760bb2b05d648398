//! One vhost-user session from arbitrary bytes: mostly what a front-end would say, in an order and
//! with details that no front-end would choose.
//!
//! [`check`] is one function for two uses: a test of its corpus in `export`, and the target
//! `session` of cargo-fuzz. The session runs on the caller's
//! thread, with all that the client will ever say in its socket; the workers live as long as the
//! process.

#![allow(missing_docs, reason = "a tool of tests; its counts are named")]

use crate::raw::{
    F_EVENT_IDX, F_FLUSH, F_INDIRECT, F_PACKED, F_PROTOCOL, F_VERSION_1, NEED_REPLY, RawClient,
    halves, request as ask, words,
};
use ringway_disk::{EngineKind, OpenOptions, Source, open};
use ringway_export::{ExportOptions, Polling, PoolOptions, WorkerOptions};
use ringway_vhost_user::{Export, Pool, Session};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, LazyLock};

/// Guest and user address of the memory.
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0010_0000;
/// Bytes of memory; the rings of each queue, and one request's buffers, are this far apart.
const MEMORY: u64 = 1 << 18;
const STRIDE: u64 = 0x4000;
const QUEUES: u16 = 4;
const QUEUE_SIZE: u16 = 64;
/// The most messages of a session.
const MESSAGES_MAX: usize = 48;

/// What was reached.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    pub sent: u64,
    pub answered: u64,
    pub refused: u64,
    pub requests: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, more: Self) {
        self.sent += more.sent;
        self.answered += more.answered;
        self.refused += more.refused;
        self.requests += more.requests;
    }
}

/// What all sessions share.
struct Bench {
    export: Arc<Export>,
    pool: Pool,
    stop: Arc<OwnedFd>,
    memory: File,
    small: File,
    null: File,
}

static BENCH: LazyLock<Bench> = LazyLock::new(|| {
    let disk = OpenOptions::new(Source::Null { bytes: 1 << 20, latency_us: 0 });
    let disk = Arc::new(open(&disk).expect("no disk at all"));
    let worker = WorkerOptions { polling: Polling::Never, pin_memory: false, sample_latency: true };
    let options = PoolOptions { worker, ..PoolOptions::new(EngineKind::Null, 2) };
    let pool = Pool::start(options).expect("workers");
    let options = ExportOptions { queues: QUEUES, queue_size: QUEUE_SIZE };
    let memory = |bytes| {
        let file = memfd_create("session", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, bytes).expect("memory");
        File::from(file)
    };
    Bench {
        export: Arc::new(Export::new(disk, options, pool.handles().to_vec(), 0)),
        pool,
        stop: Arc::new(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")),
        memory: memory(MEMORY),
        small: memory(4096),
        // Neither memory nor an eventfd, and still closed by the session: others stay open.
        null: epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll").into(),
    }
});

/// The choices that are left; when they run out every choice is 0.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn half(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn word(&mut self) -> u64 {
        (0..8).fold(0, |word, _| word << 8 | u64::from(self.byte()))
    }

    fn below(&mut self, bound: u8) -> u8 {
        self.byte() % bound
    }

    /// True in about `chance` of 256 cases; never when the choices have run out.
    fn rarely(&mut self, chance: u8) -> bool {
        self.byte() > 255 - chance
    }
}

/// What goes with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fd {
    Memory,
    Small,
    Eventfd,
    Null,
}

/// A message to be sent.
struct Message {
    request: u32,
    payload: Vec<u8>,
    fds: Vec<Fd>,
}

/// Runs the session that `data` describes. Panics if an answer is none, or anything is left behind.
pub fn check(data: &[u8]) -> Counters {
    let mut c = Choices(data);
    let bench = &*BENCH;
    let open = descriptors();
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let closer = ours.try_clone().expect("a descriptor");
    let client = RawClient::new(ours);
    let mut script = Script { features: 0, sent: Vec::new(), client, bells: Vec::new() };
    script.write(&mut c);
    closer.shutdown(Shutdown::Write).expect("a connection");
    let before = requests(bench);
    let session = Session::new(&bench.export, theirs, &bench.stop).expect("a session");
    session.run();
    let mut counters = script.judge();
    // Both workers have dropped whatever they had of it once they have answered.
    counters.requests = requests(bench) - before;
    drop((script, closer));
    assert_eq!(descriptors(), open, "descriptors open after the session, and before");
    counters
}

/// Requests that all workers have served.
fn requests(bench: &Bench) -> u64 {
    let stats = bench.pool.handles().iter().map(|worker| worker.stats().expect("a worker"));
    stats.map(|stats| stats.requests).sum()
}

/// Descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// What the client says.
struct Script {
    features: u64,
    /// Requests sent whole, and whether an answer was asked for.
    sent: Vec<(u32, bool)>,
    client: RawClient,
    bells: Vec<OwnedFd>,
}

impl Script {
    fn write(&mut self, c: &mut Choices<'_>) {
        // Mostly a good beginning, so that what follows has something to meet.
        if !c.rarely(48) {
            self.negotiate(c);
            for queue in 0..u32::from(c.below(4)) {
                self.start(c, queue);
            }
        }
        while self.sent.len() < MESSAGES_MAX && !c.0.is_empty() {
            if c.rarely(24) {
                let queue = u32::from(c.below(5));
                self.start(c, queue);
            } else {
                let message = self.any(c);
                self.send(c, message);
            }
        }
    }

    fn negotiate(&mut self, c: &mut Choices<'_>) {
        let choice = c.byte();
        let all = [F_INDIRECT, F_EVENT_IDX, F_PACKED, F_FLUSH, F_PROTOCOL, 1 << 11];
        let chosen = (0..).zip(all).filter(|(bit, _)| choice >> bit & 1 == 0);
        self.features = F_VERSION_1 | chosen.fold(0, |word, (_, feature)| word | feature);
        self.put(c, ask::SET_OWNER, Vec::new(), &[]);
        // MQ, REPLY_ACK, CONFIG, RESET_DEVICE, CONFIGURE_MEM_SLOTS.
        let protocol = 1 | 1 << 3 | 1 << 9 | 1 << 13 | 1 << 15;
        self.put(c, ask::SET_PROTOCOL_FEATURES, words(&[protocol]), &[]);
        self.put(c, ask::SET_FEATURES, words(&[self.features]), &[]);
        let mut table = halves(&[1, 0]);
        table.extend(words(&[GUEST, MEMORY, USER, 0]));
        self.put(c, ask::SET_MEM_TABLE, table, &[Fd::Memory]);
    }

    /// All that starts a queue, with requests in its ring.
    fn start(&mut self, c: &mut Choices<'_>, queue: u32) {
        lay_requests(c, queue, self.features & F_PACKED != 0);
        let size = if c.rarely(32) { u32::from(c.half()) } else { 1 << (2 + c.below(5)) };
        let base = if self.features & F_PACKED != 0 { 0x8000_8000 } else { 0 };
        self.put(c, ask::SET_VRING_NUM, halves(&[queue, size]), &[]);
        self.put(c, ask::SET_VRING_BASE, halves(&[queue, base]), &[]);
        self.put(c, ask::SET_VRING_ADDR, addresses(queue), &[]);
        self.put(c, ask::SET_VRING_CALL, words(&[queue.into()]), &[Fd::Eventfd]);
        self.put(c, ask::SET_VRING_KICK, words(&[queue.into()]), &[Fd::Eventfd]);
        self.put(c, ask::SET_VRING_ENABLE, halves(&[queue, 1]), &[]);
    }

    fn put(&mut self, c: &mut Choices<'_>, request: u32, payload: Vec<u8>, fds: &[Fd]) {
        // Left out now and then.
        if !c.rarely(6) {
            self.send(c, Message { request, payload, fds: fds.to_vec() });
        }
    }

    /// A message of the right form, mostly.
    fn any(&self, c: &mut Choices<'_>) -> Message {
        // GET_INFLIGHT_FD, SET_INFLIGHT_FD, SET_LOG_BASE, SET_BACKEND_REQ_FD and others besides.
        const REQUESTS: [u32; 32] = [
            1, 2, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 24, 25, 34, 36, 37, 38, 31, 32,
            6, 21, 11, 18, 9, 12, 5, 37, 0,
        ];
        let request = match REQUESTS[usize::from(c.below(32))] {
            0 => u32::from(c.byte()),
            request => request,
        };
        let queue = if c.rarely(16) { c.byte().into() } else { u32::from(c.below(4)) };
        let value =
            if c.rarely(24) { u32::from(c.half()) << c.below(17) } else { c.below(66).into() };
        let bell = || match c.0.first() {
            Some(250..) => Fd::Null,
            _ => Fd::Eventfd,
        };
        let (payload, fds) = match request {
            ask::SET_FEATURES | ask::SET_PROTOCOL_FEATURES => {
                let bits = if c.rarely(64) { c.word() } else { self.features };
                (words(&[bits]), vec![])
            }
            ask::SET_MEM_TABLE => memory_table(c),
            ask::ADD_MEM_REG | ask::REM_MEM_REG => {
                let mut payload = words(&[0]);
                payload.extend(region(c, 1));
                let fds = if request == ask::ADD_MEM_REG { vec![Fd::Memory] } else { vec![] };
                (payload, fds)
            }
            ask::SET_VRING_NUM | ask::SET_VRING_BASE => (halves(&[queue, value]), vec![]),
            ask::GET_VRING_BASE => (halves(&[queue, 0]), vec![]),
            ask::SET_VRING_ENABLE => (halves(&[queue, u32::from(c.below(2))]), vec![]),
            ask::SET_VRING_ADDR if c.rarely(64) => {
                let mut payload = addresses(queue);
                let at = 8 * usize::from(1 + c.below(4));
                let wrong = USER + u64::from(c.half()) * 8;
                payload[at..at + 8].copy_from_slice(&wrong.to_ne_bytes());
                (payload, vec![])
            }
            ask::SET_VRING_ADDR => (addresses(queue), vec![]),
            ask::SET_VRING_KICK | ask::SET_VRING_CALL | ask::SET_VRING_ERR => {
                let bell = bell();
                let none = c.rarely(48);
                let fds = if none { vec![] } else { vec![bell] };
                (words(&[u64::from(queue) | u64::from(none) << 8]), fds)
            }
            ask::GET_CONFIG | ask::SET_CONFIG => {
                let offset =
                    if c.rarely(32) { u32::from(c.half()) } else { u32::from(c.below(64)) };
                let len = u32::from(c.below(65));
                let mut payload = halves(&[offset, len, 0]);
                payload.extend((0..len).map(|_| c.byte() & 1));
                (payload, vec![])
            }
            // struct vhost_user_inflight: mmap size, mmap offset, queues, queue size.
            31 | 32 => {
                let mut payload = words(&[u64::from(value) * 64, u64::from(c.below(2)) * 4096]);
                payload.extend([queue.to_ne_bytes(), value.to_ne_bytes()].concat());
                payload.truncate(20);
                (payload, if request == 32 { vec![Fd::Memory] } else { vec![] })
            }
            6 => (words(&[4096, 0]), vec![Fd::Small]),
            21 => (vec![], vec![Fd::Null]),
            _ => (vec![], vec![]),
        };
        Message { request, payload, fds }
    }

    /// Sends a message, bent now and then.
    fn send(&mut self, c: &mut Choices<'_>, mut message: Message) {
        let mut flags = if c.byte() & 1 == 1 { NEED_REPLY } else { 0 };
        let mut whole = true;
        if c.rarely(5) {
            match c.below(6) {
                0 => message.payload.truncate(usize::from(c.byte())),
                1 => message.payload.extend(std::iter::repeat_n(0x5a, usize::from(c.byte()))),
                2 => message.fds.push([Fd::Memory, Fd::Eventfd, Fd::Null][usize::from(c.below(3))]),
                3 => drop(message.fds.pop()),
                4 => flags |= u32::from(c.byte()),
                _ => whole = false,
            }
        }
        for fd in &message.fds {
            if *fd == Fd::Eventfd {
                // Some have rung already.
                let count = u32::from(c.byte() & 1);
                let bell = eventfd(count, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
                self.bells.push(bell.expect("an eventfd"));
            }
        }
        let mut bells = self.bells.iter().rev();
        let name = |fd: &Fd| match fd {
            Fd::Memory => BENCH.memory.as_fd(),
            Fd::Small => BENCH.small.as_fd(),
            Fd::Null => BENCH.null.as_fd(),
            Fd::Eventfd => bells.next().expect("made above").as_fd(),
        };
        let fds: Vec<BorrowedFd<'_>> = message.fds.iter().map(name).collect();
        if whole {
            self.client.send(message.request, flags, &message.payload, &fds).expect("room");
        } else {
            let bytes = halves(&[message.request, flags | 1, 40, 0]);
            self.client.send_bytes(&bytes[..usize::from(1 + c.below(15))], &fds).expect("room");
        }
        self.sent.push((message.request, flags & NEED_REPLY != 0));
    }

    /// Reads all answers: each is to a message that was sent, in their order.
    fn judge(&self) -> Counters {
        let mut counters = Counters { sent: self.sent.len() as u64, ..Counters::default() };
        let mut sent = self.sent.iter();
        while let Ok((request, payload)) = self.client.receive() {
            let always = [1, 11, 15, 17, 24, 31, 36].contains(&request);
            let asked = sent.find(|&&(asked, ack)| asked == request && (ack || always));
            assert!(asked.is_some(), "an answer to {request} that nobody asked for, or too late");
            counters.answered += 1;
            if !always {
                assert_eq!(payload.len(), 8, "the acknowledgement of {request}");
                counters.refused += u64::from(payload != [0; 8]);
            }
            assert!(payload.len() <= 12 + 256, "{} bytes for {request}", payload.len());
        }
        counters
    }
}

/// Where the rings of a queue are, as SET_VRING_ADDR says it.
fn addresses(queue: u32) -> Vec<u8> {
    let at = USER + STRIDE * u64::from(queue);
    let mut payload = halves(&[queue, 0]);
    payload.extend(words(&[at, at + 0x2000, at + 0x1000, 0]));
    payload
}

/// A region of the memory table, mostly one that is there.
fn region(c: &mut Choices<'_>, chance: u8) -> Vec<u8> {
    let mut fields = [GUEST, MEMORY, USER, 0];
    if c.rarely(chance * 40) {
        let shift = u64::from(c.below(64)) * 4096;
        fields = [GUEST + shift, MEMORY - shift, USER + shift, shift];
    }
    if c.rarely(16) {
        fields[usize::from(c.below(4))] = c.word();
    }
    words(&fields)
}

fn memory_table(c: &mut Choices<'_>) -> (Vec<u8>, Vec<Fd>) {
    let count = 1 + if c.rarely(64) { c.below(9) } else { 0 };
    let mut payload = halves(&[count.into(), 0]);
    let part = MEMORY / u64::from(count) / 4096 * 4096;
    for number in 0..u64::from(count) {
        let at = number * part;
        payload.extend(if c.rarely(16) {
            region(c, 4)
        } else {
            words(&[GUEST + at, part, USER + at, at])
        });
    }
    let fd = if c.rarely(8) { Fd::Small } else { Fd::Memory };
    (payload, vec![fd; usize::from(count)])
}

/// Puts a few requests, or what looks like them, into a queue's rings.
fn lay_requests(c: &mut Choices<'_>, queue: u32, packed: bool) {
    let at = STRIDE * u64::from(queue);
    let poke = |offset: u64, bytes: &[u8]| {
        // A queue beyond the memory has no rings.
        if offset + (bytes.len() as u64) <= MEMORY {
            BENCH.memory.write_all_at(bytes, offset).expect("memory");
        }
    };
    poke(at, &[0; 0x3000]);
    let count = u16::from(c.below(6));
    for request in 0..count {
        let header = at + 0x3000 + 64 * u64::from(request);
        let kind = [0u32, 1, 4, 8, 11, 13, 2, 0][usize::from(c.below(8))];
        poke(header, &kind.to_le_bytes());
        poke(header + 8, &u64::from(c.half() & 0xfff).to_le_bytes());
        let writes = if kind == 0 || kind == 8 { 2 } else { 0 };
        let lengths = [16, 512 * u32::from(c.below(8)), 1];
        let spots = [header, at, header + 63];
        let flags: [u16; 3] = [1, 1 | writes, 2];
        for part in 0..3 {
            let index = u64::from(3 * request) + part as u64;
            let addr = if c.rarely(6) { c.word() } else { GUEST + spots[part] };
            let mut desc = addr.to_le_bytes().to_vec();
            desc.extend(lengths[part].to_le_bytes());
            let next = u16::try_from(index + 1).unwrap_or(0);
            if packed {
                desc.extend(request.to_le_bytes());
                desc.extend((flags[part] | 1 << 7).to_le_bytes());
            } else {
                desc.extend(flags[part].to_le_bytes());
                desc.extend(next.to_le_bytes());
            }
            poke(at + 16 * index, &desc);
        }
        poke(at + 0x1000 + 4 + 2 * u64::from(request), &(3 * request).to_le_bytes());
    }
    let index = if c.rarely(8) { c.half() } else { count };
    poke(at + 0x1000 + 2, &index.to_le_bytes());
}
