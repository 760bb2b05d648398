//! Each message of the protocol in each state of a queue: the table of docs/vhost-user.md, cell by cell. What is
//! refused has no effect, what is accepted stays, and the other queue goes on.

use ringway_disk::EngineKind;
use ringway_testkit::raw::{
    DATA, F_FLUSH, F_INDIRECT, F_PROTOCOL, F_VERSION_1, GUEST_BASE, MEMORY, NEED_REPLY, RawGuest,
    USER_DELTA, halves, inflight_payload, request as ask, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};

const TABLE: &str = include_str!("../../../docs/vhost-user.md");
const BASIC: u64 = F_VERSION_1 | F_INDIRECT | F_FLUSH;
const IN: u32 = 0;
const OK: u8 = 0;
const SIZE: u16 = 64;
/// MQ, LOG_SHMFD, REPLY_ACK, BACKEND_REQ, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS.
const PROTOCOL: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15;

/// Where queue 0 is; queue 1 is started in all but the first, and waits in the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Connected,
    Runs,
    Stopped,
    Failed,
    Paused,
}

impl State {
    const ALL: [Self; 5] = [Self::Connected, Self::Runs, Self::Stopped, Self::Failed, Self::Paused];
}

/// What a message has and what comes with it.
struct Sent {
    request: u32,
    payload: Vec<u8>,
    fd: Option<OwnedFd>,
    /// It is answered with something else than whether it was taken.
    replies: bool,
}

fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create("message", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fd
}

fn bell() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// The addresses of queue `queue`'s ring, `aside` bytes from where it is.
fn addresses(guest: &RawGuest, queue: u32, aside: u64) -> Vec<u8> {
    let (desc, avail, used) = guest.rings(queue);
    let at = |address| address + USER_DELTA + aside;
    [halves(&[queue, 0]), words(&[at(desc), at(used), at(avail), 0])].concat()
}

