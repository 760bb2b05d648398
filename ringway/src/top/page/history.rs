//! What has been, for a page that is opened later: bounded, however many disks there are.

use super::heat::Column;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU64;

/// Points of all disks together, about 100 bytes each. Ten minutes of 400 disks, asked once a second;
/// more disks have a shorter past.
const POINTS_MAX: usize = 240_000;

/// Points of one disk, so that none can be too many to draw or to send.
pub(super) const POINTS_OF_ONE_MAX: usize = 3600;

/// What one answer said of one disk. Rates are since the answer before.
#[derive(Debug, Default)]
pub(super) struct Point {
    /// Milliseconds since 1970.
    pub(super) at: u64,
    pub(super) reads_s: f32,
    pub(super) writes_s: f32,
    /// Flushes and erases.
    pub(super) others_s: f32,
    pub(super) read_mb_s: f32,
    pub(super) write_mb_s: f32,
    pub(super) in_flight: u32,
    /// p50, p99 and p99.9 in nanoseconds, of the last answers.
    pub(super) latency: [Option<NonZeroU64>; 3],
    /// Latencies of what was timed since the answer before.
    pub(super) heat: Column,
}

/// The past of one disk, or of all of them together.
#[derive(Debug, Default)]
struct Track {
    image: String,
    points: VecDeque<Point>,
}

/// The past of a daemon.
#[derive(Debug)]
pub(super) struct History {
    /// Points of each disk at most, if there is room.
    keep: usize,
    all: Track,
    disks: HashMap<u64, Track>,
}

impl History {
    /// Keeps so many points of each disk, and no more than there is room for.
    pub(super) fn new(keep: usize) -> Self {
        let keep = keep.clamp(2, POINTS_OF_ONE_MAX);
        Self { keep, all: Track::default(), disks: HashMap::new() }
    }

    /// Forgets disks that are no more. One whose number now is that of another image begins anew, as
    /// after a restart of the daemon.
    pub(super) fn keep_only(&mut self, disks: &HashMap<u64, &str>) {
        self.disks.retain(|id, track| disks.get(id).is_some_and(|image| *image == track.image));
    }

    /// How many points there may be of each disk now.
    fn room(&self) -> usize {
        self.keep.min(POINTS_MAX / (self.disks.len() + 1)).max(2)
    }

    /// Adds a point of all disks together.
    pub(super) fn push_all(&mut self, point: Point) {
        let room = self.room();
        self.all.push(point, room);
    }

    /// Adds a point of a disk.
    pub(super) fn push(&mut self, id: u64, image: &str, point: Point) {
        let room = self.room();
        let new = || Track { image: image.to_owned(), points: VecDeque::new() };
        self.disks.entry(id).or_insert_with(new).push(point, room);
    }

    /// The points of a disk, or of all together, after a moment.
    pub(super) fn since(&self, disk: Option<u64>, since: u64) -> Points<'_> {
        let track = match disk {
            None => Some(&self.all),
            Some(id) => self.disks.get(&id),
        };
        let mut points = Points::default();
        let new = track.into_iter().flat_map(|track| &track.points).filter(|p| p.at > since);
        new.for_each(|point| points.push(point));
        points
    }
}

impl Track {
    fn push(&mut self, point: Point, room: usize) {
        while self.points.len() >= room {
            self.points.pop_front();
        }
        self.points.push_back(point);
    }
}

/// Points, field by field: half as long as one object for each.
#[derive(Debug, Default, Serialize)]
pub(super) struct Points<'a> {
    at: Vec<u64>,
    reads_s: Vec<f32>,
    writes_s: Vec<f32>,
    others_s: Vec<f32>,
    read_mb_s: Vec<f32>,
    write_mb_s: Vec<f32>,
    in_flight: Vec<u32>,
    p50: Vec<Option<NonZeroU64>>,
    p99: Vec<Option<NonZeroU64>>,
    p999: Vec<Option<NonZeroU64>>,
    /// Of each point: pairs of row and count.
    heat: Vec<&'a Column>,
}

impl<'a> Points<'a> {
    fn push(&mut self, point: &'a Point) {
        let [p50, p99, p999] = point.latency;
        self.at.push(point.at);
        self.reads_s.push(point.reads_s);
        self.writes_s.push(point.writes_s);
        self.others_s.push(point.others_s);
        self.read_mb_s.push(point.read_mb_s);
        self.write_mb_s.push(point.write_mb_s);
        self.in_flight.push(point.in_flight);
        self.p50.push(p50);
        self.p99.push(p99);
        self.p999.push(p999);
        self.heat.push(&point.heat);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(at: u64) -> Point {
        Point { at, ..Point::default() }
    }

    #[test]
    fn the_newest_points_stay_and_are_told_after_a_moment() {
        let mut history = History::new(3);
        for at in 1..=5 {
            history.push(7, "a", point(at));
        }
        assert_eq!(history.since(Some(7), 0).at, [3, 4, 5]);
        assert_eq!(history.since(Some(7), 4).at, [5]);
        assert_eq!(history.since(Some(7), 9).at, [0; 0]);
        assert_eq!(history.since(Some(8), 0).at, [0; 0], "nobody knows it");
        assert_eq!(history.since(None, 0).at, [0; 0]);
    }

    #[test]
    fn a_number_that_is_now_that_of_another_image_begins_anew() {
        let mut history = History::new(10);
        history.push(0, "a", point(1));
        history.push(1, "b", point(1));
        history.keep_only(&HashMap::from([(0, "a"), (1, "c")]));
        history.push(0, "a", point(2));
        history.push(1, "c", point(2));
        assert_eq!(history.since(Some(0), 0).at, [1, 2]);
        assert_eq!(history.since(Some(1), 0).at, [2]);
    }

    #[test]
    fn all_disks_together_have_bounded_room() {
        let mut history = History::new(usize::MAX);
        (0..10_000).for_each(|at| history.push(0, "a", point(at)));
        assert_eq!(history.since(Some(0), 0).at.len(), POINTS_OF_ONE_MAX);
        for at in 10_000..10_300 {
            (0..1000).for_each(|disk| history.push(disk, "a", point(at)));
        }
        let points = |id| history.since(Some(id), 0).at.len();
        let sum: usize = (0..1000).map(points).sum();
        assert!(sum <= POINTS_MAX && points(0) == points(999), "{sum}");
        assert_eq!(points(0), POINTS_MAX / 1001);
    }
}
