//! What is counted, and how it is put together: jobs count for a while, then hand over.

use hdrhistogram::Histogram;

/// The longest latency that is told apart, in nanoseconds: an hour.
const LATENCY_MAX: u64 = 3_600_000_000_000;

/// Columns of the heat map, at most; more are put together in pairs.
const FRAMES_MAX: usize = 240;

/// Rows of the heat map per factor of two.
pub(crate) const ROWS_PER_OCTAVE: f64 = 4.0;

/// Requests of one direction. Latencies in nanoseconds, three digits, one entry per request: of those that
/// were in flight at the end, too, and of those that were not sent as long as they had waited.
#[derive(Clone, Debug)]
pub(crate) struct Side {
    /// Completed in time, as are `bytes`.
    pub done: u64,
    pub bytes: u64,
    /// In flight when the time was over.
    pub late: u64,
    /// Due by then, and not sent: the target kept all places.
    pub unsent: u64,
    /// From being due (or the slot being free) to being shown to the target.
    pub slat: Histogram<u64>,
    /// From there to being seen complete.
    pub clat: Histogram<u64>,
    /// Both.
    pub lat: Histogram<u64>,
}

impl Default for Side {
    fn default() -> Self {
        let empty = Histogram::new_with_bounds(1, LATENCY_MAX, 3).expect("the bounds are sound");
        Self {
            done: 0,
            bytes: 0,
            late: 0,
            unsent: 0,
            slat: empty.clone(),
            clat: empty.clone(),
            lat: empty,
        }
    }
}

impl Side {
    #[inline]
    pub(crate) fn count(&mut self, bytes: u32) {
        self.done += 1;
        self.bytes += u64::from(bytes);
    }

    #[inline]
    pub(crate) fn time(&mut self, slat: u64, clat: u64) {
        self.slat.saturating_record(slat);
        self.clat.saturating_record(clat);
        self.lat.saturating_record(slat + clat);
    }

    /// Counts one that was due for `waited` nanoseconds and is not sent any more.
    pub(crate) fn count_unsent(&mut self, waited: u64) {
        self.unsent += 1;
        self.slat.saturating_record(waited);
        self.lat.saturating_record(waited);
    }

    /// How many there were, completed in time or not.
    pub(crate) fn all(&self) -> u64 {
        self.done + self.late + self.unsent
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.done += other.done;
        self.bytes += other.bytes;
        self.late += other.late;
        self.unsent += other.unsent;
        if other.lat.is_empty() {
            return;
        }
        // All have the same bounds.
        let _ = self.slat.add(&other.slat);
        let _ = self.clat.add(&other.clat);
        let _ = self.lat.add(&other.lat);
    }

    fn clear(&mut self) {
        (self.done, self.bytes, self.late, self.unsent) = (0, 0, 0, 0);
        if self.lat.is_empty() {
            return;
        }
        self.slat.reset();
        self.clat.reset();
        self.lat.reset();
    }
}

/// What one job did within one tick: reads, writes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tick {
    pub sides: [Side; 2],
}

impl Tick {
    pub(crate) fn clear(&mut self) {
        self.sides.iter_mut().for_each(Side::clear);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.sides.iter_mut().zip(&other.sides) {
            if theirs.all() > 0 {
                mine.add(theirs);
            }
        }
    }

    pub(crate) fn done(&self) -> u64 {
        self.sides.iter().map(|side| side.done).sum()
    }

    /// All that are in it, completed in time or not.
    pub(crate) fn all(&self) -> u64 {
        self.sides.iter().map(Side::all).sum()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.sides.iter().map(|side| side.bytes).sum()
    }

    /// Reads and writes in one.
    pub(crate) fn total(&self) -> Side {
        let mut total = self.sides[0].clone();
        total.add(&self.sides[1]);
        total
    }
}

/// A column of the heat map: what all jobs did within a tick, or several.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Frame {
    pub done: u64,
    pub bytes: u64,
    /// Requests by [`heat_row`].
    pub heat: Vec<u64>,
}

/// The row of a latency in nanoseconds.
pub(crate) fn heat_row(latency_ns: u64) -> usize {
    // A small positive number.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let row = ((latency_ns.max(1) as f64).log2() * ROWS_PER_OCTAVE) as usize;
    row
}

impl Frame {
    fn add(&mut self, other: &Self) {
        self.done += other.done;
        self.bytes += other.bytes;
        self.heat.resize(self.heat.len().max(other.heat.len()), 0);
        self.heat.iter_mut().zip(&other.heat).for_each(|(mine, theirs)| *mine += theirs);
    }

    fn add_tick(&mut self, tick: &Tick) {
        self.done += tick.done();
        self.bytes += tick.bytes();
        for value in tick.sides.iter().flat_map(|side| side.lat.iter_recorded()) {
            let row = heat_row(value.value_iterated_to());
            self.heat.resize(self.heat.len().max(row + 1), 0);
            self.heat[row] += value.count_since_last_iteration();
        }
    }
}

/// Frames one after the other, as many as fit a picture.
#[derive(Clone, Debug)]
pub(crate) struct Frames {
    /// Seconds of one.
    pub seconds: f64,
    ticks_per_frame: usize,
    pub all: Vec<Frame>,
}

impl Frames {
    pub(crate) fn new(tick_seconds: f64) -> Self {
        Self { seconds: tick_seconds, ticks_per_frame: 1, all: Vec::new() }
    }

    /// Adds what a job did in the tick `index`.
    pub(crate) fn add(&mut self, index: usize, tick: &Tick) {
        while index / self.ticks_per_frame >= FRAMES_MAX {
            self.ticks_per_frame *= 2;
            self.seconds *= 2.0;
            self.all = self
                .all
                .chunks(2)
                .map(|pair| {
                    let mut first = pair[0].clone();
                    pair[1..].iter().for_each(|second| first.add(second));
                    first
                })
                .collect();
        }
        let at = index / self.ticks_per_frame;
        self.all.resize(self.all.len().max(at + 1), Frame::default());
        self.all[at].add_tick(tick);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_keep_everything_while_they_grow_together() {
        let mut frames = Frames::new(0.1);
        let mut tick = Tick::default();
        tick.sides[1].count(512);
        tick.sides[1].time(100, 900);
        tick.sides[0].count(4096);
        tick.sides[0].time(100, 3900);
        for index in 0..10 * FRAMES_MAX {
            frames.add(index, &tick);
        }
        assert!(frames.all.len() <= FRAMES_MAX && frames.all.len() > FRAMES_MAX / 2);
        let mut sum = Frame::default();
        frames.all.iter().for_each(|frame| sum.add(frame));
        let count = 10 * FRAMES_MAX as u64;
        assert_eq!((sum.done, sum.bytes), (2 * count, 4608 * count));
        assert_eq!(sum.heat.iter().sum::<u64>(), 2 * count);
        assert_eq!((sum.heat[heat_row(1000)], sum.heat[heat_row(4000)]), (count, count));
        assert!((frames.seconds - 1.6).abs() < 1e-9);
    }
}