/// The messages by the names that they have in the table.
#[allow(clippy::too_many_lines)]
fn messages(guest: &RawGuest) -> Vec<(&'static str, Sent)> {
    let plain = |request, payload: Vec<u8>| Sent { request, payload, fd: None, replies: false };
    let with = |request, payload: Vec<u8>, fd| Sent { fd: Some(fd), ..plain(request, payload) };
    let reply = |request, payload: Vec<u8>| Sent { replies: true, ..plain(request, payload) };
    let elsewhere = GUEST_BASE + 4 * MEMORY;
    let region = |at: u64, bytes: u64| words(&[at, bytes, at + USER_DELTA, 0]);
    let slot = |at, bytes| [words(&[0]), region(at, bytes)].concat();
    let config = |value: u8| [halves(&[32, 1, 0]), vec![value]].concat();
    let same = guest.memory.try_clone().unwrap().into();
    vec![
        ("GET_FEATURES", reply(ask::GET_FEATURES, vec![])),
        ("SET_FEATURES, the same", plain(ask::SET_FEATURES, words(&[BASIC | F_PROTOCOL]))),
        ("SET_FEATURES, others", plain(ask::SET_FEATURES, words(&[F_VERSION_1 | F_PROTOCOL]))),
        ("SET_FEATURES, not offered", plain(ask::SET_FEATURES, words(&[BASIC | 1 << 63]))),
        ("GET_PROTOCOL_FEATURES", reply(ask::GET_PROTOCOL_FEATURES, vec![])),
        ("SET_PROTOCOL_FEATURES", plain(ask::SET_PROTOCOL_FEATURES, words(&[PROTOCOL]))),
        (
            "SET_PROTOCOL_FEATURES, not offered",
            plain(ask::SET_PROTOCOL_FEATURES, words(&[1 << 40])),
        ),
        ("SET_OWNER", plain(ask::SET_OWNER, vec![])),
        ("GET_QUEUE_NUM", reply(ask::GET_QUEUE_NUM, vec![])),
        ("GET_MAX_MEM_SLOTS", reply(ask::GET_MAX_MEM_SLOTS, vec![])),
        (
            "SET_MEM_TABLE, the same",
            with(ask::SET_MEM_TABLE, [halves(&[1, 0]), region(GUEST_BASE, MEMORY)].concat(), same),
        ),
        (
            "SET_MEM_TABLE, without the rings",
            with(
                ask::SET_MEM_TABLE,
                [halves(&[1, 0]), region(elsewhere, MEMORY)].concat(),
                memory(MEMORY),
            ),
        ),
        (
            "SET_MEM_TABLE, of a short file",
            with(
                ask::SET_MEM_TABLE,
                [halves(&[1, 0]), region(GUEST_BASE, MEMORY)].concat(),
                memory(4096),
            ),
        ),
        ("ADD_MEM_REG", with(ask::ADD_MEM_REG, slot(elsewhere, MEMORY), memory(MEMORY))),
        (
            "ADD_MEM_REG, over another one",
            with(ask::ADD_MEM_REG, slot(GUEST_BASE + 4096, MEMORY), memory(MEMORY)),
        ),
        ("REM_MEM_REG, with the rings", plain(ask::REM_MEM_REG, slot(GUEST_BASE, MEMORY))),
        ("REM_MEM_REG, of none", plain(ask::REM_MEM_REG, slot(elsewhere, MEMORY))),
        ("SET_LOG_BASE", with(ask::SET_LOG_BASE, words(&[4096, 0]), memory(4096))),
        ("SET_LOG_BASE, of a short file", with(ask::SET_LOG_BASE, words(&[8192, 0]), memory(4096))),
        ("SET_LOG_FD", with(ask::SET_LOG_FD, vec![], bell())),
        ("SET_VRING_NUM, the same", plain(ask::SET_VRING_NUM, halves(&[0, SIZE.into()]))),
        ("SET_VRING_NUM, another one", plain(ask::SET_VRING_NUM, halves(&[0, 32]))),
        ("SET_VRING_NUM, of no ring", plain(ask::SET_VRING_NUM, halves(&[0, 3]))),
        ("SET_VRING_ADDR, the same", plain(ask::SET_VRING_ADDR, addresses(guest, 0, 0))),
        ("SET_VRING_ADDR, others", plain(ask::SET_VRING_ADDR, addresses(guest, 0, 0x30_0000))),
        ("SET_VRING_BASE", plain(ask::SET_VRING_BASE, halves(&[0, guest.base(0)]))),
        ("SET_VRING_BASE, of no ring", plain(ask::SET_VRING_BASE, halves(&[0, 1 << 16]))),
        ("GET_VRING_BASE", reply(ask::GET_VRING_BASE, halves(&[0, 0]))),
        ("GET_VRING_BASE, of no queue", reply(ask::GET_VRING_BASE, halves(&[9, 0]))),
        ("SET_VRING_KICK", with(ask::SET_VRING_KICK, words(&[0]), bell())),
        ("SET_VRING_KICK, no eventfd", with(ask::SET_VRING_KICK, words(&[0]), memory(8))),
        ("SET_VRING_CALL", with(ask::SET_VRING_CALL, words(&[0]), bell())),
        ("SET_VRING_CALL, no eventfd", with(ask::SET_VRING_CALL, words(&[0]), memory(8))),
        ("SET_VRING_ERR", with(ask::SET_VRING_ERR, words(&[0]), bell())),
        ("SET_VRING_ENABLE, on", plain(ask::SET_VRING_ENABLE, halves(&[0, 1]))),
        ("SET_VRING_ENABLE, off", plain(ask::SET_VRING_ENABLE, halves(&[0, 0]))),
        ("SET_VRING_ENABLE, of no queue", plain(ask::SET_VRING_ENABLE, halves(&[9, 1]))),
        ("GET_CONFIG", reply(ask::GET_CONFIG, config(0))),
        ("SET_CONFIG", plain(ask::SET_CONFIG, config(0))),
        (
            "SET_BACKEND_REQ_FD",
            with(
                ask::SET_BACKEND_REQ_FD,
                vec![],
                std::os::unix::net::UnixStream::pair().unwrap().0.into(),
            ),
        ),
        (
            "IOTLB_MSG, not negotiated",
            plain(22, [words(&[0, 4096, 0]), vec![3, 2, 0, 0, 0, 0, 0, 0]].concat()),
        ),
        ("GET_INFLIGHT_FD", reply(ask::GET_INFLIGHT_FD, inflight_payload(0, 0, 2, SIZE))),
        (
            "SET_INFLIGHT_FD",
            with(ask::SET_INFLIGHT_FD, inflight_payload(1 << 16, 0, 2, SIZE), memory(1 << 16)),
        ),
        (
            "SET_INFLIGHT_FD, of a short file",
            with(ask::SET_INFLIGHT_FD, inflight_payload(1 << 16, 0, 2, SIZE), memory(64)),
        ),
        ("RESET_DEVICE", plain(ask::RESET_DEVICE, vec![])),
    ]
}

