//! How the entries of clusters get into the tables.

use crate::disk::{Change, TestDisk};
use crate::power_cuts::checked;
use crate::record::{Event, Record};
use ringway_core::Op;
use ringway_image::NewImage;
use std::fs::File;

const CLUSTER: u64 = 65536;

/// One write has all that changes of a stretch, and leaves what lies between as it was.
#[test]
fn entries_that_change_together_are_one_write() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.qcow2");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let new = NewImage { virtual_size: 2048 * CLUSTER, cluster_bits: 16, backing: None };
    new.write(&file).unwrap();
    let mut disk = TestDisk::open(&path, false);
    for cluster in [0, 2, 3, 6, 8, 600] {
        disk.write(cluster * CLUSTER, &[cluster as u8 | 1; 512]);
    }
    let record = Record::of(&file);
    // Those from 0 to 7 are zeroes now; 1, 4, 5 and 7 were before.
    let bytes = vec![0; 8 * CLUSTER as usize];
    disk.change(&mut [Change { op: Op::WriteZeroes, at: 0, bytes }]);
    let writes = |events: Vec<Event>| -> Vec<usize> {
        let bytes = events.into_iter().filter_map(|event| match event {
            Event::Write { bytes, .. } => Some(bytes.len()),
            _ => None,
        });
        bytes.collect()
    };
    assert_eq!(writes(record.take()), [7 * 8], "from that of cluster 0 to that of cluster 6");
    assert!(disk.read(0, 8 * CLUSTER as usize).iter().all(|byte| *byte == 0));
    assert_eq!(disk.read(8 * CLUSTER, 512), [9; 512]);
    // Those of 8 and 600 are too far from each other.
    let bytes = vec![0; 593 * CLUSTER as usize];
    disk.change(&mut [Change { op: Op::WriteZeroes, at: 8 * CLUSTER, bytes }]);
    assert_eq!(writes(record.take()), [8, 8]);
    assert_eq!(disk.read(8 * CLUSTER, 512), [0; 512]);
    assert_eq!(disk.read(600 * CLUSTER, 512), [0; 512]);
    drop(disk);
    assert_eq!(checked(&path).unwrap().leaks, 0);
}
