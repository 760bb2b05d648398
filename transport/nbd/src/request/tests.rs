//! Heads of requests and what they mean, in a table.

use super::*;

const CAPACITY: u64 = 1 << 20;

fn rules(replies: Replies) -> Rules {
    Rules { replies, block_status: true, read_only: false, trims: true, fast_zero: Some(4096) }
}

fn head(replies: Replies, kind: u16, flags: u16, (offset, len): (u64, u64)) -> Vec<u8> {
    let extended = replies == Replies::Extended;
    let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
    let len = len.to_be_bytes();
    let len = if extended { &len[..] } else { &len[4..] };
    let (flags, kind) = (flags.to_be_bytes(), kind.to_be_bytes());
    [&magic.to_be_bytes()[..], &flags, &kind, &7u64.to_be_bytes(), &offset.to_be_bytes(), len]
        .concat()
}

fn judged(rules: Rules, kind: u16, flags: u16, range: (u64, u64)) -> Result<Action, NbdError> {
    let head = head(rules.replies, kind, flags, range);
    assert_eq!(head.len(), rules.head_len());
    let asked = rules.parse(&head, CAPACITY).unwrap();
    assert_eq!((asked.cookie, asked.is_read), (7, kind == command::READ));
    if let Ok(action) = asked.action {
        let plain = matches!(action, Action::Flush | Action::Disconnect);
        let (offset, len) = if plain { (0, 0) } else { range };
        assert_eq!(asked.range, ByteRange::new(offset, len).unwrap());
    }
    asked.action
}

