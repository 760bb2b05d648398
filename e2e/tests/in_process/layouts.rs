//! Chains of any legal layout (VIRTIO 1.2 §2.7.4.1): headers in pieces, header and data in one
//! descriptor, the status byte wherever it may be.

use crate::scene::{DISK, Queue, Scene, answer, engines_and_caches, flush};
use ringway_driver::{Buffer, Indirect, Options, Piece, Status};
use ringway_testkit::pattern;

const IN: u32 = 0;
const OUT: u32 = 1;
const GET_ID: u32 = 8;
const WRITE_ZEROES: u32 = 13;
const MEMORY: usize = 256 << 10;
const LEN: usize = 4096;

/// The shared memory as one piece, and where in it the parts of a request lie.
struct Sheet {
    memory: Buffer,
    header: usize,
    data: usize,
    /// Right after the data, as the device sees it.
    status: usize,
}

impl Sheet {
    fn put_header(&mut self, kind: u32, sector: u64) {
        let header = &mut self.memory[self.header..][..16];
        header.fill(0);
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.memory[self.status] = 0xee;
    }

    fn data(&mut self) -> &mut [u8] {
        &mut self.memory[self.data..][..LEN]
    }

    /// The pieces between `cuts`, which are bytes from `from`.
    fn pieces(&self, from: usize, cuts: &[usize]) -> Vec<Piece> {
        let at = self.memory.guest_address() + from as u64;
        let piece = |cut: &[usize]| Piece {
            addr: at + cut[0] as u64,
            len: u32::try_from(cut[1] - cut[0]).unwrap(),
        };
        cuts.windows(2).map(piece).collect()
    }

    #[track_caller]
    fn ask(&self, queue: &mut Queue, readable: &[Piece], writable: &[Piece]) -> (Status, u32) {
        // SAFETY: the sheet is not touched until the answer is here.
        unsafe { queue.raw(readable, writable, &raw const self.memory[self.status], 0) }
            .unwrap_or_else(|error| panic!("{error}"));
        let done = answer(queue);
        (done.status, done.used_len)
    }
}

/// Ways to cut 16 bytes of header.
const HEADERS: [&[usize]; 5] =
    [&[0, 16], &[0, 1, 16], &[0, 7, 9, 16], &[0, 4, 8, 16], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 15, 16]];
/// Ways to cut the data.
const DATA: [&[usize]; 4] =
    [&[0, LEN], &[0, 1, LEN], &[0, 100, 612, 4000, LEN], &[0, 2048, 2049, LEN]];

#[test]
fn any_cut_of_header_data_and_status() {
    for (engine, cache) in engines_and_caches() {
        for (indirect, regions) in [
            (Indirect::Never, 1),
            (Indirect::Always, 1),
            (Indirect::Never, 2),
            (Indirect::Always, 2),
        ] {
            let front = Options::new()
                .memory(MEMORY)
                .indirect(indirect)
                .regions(regions)
                .queue_size(32)
                .first_index(65500);
            let mut scene = Scene::new(engine, cache, 1 << 20, 1, &front);
            let mut queue = scene.queue();
            let memory = scene.device.pool().alloc(MEMORY).expect("all of it");
            // With two regions the header lies over their seam: it begins eight bytes before.
            let header = MEMORY / 2 - 8;
            let mut sheet = Sheet { memory, header, data: 0, status: 0 };
            let mut sequence = 0;
            // Right behind the header, so that they can share a descriptor; aligned; odd.
            for data in [header + 16, 8192, 8192 + 513] {
                (sheet.data, sheet.status) = (data, data + LEN);
                for head in HEADERS {
                    for cuts in DATA {
                        sequence += 1;
                        transfer(&mut sheet, &mut queue, head, cuts, sequence);
                    }
                }
            }
            flush(&mut queue);
            let found = scene.found();
            let at = usize::try_from(sequence).unwrap() * LEN;
            assert_eq!(
                pattern::first_difference(&found[at..][..LEN], DISK, sequence * 8, sequence),
                None
            );
        }
    }
}

