use super::*;
use ringway_testkit::FakeStore;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

fn over(fake: &FakeStore) -> Xenstore {
    Xenstore::over(fake.connect().into())
}

fn wait_for(store: &mut Xenstore, wanted: usize) -> Changes {
    let begun = Instant::now();
    let mut all = Changes::default();
    while all.list.len() < wanted && begun.elapsed() < Duration::from_secs(10) {
        let mut more = store.events().unwrap();
        all.list.append(&mut more.list);
        all.missed |= more.missed;
        std::thread::sleep(Duration::from_millis(1));
    }
    all
}

#[test]
fn reads_writes_lists_and_removes() {
    let fake = FakeStore::default();
    let mut store = over(&fake);
    assert_eq!(store.read(Tx::NONE, "a/b").unwrap(), None);
    assert_eq!(store.list(Tx::NONE, "a").unwrap(), Vec::<String>::new());
    store.write(Tx::NONE, "a/b", "one").unwrap();
    store.write(Tx::NONE, "a/c/d", "").unwrap();
    assert_eq!(store.read(Tx::NONE, "a/b").unwrap().as_deref(), Some("one"));
    assert_eq!(store.read(Tx::NONE, "a/c/d").unwrap().as_deref(), Some(""));
    assert_eq!(store.list(Tx::NONE, "a").unwrap(), ["b", "c"]);
    store.remove(Tx::NONE, "a/b").unwrap();
    store.remove(Tx::NONE, "a/b").unwrap();
    assert_eq!(store.list(Tx::NONE, "a").unwrap(), ["c"]);
}

#[test]
fn says_who_refuses_what() {
    let mut store = over(&FakeStore::default());
    let error = store.write(Tx::NONE, "forbidden/key", "1").unwrap_err();
    assert_eq!(error.to_string(), "xenstore refuses 'forbidden/key': EACCES");
    let error = store.write(Tx::NONE, "long", &"x".repeat(5000)).unwrap_err();
    assert!(matches!(error, StoreError::TooLong(_)));
    // The connection is as good as before.
    store.write(Tx::NONE, "short", "1").unwrap();
}

#[test]
fn a_transaction_is_carried_out_again_until_nobody_was_faster() {
    let fake = FakeStore::default();
    let mut store = over(&fake);
    fake.make_conflicts(3);
    let mut tries = 0;
    let value = store.transaction(|store, tx| {
        tries += 1;
        store.write(tx, "counter", &tries.to_string())?;
        store.read(tx, "counter")
    });
    assert_eq!(value.unwrap().as_deref(), Some("4"));
    assert_eq!((tries, fake.committed()), (4, 1));
    assert_eq!(fake.get("counter").as_deref(), Some("4"));
}

#[test]
fn a_transaction_that_fails_leaves_nothing() {
    let fake = FakeStore::default();
    let mut store = over(&fake);
    let outcome = store.transaction(|store, tx| {
        store.write(tx, "half", "1")?;
        store.write(tx, "forbidden", "1")
    });
    assert!(outcome.is_err());
    assert_eq!((fake.get("half"), fake.committed()), (None, 0));
    fake.make_conflicts(u32::MAX);
    assert!(store.transaction(|store, tx| store.write(tx, "never", "1")).is_err());
}

#[test]
fn watches_ring_for_all_below() {
    let fake = FakeStore::default();
    let mut store = over(&fake);
    store.watch("device/1", "d1").unwrap();
    let change = |path: &str| Change { path: path.into(), token: "d1".into() };
    assert_eq!(wait_for(&mut store, 1).list, [change("device/1")]);
    fake.set("device/1/state", "4");
    fake.set("device/10/state", "4");
    fake.remove("device");
    assert_eq!(wait_for(&mut store, 2).list, [change("device/1/state"), change("device/1")]);
}

/// An event that came before an answer is not in the socket any more; whoever sleeps on that asks first.
#[test]
fn an_event_between_answers_is_not_slept_over() {
    let fake = FakeStore::default();
    let mut store = over(&fake);
    store.watch("device", "d").unwrap();
    wait_for(&mut store, 1);
    assert!(!store.has_events());
    let begun = Instant::now();
    while !store.has_events() && begun.elapsed() < Duration::from_secs(10) {
        fake.set("device/state", "4");
        store.read(Tx::NONE, "device/state").unwrap();
    }
    assert!(store.has_events());
    wait_for(&mut store, 1);
    assert!(!store.has_events());
}

/// Hazard B14 (XSA-349): a flood of events is one event, and one of many paths costs bounded memory.
#[test]
fn b14_a_flood_of_watches_is_coalesced() {
    let fake = FakeStore::default();
    let mut store = over(&fake);
    store.watch("device", "d").unwrap();
    let flood = {
        let fake = fake.clone();
        std::thread::spawn(move || {
            for _ in 0..5_000 {
                fake.ring("device/1/state");
            }
        })
    };
    // Meanwhile requests are answered: events are put aside, each once.
    let begun = Instant::now();
    while !flood.is_finished() {
        assert_eq!(store.read(Tx::NONE, "nothing").unwrap(), None);
        assert!(store.events.len() <= 2, "{} kept", store.events.len());
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
    flood.join().unwrap();
    // One of many paths costs no more than what may be kept, and says so.
    let flood = {
        let fake = fake.clone();
        std::thread::spawn(move || (0..3_000).for_each(|n| fake.ring(&format!("device/{n}"))))
    };
    while !flood.is_finished() {
        assert_eq!(store.read(Tx::NONE, "nothing").unwrap(), None);
    }
    assert_eq!(store.read(Tx::NONE, "nothing").unwrap(), None);
    let changes = store.events().unwrap();
    assert!(changes.missed && changes.list.len() >= EVENTS_MAX, "{}", changes.list.len());
}

#[test]
fn a_daemon_that_talks_nonsense_is_left() {
    for nonsense in [[9u32, 1, 0, 0], [2, 99, 0, 0], [2, 1, 0, 5000], [16, 7, 0, 0]] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut store = Xenstore::over(theirs.into());
        let bytes: Vec<u8> = nonsense.iter().flat_map(|word| word.to_ne_bytes()).collect();
        (&ours).write_all(&bytes).unwrap();
        let error = store.read(Tx::NONE, "x").unwrap_err();
        assert!(matches!(error, StoreError::Broken(_)), "{nonsense:?}: {error}");
    }
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    assert!(Xenstore::over(theirs.into()).read(Tx::NONE, "x").is_err());
}

/// Through `/dev/xen/xenbus` the kernel says itself that a watch is set, and leaves the number out.
#[test]
fn the_kernel_answers_a_watch_without_its_number() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut store = Xenstore::over(theirs.into());
    let say = |head: [u32; 4], body: &[u8]| {
        let bytes: Vec<u8> = head.iter().flat_map(|word| word.to_ne_bytes()).collect();
        (&ours).write_all(&[&bytes, body].concat()).unwrap();
    };
    say([WATCH, 0, 0, 3], b"OK\0");
    store.watch("backend", "t").unwrap();
    // Nothing else may do so.
    say([READ, 0, 0, 0], b"");
    assert!(matches!(store.read(Tx::NONE, "x"), Err(StoreError::Broken(_))));
}
