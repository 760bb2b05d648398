//! What front-end and back-end agree on before queues run: features, and what the configuration space says.

use ringway_disk::{EngineKind, Source};
use ringway_testkit::raw::{
    DATA, F_FLUSH, F_INDIRECT, F_PROTOCOL, F_VERSION_1, RawGuest, USER_DELTA, halves, request,
    words,
};
use ringway_testkit::rig::{Rig, RigOptions};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::AsFd;

const BASIC: u64 = F_VERSION_1 | F_INDIRECT | F_FLUSH;
const IN: u32 = 0;
const OK: u8 = 0;

fn options() -> RigOptions {
    let source = Source::Null { bytes: 1 << 20, latency_us: 0 };
    RigOptions::new(source, EngineKind::Null)
}

fn set_features(guest: &RawGuest, features: u64) -> bool {
    guest.client.acked(request::SET_FEATURES, &words(&[features]), &[]).unwrap()
}

/// SET_VRING_ENABLE is a message of those who have negotiated protocol features. For the others a kick
/// descriptor enables a queue.
#[test]
fn a_queue_is_enabled_by_its_kick_without_protocol_features_only() {
    for (features, runs) in [(BASIC, true), (BASIC | F_PROTOCOL, false)] {
        let mut rig = Rig::start(&options());
        let guest = RawGuest::connect(rig.connect(), BASIC);
        assert!(set_features(&guest, features));
        let (desc, avail, used) = guest.rings(0);
        let addresses = [desc, used, avail].map(|at| at + USER_DELTA);
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for (message, payload) in [
            (request::SET_VRING_NUM, halves(&[0, 64])),
            (request::SET_VRING_BASE, halves(&[0, 0])),
            (request::SET_VRING_ADDR, [halves(&[0, 0]), words(&addresses), words(&[0])].concat()),
        ] {
            assert!(guest.client.acked(message, &payload, &[]).unwrap());
        }
        let running = || rig.stats()[0].queues.len();
        assert_eq!(running(), 0);
        let queue = words(&[0]);
        assert!(guest.client.acked(request::SET_VRING_KICK, &queue, &[kick.as_fd()]).unwrap());
        assert_eq!(running(), usize::from(runs), "features {features:#x}");
        assert!(guest.client.acked(request::SET_VRING_ENABLE, &halves(&[0, 1]), &[]).unwrap());
        assert_eq!(running(), 1, "features {features:#x}");
    }
}

/// What a queue runs with cannot change under it. Front-ends that say it once more are right, though.
#[test]
fn features_of_a_queue_that_runs_stay_as_they_are() {
    let mut rig = Rig::start(&options());
    let mut guest = RawGuest::start(rig.connect(), 1, 64, BASIC);
    assert!(set_features(&guest, BASIC | F_PROTOCOL), "the same");
    assert!(!set_features(&guest, BASIC & !F_FLUSH | F_PROTOCOL), "less");
    assert!(!set_features(&guest, BASIC | F_PROTOCOL | 1 << 11), "more");
    assert_eq!(guest.simple(0, IN, 0, DATA, 512), (OK, 513));
    guest.stop_queue(0).unwrap();
    assert!(set_features(&guest, BASIC & !F_FLUSH | F_PROTOCOL), "it has stopped");
}

/// struct virtio_blk_config, VIRTIO 1.2 §5.2.4: what guests may send in one request.
#[test]
fn a_guest_is_told_how_large_a_request_may_be() {
    for (queue_size, segments) in [(1024, 126), (128, 126), (64, 62), (4, 2), (2, 1)] {
        let mut options = options().queues(3, 1);
        options.queue_size = queue_size;
        let mut rig = Rig::start(&options);
        let guest = RawGuest::connect(rig.connect(), BASIC);
        let mut payload = halves(&[0, 60, 0]);
        payload.resize(12 + 60, 0);
        guest.client.send(request::GET_CONFIG, 0, &payload, &[]).unwrap();
        let space = guest.client.receive().unwrap().1.split_off(12);
        let word = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
        assert_eq!(word(8), 4 << 20, "bytes of a segment");
        assert_eq!(word(12), segments, "segments, with queues of {queue_size}");
        assert_eq!(space[34..36], [3, 0], "queues");
    }
}
