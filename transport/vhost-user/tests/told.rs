//! What people are told of a connection: how it ends, and what of it cannot be reached. Lines of the whole
//! process are looked at here.
#![allow(missing_docs)]

use ringway_disk::{EngineKind, Source};
use ringway_testkit::raw::{
    Desc, F_VERSION_1, GUEST_BASE, NEED_REPLY, RawClient, RawGuest, USER_DELTA, request, words,
};
use ringway_testkit::rig::{Rig, RigOptions};
use std::fmt::Debug;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};
use tracing::Level;
use tracing::field::{Field, Visit};

static LINES: Mutex<Vec<(Level, String)>> = Mutex::new(Vec::new());

struct Lines;

struct Line(String);

impl tracing::Subscriber for Lines {
    fn enabled(&self, about: &tracing::Metadata<'_>) -> bool {
        *about.level() <= Level::INFO
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        LINES.lock().unwrap().push((*event.metadata().level(), line.0));
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

/// From now on lines are collected, and those of no other test.
fn listen() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    static LISTENS: Once = Once::new();
    let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    LISTENS.call_once(|| tracing::subscriber::set_global_default(Lines).unwrap());
    lines(Level::WARN);
    alone
}

/// What was said at this level and above since this was asked last.
fn lines(level: Level) -> Vec<String> {
    let all = std::mem::take(&mut *LINES.lock().unwrap());
    all.into_iter().filter(|(of, _)| *of <= level).map(|(_, line)| line).collect()
}

fn options() -> RigOptions {
    RigOptions::new(Source::Null { bytes: 1 << 20, latency_us: 0 }, EngineKind::Null)
}

#[test]
fn why_a_connection_ended_is_told() {
    let _alone = listen();
    let mut rig = Rig::start(&options());
    let mut ended = |bytes: &[u8]| {
        let client = RawClient::new(rig.connect());
        client.send_bytes(bytes, &[]).unwrap();
        client.hang_up();
        drop(client);
        rig.join_sessions();
        lines(Level::WARN)
    };
    let header = |flags| [request::GET_QUEUE_NUM, flags, 0].map(u32::to_ne_bytes).concat();
    assert_eq!(ended(&[]), [""; 0], "who leaves is no matter for anybody");
    let lines = ended(&header(2 | NEED_REPLY));
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("connection ended: a message header of version 2"), "{lines:?}");
}

const IOTLB_MSG: u32 = 22;
/// An answer that there is no translation.
const NONE: [u32; 5] = [1, 1 | 4, 8, 1, 0];

/// A guest behind an IOMMU, and where it is asked for translations.
fn behind_iommu(rig: &mut Rig) -> (RawGuest, UnixStream) {
    const ACCESS_PLATFORM: u64 = 1 << 33;
    let guest = RawGuest::connect(rig.connect(), F_VERSION_1 | ACCESS_PLATFORM);
    let (channel, theirs) = UnixStream::pair().unwrap();
    channel.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    // MQ, REPLY_ACK, BACKEND_REQ.
    let protocol = words(&[1 | 1 << 3 | 1 << 5]);
    guest.client.send(request::SET_PROTOCOL_FEATURES, 0, &protocol, &[]).unwrap();
    assert!(guest.client.acked(request::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]).unwrap());
    (guest, channel)
}

/// Why a front-end is asked no more is told by what it did.
#[test]
fn why_a_channel_was_given_up_is_told() {
    let _alone = listen();
    let mut rig = Rig::start(&options());
    let file = tempfile::tempfile().unwrap();
    for (what, why) in [
        (Some((NONE.to_vec(), vec![file.as_fd()])), "it sends descriptors"),
        (Some((vec![0xffff; 5], vec![])), "what it answers is not understood"),
        (None, "it has closed the channel"),
    ] {
        let (mut guest, mut channel) = behind_iommu(&mut rig);
        assert!(guest.start_queue(0).unwrap());
        channel.read_exact(&mut [0; 12 + 32]).unwrap();
        // It stays open, with questions that nobody has read: a socket that is closed like that is reset.
        let channel = RawClient::new(channel);
        match what {
            Some((words, fds)) => {
                let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
                channel.send_bytes(&bytes, &fds).unwrap();
            }
            None => channel.hang_up(),
        }
        let begun = Instant::now();
        let said = loop {
            let said = lines(Level::INFO);
            if let Some(line) = said.iter().find(|line| line.contains("asked for translations")) {
                break line.clone();
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "nothing is told of {why}");
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(said.contains(why), "{said}");
        drop(guest);
        rig.join_sessions();
    }
}

/// Behind an IOMMU a ring may be where its front-end knows no memory. That is a line, once; a request's own
/// memory that is missing is the guest's affair, and none.
#[test]
fn a_ring_that_cannot_be_reached_is_told_once() {
    let _alone = listen();
    let mut rig = Rig::start(&options().queues(2, 1));
    let (mut guest, mut channel) = behind_iommu(&mut rig);
    // The ring of queue 0, read and write; a front-end may tell it unasked.
    let mut update = words(&[GUEST_BASE + USER_DELTA, 0x1_0000, GUEST_BASE + USER_DELTA]);
    update.extend([3, 2, 0, 0, 0, 0, 0, 0]);
    assert!(guest.client.acked(IOTLB_MSG, &update, &[]).unwrap());
    assert!(guest.start_queue(0).unwrap());
    // Header and status are where its ring is; so are the data of one request, and those of the next nowhere.
    let (header, data) = (GUEST_BASE + 0xf000, 0xfff0_0000_0000);
    let read_to = |guest: &mut RawGuest, data| {
        guest.put_header(header, 0, 0);
        let chain = [
            Desc { addr: header + USER_DELTA, len: 16, ..Desc::default() },
            Desc { addr: data, len: 512, flags: 2, next: 0 },
            Desc { addr: header + USER_DELTA + 64, len: 1, flags: 2, next: 0 },
        ];
        guest.put_chain(0, 0, &chain);
        guest.offer(0, 0);
    };
    read_to(&mut guest, GUEST_BASE + USER_DELTA + 0xe000);
    assert_eq!(guest.next_used(0, Duration::from_secs(20)), Some((0, 513)));
    read_to(&mut guest, data);
    let mut asked = || {
        let mut question = [0; 12 + 32];
        channel.read_exact(&mut question).unwrap();
        u64::from_ne_bytes(question[12..20].try_into().unwrap())
    };
    assert_eq!(asked(), data);
    assert!(guest.start_queue(1).unwrap());
    let ring = GUEST_BASE + USER_DELTA + 0x1_0000;
    for _ in 0..3 {
        let page = asked();
        assert!((ring..ring + 0x1_0000).contains(&page), "{page:#x}");
    }
    let mut deny = || {
        channel.write_all(&NONE.map(u32::to_ne_bytes).concat()).unwrap();
        // It hears this before the next message, and has told what there is to tell by its answer.
        std::thread::sleep(Duration::from_millis(150));
        guest.client.ask_u64(request::GET_QUEUE_NUM).unwrap();
        lines(Level::WARN)
    };
    assert_eq!(deny(), [""; 0], "a request's own memory");
    let said = deny();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].starts_with("a ring cannot be reached"), "{said:?}");
    for _ in 0..2 {
        assert_eq!(deny(), [""; 0], "once");
    }
    assert_eq!(guest.next_used(0, Duration::from_secs(20)), Some((0, 1)));
    assert_eq!(guest.peek(header + 64, 1), [1], "an error");
    drop(guest);
    rig.join_sessions();
}
