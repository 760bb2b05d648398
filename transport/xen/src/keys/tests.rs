use super::*;
use ringway_testkit::FakeStore;

fn over(fake: &FakeStore) -> Xenstore {
    Xenstore::over(fake.connect().into())
}

fn saying() -> Saying {
    Saying {
        queues: 4,
        geometry: Geometry {
            capacity: 64 << 20,
            logical_block: 512,
            physical_block: 4096,
            optimal_io: 0,
            read_only: false,
            discard: true,
            discard_granularity: 4096,
        },
        write_cache: true,
        persistent: true,
        limits: GuestLimits::all(true),
    }
}

#[test]
fn b15_a_guest_is_told_what_it_can_bear() {
    let fake = FakeStore::default();
    let mut store = over(&fake);
    assert_eq!(guest_memory(&mut store, 7).unwrap(), None);
    fake.set("/local/domain/7/memory/static-max", "1048576");
    assert_eq!(guest_memory(&mut store, 7).unwrap(), Some(1 << 30));
    for nonsense in ["", "-1", "0", "much"] {
        fake.set("/local/domain/7/memory/target", nonsense);
        assert_eq!(guest_memory(&mut store, 7).unwrap(), Some(1 << 30), "{nonsense:?}");
    }
    fake.set("/local/domain/7/memory/target", "327680");
    let memory = guest_memory(&mut store, 7).unwrap();
    assert_eq!(memory, Some(320 << 20));
    let small = Saying { limits: GuestLimits::bearable(4, true, memory), ..saying() };
    let keys = small.keys();
    for said in [
        ("max-ring-page-order", "0"),
        ("feature-max-indirect-segments", "32"),
        ("feature-persistent", "1"),
    ] {
        assert!(keys.contains(&(said.0, said.1.to_owned())), "{said:?} in {keys:?}");
    }
    // Its front-end may have been told more by a predecessor.
    assert_eq!(small.offered(), saying().offered());
}

fn front(keys: &[(&str, &str)]) -> Result<FrontKeys, KeyError> {
    front_of("1", keys, &saying())
}

/// What is read of a front-end whose back-end has `offered` it persistent grants.
fn front_of(offered: &str, keys: &[(&str, &str)], saying: &Saying) -> Result<FrontKeys, KeyError> {
    let fake = FakeStore::default();
    keys.iter().for_each(|(key, value)| fake.set(&format!("f/{key}"), value));
    fake.set("b/feature-persistent", offered);
    FrontKeys::read(&mut over(&fake), "f", "b", saying)
}

/// Linux writes `feature-persistent` for itself, whatever its back-end offers, and gives its disk up
/// when a page that it does not keep is still mapped at the end of a request.
#[test]
fn b15_persistent_grants_are_used_if_both_ends_said_so() {
    let both = [("ring-ref", "8"), ("event-channel", "5"), ("feature-persistent", "1")];
    let persistent = |offered, keys: &[_], saying: &Saying| {
        front_of(offered, keys, saying).map(|keys| keys.persistent)
    };
    assert!(persistent("1", &both, &saying()).unwrap());
    // Not offered: to this guest, or by a predecessor with other options.
    assert!(!persistent("0", &both, &saying()).unwrap());
    assert!(!persistent("1", &both[..2], &saying()).unwrap());
    // A successor that does not want them need not use what was offered.
    assert!(!persistent("1", &both, &Saying { persistent: false, ..saying() }).unwrap());
    let fake = FakeStore::default();
    both.iter().for_each(|(key, value)| fake.set(&format!("f/{key}"), value));
    let unsaid = FrontKeys::read(&mut over(&fake), "f", "b", &saying()).unwrap();
    assert!(!unsaid.persistent, "nothing said is no offer");
}

#[test]
fn an_old_front_end_has_one_flat_ring_of_one_page() {
    let keys = front(&[("ring-ref", "8"), ("event-channel", "5")]).unwrap();
    assert_eq!(keys.rings, [RingKeys { pages: vec![8], port: 5 }]);
    assert_eq!((keys.abi, keys.order, keys.persistent), (Abi::X86_64, 0, false));
}

