//! Finding what an earlier run with `--verify` has left.

use crate::backend::{Ask, Backend};
use crate::content::SECTOR;
use crate::job::after::carry_out;
use crate::record::Record;
use crate::verifier::Left;
use anyhow::{Result, bail};
use std::ops::Range;

/// Learns what a run with this seed has left of its jobs in `part` of `region`. Requests are multiples
/// of `block` bytes.
///
/// # Errors
/// That there is nothing of such a run, or that it cannot be read.
pub(crate) fn learn<P: Backend>(
    backend: &mut P,
    seed: u64,
    region: &Range<u64>,
    part: &Range<u64>,
    block: u32,
) -> Result<Vec<Left>> {
    let mut find = |at: u64| -> Result<Option<Record>> {
        let block = u64::from(block.max(512));
        let offset = at / block * block;
        carry_out(backend, &Ask { write: false, offset, len: u32::try_from(block)? })?;
        let skip = usize::try_from(at - offset)?;
        let sector = &backend.memory(0)[skip..skip + SECTOR];
        Ok(Record::of(sector).filter(|record| record.seed == seed))
    };
    let mut any = None;
    for place in Record::places(region) {
        any = match any {
            None => find(place)?,
            found => found,
        };
    }
    let Some(any) = any else {
        bail!(
            "verify: no run with --verify and this --seed that begins at offset {} and ended in \
             order has left anything here to judge. Write first, with --rw randwrite --verify; read \
             with the --offset and --seed of that run",
            region.start
        );
    };
    let mut all = Vec::new();
    for job in 0..any.jobs {
        let its = Record { job, ..any.clone() };
        let places = its.part();
        if places.is_empty() || places.end <= part.start || part.end <= places.start {
            continue;
        }
        for place in Record::places(&places) {
            // A smaller target than it was written for.
            let there = find(place).ok().flatten();
            let fits = |found: &Record| Record { reached: any.reached, ..found.clone() } == its;
            if let Some(found) = there.filter(fits) {
                all.push(Left::new(found));
                break;
            }
        }
    }
    Ok(all)
}
