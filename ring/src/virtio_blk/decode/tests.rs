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