#[test]
fn queues_have_folders_and_rings_have_pages() {
    let mut said = vec![
        ("multi-queue-num-queues", "2"),
        ("ring-page-order", "1"),
        ("protocol", "x86_32-abi"),
        ("feature-persistent", "1"),
    ];
    let rest = [
        ("queue-0/ring-ref0", "1"),
        ("queue-0/ring-ref1", "2"),
        ("queue-0/event-channel", "3"),
        ("queue-1/ring-ref0", "4"),
        ("queue-1/ring-ref1", "5"),
        ("queue-1/event-channel", "6"),
    ];
    said.extend(rest);
    let keys = front(&said).unwrap();
    let ring = |pages: [u32; 2], port| RingKeys { pages: pages.into(), port };
    assert_eq!(keys.rings, [ring([1, 2], 3), ring([4, 5], 6)]);
    assert_eq!((keys.abi, keys.order, keys.persistent), (Abi::X86_32, 1, true));
    for (missing, _) in rest {
        let said: Vec<_> = said.iter().copied().filter(|(key, _)| *key != missing).collect();
        let error = front(&said).unwrap_err().to_string();
        assert_eq!(error, format!("the front-end has not written f/{missing}"));
    }
}

#[test]
fn what_cannot_be_is_refused_and_named() {
    let ring = [("ring-ref", "8"), ("event-channel", "5")];
    for (key, value, why) in [
        ("multi-queue-num-queues", "0", "is not 1 to 4, the most that was offered"),
        ("multi-queue-num-queues", "5", "is not 1 to 4, the most that was offered"),
        ("multi-queue-num-queues", "4294967296", "is no number"),
        ("ring-page-order", "5", "is above 4, the most that was offered"),
        ("ring-page-order", "-1", "is no number"),
        ("protocol", "arm-abi", "is not x86_64-abi or x86_32-abi"),
        ("event-channel", "many", "is no number"),
    ] {
        let mut said: Vec<_> = ring.iter().copied().filter(|(other, _)| *other != key).collect();
        said.push((key, value));
        let error = front(&said).unwrap_err().to_string();
        assert_eq!(error, format!("the front-end has written {value:?} to f/{key}, which {why}"));
    }
}

#[test]
fn says_what_a_disk_can_do() {
    let value = |saying: &Saying, key: &str| {
        saying.keys().into_iter().find(|(name, _)| *name == key).map(|(_, value)| value)
    };
    let plain = saying();
    for (key, wanted) in [
        ("multi-queue-max-queues", "4"),
        ("sectors", "131072"),
        ("sector-size", "512"),
        ("physical-sector-size", "4096"),
        ("feature-flush-cache", "1"),
        ("feature-discard", "1"),
        ("discard-granularity", "4096"),
        ("info", "0"),
    ] {
        assert_eq!(value(&plain, key).as_deref(), Some(wanted), "{key}");
    }
    let mut locked = saying();
    (locked.geometry.read_only, locked.write_cache) = (true, false);
    assert_eq!(value(&locked, "info").as_deref(), Some("4"));
    assert_eq!(value(&locked, "feature-discard").as_deref(), Some("0"));
    assert_eq!(value(&locked, "feature-flush-cache").as_deref(), Some("0"));
    assert_eq!(value(&locked, "discard-granularity"), None);
    let offered = locked.offered();
    assert!(!offered.flush && !offered.discard && !offered.barrier);
}

/// A store that cannot tell has not said that a disk is gone.
#[test]
fn b33_an_error_of_the_store_is_no_removal() {
    let fake = FakeStore::default();
    let mut store = over(&fake);
    let (back, front) = ("backend/vbd3/7/51712", "/local/domain/7/device/vbd/51712");
    for (key, value) in
        [("frontend", front), ("params", "/i"), ("mode", "w"), ("online", "1"), ("state", "4")]
    {
        fake.set(&format!("{back}/{key}"), value);
    }
    fake.set(&format!("{front}/state"), "4");
    let at = Address::read(&mut store, back).unwrap().unwrap();
    assert!(read(&mut store, &at).unwrap().is_connected());
    let keys = ["params", "online", "state"].map(|key| format!("{back}/{key}"));
    for key in keys.iter().chain([&format!("{front}/state")]) {
        for name in ["EIO", "ENOMEM", "EAGAIN", "EBUSY"] {
            fake.set_error(key, Some(name));
            assert!(read(&mut store, &at).is_err(), "{key}: {name}");
            fake.set_error(key, None);
        }
        assert!(read(&mut store, &at).unwrap().is_connected(), "{key}");
    }
    // Its guest may keep its own state to itself.
    fake.set_error(&format!("{front}/state"), Some("EACCES"));
    assert_eq!(read(&mut store, &at).unwrap().front, State::Unknown);
}
