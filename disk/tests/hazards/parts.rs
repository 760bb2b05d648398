//! Requests that go in parts: where parts begin, and what is counted.

use crate::bench::{Ask, Bench, Memory, Place, Surface, engine};
use ringway_aio::{Fault, Faulty, Io};
use ringway_core::{Op, Status};
use std::sync::{Arc, Mutex};

/// What the engine was asked for: where on the disk, how long, where in memory.
type Asked = Arc<Mutex<Vec<(u64, u64, usize)>>>;

/// An engine that keeps nothing, writes down what it is asked for, and moves `short` bytes at first.
fn watched(
    short: Option<u32>,
    asked: &Asked,
) -> Faulty<Box<dyn ringway_aio::Engine>, impl FnMut(&Io<'_>) -> Option<Fault> + Send + use<>> {
    let asked = Arc::clone(asked);
    let choose = move |io: &Io<'_>| {
        let mut asked = asked.lock().unwrap();
        let base = io.memory.segments().first().map_or(0, |segment| segment.base.addr());
        asked.push((io.offset, io.len, base));
        short.filter(|_| asked.len() == 1).map(Fault::Short)
    };
    Faulty::new(engine("null", 8).unwrap(), 512, choose)
}

/// A file with O_DIRECT refuses what begins within a block: the rest of a short transfer is not even
/// asked for so, and goes through no other memory where it need not.
#[test]
fn c02_the_rest_of_a_short_transfer_is_asked_for_as_the_file_takes_it() {
    for surface in [Surface::Direct, Surface::Bounced] {
        let place = match Place::new(surface, 1 << 20) {
            Ok(place) => place,
            Err(lack) => return lack.skip(),
        };
        for (op, short) in [Op::Read, Op::Write].into_iter().flat_map(|op| {
            // The first two end within a block of any file, the last at the end of one.
            [(op, 100), (op, 4096 + 700), (op, 8192)]
        }) {
            let asked = Asked::default();
            let mut bench = Bench::new(watched(Some(short), &asked), place.open(), 4).unwrap();
            let memory = Memory::new(65536, surface.memory_offset());
            let begin = memory.segment(0, 1).base.addr();
            assert_eq!(bench.one(&memory, Ask::new(op, 4096, 65536)), Status::Ok);
            assert_eq!(bench.queue.stats().continued, 1);
            let asked = asked.lock().unwrap();
            let odd = |&&(offset, len, base): &&(u64, u64, usize)| {
                offset % 512 != 0 || len % 512 != 0 || base % 512 != 0
            };
            let what = format!("{surface:?} {op:?} {short}: {asked:?}");
            // What is written of a block is read first.
            let more = usize::from(op == Op::Write && short % 4096 != 0);
            assert_eq!((asked.len(), asked.iter().find(odd)), (2 + more, None), "{what}");
            let own = asked[1].2 == begin + short as usize;
            assert_eq!(own, surface == Surface::Direct && short == 8192, "{what}");
        }
    }
}

/// A part that ends where it should is no short transfer.
#[test]
fn c02_parts_of_a_long_request_follow_each_other() {
    const LEN: u64 = 3 << 20;
    for surface in [Surface::Cached, Surface::Bounced] {
        let place = match Place::new(surface, LEN) {
            Ok(place) => place,
            Err(lack) => return lack.skip(),
        };
        let asked = Asked::default();
        let mut bench = Bench::new(watched(None, &asked), place.open(), 4).unwrap();
        let memory = Memory::new(LEN.try_into().unwrap(), surface.memory_offset());
        for op in [Op::Read, Op::Write] {
            assert_eq!(bench.one(&memory, Ask::new(op, 0, LEN)), Status::Ok);
            let parts: Vec<_> =
                asked.lock().unwrap().drain(..).map(|(at, len, _)| (at, len)).collect();
            let mib = 1 << 20;
            assert_eq!(parts, [(0, mib), (mib, mib), (2 * mib, mib)], "{surface:?} {op:?}");
        }
        assert_eq!(bench.queue.stats().continued, 0);
    }
}
