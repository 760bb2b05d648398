//! VIRTIO_F_RING_RESET: one queue is stopped, set up anew and started while another one works. The
//! front-end turns the reset into GET_VRING_BASE, and what follows into SET_VRING_*.

use ringway_disk::EngineKind;
use ringway_export::Polling;
use ringway_testkit::raw::{
    DATA, Desc, F_FLUSH, F_INDIRECT, F_PACKED, F_VERSION_1, RawGuest, request, words,
};
use ringway_testkit::rig::{Rig, RigOptions, image};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::AsFd;
use std::time::Duration;

const RING_RESET: u64 = 1 << 40;
const NOTIFICATION_DATA: u64 = 1 << 38;
const IN: u32 = 0;
const OK: u8 = 0;
const WRITE: u16 = 2;
const SOON: Duration = Duration::from_secs(20);

/// Puts `count` reads of 256 KiB into queue 1.
fn keep_busy(guest: &mut RawGuest, count: u16) {
    guest.put_header(DATA - 64, IN, 0);
    for i in 0..count {
        let chain = [
            Desc { addr: DATA - 64, len: 16, ..Desc::default() },
            Desc { addr: DATA + 0x10_0000, len: 256 << 10, flags: WRITE, next: 0 },
            Desc { addr: DATA - 32, len: 1, flags: WRITE, next: 0 },
        ];
        guest.put_chain(1, 3 * i, &chain);
        guest.offer_quietly(1, 3 * i);
    }
    guest.kick(1);
}

fn a_queue_is_reset_while_another_works(format: u64) {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut rig = Rig::start(&RigOptions::buffered(&path, EngineKind::Threads).queues(2, 1));
    let features = F_VERSION_1 | F_INDIRECT | F_FLUSH | RING_RESET | NOTIFICATION_DATA | format;
    let mut guest = RawGuest::start(rig.connect(), 2, 128, features);
    // Packed rings may have any size.
    let sizes = if format == F_PACKED { [64, 100, 128, 7] } else { [64, 256, 128, 8] };
    for size in sizes {
        for round in 0..20 {
            assert_eq!(guest.simple(0, IN, round, DATA, 512), (OK, 513));
        }
        keep_busy(&mut guest, 40);
        let expected = guest.base(0);
        assert_eq!(guest.stop_queue(0).unwrap(), expected);
        guest.reset_queue(0);
        let other = std::mem::replace(&mut guest.size, size);
        assert!(guest.start_queue(0).unwrap(), "size {size}");
        assert_eq!(guest.simple(0, IN, 1, DATA, 512), (OK, 513), "size {size}");
        let mut again = 0;
        guest.size = other;
        while again < 40 && guest.next_used(1, SOON).is_some() {
            again += 1;
        }
        assert_eq!(again, 40, "the other queue answers all it was asked");
        // Back to the size that both queues have.
        guest.size = size;
        let _ = guest.stop_queue(0).unwrap();
        guest.reset_queue(0);
        guest.size = other;
        assert!(guest.start_queue(0).unwrap());
    }
}

#[test]
fn split() {
    a_queue_is_reset_while_another_works(0);
}

#[test]
fn packed() {
    a_queue_is_reset_while_another_works(F_PACKED);
}

/// A front-end may give a queue that runs another doorbell: from then on that one counts, for this queue.
#[test]
fn a_queue_that_runs_takes_another_kick() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 16 << 20);
    let mut options = RigOptions::buffered(&path, EngineKind::Threads).queues(2, 1);
    // Nobody finds a request without being told of it.
    options.polling = Polling::Never;
    let mut rig = Rig::start(&options);
    let mut guest = RawGuest::start(rig.connect(), 2, 64, F_VERSION_1 | F_INDIRECT | F_FLUSH);
    for queue in [0, 1] {
        assert_eq!(guest.simple(queue, IN, 1, DATA, 512), (OK, 513));
    }
    // Each of those was called for.
    let calls = rig.stats()[0].queues.iter().map(|queue| queue.totals.calls).collect::<Vec<_>>();
    assert!(calls.iter().all(|&calls| calls > 0), "{calls:?}");
    for _ in 0..3 {
        assert_eq!(guest.simple(0, IN, 1, DATA, 512), (OK, 513));
    }
    let total = |calls: &[u64]| calls.iter().sum::<u64>();
    let more = rig.stats()[0].queues.iter().map(|queue| queue.totals.calls).collect::<Vec<_>>();
    assert!(total(&more) >= total(&calls) + 3, "{calls:?} and {more:?}");
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    assert!(guest.client.acked(request::SET_VRING_KICK, &words(&[0]), &[kick.as_fd()]).unwrap());
    assert_eq!(guest.simple(1, IN, 1, DATA, 512), (OK, 513), "the other one keeps its own");
    guest.put_header(DATA - 64, IN, 0);
    for round in 0..3 {
        let chain = [
            Desc { addr: DATA - 64, len: 16, ..Desc::default() },
            Desc { addr: DATA, len: 512, flags: WRITE, next: 0 },
            Desc { addr: DATA - 32, len: 1, flags: WRITE, next: 0 },
        ];
        guest.put_chain(0, 0, &chain);
        guest.offer_quietly(0, 0);
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        assert_eq!(guest.next_used(0, SOON), Some((0, 513)), "round {round}");
    }
}
