//! Clients that go while their requests wait (docs/hazards.md, C51 to C53, C59): what storage was not given is
//! dropped, what it was given counts until it is over.

use ringway_disk::{Alignment, CustomDisk, EngineKind, ErrorPolicy, OnError, Source};
use ringway_export::ChangeError;
use ringway_testkit::StallingStore;
use ringway_testkit::nbd::{CLOSED, Client, NbdRig, SIMPLE, STRUCTURED, command as c};
use ringway_testkit::rig::RigOptions;
use ringway_throttle::{LimitKind, Member, Rates};
use std::time::{Duration, Instant};

const BYTES: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

fn rig(store: &StallingStore, drain_max: Duration) -> NbdRig {
    rig_of(store, drain_max, (4, 1))
}

/// With so many places, and so many workers.
fn rig_of(store: &StallingStore, drain_max: Duration, (places, workers): (u16, usize)) -> NbdRig {
    let source = Source::Null { bytes: BYTES as u64, latency_us: 0 };
    let mut options = RigOptions::new(source, EngineKind::Null).queues(places, workers);
    options.drain_max = drain_max;
    let disk = CustomDisk::new(BYTES as u64).open(None).unwrap();
    NbdRig::stalling(store, disk, &options)
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn nobody_is_connected(rig: &NbdRig) {
    until("nobody is connected", || !rig.export().is_connected());
}

/// So few bytes a second that whatever waits for the limit waits for the whole test.
fn limit(rig: &NbdRig) {
    let mut rates = Rates::default();
    rates[LimitKind::BpsWrite].avg = Some(100);
    rig.export().set_limits(vec![Member::alone(&rates).unwrap()]);
}

#[test]
fn c51_requests_that_wait_for_a_limit_go_with_their_connection() {
    let store = StallingStore::new(BYTES);
    let rig = rig(&store, PATIENCE);
    limit(&rig);
    let mut client = Client::new(rig.connect(), SIMPLE);
    assert_eq!(client.call(c::WRITE, 0, (0, 65536), &[1; 65536]).error, 0);
    for cookie in 0..3 {
        client.ask(c::WRITE, 0, cookie, (0, 65536), &[2; 65536]);
    }
    until("they wait", || rig.export().disk().is_at_limit());
    // A limit may let one of them through before it is known to be used up.
    let passed = store.asked(2);
    drop(client);
    nobody_is_connected(&rig);
    until("its queue is back", || rig.export().is_clear());
    rig.export().set_limits(Vec::new());
    let mut next = Client::new(rig.connect(), SIMPLE);
    assert_eq!(next.call(c::WRITE, 0, (0, 512), &[3; 512]).error, 0);
    assert_eq!((store.byte(0), store.asked(2)), (3, passed));
    assert!(passed < 3, "none has waited");
}

#[test]
fn c51_requests_that_wait_for_resume_go_with_their_connection() {
    for mode in [SIMPLE, STRUCTURED] {
        let store = StallingStore::new(BYTES);
        let rig = rig(&store, PATIENCE);
        let mut client = Client::new(rig.connect(), mode);
        assert_eq!(client.call(c::WRITE, 0, (0, 512), &[1; 512]).error, 0);
        rig.export().pause().unwrap();
        client.ask(c::WRITE, 0, 1, (0, 512), &[2; 512]);
        // The rest of this one is never sent.
        client.ask(c::WRITE, 0, 2, (0, 4096), &[2; 512]);
        drop(client);
        nobody_is_connected(&rig);
        rig.export().resume().unwrap();
        let mut next = Client::new(rig.connect(), mode);
        assert_eq!(next.call(c::READ, 0, (0, 512), &[]).data, [1; 512]);
        assert_eq!(store.asked(2), 0);
    }
}

/// Whoever says that it goes has all carried out that it has asked for before (NBD_CMD_DISC).
#[test]
fn c51_requests_before_a_disconnect_are_carried_out() {
    for limited in [false, true] {
        let store = StallingStore::new(BYTES);
        let rig = rig(&store, PATIENCE);
        if limited {
            limit(&rig);
        } else {
            rig.export().pause().unwrap();
        }
        let mut client = Client::new(rig.connect(), SIMPLE);
        for block in 0..4 {
            // With what looks like a disconnect request in the middle of a write.
            let mut data = ringway_testkit::nbd::request(SIMPLE, c::DISC, 0, 1, (0, 0));
            data.resize(512, 2);
            client.ask(c::WRITE, 0, block, (512 * block, 512), &data);
        }
        client.ask(c::DISC, 0, 9, (0, 0), &[]);
        drop(client);
        // The limit takes its time; what the client has said is known before.
        if limited {
            until("the first is there", || store.byte(511) == 2);
            rig.export().set_limits(Vec::new());
        } else {
            rig.export().resume().unwrap();
        }
        until("all are there", || (0..4).all(|block| store.byte(512 * block + 511) == 2));
        nobody_is_connected(&rig);
    }
}

#[test]
fn c51_requests_that_an_error_policy_holds_go_with_their_connection() {
    for errno in [libc::EIO, libc::ENOSPC] {
        let store = StallingStore::new(BYTES);
        let rig = rig(&store, PATIENCE);
        let on_enospc = Some(OnError::Hold);
        let policy = ErrorPolicy { on_write: OnError::Hold, on_enospc, ..ErrorPolicy::default() };
        rig.export().disk().set_error_policy(policy);
        store.fail(Some(errno));
        let mut client = Client::new(rig.connect(), SIMPLE);
        client.ask(c::WRITE, 0, 1, (0, 512), &[2; 512]);
        until("it is held", || rig.export().disk().held().is_some());
        let asked = store.asked(2);
        store.fail(None);
        drop(client);
        nobody_is_connected(&rig);
        // One that waits for space may have been tried by itself before it was dropped.
        let most = asked + usize::from(errno == libc::ENOSPC);
        assert!(rig.export().disk().held().is_none() && store.asked(2) <= most, "{errno}");
    }
}

/// A client that is there gets its answers, however much it has in flight when it breaks a rule.
#[test]
fn c51_who_is_there_is_answered() {
    let store = StallingStore::new(BYTES);
    let rig = rig(&store, PATIENCE);
    store.stall(Some(2));
    let mut client = Client::new(rig.connect(), SIMPLE);
    client.ask(c::WRITE, 0, 1, (0, 512), &[2; 512]);
    store.wait_stalled(1);
    client.send(&[0xa5; 64]);
    store.stall(None);
    assert_eq!(client.reply().expect("an answer").error, 0);
    assert_eq!(client.reply(), CLOSED);
}

#[test]
fn c52_drain_and_pause_wait_for_writes_of_ended_connections() {
    let store = StallingStore::new(BYTES);
    let rig = rig(&store, Duration::from_millis(300));
    store.stall(Some(2));
    let mut client = Client::new(rig.connect(), SIMPLE);
    client.ask(c::WRITE, 0, 1, (0, 512), &[2; 512]);
    store.wait_stalled(1);
    drop(client);
    nobody_is_connected(&rig);
    let export = rig.export();
    assert!(matches!(export.drain(), Err(ChangeError::LeftInFlight { .. })));
    let mut acted = false;
    assert!(export.at_rest(&mut || acted = true).is_err() && !acted, "nothing is at rest");
    assert!(matches!(export.pause(), Err(ChangeError::LeftInFlight { .. })));
    assert!(!export.is_paused());
    store.stall(None);
    until("it is at rest", || export.is_paused());
    assert_eq!(store.byte(0), 2);
    export.drain().unwrap();
    export.resume().unwrap();
}

/// A client whose write of 2 at block 0 stalls, and which is gone.
fn leave_a_write(rig: &NbdRig, store: &StallingStore) {
    store.stall(Some(2));
    let mut client = Client::new(rig.connect(), SIMPLE);
    client.ask(c::WRITE, 0, 1, (0, 512), &[2; 512]);
    store.wait_stalled(1);
    drop(client);
    nobody_is_connected(rig);
}

/// Nothing is told of it yet, and a request that was asked for later has its reply.
fn waits(client: &mut Client, cookie: u64) {
    client.ask(c::FLUSH, 0, 1000 + cookie, (0, 0), &[]);
    assert_eq!(client.reply().expect("an answer").cookie, 1000 + cookie, "{cookie} does not wait");
}

#[test]
fn c53_what_overlaps_a_write_of_an_ended_connection_waits_for_it() {
    for workers in [1, 2] {
        let store = StallingStore::new(BYTES);
        let rig = rig_of(&store, PATIENCE, (4, workers));
        leave_a_write(&rig, &store);
        // The next connection is on another worker, if there is one.
        let _same = (workers > 1).then(|| client_of(&rig));
        let mut next = Client::new(rig.connect(), SIMPLE);
        next.ask(c::WRITE, 0, 1, (0, 512), &[3; 512]);
        waits(&mut next, 1);
        next.ask(c::READ, 0, 2, (0, 4096), &[]);
        waits(&mut next, 2);
        next.ask(c::WRITE_ZEROES, 0, 3, (0, 1024), &[]);
        waits(&mut next, 3);
        // Nothing else does, nor does anything wait for a read.
        assert_eq!(next.call(c::WRITE, 0, (1024, 512), &[4; 512]).error, 0);
        assert_eq!(next.call(c::READ, 0, (1024, 512), &[]).data, [4; 512]);
        assert_eq!((store.asked(3), store.byte(0)), (0, 0));
        store.stall(None);
        let mut done: Vec<_> = (0..3).map(|_| next.reply().expect("an answer").cookie).collect();
        done.sort_unstable();
        assert_eq!(done, [1, 2, 3]);
        assert_eq!(next.call(c::WRITE, 0, (0, 512), &[5; 512]).error, 0);
        assert_eq!((store.byte(0), rig.export().is_clear()), (5, true));
    }
}

/// Before the thread of the connection that has ended may have looked.
#[test]
fn c53_a_client_that_comes_back_at_once_finds_its_writes_known() {
    const TIMES: u64 = 40;
    let store = StallingStore::new(BYTES);
    let rig = rig_of(&store, PATIENCE, (128, 2));
    store.stall(Some(2));
    let mut all = Vec::new();
    for block in 0..TIMES {
        let place = (512 * block, 512);
        let mut client = Client::new(rig.connect(), SIMPLE);
        client.ask(c::WRITE, 0, 1, place, &[2; 512]);
        store.wait_stalled(usize::try_from(block).unwrap() + 1);
        drop(client);
        let mut next = Client::new(rig.connect(), SIMPLE);
        next.ask(c::WRITE, 0, block, place, &[3; 512]);
        waits(&mut next, block);
        all.push(next);
    }
    store.stall(None);
    for (block, next) in all.iter_mut().enumerate() {
        assert_eq!(next.reply().expect("an answer").error, 0);
        assert_eq!(store.byte(512 * block), 3, "{block}");
    }
}

/// Before its queue has begun, perhaps: then nobody waits for it.
#[test]
fn c53_a_client_that_goes_as_its_connection_begins_writes_nothing_later() {
    const TIMES: u64 = 300;
    let store = StallingStore::new(BYTES);
    let rig = rig_of(&store, PATIENCE, (128, 2));
    for block in 0..TIMES {
        let place = (512 * block, 512);
        let mut client = Client::new(rig.connect(), SIMPLE);
        client.ask(c::WRITE, 0, 1, place, &[2; 512]);
        drop(client);
        let mut next = Client::new(rig.connect(), SIMPLE);
        assert_eq!(next.call(c::WRITE, 0, place, &[3; 512]).error, 0);
    }
    nobody_is_connected(&rig);
    let old: Vec<_> = (0..TIMES)
        .filter(|&block| store.byte(512 * usize::try_from(block).unwrap()) != 3)
        .collect();
    assert!(old.is_empty(), "older writes landed later at {old:?}");
}

/// A client that comes back before anybody knows that it had gone, as after a cut cable.
#[test]
fn c53_what_overlaps_an_old_write_waits_for_it_whoever_asked_for_that() {
    let store = StallingStore::new(BYTES);
    let rig = rig(&store, PATIENCE);
    store.stall(Some(2));
    let mut client = Client::new(rig.connect(), SIMPLE);
    client.ask(c::WRITE, 0, 1, (0, 512), &[2; 512]);
    store.wait_stalled(1);
    // While it is young its client decides what overlaps it.
    rig.inspect(1);
    rig.inspect(999_999_999);
    let mut next = Client::new(rig.connect(), SIMPLE);
    assert_eq!(next.call(c::WRITE, 0, (0, 512), &[3; 512]).error, 0);
    rig.inspect(1_000_000_001);
    next.ask(c::WRITE, 0, 1, (0, 512), &[4; 512]);
    waits(&mut next, 1);
    assert_eq!(next.call(c::WRITE, 0, (512, 512), &[5; 512]).error, 0);
    store.stall(None);
    assert_eq!(next.reply().expect("an answer").cookie, 1);
    assert_eq!(client.reply().expect("an answer").error, 0);
    assert_eq!(store.byte(0), 4);
}

/// What waits for a late write is not with storage: it goes with its own connection.
#[test]
fn c53_what_waits_for_a_late_write_goes_with_its_connection() {
    let store = StallingStore::new(BYTES);
    let rig = rig(&store, PATIENCE);
    leave_a_write(&rig, &store);
    let mut second = Client::new(rig.connect(), SIMPLE);
    second.ask(c::WRITE, 0, 1, (0, 512), &[3; 512]);
    waits(&mut second, 1);
    drop(second);
    nobody_is_connected(&rig);
    let mut third = Client::new(rig.connect(), SIMPLE);
    third.ask(c::WRITE, 0, 1, (0, 512), &[4; 512]);
    waits(&mut third, 1);
    store.stall(None);
    assert_eq!(third.reply().expect("an answer").error, 0);
    assert_eq!((store.byte(0), store.asked(3)), (4, 0));
}

/// The next client that has a place.
fn client_of(rig: &NbdRig) -> Client {
    let begun = Instant::now();
    loop {
        if let Ok(client) = Client::begin(rig.connect(), SIMPLE) {
            return client;
        }
        assert!(begun.elapsed() < PATIENCE, "no place is free");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The only place is free again although storage does not answer, unless too much was left behind already.
#[test]
fn c53_no_more_than_a_bounded_number_of_requests_outlive_their_connections() {
    let store = StallingStore::new(BYTES);
    let rig = rig_of(&store, PATIENCE, (1, 1));
    store.stall(Some(2));
    for round in 0..3 {
        let mut client = client_of(&rig);
        for write in 100 * round..100 * (round + 1) {
            client.ask(c::WRITE, 0, write, (512 * write, 512), &[2; 512]);
        }
        store.wait_stalled(100 * (usize::try_from(round).unwrap() + 1));
    }
    std::thread::sleep(Duration::from_secs(1));
    let refused = Client::begin(rig.connect(), SIMPLE).is_err();
    assert!(refused, "300 requests have outlived their connections");
    store.stall(None);
    drop(client_of(&rig));
    until("all are over", || rig.export().is_clear());
}

/// A write of 2 at block 0 that stalls and is older than a second; its client is there, or its cable was cut.
fn stall_an_old_write(rig: &NbdRig, store: &StallingStore) -> Client {
    store.stall(Some(2));
    let mut client = Client::new(rig.connect(), SIMPLE);
    client.ask(c::WRITE, 0, 1, (0, 512), &[2; 512]);
    store.wait_stalled(1);
    rig.inspect(1);
    rig.inspect(1_000_000_001);
    client
}

fn replies(client: &mut Client, wanted: usize) {
    (0..wanted).for_each(|_| assert_eq!(client.reply().expect("an answer").error, 0));
}

/// Of a connection whose cable was cut, perhaps: whoever comes back writes nothing that lands before it.
#[test]
fn c59_a_write_that_waits_for_a_late_one_is_overtaken_by_nothing_newer() {
    for workers in [1, 2] {
        let store = StallingStore::new(BYTES);
        let rig = rig_of(&store, PATIENCE, (4, workers));
        let mut client = stall_an_old_write(&rig, &store);
        client.ask(c::WRITE, 0, 2, (0, 1024), &[3; 1024]);
        waits(&mut client, 2);
        let mut next = Client::new(rig.connect(), SIMPLE);
        // These do not overlap what storage has.
        next.ask(c::WRITE, 0, 1, (512, 512), &[4; 512]);
        waits(&mut next, 1);
        next.ask(c::READ, 0, 2, (512, 512), &[]);
        waits(&mut next, 2);
        assert_eq!(next.call(c::WRITE, 0, (1024, 512), &[5; 512]).error, 0);
        store.stall(None);
        replies(&mut client, 2);
        let read = (0..2).map(|_| next.reply().expect("an answer")).find(|it| it.cookie == 2);
        assert_eq!(read.expect("both").data, [4; 512]);
        assert_eq!((store.byte(0), store.byte(512)), (3, 4), "{workers} workers");
    }
}

/// What waits goes with its connection, and nobody waits for it any more.
#[test]
fn c59_nobody_waits_for_what_was_dropped() {
    let store = StallingStore::new(BYTES);
    let rig = rig(&store, PATIENCE);
    let mut client = stall_an_old_write(&rig, &store);
    let mut second = Client::new(rig.connect(), SIMPLE);
    second.ask(c::WRITE, 0, 1, (0, 1024), &[3; 1024]);
    waits(&mut second, 1);
    let mut third = Client::new(rig.connect(), SIMPLE);
    third.ask(c::WRITE, 0, 1, (512, 512), &[4; 512]);
    waits(&mut third, 1);
    drop(second);
    replies(&mut third, 1);
    assert_eq!((store.byte(512), store.asked(3)), (4, 0));
    store.stall(None);
    replies(&mut client, 1);
}

fn hold_all(rig: &NbdRig) {
    let policy = ErrorPolicy { on_write: OnError::Hold, ..ErrorPolicy::default() };
    rig.export().disk().set_error_policy(policy);
}

/// It is tried again when somebody says so, which may be long after its client came back on another connection.
#[test]
fn c59_a_held_write_is_overtaken_by_nothing_newer() {
    for was_late in [false, true] {
        let store = StallingStore::new(BYTES);
        let rig = rig_of(&store, PATIENCE, (4, 2));
        hold_all(&rig);
        let mut client = match was_late {
            true => stall_an_old_write(&rig, &store),
            false => Client::new(rig.connect(), SIMPLE),
        };
        store.fail(Some(libc::EIO));
        match was_late {
            true => store.stall(None),
            false => client.ask(c::WRITE, 0, 1, (0, 512), &[2; 512]),
        }
        until("it is held", || rig.export().disk().held().is_some());
        store.fail(None);
        let mut next = Client::new(rig.connect(), SIMPLE);
        next.ask(c::WRITE, 0, 1, (0, 1024), &[3; 1024]);
        waits(&mut next, 1);
        next.ask(c::READ, 0, 2, (0, 512), &[]);
        waits(&mut next, 2);
        assert_eq!(next.call(c::WRITE, 0, (1024, 512), &[4; 512]).error, 0);
        assert_eq!(rig.export().retry_held(false).requests, 1);
        replies(&mut client, 1);
        let read = (0..2).map(|_| next.reply().expect("an answer")).find(|it| it.cookie == 2);
        assert_eq!(read.expect("both").data, [3; 512]);
        assert_eq!((store.byte(0), store.byte(512)), (3, 3), "{was_late}");
        assert!(rig.export().is_clear());
    }
}

/// Tried again, a request is begun as if it had just come.
#[test]
fn c59_what_is_tried_again_waits_for_late_writes() {
    let store = StallingStore::new(BYTES);
    let rig = rig_of(&store, PATIENCE, (4, 2));
    hold_all(&rig);
    store.stall(Some(2));
    let mut client = Client::new(rig.connect(), SIMPLE);
    client.ask(c::WRITE, 0, 1, (0, 512), &[2; 512]);
    store.wait_stalled(1);
    store.fail(Some(libc::EIO));
    let mut next = Client::new(rig.connect(), SIMPLE);
    next.ask(c::WRITE, 0, 1, (0, 1024), &[3; 1024]);
    until("it is held", || rig.export().disk().held().is_some());
    rig.inspect(1);
    rig.inspect(1_000_000_001);
    store.fail(None);
    rig.export().retry_held(false);
    waits(&mut next, 1);
    assert_eq!(store.asked(3), 1, "not again");
    store.stall(None);
    replies(&mut client, 1);
    replies(&mut next, 1);
    assert_eq!((store.byte(0), store.byte(512)), (3, 3));
}

/// A disk whose engine takes one request at a time, or whole blocks of 4 KiB only: the next one waits for room, or for the
/// block.
fn narrow_rig(store: &StallingStore, blocks: bool) -> NbdRig {
    let source = Source::Null { bytes: BYTES as u64, latency_us: 0 };
    let options = RigOptions::new(source, EngineKind::Null).queues(4, if blocks { 2 } else { 1 });
    let alignment = Alignment { memory: 512, offset: if blocks { 4096 } else { 1 } };
    let disk = CustomDisk { alignment, ..CustomDisk::new(BYTES as u64) }.open(None).unwrap();
    let (store, depth) = (store.clone(), if blocks { 1024 } else { 1 });
    NbdRig::with_engines(disk, &options, move || store.engine_of(depth))
}

/// A write of 2 to the first sector that stalls, and one of 3 to the second that storage is not given meanwhile.
fn two_in_a_row(rig: &NbdRig, store: &StallingStore) -> (Client, Client) {
    store.stall(Some(2));
    let (mut first, mut second) = (client_of(rig), client_of(rig));
    first.ask(c::WRITE, 0, 1, (0, 512), &[2; 512]);
    store.wait_stalled(1);
    second.ask(c::WRITE, 0, 1, (512, 512), &[3; 512]);
    until("it was taken", || in_flight(rig) == 2);
    (first, second)
}

fn in_flight(rig: &NbdRig) -> usize {
    rig.stats().iter().flat_map(|worker| &worker.queues).map(|queue| queue.in_flight).sum()
}

#[test]
fn c59_what_waits_for_a_block_goes_with_its_connection() {
    let store = StallingStore::new(BYTES);
    let rig = narrow_rig(&store, true);
    let (mut first, second) = two_in_a_row(&rig, &store);
    drop(second);
    until("it was dropped", || in_flight(&rig) == 1);
    store.stall(None);
    replies(&mut first, 1);
    assert_eq!((store.byte(0), store.byte(512), rig.export().is_clear()), (2, 0, true));
}

/// It counts as with storage.
#[test]
fn c59_what_waits_for_room_in_the_engine_is_overtaken_by_nothing_newer() {
    let store = StallingStore::new(BYTES);
    let rig = narrow_rig(&store, false);
    let (mut first, second) = two_in_a_row(&rig, &store);
    drop(second);
    until("it is known", || !rig.export().is_clear());
    let mut third = client_of(&rig);
    third.ask(c::WRITE, 0, 1, (512, 512), &[4; 512]);
    until("it was taken", || in_flight(&rig) == 3);
    store.stall(None);
    replies(&mut first, 1);
    replies(&mut third, 1);
    assert_eq!((store.byte(0), store.byte(512)), (2, 4));
    assert_eq!(store.asked(3), 1, "it was carried out before");
}

/// The server ends in order: what was taken is carried out, whatever it waits for.
#[test]
fn c59_what_waits_is_carried_out_when_the_server_ends() {
    for blocks in [false, true] {
        let store = StallingStore::new(BYTES);
        let mut rig = narrow_rig(&store, blocks);
        let (mut first, mut second) = two_in_a_row(&rig, &store);
        let goes_on = std::thread::spawn({
            let store = store.clone();
            move || {
                std::thread::sleep(Duration::from_millis(200));
                store.stall(None);
            }
        });
        rig.stop().unwrap();
        goes_on.join().unwrap();
        replies(&mut first, 1);
        replies(&mut second, 1);
        assert_eq!((store.byte(0), store.byte(512)), (2, 3), "{blocks}");
    }
}
