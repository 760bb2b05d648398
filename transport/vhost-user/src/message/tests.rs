//! The form of each message of the protocol: how many bytes, how many descriptors.

use super::FrontendReq as R;
use super::*;
use rustix::event::{EventfdFlags, eventfd};

/// A good message: request, payload, descriptors.
type Good = (R, Vec<u8>, usize);

/// So many zeroes behind the words.
fn padded(words: &[u32], len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.resize(len, 0);
    bytes
}

fn empty(len: usize) -> Vec<u8> {
    vec![0; len]
}

/// Every form that the protocol has for what a front-end of a block device may send.
fn good() -> Vec<Good> {
    let mut all = Vec::new();
    for request in [
        R::GET_FEATURES,
        R::SET_OWNER,
        R::RESET_OWNER,
        R::GET_PROTOCOL_FEATURES,
        R::GET_QUEUE_NUM,
        R::RESET_DEVICE,
        R::GET_MAX_MEM_SLOTS,
    ] {
        all.push((request, empty(0), 0));
    }
    all.extend([R::SET_LOG_FD, R::SET_BACKEND_REQ_FD].map(|request| (request, empty(0), 1)));
    for request in [
        R::SET_FEATURES,
        R::SET_PROTOCOL_FEATURES,
        R::SET_VRING_NUM,
        R::SET_VRING_BASE,
        R::GET_VRING_BASE,
        R::SET_VRING_ENABLE,
    ] {
        all.push((request, empty(8), 0));
    }
    for request in [R::SET_VRING_KICK, R::SET_VRING_CALL, R::SET_VRING_ERR] {
        // Queue 3, with a descriptor; and without, which bit 8 says.
        all.push((request, padded(&[3], 8), 1));
        all.push((request, padded(&[0x103], 8), 0));
    }
    all.extend([(R::SET_LOG_BASE, empty(16), 1), (R::SET_LOG_BASE, empty(8), 0)]);
    all.extend([(R::SET_VRING_ADDR, empty(40), 0), (R::ADD_MEM_REG, empty(40), 1)]);
    all.extend([(R::REM_MEM_REG, empty(40), 0), (R::REM_MEM_REG, empty(40), 1)]);
    for regions in [0, 1, 2, 8] {
        let count = u32::try_from(regions).unwrap();
        all.push((R::SET_MEM_TABLE, padded(&[count], 8 + 32 * regions), regions));
    }
    all.extend([26, 32].map(|len| (R::IOTLB_MSG, empty(len), 0)));
    for len in [20, 24] {
        all.extend([(R::GET_INFLIGHT_FD, empty(len), 0), (R::SET_INFLIGHT_FD, empty(len), 1)]);
    }
    for bytes in [0, 1, 60] {
        let payload = padded(&[0, bytes, 0], 12 + bytes as usize);
        all.push((R::GET_CONFIG, payload.clone(), 0));
        all.push((R::SET_CONFIG, payload, 0));
    }
    all
}

fn form(request: R, payload: &[u8], fds: usize) -> Result<(), MessageError> {
    let fd = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let fds = std::iter::repeat_with(fd).take(fds).collect();
    let (code, payload) = (request as u32, payload.to_vec());
    Message { request: Some(request), code, need_reply: false, payload, fds }.check_form()
}

#[test]
fn every_message_has_the_form_of_its_request_or_is_refused() {
    let good = good();
    let is_good = |request, payload: &[u8], fds| {
        good.iter().any(|(r, p, n)| (*r, &p[..], *n) == (request, payload, fds))
    };
    for (request, payload, fds) in &good {
        let (request, fds) = (*request, *fds);
        let what = format!("{request:?} of {} bytes, {fds} descriptors", payload.len());
        assert!(form(request, payload, fds).is_ok(), "{what}");
        let longer = [&payload[..], &[0]].concat();
        let shorter = payload.len().checked_sub(1).map(|len| payload[..len].to_vec());
        for wrong in std::iter::once(longer).chain(shorter) {
            let refused = form(request, &wrong, fds);
            assert!(
                matches!(refused, Err(MessageError::PayloadSize { .. })),
                "{what}: {refused:?}"
            );
        }
        for wrong in [fds + 1, fds.wrapping_sub(1)] {
            if wrong == usize::MAX || is_good(request, payload, wrong) {
                continue;
            }
            let refused = form(request, payload, wrong);
            let count = matches!(refused, Err(MessageError::DescriptorCount { .. }));
            assert!(count, "{what}, but {wrong}: {refused:?}");
        }
    }
}

#[test]
fn a_table_of_more_memory_than_a_message_has_descriptors_for_is_refused() {
    let refused = form(R::SET_MEM_TABLE, &padded(&[9], 8 + 32 * 9), 9);
    assert!(matches!(refused, Err(MessageError::PayloadSize { .. })), "{refused:?}");
    // Not even the number of regions is there, or the length of the configuration.
    for (request, len) in [(R::SET_MEM_TABLE, 4), (R::GET_CONFIG, 8), (R::SET_CONFIG, 0)] {
        let refused = form(request, &empty(len), 0);
        assert!(matches!(refused, Err(MessageError::PayloadSize { .. })), "{refused:?}");
    }
}

#[test]
fn fields_lie_where_they_are_asked_for() {
    let payload: Vec<u8> = (1..=12).collect();
    let message = Message { request: None, code: 0, need_reply: false, payload, fds: Vec::new() };
    assert_eq!(message.u16(1), u16::from_ne_bytes([2, 3]));
    assert_eq!(message.u32(2), u32::from_ne_bytes([3, 4, 5, 6]));
    assert_eq!(message.u64(4), u64::from_ne_bytes([5, 6, 7, 8, 9, 10, 11, 12]));
    // Behind the end nothing is read.
    assert_eq!((message.u16(11), message.u32(9), message.u64(5)), (0, 0, 0));
}

