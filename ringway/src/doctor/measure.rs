//! The engines on one disk, measured in turn: what `auto` would choose, and whether another one reads faster.
//!
//! By the engine alone, without rings, and by reads alone: nothing is written. That is why `serve` does not do
//! it by itself ([ADR 0011](../../../docs/adr/0011-the-path-is-found-by-trying.md)).

use anyhow::{Context, Result};
use ringway_bench::usage::Usage;
use ringway_bench::{AccessArgs, Load, Rw, Sizes, Target, measure, median};
use ringway_control::config::Choice;
use ringway_disk::EngineKind;
use serde::Serialize;
use std::path::Path;
use std::time::Duration;

/// Bytes of a read.
const BYTES: u32 = 4096;

/// Reads in flight.
const DEPTHS: [u32; 2] = [1, 32];

const ROUNDS: u64 = 5;

/// Before each of them there is a tenth of it that is not counted.
const RAMP: u32 = 10;

/// A median that is less than this part above another one says nothing, whatever the rounds say.
const TIE: f64 = 1.05;

/// What one engine did at one depth. The names of its fields are the keys of the JSON and stay as they are.
#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) engine: &'static str,
    pub(crate) depth: u32,
    /// Reads a second: the median of all rounds, the smallest and the largest.
    pub(crate) iops: f64,
    pub(crate) iops_min: f64,
    pub(crate) iops_max: f64,
    /// CPU time of a read, in nanoseconds, that of whoever asks included: the median.
    pub(crate) cpu_ns: f64,
}

impl Measured {
    /// True if no round of the other one came near any of this one.
    fn beats(&self, other: &Self) -> bool {
        self.iops > TIE * other.iops && self.iops_min > other.iops_max
    }
}

/// Reads a file or device with each of these engines, in rounds of this length. `direct` is O_DIRECT.
///
/// # Errors
/// What the host says, or that somebody else has the disk.
pub(super) fn run(
    path: &Path,
    engines: &[EngineKind],
    direct: bool,
    length: Duration,
) -> Result<Vec<Measured>> {
    let cells: Vec<_> =
        DEPTHS.iter().flat_map(|&depth| engines.iter().map(move |&kind| (kind, depth))).collect();
    let mut rounds = vec![Vec::new(); cells.len()];
    for round in 0..ROUNDS {
        // There and back, so that a drift favours nobody.
        let there = 0..cells.len();
        let order: Vec<_> = if round % 2 == 0 { there.collect() } else { there.rev().collect() };
        for at in order {
            // Places of its own: what one has read, a cache on the way may have by now.
            let seed = 1 + round * cells.len() as u64 + at as u64;
            let (kind, depth) = cells[at];
            let load =
                Load { timed: false, seed, ..Load::new(Rw::Randread, Sizes::one(BYTES), depth) };
            let found = answered(length, |length| {
                let load = Load { runtime: Some(length), ramp: length / RAMP, ..load.clone() };
                one(path, kind, direct, &load)
            });
            rounds[at].push(found.with_context(|| format!("cannot measure {}", kind.name()))?);
        }
    }
    let middle = |values: &[f64]| median(values.to_vec()).unwrap_or(0.0);
    let measured = |((kind, depth), found): ((EngineKind, u32), Vec<(f64, f64)>)| {
        let (iops, cpu): (Vec<f64>, Vec<f64>) = found.into_iter().unzip();
        Measured {
            engine: kind.name(),
            depth,
            iops: middle(&iops),
            iops_min: iops.iter().copied().fold(f64::INFINITY, f64::min),
            iops_max: iops.iter().copied().fold(0.0, f64::max),
            cpu_ns: middle(&cpu),
        }
    };
    Ok(cells.into_iter().zip(rounds).map(measured).collect())
}

/// A round in which nothing was answered says nothing of an engine, but of a busy host: another one, twice as long,
/// until that is a minute.
fn answered(
    mut length: Duration,
    mut round: impl FnMut(Duration) -> Result<(f64, f64)>,
) -> Result<(f64, f64)> {
    loop {
        let found = round(length)?;
        if found.0 > 0.0 || length > Duration::from_secs(60) {
            return Ok(found);
        }
        length *= 2;
    }
}

/// Reads a second, and the CPU time of one.
fn one(path: &Path, kind: EngineKind, direct: bool, load: &Load) -> Result<(f64, f64)> {
    let access =
        AccessArgs { engine: Some(Choice::Is(kind)), cached: !direct, ..AccessArgs::default() };
    let target: Target = format!("file:{}", path.display()).parse().map_err(anyhow::Error::msg)?;
    let opened = target.open(load, &access)?;
    let before = Usage::of_this_process();
    let outcome = measure(opened, load, &mut || Ok(()))?;
    let cpu = Usage::of_this_process().saturating_sub(before) as f64;
    // What was not counted is in it, in proportion.
    let all = outcome.done() as f64 * (1.0 + 1.0 / f64::from(RAMP));
    Ok((outcome.iops(), cpu / all.max(1.0)))
}

/// What reads more than the engine that is `chosen`, by words.
pub(super) fn better(all: &[Measured], chosen: &str) -> Vec<String> {
    let mut better = Vec::new();
    for depth in DEPTHS {
        let of = || all.iter().filter(move |measured| measured.depth == depth);
        let Some(ours) = of().find(|measured| measured.engine == chosen) else { continue };
        let best = of().filter(|other| other.beats(ours)).max_by(|a, b| a.iops.total_cmp(&b.iops));
        if let Some(best) = best {
            let percent = 100.0 * (best.iops / ours.iops - 1.0);
            better.push(format!("{} {percent:.0} % more at depth {depth}", best.engine));
        }
    }
    better
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(engine: &'static str, depth: u32, [min, iops, max]: [f64; 3]) -> Measured {
        Measured { engine, depth, iops, iops_min: min, iops_max: max, cpu_ns: 1000.0 }
    }

    #[test]
    fn only_what_is_clearly_faster_is_recommended() {
        for (rounds, is_better) in [
            ([190.0, 200.0, 210.0], true),
            // Within noise.
            ([101.0, 120.0, 140.0], false),
            ([104.0, 104.5, 105.0], false),
            ([50.0, 60.0, 70.0], false),
        ] {
            let all = [
                measured("io_uring", 1, [100.0; 3]),
                measured("linux-aio", 1, [100.0; 3]),
                measured("io_uring", 32, [98.0, 100.0, 102.0]),
                measured("linux-aio", 32, rounds),
            ];
            let text = better(&all, "io_uring").join(", ");
            assert_eq!(text.contains("linux-aio"), is_better, "{rounds:?}: {text}");
            assert!(!text.contains("depth 1"), "{text}");
            let text = better(&all, "linux-aio").join(", ");
            assert_eq!(text.contains("io_uring 67 %"), rounds[1] == 60.0, "{text}");
        }
    }
}
