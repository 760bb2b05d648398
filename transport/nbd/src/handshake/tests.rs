//! What clients say, and what they are told, byte by byte.

use super::*;
use crate::protocol::{answer, option};

fn offers() -> Vec<Offer> {
    let offer = Offer {
        name: "one".into(),
        nameless: true,
        description: "the first".into(),
        bytes: 1 << 30,
        min_block: 512,
        preferred_block: 4096,
        read_only: false,
        trims: true,
    };
    vec![
        offer.clone(),
        Offer { name: "two".into(), nameless: false, bytes: 512, read_only: true, ..offer },
    ]
}

/// Says all of `said` and gives back what was answered, and how it went on.
fn say(handshake: &mut Handshake<'_>, said: &[u8]) -> (Vec<u8>, Result<Next, HandshakeError>) {
    let (mut out, mut rest) = (Vec::new(), said);
    loop {
        let (now, later) = rest.split_at(handshake.needs());
        let next = handshake.take(now, &mut out);
        rest = later;
        if rest.is_empty() || next != Ok(Next::More) {
            assert_eq!(rest, b"", "all of it was taken: {next:?}");
            return (out, next);
        }
    }
}

fn begun(offers: &[Offer]) -> Handshake<'_> {
    let mut handshake = Handshake::new(offers);
    assert_eq!(say(&mut handshake, &3u32.to_be_bytes()), (Vec::new(), Ok(Next::More)));
    handshake
}

fn asked(option: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap().to_be_bytes();
    [b"IHAVEOPT", &option.to_be_bytes()[..], &len, data].concat()
}

/// Kinds and data of the answers.
fn answers(mut out: &[u8], option: u32) -> Vec<(u32, Vec<u8>)> {
    let mut answers = Vec::new();
    while !out.is_empty() {
        assert_eq!(out[..8], crate::protocol::OPTION_REPLY_MAGIC.to_be_bytes());
        assert_eq!(u32_at(out, 8), option);
        let len = u32_at(out, 16) as usize;
        answers.push((u32_at(out, 12), out[20..20 + len].to_vec()));
        out = &out[20 + len..];
    }
    answers
}

fn kinds(out: &[u8], option: u32) -> Vec<u32> {
    answers(out, option).into_iter().map(|(kind, _)| kind).collect()
}

#[test]
fn go_tells_size_flags_and_blocks_and_begins() {
    let offers = offers();
    let mut handshake = begun(&offers);
    let (out, next) = say(&mut handshake, &asked(option::GO, b"\0\0\0\x03two\0\x01\0\x01"));
    let began = Negotiated { export: 1, replies: Replies::Simple, block_status: false };
    assert_eq!(next, Ok(Next::Begin(began)));
    let answers = answers(&out, option::GO);
    assert_eq!(answers[0], (answer::INFO, b"\0\0\0\0\0\0\0\0\x02\0\x05\x87".to_vec()));
    assert_eq!(answers[1], (answer::INFO, b"\0\x01two".to_vec()));
    let blocks = b"\0\x03\0\0\x02\0\0\0\x10\0\x02\0\0\0".to_vec();
    assert_eq!(answers[2], (answer::INFO, blocks));
    assert_eq!(answers[3], (answer::ACK, Vec::new()));
}

#[test]
fn who_names_nothing_gets_the_first_and_who_names_another_nothing() {
    let offers = offers();
    for (option, begins) in [(option::INFO, false), (option::GO, true)] {
        let mut handshake = begun(&offers);
        let (_, next) = say(&mut handshake, &asked(option, &[0; 6]));
        assert_eq!(matches!(next, Ok(Next::Begin(Negotiated { export: 0, .. }))), begins);
        let mut handshake = begun(&offers);
        let (out, next) = say(&mut handshake, &asked(option, b"\0\0\0\x04nine\0\0"));
        assert_eq!((kinds(&out, option), next), (vec![answer::ERR_UNKNOWN], Ok(Next::More)));
    }
}