/// A channel, its peer, and the bell that tells it to stop.
fn channel() -> (Channel, UnixStream, OwnedFd) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let quarantine = Arc::new(Quarantine::default());
    (Channel::new(ours, quarantine).unwrap(), theirs, eventfd(0, EventfdFlags::CLOEXEC).unwrap())
}

fn bells(count: usize) -> Vec<OwnedFd> {
    std::iter::repeat_with(|| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).take(count).collect()
}

fn send(peer: &UnixStream, header: [u32; 3], payload: &[u8], fds: &[OwnedFd]) {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [&header.map(u32::to_ne_bytes).concat(), payload].concat();
    let sent = sendmsg(peer, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty());
    assert_eq!(sent, Ok(bytes.len()));
}

/// What the protocol lets a message carry is told apart from what this one has a use for.
#[test]
fn more_descriptors_than_any_message_carries_are_too_many() {
    let payload = padded(&[8], 8 + 32 * TABLE_REGIONS_MAX);
    let header = [R::SET_MEM_TABLE as u32, 1, u32::try_from(payload.len()).unwrap()];
    for (count, enough) in [(TABLE_REGIONS_MAX, true), (MAX_ATTACHED_FD_ENTRIES, false)] {
        let (mut channel, peer, _stop) = channel();
        send(&peer, header, &payload, &bells(count));
        match channel.receive() {
            Ok(message) => assert!(enough && message.is_some_and(|m| m.fds.len() == count)),
            Err(MessageError::DescriptorCount { have, .. }) => assert!(!enough && have == count),
            other => panic!("{count} descriptors: {other:?}"),
        }
    }
    for count in [MAX_ATTACHED_FD_ENTRIES + 1, MAX_ATTACHED_FD_ENTRIES + 9] {
        let (mut channel, peer, _stop) = channel();
        send(&peer, header, &payload, &bells(count));
        assert!(matches!(channel.receive(), Err(MessageError::TooManyDescriptors)), "{count}");
    }
}

/// Whatever else would be wrong with it.
#[test]
fn b22_a_socket_ends_every_message_but_the_one_that_it_is_for() {
    for (request, fits) in
        [(R::GET_FEATURES, false), (R::REM_MEM_REG, false), (R::SET_BACKEND_REQ_FD, true)]
    {
        let (mut channel, peer, _stop) = channel();
        let payload = empty(if request == R::REM_MEM_REG { 40 } else { 0 });
        let header = [request as u32, 1, u32::try_from(payload.len()).unwrap()];
        let (socket, _other) = UnixStream::pair().unwrap();
        send(&peer, header, &payload, &[socket.into()]);
        match channel.receive() {
            Ok(message) => assert!(fits && message.is_some_and(|m| m.fds.len() == 1)),
            Err(MessageError::Foreign(1)) => assert!(!fits, "{request:?}"),
            other => panic!("{request:?}: {other:?}"),
        }
    }
}

#[test]
fn a_header_says_how_much_is_to_come_and_that_is_bounded() {
    let longest = u32::try_from(PAYLOAD_MAX).unwrap();
    for (size, fits) in [(longest, true), (longest + 1, false), (u32::MAX, false)] {
        let (mut channel, peer, _stop) = channel();
        assert_eq!(channel.deadline(), None);
        send(&peer, [R::GET_CONFIG as u32, 1, size], &[], &[]);
        match channel.receive() {
            // The rest is to come.
            Ok(None) => assert!(fits && channel.deadline().is_some(), "{size} bytes"),
            Err(MessageError::PayloadSize { have, .. }) => {
                assert!(!fits && have == size as usize, "{size} bytes: {have}");
            }
            other => panic!("{size} bytes: {other:?}"),
        }
    }
    // A version of its own, and a reply that nobody asked for.
    for flags in [0, 2, 3, 1 | 4] {
        let (mut channel, peer, _stop) = channel();
        send(&peer, [R::GET_FEATURES as u32, flags, 0], &[], &[]);
        assert!(matches!(channel.receive(), Err(MessageError::Version(_))), "flags {flags}");
    }
}

/// More than a socket holds. Whoever answers waits for the peer, or for the order to stop.
#[test]
fn a_long_answer_waits_for_its_peer_unless_told_to_stop() {
    let payload: Vec<u8> = (0..4 << 20).map(|n: u32| n.to_le_bytes()[0]).collect();
    let (channel, peer, stop) = channel();
    let read = std::thread::spawn(move || {
        let (mut bytes, mut fds) = (Vec::new(), 0);
        while bytes.len() < HEADER_BYTES + (4 << 20) {
            let mut room = [0; 1 << 16];
            poll(&mut [PollFd::new(&peer, PollFlags::IN)], None).unwrap();
            let part = received::receive(peer.as_fd(), &mut room).unwrap();
            bytes.extend_from_slice(&room[..part.bytes]);
            fds += part.fds.len();
        }
        (peer, bytes, fds)
    });
    channel.reply(7, &payload, Some(stop.as_fd()), stop.as_fd()).unwrap();
    let (_peer, bytes, fds) = read.join().unwrap();
    let header = [7, 1 | 4, 4 << 20].map(u32::to_ne_bytes).concat();
    assert!(bytes[..HEADER_BYTES] == header && bytes[HEADER_BYTES..] == payload);
    assert_eq!(fds, 1, "the descriptor comes once");
    // Nobody reads this one.
    rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
    let told = channel.reply(7, &payload, None, stop.as_fd());
    assert!(matches!(told, Err(MessageError::Stopped)), "{told:?}");
}
