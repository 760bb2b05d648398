//! Random reads and writes of 4 KiB: how many, how fast.

use super::pump::{PumpThread, Queues, Sent};
use fastrand::Rng;
use hdrhistogram::Histogram;
use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// Bytes of each request.
const BLOCK: usize = 4096;

/// The longest latency told apart, in nanoseconds.
const LATENCY_MAX: u64 = 60_000_000_000;

/// The table's columns.
pub(super) const HEADER: [&str; 8] =
    ["4 KiB random", "queues", "depth", "IOPS", "MB/s", "p50 µs", "p99 µs", "p99.9 µs"];

/// One kind of load.
#[derive(Clone, Copy)]
struct Load {
    write: bool,
    queues: usize,
    depth: usize,
}

/// Measures each load for a while; rows for the table.
///
/// # Errors
/// A failed request, or a daemon that has gone.
pub(super) fn run(queues: &mut Queues<'_>, time: Duration) -> anyhow::Result<Vec<Vec<String>>> {
    let mut shapes = vec![(1, 1), (1, 32)];
    if queues.len() > 1 {
        shapes.push((queues.len(), 32));
    }
    let loads: Vec<_> = [false, true]
        .into_iter()
        .flat_map(|write| shapes.iter().map(move |&(queues, depth)| Load { write, queues, depth }))
        .collect();
    let style = ProgressStyle::with_template("{prefix:>9}  {bar:32.green/dim} {msg}");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸━");
    let bar = ProgressBar::new(loads.len() as u64).with_style(style).with_prefix("measure");
    let mut rows = Vec::new();
    for load in loads {
        bar.set_message(format!("{}, {} × {}", name(load), load.queues, load.depth));
        rows.push(measure(queues, load, time)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn name(load: Load) -> &'static str {
    if load.write { "write" } else { "read" }
}

fn measure(queues: &mut Queues<'_>, load: Load, time: Duration) -> anyhow::Result<Vec<String>> {
    let begin = Instant::now();
    let capacity = queues.capacity();
    let parts = queues
        .each(load.queues, BLOCK as u64, |part| one_queue(part, load, capacity, begin + time))?;
    let seconds = begin.elapsed().as_secs_f64();
    let mut latencies = Histogram::<u64>::new_with_bounds(1, LATENCY_MAX, 3)?;
    for part in &parts {
        latencies.add(part)?;
    }
    let iops = latencies.len() as f64 / seconds;
    // A rate; the fraction does not matter.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let whole = HumanCount(iops as u64).to_string();
    let micros = |quantile| {
        let micros = latencies.value_at_quantile(quantile) as f64 / 1000.0;
        if micros < 100.0 { format!("{micros:.1}") } else { format!("{micros:.0}") }
    };
    Ok(vec![
        name(load).into(),
        load.queues.to_string(),
        load.depth.to_string(),
        whole,
        format!("{:.1}", iops * BLOCK as f64 / 1e6),
        micros(0.5),
        micros(0.99),
        micros(0.999),
    ])
}

fn one_queue(
    mut part: PumpThread<'_>,
    load: Load,
    capacity: u64,
    deadline: Instant,
) -> anyhow::Result<Histogram<u64>> {
    let mut latencies = Histogram::new_with_bounds(1, LATENCY_MAX, 3)?;
    let mut random = Rng::with_seed(part.index as u64);
    let blocks = capacity / BLOCK as u64;
    part.pump(
        load.depth,
        BLOCK,
        |queue, mut buffer| {
            let at = Instant::now();
            if at >= deadline {
                return Ok(Some(buffer));
            }
            let offset = random.u64(..blocks) * BLOCK as u64;
            let sent = Sent { offset, at };
            if load.write {
                // Blocks differ, for disks that compress or look for equal ones.
                buffer[..8].copy_from_slice(&offset.to_le_bytes());
                queue.write(offset, buffer, sent).map(|()| None)
            } else {
                queue.read(offset, buffer, sent).map(|()| None)
            }
        },
        |sent, _| {
            let nanos = u64::try_from(sent.at.elapsed().as_nanos()).unwrap_or(LATENCY_MAX);
            latencies.saturating_record(nanos);
            Ok(())
        },
    )?;
    Ok(latencies)
}