#[test]
fn d18_who_names_nothing_gets_no_other_disk_than_before() {
    let others = &offers()[1..];
    for option in [option::INFO, option::GO] {
        let (out, next) = say(&mut begun(others), &asked(option, &[0; 6]));
        assert_eq!((kinds(&out, option), next), (vec![answer::ERR_UNKNOWN], Ok(Next::More)));
    }
    let (out, next) = say(&mut begun(others), &asked(option::EXPORT_NAME, b""));
    assert_eq!((out.len(), next), (0, Err(HandshakeError::NoSuchExport)));
    let mut handshake = begun(others);
    say(&mut handshake, &asked(option::STRUCTURED_REPLY, b"")).1.unwrap();
    let set = option::SET_META_CONTEXT;
    let (out, _) = say(&mut handshake, &asked(set, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation"));
    assert_eq!(kinds(&out, set), [answer::ERR_UNKNOWN]);
}

#[test]
fn d04_who_has_no_place_is_told_and_may_choose_again() {
    let offers = offers();
    let mut handshake = begun(&offers);
    let one = asked(option::GO, b"\0\0\0\x03one\0\0");
    assert!(matches!(say(&mut handshake, &one).1, Ok(Next::Begin(_))));
    let mut out = Vec::new();
    assert_eq!(handshake.has_no_place(&mut out), Ok(Next::More));
    assert_eq!(kinds(&out, option::GO), [answer::ERR_POLICY]);
    let two = asked(option::GO, b"\0\0\0\x03two\0\0");
    let next = say(&mut handshake, &two).1;
    assert!(matches!(next, Ok(Next::Begin(Negotiated { export: 1, .. }))), "{next:?}");
    // There is no such answer to this one.
    let mut handshake = begun(&offers);
    say(&mut handshake, &asked(option::EXPORT_NAME, b"one")).1.unwrap();
    assert_eq!(handshake.has_no_place(&mut out), Err(HandshakeError::NoPlace));
}

#[test]
fn export_name_is_answered_with_or_without_zeroes() {
    let offers = offers();
    for (flags, len) in [(1u32, 134), (3, 10)] {
        let mut handshake = Handshake::new(&offers);
        let said = [&flags.to_be_bytes()[..], &asked(option::EXPORT_NAME, b"one")].concat();
        let (out, next) = say(&mut handshake, &said);
        assert!(matches!(next, Ok(Next::Begin(Negotiated { export: 0, .. }))), "{next:?}");
        assert_eq!((out.len(), &out[..8]), (len, &(1u64 << 30).to_be_bytes()[..]));
    }
    let (out, next) = say(&mut begun(&offers), &asked(option::EXPORT_NAME, b"nine"));
    assert_eq!((out.len(), next), (0, Err(HandshakeError::NoSuchExport)));
}

#[test]
fn lists_name_all_disks() {
    let offers = offers();
    let (out, next) = say(&mut begun(&offers), &asked(option::LIST, b""));
    let answers = answers(&out, option::LIST);
    assert_eq!(answers[0], (answer::SERVER, b"\0\0\0\x03one".to_vec()));
    assert_eq!(answers[1], (answer::SERVER, b"\0\0\0\x03two".to_vec()));
    assert_eq!((answers[2].0, answers.len(), next), (answer::ACK, 3, Ok(Next::More)));
}

#[test]
fn block_status_needs_structured_replies_and_the_disk_it_was_asked_for() {
    let offers = offers();
    let query = b"\0\0\0\x03one\0\0\0\x01\0\0\0\x0fbase:allocation";
    let set = asked(option::SET_META_CONTEXT, query);
    let go = |name: &[u8]| asked(option::GO, &[b"\0\0\0\x03", name, b"\0\0"].concat());
    let mut handshake = begun(&offers);
    let (out, _) = say(&mut handshake, &set);
    assert_eq!(kinds(&out, option::SET_META_CONTEXT), [answer::ERR_INVALID]);
    for (name, block_status) in [(b"one", true), (b"two", false)] {
        let mut handshake = begun(&offers);
        say(&mut handshake, &asked(option::STRUCTURED_REPLY, b"")).1.unwrap();
        let (out, _) = say(&mut handshake, &set);
        let answers = answers(&out, option::SET_META_CONTEXT);
        assert_eq!(answers[0], (answer::META_CONTEXT, b"\0\0\0\x01base:allocation".to_vec()));
        assert_eq!(answers[1].0, answer::ACK);
        let (_, next) = say(&mut handshake, &go(name));
        let Ok(Next::Begin(began)) = next else { panic!("{next:?}") };
        assert_eq!((began.block_status, began.replies), (block_status, Replies::Structured));
    }
    // Who asks again for nothing has nothing.
    let mut handshake = begun(&offers);
    say(&mut handshake, &asked(option::EXTENDED_HEADERS, b"")).1.unwrap();
    say(&mut handshake, &set).1.unwrap();
    let none = asked(option::SET_META_CONTEXT, b"\0\0\0\x03one\0\0\0\0");
    assert_eq!(kinds(&say(&mut handshake, &none).0, option::SET_META_CONTEXT), [answer::ACK]);
    let (_, next) = say(&mut handshake, &go(b"one"));
    let Ok(Next::Begin(began)) = next else { panic!("{next:?}") };
    assert_eq!((began.block_status, began.replies), (false, Replies::Extended));
}

#[test]
fn contexts_are_listed_by_name_and_by_beginning() {
    let offers = offers();
    for (query, listed) in [
        (&b"\0\0\0\0\0\0\0\0"[..], true),
        (b"\0\0\0\0\0\0\0\x01\0\0\0\x05base:", true),
        (b"\0\0\0\0\0\0\0\x01\0\0\0\x05qemu:", false),
    ] {
        let mut handshake = begun(&offers);
        say(&mut handshake, &asked(option::STRUCTURED_REPLY, b"")).1.unwrap();
        let (out, _) = say(&mut handshake, &asked(option::LIST_META_CONTEXT, query));
        let kinds = kinds(&out, option::LIST_META_CONTEXT);
        let expected =
            if listed { &[answer::META_CONTEXT, answer::ACK][..] } else { &[answer::ACK] };
        assert_eq!(kinds, expected);
    }
}

#[test]
fn where_tls_is_required_nothing_is_told_before() {
    let offers = offers();
    let mut handshake = begun(&offers).with_tls(TlsRule::Required);
    for option in [option::LIST, option::GO, option::INFO, option::STRUCTURED_REPLY, 4711] {
        let (out, next) = say(&mut handshake, &asked(option, b""));
        assert_eq!(kinds(&out, option), [answer::ERR_TLS_REQD]);
        assert_eq!(next, Ok(Next::More));
    }
    let (out, _) = say(&mut handshake, &asked(option::STARTTLS, b"x"));
    assert_eq!(kinds(&out, option::STARTTLS), [answer::ERR_INVALID]);
    let (out, next) = say(&mut handshake, &asked(option::STARTTLS, b""));
    assert_eq!(
        (&kinds(&out, option::STARTTLS)[..], next),
        (&[answer::ACK][..], Ok(Next::StartTls))
    );
    handshake.is_encrypted();
    let (out, _) = say(&mut handshake, &asked(option::STARTTLS, b""));
    assert_eq!(kinds(&out, option::STARTTLS), [answer::ERR_INVALID], "once");
    let (out, _) = say(&mut handshake, &asked(option::STRUCTURED_REPLY, b""));
    assert_eq!(kinds(&out, option::STRUCTURED_REPLY), [answer::ACK]);
    let mut handshake = begun(&offers).with_tls(TlsRule::Required);
    let (_, next) = say(&mut handshake, &asked(option::EXPORT_NAME, b"one"));
    assert_eq!(next, Err(HandshakeError::NoTls));
}

#[test]
fn what_was_said_before_tls_holds_no_more() {
    let offers = offers();
    let mut handshake = begun(&offers).with_tls(TlsRule::Possible);
    say(&mut handshake, &asked(option::EXTENDED_HEADERS, b"")).1.unwrap();
    assert_eq!(say(&mut handshake, &asked(option::STARTTLS, b"")).1, Ok(Next::StartTls));
    handshake.is_encrypted();
    let (_, next) = say(&mut handshake, &asked(option::GO, b"\0\0\0\x03one\0\0"));
    let Ok(Next::Begin(negotiated)) = next else { panic!("{next:?}") };
    assert_eq!((negotiated.replies, negotiated.block_status), (Replies::Simple, false));
}

#[test]
fn extended_headers_are_not_taken_back() {
    let offers = offers();
    let mut handshake = begun(&offers);
    let (out, _) = say(&mut handshake, &asked(option::EXTENDED_HEADERS, b""));
    assert_eq!(kinds(&out, option::EXTENDED_HEADERS), [answer::ACK]);
    let (out, _) = say(&mut handshake, &asked(option::STRUCTURED_REPLY, b""));
    assert_eq!(kinds(&out, option::STRUCTURED_REPLY), [answer::ERR_EXT_HEADER_REQD]);
}

#[test]
fn what_is_not_known_or_malformed_is_refused_and_the_handshake_goes_on() {
    let offers = offers();
    let mut handshake = begun(&offers);
    for (option, data, kind) in [
        (4, &b""[..], answer::ERR_UNSUP),
        (4711, b"anything", answer::ERR_UNSUP),
        (option::STARTTLS, b"", answer::ERR_POLICY),
        (option::LIST, b"x", answer::ERR_INVALID),
        (option::STRUCTURED_REPLY, b"x", answer::ERR_INVALID),
        (option::EXTENDED_HEADERS, b"x", answer::ERR_INVALID),
        (option::GO, b"", answer::ERR_INVALID),
        (option::GO, b"\xff\xff\xff\xffone\0\0", answer::ERR_INVALID),
        (option::GO, b"\0\0\0\x03one\0\x02\0\x01", answer::ERR_INVALID),
        (option::INFO, b"\0\0\0\x03one\0\0more", answer::ERR_INVALID),
    ] {
        let (out, next) = say(&mut handshake, &asked(option, data));
        assert_eq!((kinds(&out, option), next), (vec![kind], Ok(Next::More)), "{option} {data:?}");
    }
    let (out, next) = say(&mut handshake, &asked(option::ABORT, b""));
    assert_eq!((kinds(&out, option::ABORT), next), (vec![answer::ACK], Ok(Next::Abort)));
}

#[test]
fn d01_what_no_handshake_needs_ends_it() {
    let offers = offers();
    let flags = |flags: u32| Handshake::new(&offers).take(&flags.to_be_bytes(), &mut Vec::new());
    assert_eq!(flags(4), Err(HandshakeError::Flags(4)));
    assert_eq!(flags(0), Ok(Next::More));
    let mut handshake = begun(&offers);
    let head = |magic: &[u8; 8], len: u32| [magic, &[0, 0, 0, 3][..], &len.to_be_bytes()].concat();
    let mut take = |head: Vec<u8>| handshake.take(&head, &mut Vec::new());
    assert!(matches!(take(head(b"IHAVEOPS", 0)), Err(HandshakeError::Magic(_))));
    assert_eq!(take(head(b"IHAVEOPT", u32::MAX)), Err(HandshakeError::TooLong(3, u32::MAX)));
    assert_eq!(take(head(b"IHAVEOPT", 32769)), Err(HandshakeError::TooLong(3, 32769)));
    let mut handshake = begun(&offers);
    let mut out = Vec::new();
    let outcome = (0..65).try_for_each(|_| {
        handshake.take(&asked(option::LIST, b""), &mut out).map(|next| assert_eq!(next, Next::More))
    });
    assert_eq!(outcome, Err(HandshakeError::TooMany));
}