/// A guest whose queue 0 is in `state`.
fn guest_in(state: State, rig: &mut Rig) -> RawGuest {
    let mut guest = RawGuest::connect(rig.connect(), BASIC);
    let client = &guest.client;
    assert!(client.acked(ask::SET_PROTOCOL_FEATURES, &words(&[PROTOCOL]), &[]).unwrap());
    guest.size = SIZE;
    if state == State::Connected {
        return guest;
    }
    for queue in [0, 1] {
        assert!(guest.start_queue(queue).unwrap());
        assert_eq!(guest.simple(queue, IN, 1, DATA, 512).0, OK);
    }
    match state {
        State::Stopped => drop(guest.stop_queue(0).unwrap()),
        State::Failed => {
            guest.stop_queue(0).unwrap();
            let nowhere = addresses(&guest, 0, 1 << 40);
            assert!(guest.client.acked(ask::SET_VRING_ADDR, &nowhere, &[]).unwrap());
            let kick = bell();
            let index = words(&[0]);
            assert!(!guest.client.acked(ask::SET_VRING_KICK, &index, &[kick.as_fd()]).unwrap());
        }
        State::Paused => rig.export().pause().unwrap(),
        State::Connected | State::Runs => {}
    }
    guest
}

/// Sends it: whether it was taken, or `None` if the connection has ended.
fn send(guest: &RawGuest, sent: &Sent) -> Option<bool> {
    let fds: Vec<_> = sent.fd.iter().map(AsFd::as_fd).collect();
    if sent.request == ask::GET_INFLIGHT_FD {
        return guest.client.get_inflight(2, SIZE).ok().map(|_| true);
    }
    let flags = if sent.replies { 0 } else { NEED_REPLY };
    guest.client.send(sent.request, flags, &sent.payload, &fds).ok()?;
    let (_, answer) = guest.client.receive().ok()?;
    Some(sent.replies || answer == 0u64.to_ne_bytes())
}

/// The queues that have to work after `name` was `taken`, beginning anew what it has changed.
fn goes_on(guest: &mut RawGuest, state: State, name: &str, taken: bool) {
    let kind = name.split(',').next().unwrap();
    if kind == "RESET_DEVICE" || (taken && name == "SET_FEATURES, others") {
        let client = &guest.client;
        assert!(client.ask_u64(ask::GET_QUEUE_NUM).is_ok(), "{name}, {state:?}");
        return;
    }
    if taken && matches!(kind, "SET_MEM_TABLE" | "REM_MEM_REG") {
        assert!(guest.set_mem_table().unwrap(), "{name}, {state:?}");
    }
    if state != State::Connected {
        assert_eq!(guest.simple(1, IN, 1, DATA, 512).0, OK, "{name}, {state:?}: the other queue");
    }
    let is_whole = matches!(state, State::Runs | State::Paused)
        && (!taken || matches!(kind, "SET_MEM_TABLE" | "REM_MEM_REG" | "ADD_MEM_REG"));
    if !is_whole {
        // From wherever it is.
        guest.stop_queue(0).unwrap();
        let address = addresses(guest, 0, 0);
        assert!(guest.client.acked(ask::SET_VRING_ADDR, &address, &[]).unwrap(), "{name}");
        assert!(guest.start_queue(0).unwrap(), "{name}, {state:?}");
    }
    assert_eq!(guest.simple(0, IN, 1, DATA, 512).0, OK, "{name}, {state:?}: its queue");
}

/// What the table says of `name` in each state.
fn cells(name: &str) -> Option<Vec<&'static str>> {
    let row = TABLE.lines().find(|line| line.starts_with(&format!("| {name} |")))?;
    Some(row.trim_matches('|').split('|').skip(1).map(str::trim).collect())
}

#[test]
fn b41_each_message_is_judged_in_each_state_of_a_queue() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads).queues(2, 1));
    let count = messages(&RawGuest::connect(rig.connect(), BASIC)).len();
    let (mut wrong, mut rows) = (false, Vec::new());
    for at in 0..count {
        let (mut row, mut title) = (Vec::new(), "");
        for state in State::ALL {
            let mut guest = guest_in(state, &mut rig);
            let (name, sent) = messages(&guest).swap_remove(at);
            title = name;
            let outcome = send(&guest, &sent);
            if state == State::Paused {
                rig.export().resume().unwrap();
            }
            row.push(match outcome {
                Some(true) => "yes",
                Some(false) => "no",
                None => "ends",
            });
            if let Some(taken) = outcome {
                goes_on(&mut guest, state, name, taken);
            }
            drop(guest);
            rig.join_sessions();
        }
        wrong |= cells(title).as_deref() != Some(&row[..]);
        rows.push(format!("| {title} | {} |", row.join(" | ")));
    }
    assert!(!wrong, "the table is another one:\n{}", rows.join("\n"));
}
