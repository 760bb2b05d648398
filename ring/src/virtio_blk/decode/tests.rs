use super::*;
use ringway_core::Segment;
use ringway_core::mem::{GuestMap, Mapping, Region};
use std::sync::Arc;

/// Where a front-end has the pieces of a read: header, data, status.
type Layout = (&'static str, &'static [(u64, u32)], &'static [(u64, u32)]);

const HIGH: u64 = 1 << 32;

/// As stock clients have them, and as they may.
const LAYOUTS: [Layout; 5] = [
    // Headers and status bytes back to back in a region of their own: nothing is aligned.
    ("libblkio", &[(17, 16)], &[(HIGH + 4096, 4096), (33, 1)]),
    // A guest of more than 3 GiB: its requests on one side of the hole, pages on both.
    ("Linux", &[(64, 16)], &[(HIGH + 4096, 2048), (4096, 2048), (80, 1)]),
    // Header, data and status one after the other.
    ("firmware", &[(HIGH + 3, 16)], &[(HIGH + 19, 4096), (HIGH + 4115, 1)]),
    ("a header over two regions", &[(8191, 1), (HIGH, 15)], &[(100, 4096), (HIGH + 100, 1)]),
    ("a status behind the data", &[(1000, 4), (8, 12)], &[(HIGH + 512, 4097)]),
];

fn memory() -> Arc<GuestMap> {
    let region = |guest| {
        let mapping = Arc::new(Mapping::anonymous(8192).unwrap());
        Region { guest, user: guest, len: 8192, mapping }
    };
    Arc::new(GuestMap::new(vec![region(0), region(HIGH)]).unwrap())
}

fn at(map: &GuestMap, guest: u64) -> *mut u8 {
    let region = &map.regions()[usize::from(guest >= HIGH)];
    region.mapping.at(usize::try_from(guest - region.guest).unwrap())
}

/// Lays a header out over the readable pieces.
fn put_header(map: &GuestMap, pieces: &[(u64, u32)], kind: u32, sector: u64) {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend_from_slice(&[0xff; 4]);
    header.extend_from_slice(&sector.to_le_bytes());
    let places = pieces.iter().flat_map(|&(addr, len)| (0..u64::from(len)).map(move |n| addr + n));
    for (place, byte) in places.zip(header) {
        // SAFETY: the byte lies in a region.
        unsafe { at(map, place).write(byte) };
    }
}

#[test]
fn layouts_of_stock_clients_are_understood_whatever_came_before() {
    let map = memory();
    let mut mem = Translator::new(Arc::clone(&map));
    let mut chain = Chain::for_queue(16);
    let mut request = Request::with_capacity(8);
    for round in 0..3 * LAYOUTS.len() {
        let (name, readable, writable) = LAYOUTS[(2 * round + round / 5) % LAYOUTS.len()];
        let round = round as u64;
        put_header(&map, readable, VIRTIO_BLK_T_IN, round << 33);
        chain.assemble(readable, writable).unwrap();
        let decoded = decode(&chain, &mut mem, &mut request);
        assert_eq!(decoded.verdict, Ok(()), "{name}");
        assert_eq!(request.op, Op::Read, "{name}");
        assert_eq!(Some(request.range), ByteRange::from_sector(round << 33, 4096), "{name}");
        let data = request.segments.as_slice().iter().map(|s| (s.base, s.len));
        let mut left = 4096;
        let wanted = writable.iter().map_while(|&(addr, len)| {
            let len = left.min(len as usize);
            left -= len;
            (len > 0).then(|| (at(&map, addr), len))
        });
        assert!(data.eq(wanted), "{name}: {:?}", request.segments);
        let (addr, len) = writable[writable.len() - 1];
        let place = at(&map, addr + u64::from(len) - 1);
        assert_eq!(decoded.status_at.address().map(NonNull::as_ptr), Some(place), "{name}");
    }
}

#[test]
fn a_write_has_its_data_behind_the_header_wherever_that_ends() {
    let map = memory();
    let mut mem = Translator::new(Arc::clone(&map));
    let mut chain = Chain::for_queue(16);
    let mut request = Request::with_capacity(8);
    // One descriptor for all, at an odd address, and a status in the other region.
    let readable = [(HIGH + 5, 16 + 1024)];
    put_header(&map, &readable, VIRTIO_BLK_T_OUT, 7);
    chain.assemble(&readable, &[(13, 1)]).unwrap();
    assert_eq!(decode(&chain, &mut mem, &mut request).verdict, Ok(()));
    assert_eq!(request.op, Op::Write);
    let data = Segment { base: at(&map, HIGH + 21), len: 1024 };
    assert_eq!(request.segments.as_slice(), [data]);
    // The end of a region is the end of a header that begins there.
    chain.assemble(&[(8180, 16)], &[(13, 1)]).unwrap();
    assert_eq!(decode(&chain, &mut mem, &mut request).verdict, Err(Status::IoError));
}

/// What a chain of these pieces asks for; its header and what follows that lie back to back from address 64.
fn asked(kind: u32, sector: u64, more: &[u8], writable: &[(u64, u32)]) -> (Request, Decoded) {
    let map = memory();
    let mut chain = Chain::for_queue(16);
    let mut request = Request::with_capacity(8);
    let len = 16 + more.len();
    let readable = [(64, u32::try_from(len).unwrap())];
    put_header(&map, &readable, kind, sector);
    for (place, &byte) in (80..).zip(more) {
        // SAFETY: the byte lies in a region.
        unsafe { at(&map, place).write(byte) };
    }
    chain.assemble(&readable, writable).unwrap();
    let decoded = decode(&chain, &mut Translator::new(map), &mut request);
    (request, decoded)
}

/// `struct virtio_blk_discard_write_zeroes`.
fn erased(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

const STATUS: &[(u64, u32)] = &[(4096, 1)];

#[test]
fn discards_and_zeroes_are_one_segment_within_what_is_offered() {
    for (kind, op) in
        [(VIRTIO_BLK_T_DISCARD, Op::Discard), (VIRTIO_BLK_T_WRITE_ZEROES, Op::WriteZeroes)]
    {
        let verdict = |more: &[u8]| asked(kind, 77, more, STATUS).1.verdict;
        // The sector of the header means nothing, and 2 GiB is the most.
        for (sector, sectors) in [(0x0102_0304_0506, 0x0012_3456), (5, 1 << 22), (9, 0)] {
            let (request, decoded) = asked(kind, 77, &erased(sector, sectors, 0), STATUS);
            assert_eq!((decoded.verdict, request.op, request.unmap), (Ok(()), op, false));
            let range = ByteRange::from_sector(sector, u64::from(sectors) * 512);
            assert_eq!(Some(request.range), range);
            assert!(request.segments.as_slice().is_empty());
        }
        assert_eq!(verdict(&erased(5, (1 << 22) + 1, 0)), Err(Status::IoError));
        assert_eq!(verdict(&erased(u64::MAX >> 9, 2, 0)), Err(Status::IoError));
        assert_eq!(verdict(&erased(5, 1, 2)), Err(Status::Unsupported));
        assert_eq!(verdict(&erased(5, 1, 1 << 31)), Err(Status::Unsupported));
        assert_eq!(verdict(&erased(5, 1, 0)[..15]), Err(Status::IoError));
        assert_eq!(verdict(&[]), Err(Status::IoError));
        let two = [erased(5, 1, 0), erased(9, 1, 0)].concat();
        assert_eq!(verdict(&two), Err(Status::Unsupported));
    }
    // Only zeroes may be asked to unmap.
    let unmap = erased(5, 1, 1);
    let (request, decoded) = asked(VIRTIO_BLK_T_WRITE_ZEROES, 0, &unmap, STATUS);
    assert_eq!((decoded.verdict, request.unmap), (Ok(()), true));
    let refused = asked(VIRTIO_BLK_T_DISCARD, 0, &unmap, STATUS).1;
    assert_eq!(refused.verdict, Err(Status::Unsupported));
}

#[test]
fn a_flush_has_no_range_and_a_serial_has_twenty_bytes() {
    let (request, decoded) = asked(VIRTIO_BLK_T_FLUSH, 77, &[], STATUS);
    assert_eq!((decoded.verdict, request.op), (Ok(()), Op::Flush));
    assert_eq!(request.range, ByteRange::default());
    for (room, bytes) in [(1, 0), (20, 19), (21, 20), (64, 20)] {
        let (request, decoded) = asked(VIRTIO_BLK_T_GET_ID, 77, &[], &[(4096, room)]);
        assert_eq!((decoded.verdict, request.op), (Ok(()), Op::GetId));
        assert_eq!((request.segments.bytes(), request.range), (bytes, ByteRange::default()));
        assert!(decoded.status_at.address().is_some());
    }
}

#[test]
fn what_is_no_request_is_answered_where_there_is_room_for_an_answer() {
    // SCSI passthrough, and what nobody has thought of.
    for kind in [2, 3, 7, 0x8000_0000, u32::MAX] {
        assert_eq!(asked(kind, 0, &[], STATUS).1.verdict, Err(Status::Unsupported), "{kind}");
    }
    // Data is whole sectors, and more than none of them.
    for bytes in [0, 1, 511, 513] {
        let more = vec![0; bytes];
        assert_eq!(asked(VIRTIO_BLK_T_OUT, 0, &more, STATUS).1.verdict, Err(Status::IoError));
        let writable = [(4096, u32::try_from(bytes).unwrap() + 1)];
        let (_, decoded) = asked(VIRTIO_BLK_T_IN, 0, &[], &writable);
        assert_eq!(decoded.verdict, Err(Status::IoError));
        assert!(decoded.status_at.address().is_some());
    }
    // The last sector that 64 bits of bytes can name, and the one behind it.
    let last = u64::MAX >> 9;
    for (sector, verdict) in [(last - 1, Ok(())), (last, Err(Status::IoError))] {
        assert_eq!(asked(VIRTIO_BLK_T_IN, sector, &[], &[(4096, 513)]).1.verdict, verdict);
    }
    // Nowhere to write the status to: nothing at all, no memory, the end of the address space.
    for writable in [&[][..], &[(16384, 1)], &[(u64::MAX, 2)]] {
        let (_, decoded) = asked(VIRTIO_BLK_T_FLUSH, 0, &[], writable);
        assert_eq!(decoded.verdict, Err(Status::IoError), "{writable:?}");
        assert!(decoded.status_at.address().is_none(), "{writable:?}");
        // SAFETY: it leads nowhere.
        let written = unsafe { decoded.status_at.write(Status::Ok) };
        assert_eq!(written, 0);
    }
    let map = memory();
    let place = StatusByte(NonNull::new(at(&map, 5)));
    // SAFETY: the byte lies in a region.
    let (written, byte) = unsafe { (place.write(Status::Unsupported), at(&map, 5).read()) };
    assert_eq!((written, byte), (1, 2));
}
