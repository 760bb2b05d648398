//! Fills the disk, writes parts of it again, reads all of it back.

use super::pump::{PumpThread, Queues, Sent};
use fastrand::Rng;
use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use ringway_bench::content::{SECTOR, SectorStamp};
use ringway_control::size::Size;
use std::sync::Mutex;
use std::time::Instant;

/// Bytes of one request when going through the whole disk.
const CHUNK: usize = 256 << 10;

/// Bytes of the cells of which every other one is written again: one write each, somewhere in it.
const CELL: usize = 64 << 10;

/// Requests in flight on each queue.
const DEPTH: usize = 16;

/// The number in the content that tells this disk from others.
fn disk_number() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    // The lower half changes fastest.
    #[allow(clippy::cast_possible_truncation)]
    let number = since.map_or(1, |since| since.as_nanos() as u64);
    number ^ (u64::from(std::process::id()) << 32)
}

/// Verifies the disk, telling of each step.
///
/// # Errors
/// The first wrong sector or failed request.
pub(super) fn run(
    queues: &mut Queues<'_>,
    say: impl Fn(&str) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let disk = disk_number();
    let (all, capacity) = (queues.len(), queues.capacity());

    let step = Step::begin("write", capacity);
    queues.each(all, CELL as u64, |part| write_all(part, disk, &step.bar))?;
    say(&step.end(capacity, "each sector says which it is"))?;

    let step = Step::begin("rewrite", capacity / 2);
    let rewritten = Mutex::new(vec![false; usize::try_from(capacity / SECTOR as u64)?]);
    let bytes =
        queues.each(all, CELL as u64, |part| write_again(part, disk, &rewritten, &step.bar))?;
    let rewritten = rewritten.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    say(&step.end(bytes.iter().sum(), "random pieces, then flushed"))?;

    let step = Step::begin("verify", capacity);
    queues.each(all, CELL as u64, |part| read_all(part, disk, &rewritten, &step.bar))?;
    let sectors = HumanCount(capacity / SECTOR as u64);
    say(&step.end(capacity, &format!("all {sectors} sectors are right")))?;
    Ok(())
}

/// A step with a progress bar (on a terminal) and a line at its end.
struct Step {
    name: &'static str,
    bar: ProgressBar,
    begin: Instant,
}

impl Step {
    fn begin(name: &'static str, bytes: u64) -> Self {
        let style = ProgressStyle::with_template(
            "{prefix:>9}  {bar:32.green/dim} {percent:>3} %  {binary_bytes_per_sec}",
        );
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸━");
        // On a terminal only: indicatif sees to that.
        let bar = ProgressBar::new(bytes).with_style(style).with_prefix(name);
        Self { name, bar, begin: Instant::now() }
    }

    fn end(self, bytes: u64, what: &str) -> String {
        let seconds = self.begin.elapsed().as_secs_f64();
        self.bar.finish_and_clear();
        let rate = bytes as f64 / 1e6 / seconds;
        let size = Size(bytes).to_string();
        format!("{:>9}  {size:>10}  {seconds:6.2} s  {rate:6.0} MB/s  {what}", self.name)
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        // After an error, so that its message stands alone.
        self.bar.finish_and_clear();
    }
}

/// The sectors of `len` bytes from `offset`.
fn sectors(offset: u64, len: usize) -> std::ops::Range<u64> {
    let first = offset / SECTOR as u64;
    first..first + (len / SECTOR) as u64
}

fn fill(bytes: &mut [u8], disk: u64, offset: u64, sequence: u64) {
    let marks = sectors(offset, bytes.len()).map(|sector| SectorStamp { disk, sector, sequence });
    bytes.chunks_exact_mut(SECTOR).zip(marks).for_each(|(bytes, mark)| mark.fill(bytes));
}

/// Requests of up to [`CHUNK`] bytes that cover a range.
fn chunks(range: std::ops::Range<u64>) -> impl Iterator<Item = (u64, usize)> {
    let end = range.end;
    // At most CHUNK.
    #[allow(clippy::cast_possible_truncation)]
    let len = move |offset: u64| (end - offset).min(CHUNK as u64) as usize;
    range.step_by(CHUNK).map(move |offset| (offset, len(offset)))
}

fn write_all(mut part: PumpThread<'_>, disk: u64, bar: &ProgressBar) -> anyhow::Result<()> {
    let mut todo = chunks(part.range.clone());
    part.pump(
        DEPTH,
        CHUNK,
        |queue, mut buffer| {
            let Some((offset, len)) = todo.next() else { return Ok(Some(buffer)) };
            buffer.set_len(len);
            fill(&mut buffer, disk, offset, 1);
            queue.write(offset, buffer, Sent { offset, at: Instant::now() }).map(|()| None)
        },
        |_, buffer| {
            bar.inc(buffer.len() as u64);
            Ok(())
        },
    )
}

/// One write into every other cell, in random order; no two overlap.
fn write_again(
    mut part: PumpThread<'_>,
    disk: u64,
    rewritten: &Mutex<Vec<bool>>,
    bar: &ProgressBar,
) -> anyhow::Result<u64> {
    let mut random = Rng::with_seed(part.index as u64);
    let mut cells: Vec<u64> = part.range.clone().step_by(CELL).step_by(2).collect();
    for last in (1..cells.len()).rev() {
        cells.swap(last, usize::try_from(random.u64(..=last as u64))?);
    }
    let (end, mut bytes) = (part.range.end, 0);
    part.pump(
        DEPTH,
        CELL,
        |queue, mut buffer| {
            let Some(cell) = cells.pop() else { return Ok(Some(buffer)) };
            let room = (end - cell).min(CELL as u64) / SECTOR as u64;
            let count = 1 + random.u64(..room);
            let offset = cell + random.u64(..=room - count) * SECTOR as u64;
            // At most CELL.
            #[allow(clippy::cast_possible_truncation)]
            let len = count as usize * SECTOR;
            buffer.set_len(len);
            fill(&mut buffer, disk, offset, 2);
            bytes += len as u64;
            queue.write(offset, buffer, Sent { offset, at: Instant::now() }).map(|()| None)
        },
        |sent, buffer| {
            let mut rewritten = rewritten.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            for sector in sectors(sent.offset, buffer.len()) {
                rewritten[usize::try_from(sector)?] = true;
            }
            bar.inc(CELL as u64);
            Ok(())
        },
    )?;
    part.flush()?;
    Ok(bytes)
}

fn read_all(
    mut part: PumpThread<'_>,
    disk: u64,
    rewritten: &[bool],
    bar: &ProgressBar,
) -> anyhow::Result<()> {
    let mut todo = chunks(part.range.clone());
    part.pump(
        DEPTH,
        CHUNK,
        |queue, mut buffer| {
            let Some((offset, len)) = todo.next() else { return Ok(Some(buffer)) };
            buffer.set_len(len);
            // Nothing left from before may pass for what was read.
            buffer.fill(0xa5);
            queue.read(offset, buffer, Sent { offset, at: Instant::now() }).map(|()| None)
        },
        |sent, buffer| {
            let found = buffer.chunks_exact(SECTOR).zip(sectors(sent.offset, buffer.len()));
            for (bytes, sector) in found {
                let sequence = 1 + u64::from(rewritten[usize::try_from(sector)?]);
                SectorStamp { disk, sector, sequence }.check(bytes)?;
            }
            bar.inc(buffer.len() as u64);
            Ok(())
        },
    )
}