fn transfer(sheet: &mut Sheet, queue: &mut Queue, head: &[usize], cuts: &[usize], sequence: u64) {
    let sector = sequence * 8;
    let what = format!("header {head:?}, data {cuts:?} at {}", sheet.data);
    sheet.put_header(OUT, sector);
    pattern::fill(sheet.data(), DISK, sector, sequence);
    let mut readable = sheet.pieces(sheet.header, head);
    let mut data = sheet.pieces(sheet.data, cuts);
    if sheet.data == sheet.header + 16 {
        // The header's last piece and the data's first are one.
        let first = data.remove(0);
        readable.last_mut().expect("a piece").len += first.len;
    }
    readable.extend(data);
    let status = sheet.pieces(sheet.status, &[0, 1]);
    assert_eq!(sheet.ask(queue, &readable, &status), (Status::Ok, 1), "write: {what}");

    sheet.put_header(IN, sector);
    sheet.data().fill(0xdd);
    let readable = sheet.pieces(sheet.header, head);
    let mut writable = sheet.pieces(sheet.data, cuts);
    // The status byte lies behind the data: in a descriptor of its own, or in the last one.
    if sequence % 2 == 0 {
        writable.extend(status);
    } else {
        writable.last_mut().expect("a piece").len += 1;
    }
    let answer = sheet.ask(queue, &readable, &writable);
    assert_eq!(answer, (Status::Ok, 4096 + 1), "read: {what}");
    assert_eq!(pattern::first_difference(sheet.data(), DISK, sector, sequence), None, "{what}");
}

/// A write without data, a read without room, header bytes that are missing.
#[test]
fn chains_that_lack_something_fail_alone() {
    let mut scene = Scene::with(1 << 20, &Options::new().memory(MEMORY), |_| {});
    let mut queue = scene.queue();
    let memory = scene.device.pool().alloc(MEMORY).expect("all of it");
    let mut sheet = Sheet { memory, header: 0, data: 64, status: 64 + LEN };
    let status = sheet.pieces(sheet.status, &[0, 1]);
    for kind in [IN, OUT] {
        for head in [&[0, 16][..], &[0, 15], &[0, 1]] {
            sheet.put_header(kind, 0);
            let readable = sheet.pieces(sheet.header, head);
            assert_eq!(sheet.ask(&mut queue, &readable, &status), (Status::IoError, 1));
        }
    }
    sheet.put_header(77, 0);
    let readable = sheet.pieces(0, &[0, 16]);
    assert_eq!(sheet.ask(&mut queue, &readable, &status), (Status::Unsupported, 1));
    flush(&mut queue);
}

/// Erasing carries its range behind the header; the serial goes to memory of any cut.
#[test]
fn erase_and_get_id_in_pieces() {
    let mut scene = Scene::with(1 << 20, &Options::new().memory(MEMORY).regions(2), |rig| {
        rig.disk.serial = Some("twenty bytes or less".into());
    });
    let mut queue = scene.queue();
    let memory = scene.device.pool().alloc(MEMORY).expect("all of it");
    let header = MEMORY / 2 - 20;
    let mut sheet = Sheet { memory, header, data: header + 16, status: 64 };
    let status = sheet.pieces(64, &[0, 1]);
    for cuts in [&[0, 32][..], &[0, 16, 32], &[0, 5, 17, 20, 31, 32]] {
        sheet.put_header(OUT, 8);
        sheet.data().fill(7);
        let write = sheet.pieces(header, &[0, 16 + 512]);
        assert_eq!(sheet.ask(&mut queue, &write, &status), (Status::Ok, 1));
        sheet.put_header(WRITE_ZEROES, 0);
        let range = &mut sheet.data()[..16];
        range.fill(0);
        (range[0], range[8]) = (8, 1);
        let readable = sheet.pieces(header, cuts);
        assert_eq!(sheet.ask(&mut queue, &readable, &status), (Status::Ok, 1));
        assert_eq!(scene.found()[4096..][..512], [0; 512]);
    }
    for cuts in [&[0, 20][..], &[0, 1, 19, 20], &[0, 10, 20]] {
        sheet.put_header(GET_ID, 0);
        sheet.data().fill(0xee);
        let readable = sheet.pieces(header, &[0, 16]);
        let mut writable = sheet.pieces(sheet.data, cuts);
        writable.extend(&status);
        assert_eq!(sheet.ask(&mut queue, &readable, &writable), (Status::Ok, 21));
        assert_eq!(sheet.data()[..21], *b"twenty bytes or less\xee");
    }
}
