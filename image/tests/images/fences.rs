//! Clusters that are given back while something is in flight there.

use crate::disk::{Change, TestDisk};
use crate::qemu;
use crate::record::Hold;
use ringway_core::{ByteRange, Op};
use ringway_image::{Ask, ImageClient, NewImage, Place, Room};
use std::fs::File;
use std::time::{Duration, Instant};

const CLUSTER: u64 = 65536;
/// Bytes of the disk.
const BYTES: u64 = 4096 * CLUSTER;

impl TestDisk {
    /// Where a cluster is, which is in the file.
    fn host(&self, cluster: u64) -> u64 {
        let range = ByteRange::new(cluster * CLUSTER, CLUSTER).unwrap();
        match self.image.place(range, false) {
            Place::Direct { offset, .. } => offset,
            other => panic!("cluster {cluster}: {other:?}"),
        }
    }

    /// Writes clusters that were not there, one after the other, until one is at `host` or `until`
    /// is over. True if one is.
    fn is_used_again(&mut self, next: &mut u64, host: u64, until: Duration) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < until && *next < BYTES / CLUSTER {
            self.write(*next * CLUSTER, &[1; 512]);
            if self.host(*next) == host {
                return true;
            }
            *next += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }
}

/// Until something was said to a queue.
fn wait_for_bell(client: &ImageClient) {
    let mut bell = libc::pollfd { fd: client.bell(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which is ours.
    assert_eq!(unsafe { libc::poll(&raw mut bell, 1, 60_000) }, 1, "nothing is said");
}

#[test]
fn a25_a_cluster_is_not_used_again_while_something_is_in_flight_there() {
    if !qemu::is_here() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fences.qcow2");
    qemu::img(&["create", "-f", "qcow2", path.to_str().unwrap(), &BYTES.to_string()]);
    let mut disk = TestDisk::open(&path, false);
    disk.write(0, &[7; 512]);
    let host = disk.host(0);
    // A write of another queue that has looked, and takes its time.
    let mut other = disk.image.client(4).unwrap();
    let generation = other.began();
    let len = usize::try_from(CLUSTER).unwrap();
    disk.change(&mut [Change { op: Op::Discard, at: 0, bytes: vec![0; len] }]);
    assert_eq!(disk.read(0, 512), [0; 512]);
    let mut next = 1;
    // A few freed clusters wait for company, but not for long while nobody asks for anything.
    std::thread::sleep(Duration::from_secs(1));
    let used = disk.is_used_again(&mut next, host, Duration::from_secs(1));
    assert!(!used, "cluster {next} has its place, and a write is in flight there");
    assert_eq!(other.take(), Ok(None), "a fence is no answer");
    other.ended(generation);
    let used = disk.is_used_again(&mut next, host, Duration::from_secs(30));
    assert!(used, "its place is used again once nothing is in flight there");
    drop((other, disk));
    qemu::check(&path, false);
}

/// It has looked before the batch was over in which the cluster is given back.
#[test]
fn a25_a_queue_that_comes_during_a_batch_is_waited_for() {
    is_waited_for(false);
}

/// Clusters were given back that waited for an earlier fence, as when an image is opened anew, and that did not come to be.
#[test]
fn c74_a_fence_is_not_taken_for_an_earlier_one() {
    is_waited_for(true);
}

/// A queue has something in flight where a batch takes clusters away. With `earlier`, a fence is on its way to it then for
/// which nobody waits any more.
fn is_waited_for(earlier: bool) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fences.qcow2");
    let file = File::create_new(&path).unwrap();
    let new = NewImage { virtual_size: BYTES, cluster_bits: 16, backing: None };
    new.write(&file).unwrap();
    let mut disk = TestDisk::open(&path, false);
    // So many that they wait for no others.
    let many = 1200;
    (0..=many).for_each(|cluster| disk.write(cluster * CLUSTER, &[7; 512]));
    let host = disk.host(0);
    let mut known = earlier.then(|| {
        let other = disk.image.client(4).unwrap();
        disk.change(&mut [Change { op: Op::Discard, at: many * CLUSTER, bytes: vec![0; 65536] }]);
        wait_for_bell(&other);
        disk.image.give_back().unwrap();
        other
    });
    let hold = Hold::of(&file);
    let mut first = disk.image.client(4).unwrap();
    let range = ByteRange::new(0, many * CLUSTER).unwrap();
    let memory = std::ptr::null();
    let ask = Ask { tag: 0, op: Op::Discard, range, memory, skip: 0, room: Room::Freed };
    // SAFETY: there is no memory.
    unsafe { first.ask(ask) }.unwrap();
    // Its entry is being written.
    hold.reached();
    if let Some(known) = &mut known {
        assert_eq!(known.take(), Ok(None), "the earlier fence");
    }
    let mut other = known.unwrap_or_else(|| disk.image.client(4).unwrap());
    assert_eq!(disk.host(0), host);
    let generation = other.began();
    drop(hold);
    let begun = Instant::now();
    while first.take().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60), "no answer");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(first);
    // More than it takes ahead.
    for cluster in many + 1..many + 1300 {
        disk.write(cluster * CLUSTER, &[1; 512]);
        assert!(disk.host(cluster) != host, "cluster {cluster} has its place in flight");
    }
    assert_eq!(other.take(), Ok(None), "a fence is no answer");
    other.ended(generation);
    let mut next = many + 1300;
    let used = disk.is_used_again(&mut next, host, Duration::from_secs(60));
    assert!(used, "its place is used again once nothing is in flight there");
}
