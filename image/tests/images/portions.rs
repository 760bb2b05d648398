//! Requests for much of an image are carried out in portions, with those of others in between.

use crate::disk::TestDisk;
use ringway_core::mem::Segments;
use ringway_core::{ByteRange, Op};
use ringway_image::{Answer, Ask, Format, ImageClient, NewImage, Place, Room};
use std::fs::File;
use std::path::Path;
use std::time::Duration;

const CLUSTER: u64 = 512;
/// What one portion has at most, in clusters.
const PORTION: u64 = 8192;
const BYTES: u64 = (3 * PORTION + 8) * CLUSTER;

fn ask(client: &mut ImageClient, op: Op, at: u64, memory: &Segments) {
    let range = ByteRange::new(at, BYTES - at).unwrap();
    let range = if op == Op::Read { ByteRange::new(at, CLUSTER).unwrap() } else { range };
    let ask = Ask { tag: 0, op, range, memory, skip: 0, room: Room::Freed };
    // SAFETY: the list names no memory, and is kept until the answer.
    unsafe { client.ask(ask) }.unwrap();
}

fn answer(client: &mut ImageClient) -> u64 {
    loop {
        if let Some(Answer { result, .. }) = client.take().expect("the thread lives") {
            return u64::try_from(result).expect("it succeeds");
        }
        std::thread::sleep(Duration::from_micros(20));
    }
}

#[test]
fn d21_what_erases_goes_in_portions_and_others_go_on_in_between() {
    for op in [Op::Discard, Op::WriteZeroes] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.qcow2");
        std::fs::write(folder.path().join("base.raw"), vec![1; BYTES as usize]).unwrap();
        let backing = Some((Path::new("base.raw"), Format::Raw));
        let new = NewImage { virtual_size: BYTES, cluster_bits: CLUSTER.ilog2(), backing };
        new.write(&File::create_new(&path).unwrap()).unwrap();
        let mut disk = TestDisk::open(&path, false);
        let (mut one, mut other) = (disk.image.client(8).unwrap(), disk.image.client(8).unwrap());
        let memory = Segments::with_capacity(1);
        let (mut done, mut portions) = (0, 0);
        while done < BYTES {
            // Somebody else first: answered before all is done, not after it.
            ask(&mut other, Op::Read, BYTES - CLUSTER, &memory);
            ask(&mut one, op, done, &memory);
            answer(&mut other);
            let more = answer(&mut one);
            assert!(more > 0 && more <= PORTION * CLUSTER, "{op:?}: {more} bytes at once");
            (done, portions) = (done + more, portions + 1);
            assert!(portions <= 4, "{op:?}: {done} bytes after {portions}");
        }
        assert_eq!((done, portions), (BYTES, 4), "{op:?}");
        // Several at a time have one portion together.
        (0..4).for_each(|_| ask(&mut one, op, 0, &memory));
        let together: Vec<_> = (0..4).map(|_| answer(&mut one)).collect();
        assert!(together.iter().all(|bytes| *bytes >= PORTION / 4 * CLUSTER), "{together:?}");
        drop((one, other));
        assert!(disk.read(0, BYTES as usize).iter().all(|byte| *byte == 0), "{op:?}");
    }
}

/// Zeroes that are to have room get it; others that keep it get none where nothing is, whatever a base has there.
#[test]
fn e73_zeroes_that_are_to_keep_their_room_have_it() {
    const CLUSTER: u64 = 1 << 16;
    const CLUSTERS: u64 = 16;
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("base.raw");
    std::fs::write(&base, vec![1; (CLUSTERS * CLUSTER) as usize]).unwrap();
    for backing in [None, Some((Path::new("base.raw"), Format::Raw))] {
        let path = folder.path().join(format!("{}.qcow2", backing.is_some()));
        let new = NewImage { virtual_size: CLUSTERS * CLUSTER, cluster_bits: 16, backing };
        new.write(&File::create_new(&path).unwrap()).unwrap();
        let mut disk = TestDisk::open(&path, false);
        let mut client = disk.image.client(8).unwrap();
        let memory = Segments::with_capacity(1);
        for (step, room, has) in [
            (1, Room::Kept, false),
            (2, Room::Made, true),
            (3, Room::Kept, true),
            (4, Room::Freed, false),
            (5, Room::Kept, false),
            (6, Room::Made, true),
        ] {
            let mut done = 0;
            while done < CLUSTERS * CLUSTER {
                let range = ByteRange::new(done, CLUSTERS * CLUSTER - done).unwrap();
                let (op, memory) = (Op::WriteZeroes, &raw const memory);
                let ask = Ask { tag: 0, op, range, memory, skip: 0, room };
                // SAFETY: the list names no memory, and is kept until the answer.
                unsafe { client.ask(ask) }.unwrap();
                done += answer(&mut client);
            }
            let mut clusters =
                (0..CLUSTERS).map(|at| ByteRange::new(at * CLUSTER, CLUSTER).unwrap());
            let has_room = |range| matches!(disk.image.place(range, true), Place::Direct { .. });
            let what = format!("step {step}, {room:?}, based: {}", backing.is_some());
            assert!(clusters.all(|range| has_room(range) == has), "{what}");
        }
        let blocks = std::os::unix::fs::MetadataExt::blocks(&path.metadata().unwrap());
        assert!(blocks * 512 >= CLUSTERS * CLUSTER, "the host has given it room: {blocks}");
        drop(client);
        let bytes = disk.read(0, (CLUSTERS * CLUSTER) as usize);
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
}