#[test]
fn each_command_means_what_the_protocol_says() {
    use command as c;
    for replies in [Replies::Simple, Replies::Structured, Replies::Extended] {
        let paid = if replies == Replies::Extended { flag::PAYLOAD_LEN } else { 0 };
        let ok = |kind, flags, range| judged(rules(replies), kind, flags, range).unwrap();
        let page = (4096, 4096);
        assert_eq!(ok(c::READ, 0, page), Action::Read);
        assert_eq!(ok(c::READ, flag::DF, (0, CAPACITY)), Action::Read);
        assert_eq!(ok(c::WRITE, paid, page), Action::Write { fua: false });
        assert_eq!(ok(c::WRITE, paid | flag::FUA, page), Action::Write { fua: true });
        assert_eq!(ok(c::FLUSH, 0, (0, 0)), Action::Flush);
        assert_eq!(ok(c::DISC, 0, (0, 0)), Action::Disconnect);
        assert_eq!(ok(c::TRIM, flag::FUA, page), Action::Trim { fua: true });
        assert_eq!(ok(c::CACHE, 0, page), Action::Nothing);
        assert_eq!(ok(c::BLOCK_STATUS, flag::REQ_ONE, page), Action::BlockStatus { one: true });
        let zero = |flags| ok(c::WRITE_ZEROES, flags, page);
        assert_eq!(zero(0), Action::WriteZeroes { fua: false, unmap: true });
        assert_eq!(zero(flag::NO_HOLE), Action::WriteZeroes { fua: false, unmap: false });
        assert_eq!(zero(flag::FAST_ZERO), Action::WriteZeroes { fua: false, unmap: true });
        for kind in [c::READ, c::WRITE, c::TRIM, c::WRITE_ZEROES] {
            let flags = if kind == c::WRITE { paid } else { 0 };
            assert_eq!(ok(kind, flags, (CAPACITY, 0)), Action::Nothing);
        }
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_the_right_error() {
    use NbdError::{Invalid, NoSpace, Unsupported};
    use command as c;
    let plain = rules(Replies::Structured);
    for (kind, flags, range, error) in [
        (c::READ, 0, (CAPACITY - 512, 1024), Invalid),
        (c::WRITE, 0, (CAPACITY - 512, 1024), NoSpace),
        (c::TRIM, 0, (CAPACITY, 512), NoSpace),
        (c::WRITE_ZEROES, 0, (u64::MAX - 511, 512), NoSpace),
        (c::BLOCK_STATUS, 0, (CAPACITY, 512), Invalid),
        (c::BLOCK_STATUS, 0, (0, 0), Invalid),
        (c::READ, 0, (u64::MAX, 512), Invalid),
        (c::READ, 0, (1, 512), Invalid),
        (c::WRITE, 0, (512, 511), Invalid),
        (c::READ, flag::FAST_ZERO, (0, 512), Invalid),
        (c::WRITE, flag::NO_HOLE, (0, 512), Invalid),
        (c::WRITE, flag::PAYLOAD_LEN, (0, 512), Invalid),
        (c::FLUSH, flag::NO_HOLE, (0, 0), Invalid),
        (c::WRITE_ZEROES, flag::FAST_ZERO | flag::NO_HOLE, (0, 4096), Unsupported),
        (c::WRITE_ZEROES, flag::FAST_ZERO, (512, 4096), Unsupported),
        (8, 0, (0, 512), Invalid),
        (u16::MAX, 0, (0, 512), Invalid),
    ] {
        assert_eq!(judged(plain, kind, flags, range), Err(error), "{kind} {flags} {range:?}");
    }
    let slow = Rules { fast_zero: None, ..plain };
    let fast = judged(slow, c::WRITE_ZEROES, flag::FAST_ZERO, (0, 4096));
    assert_eq!(fast, Err(Unsupported));
    let kept = Rules { trims: false, ..plain };
    assert_eq!(judged(kept, c::TRIM, 0, (0, 4096)), Err(Unsupported));
    let silent = Rules { block_status: false, ..plain };
    assert_eq!(judged(silent, c::BLOCK_STATUS, 0, (0, 4096)), Err(Invalid));
    let read_only = Rules { read_only: true, ..plain };
    for kind in [c::WRITE, c::TRIM, c::WRITE_ZEROES] {
        assert_eq!(judged(read_only, kind, 0, (0, 4096)), Err(NbdError::Perm));
    }
    assert_eq!(judged(read_only, c::FLUSH, 0, (0, 0)), Ok(Action::Flush));
}

#[test]
fn lengths_of_64_bits_are_for_what_brings_no_data() {
    let wide = rules(Replies::Extended);
    let huge = 1u64 << 40;
    let head = |kind, flags, len| head(Replies::Extended, kind, flags, (0, len));
    let asked = |kind, flags, len| wide.parse(&head(kind, flags, len), huge);
    let zero = asked(command::WRITE_ZEROES, 0, huge).unwrap();
    assert_eq!((zero.range.len(), zero.payload), (huge, 0));
    assert_eq!(asked(command::READ, 0, huge).unwrap().action, Err(NbdError::Overflow));
    let most = u64::from(PAYLOAD_MAX);
    assert_eq!(asked(command::READ, 0, most).unwrap().action, Ok(Action::Read));
    assert_eq!(asked(command::WRITE, flag::PAYLOAD_LEN, most).unwrap().payload, PAYLOAD_MAX);
    // Whatever brings data that nobody wants.
    let paid = asked(command::TRIM, flag::PAYLOAD_LEN, 512).unwrap();
    assert_eq!((paid.payload, paid.action), (512, Err(NbdError::Invalid)));
}

/// QEMU's client since 8.2 agrees upon extended headers and never sets `NBD_CMD_FLAG_PAYLOAD_LEN`.
#[test]
fn d17_the_length_of_a_write_is_that_of_its_data_with_and_without_the_flag() {
    let wide = rules(Replies::Extended);
    for flags in [0, flag::PAYLOAD_LEN] {
        for (fua, range, payload) in [(0, (4096, 512), 512), (flag::FUA, (0, 65536), 65536)] {
            let head = head(Replies::Extended, command::WRITE, flags | fua, range);
            let asked = wide.parse(&head, CAPACITY).unwrap();
            assert_eq!(asked.payload, payload);
            assert_eq!(asked.action, Ok(Action::Write { fua: fua != 0 }));
        }
        // What is refused brings its data, too.
        let head = head(Replies::Extended, command::WRITE, flags, (CAPACITY, 512));
        let asked = wide.parse(&head, CAPACITY).unwrap();
        assert_eq!((asked.payload, asked.action), (512, Err(NbdError::NoSpace)));
    }
}

#[test]
fn d02_what_cannot_be_read_past_ends_the_connection() {
    for replies in [Replies::Simple, Replies::Extended] {
        let mut wrong = head(replies, 0, 0, (0, 512));
        wrong[3] ^= 1;
        let wrong = rules(replies).parse(&wrong, CAPACITY);
        assert!(matches!(wrong, Err(ProtocolError::Magic(_))), "{wrong:?}");
        let long = head(replies, command::WRITE, 0, (0, u64::from(PAYLOAD_MAX) + 1));
        let long = rules(replies).parse(&long, CAPACITY);
        assert_eq!(long, Err(ProtocolError::Payload(u64::from(PAYLOAD_MAX) + 1)));
    }
}
