//! What is known of a daemon, and what of it a page is told.

use super::super::app::Link;
use super::super::buckets::{Buckets, Percentiles};
use super::super::columns;
use super::super::figures::{DiskFigures, Figures, Sample, Samples, WorkerFigures};
use super::events::Entry;
use super::heat;
use super::history::{History, Point, Points};
use ringway_control::protocol::{Counts, DaemonFacts, DiskStatsOf, Event, FailuresOf};
use ringway_terminal::reasons::in_full;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU64;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// How many events are kept.
const EVENTS_MAX: usize = 256;

/// What is known of a daemon.
pub(super) struct Board {
    /// When this began: a page that finds another one forgets what it knew.
    begun: u64,
    /// When the daemon was heard of last, or was not. Never the same twice.
    at: u64,
    socket: String,
    every: Duration,
    link: Link,
    samples: Samples,
    figures: Option<Figures>,
    /// The daemon that `figures` are of.
    pid: Option<u32>,
    history: History,
    events: VecDeque<Entry>,
}

/// What a page asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageQuestion {
    /// The disk whose past and details are wanted; all together if there is none.
    pub(super) disk: Option<u64>,
    /// The `at` of the last answer: only what came later is wanted.
    pub(super) since: u64,
}

/// What it is told. For this page alone: it may change with the next version.
#[derive(Serialize)]
struct PageAnswer<'a> {
    begun: u64,
    at: u64,
    every_ms: u64,
    socket: &'a str,
    /// `null` as long as the daemon answers, else why it does not.
    lost: Option<&'a str>,
    daemon: Option<&'a DaemonFacts>,
    disks: Vec<Row<'a>>,
    workers: &'a [WorkerFigures],
    /// Of the disk that was asked for.
    detail: Option<Detail<'a>>,
    points: Points<'a>,
    /// Where each row of the heat map begins.
    edges: &'static [u64],
    events: Vec<&'a Entry>,
}

/// A line of the list of disks.
#[derive(Serialize)]
struct Row<'a> {
    id: u64,
    image: &'a str,
    state: &'static str,
    connected: bool,
    in_flight: usize,
    overdue: usize,
    iops: Option<f64>,
    errors_s: Option<f64>,
    read_mb_s: Option<f64>,
    write_mb_s: Option<f64>,
    p50: Option<u64>,
    p99: Option<u64>,
    p999: Option<u64>,
}

/// One disk.
#[derive(Serialize)]
struct Detail<'a> {
    figures: &'a DiskFigures,
    counts: &'a Counts,
    failures: &'a [FailuresOf],
}

impl Board {
    /// Knows nothing yet of the daemon at `socket`, which will be asked so often. Its past is kept for
    /// so long, within what there is room for.
    pub(super) fn new(socket: &Path, every: Duration, past: Duration) -> Self {
        let begun = now_ms(0);
        let keep = past.as_nanos().div_ceil(every.as_nanos().max(1));
        Self {
            begun,
            at: begun,
            socket: socket.display().to_string(),
            every,
            link: Link::New,
            samples: Samples::default(),
            figures: None,
            pid: None,
            history: History::new(usize::try_from(keep).unwrap_or(usize::MAX)),
            events: VecDeque::new(),
        }
    }

    /// Takes in what the daemon has answered, or why it has not.
    pub(super) fn hear(&mut self, answer: anyhow::Result<Sample>) {
        self.at = now_ms(self.at);
        let sample = match answer {
            Ok(sample) => sample,
            Err(error) => {
                let why = in_full(&error);
                if !matches!(self.link, Link::Lost(_)) {
                    self.tell("daemon lost", true, why.clone());
                }
                self.link = Link::Lost(why);
                return;
            }
        };
        let pid = sample.list.daemon.pid;
        let is_another = self.pid.is_some_and(|before| before != pid);
        if is_another {
            self.tell("daemon restarted", true, format!("process {pid}"));
        } else if matches!(self.link, Link::Lost(_)) {
            self.tell("daemon answers", false, format!("process {pid}"));
        }
        (self.link, self.pid) = (Link::Live, Some(pid));
        self.samples.push(sample);
        self.figures = self.samples.figures();
        self.remember();
    }

    fn tell(&mut self, kind: &'static str, bad: bool, text: String) {
        let of = self.socket.clone();
        self.keep(Entry { at: self.at, kind, bad, disk: None, of, text });
    }

    fn keep(&mut self, entry: Entry) {
        self.events.push_back(entry);
        self.events.drain(..self.events.len().saturating_sub(EVENTS_MAX));
    }

    /// Takes in what the daemon tells of itself, or why it tells nothing.
    pub(super) fn hear_event(&mut self, event: Result<Event, String>) {
        self.at = now_ms(self.at);
        match event {
            Ok(event) => self.keep(Entry::new(event, self.at, &self.socket)),
            Err(why) => self.tell("no events", true, why),
        }
    }

    /// Adds a point to each past; there is none before there are rates.
    fn remember(&mut self) {
        let (Some(figures), Some((now, Some(then), oldest))) = (&self.figures, self.samples.span())
        else {
            return;
        };
        let images = figures.disks.iter().map(|disk| (disk.id, &*disk.image)).collect();
        self.history.keep_only(&images);
        let (before, first) = (by_id(Some(then)), by_id(oldest));
        let after = by_id(Some(now));
        let (mut all, mut late, mut window) =
            (Point::default(), Buckets::default(), Buckets::default());
        for disk in &figures.disks {
            let last = after.get(&disk.id).map(|disk| timed(disk)).unwrap_or_default();
            let since = |then: &HashMap<u64, &DiskStatsOf>| {
                let then = then.get(&disk.id).map(|disk| timed(disk)).unwrap_or_default();
                last.clone().since(&then)
            };
            let recent = since(&before);
            let point = point(self.at, disk, heat::column(&recent));
            all.add(&point);
            late = late.and(recent);
            window = window.and(since(&first));
            self.history.push(disk.id, &disk.image, point);
        }
        all.at = self.at;
        all.latency = known(&window.percentiles());
        all.heat = heat::column(&late);
        self.history.push_all(all);
    }

    /// As `ringway top --json`; `None` before the daemon has answered.
    ///
    /// # Errors
    /// That the figures are no JSON, which they are.
    pub(super) fn figures(&self) -> serde_json::Result<Option<Vec<u8>>> {
        self.figures.as_ref().map(serde_json::to_vec).transpose()
    }

    /// What a page is told.
    ///
    /// # Errors
    /// As [`Board::figures`].
    pub(super) fn answer(&self, question: PageQuestion) -> serde_json::Result<Vec<u8>> {
        let figures = self.figures.as_ref();
        // Of another page's process, maybe: its moments mean nothing here.
        let since = if question.since > self.at { 0 } else { question.since };
        let detail = question.disk.and_then(|id| {
            let of = figures?.disks.iter().find(|disk| disk.id == id)?;
            let (now, ..) = self.samples.span()?;
            let stats = now.stats.disks.iter().find(|disk| disk.id == id)?;
            Some(Detail { figures: of, counts: &stats.counts, failures: &stats.failures })
        });
        serde_json::to_vec(&PageAnswer {
            begun: self.begun,
            at: self.at,
            every_ms: u64::try_from(self.every.as_millis()).unwrap_or(u64::MAX),
            socket: &self.socket,
            lost: match &self.link {
                Link::Lost(why) => Some(why),
                Link::New | Link::Live => None,
            },
            daemon: figures.map(|figures| &figures.daemon),
            disks: figures.iter().flat_map(|figures| &figures.disks).map(row).collect(),
            workers: figures.map_or(&[], |figures| &figures.workers),
            detail,
            points: self.history.since(question.disk, since),
            edges: &heat::EDGES,
            events: self.events.iter().filter(|entry| entry.at > since).collect(),
        })
    }
}

/// Milliseconds since 1970, and later than `last` whatever becomes of the host's clock.
fn now_ms(last: u64) -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX).max(last + 1)
}

fn by_id(sample: Option<&Sample>) -> HashMap<u64, &DiskStatsOf> {
    sample.into_iter().flat_map(|s| &s.stats.disks).map(|disk| (disk.id, disk)).collect()
}

/// Latencies of reads and writes.
fn timed(disk: &DiskStatsOf) -> Buckets {
    Buckets::of(disk.latency.as_ref(), &[|l| &l.reads, |l| &l.writes])
}

fn known(latency: &Percentiles) -> [Option<NonZeroU64>; 3] {
    [latency.p50, latency.p99, latency.p999].map(|nanos| nanos.and_then(NonZeroU64::new))
}

#[allow(clippy::cast_possible_truncation, reason = "seven figures are more than a chart shows")]
fn point(at: u64, disk: &DiskFigures, heat: heat::Column) -> Point {
    let rates = disk.rates.clone().unwrap_or_default();
    Point {
        at,
        reads_s: rates.reads_s as f32,
        writes_s: rates.writes_s as f32,
        others_s: (rates.flushes_s + rates.erases_s) as f32,
        read_mb_s: rates.read_mb_s as f32,
        write_mb_s: rates.write_mb_s as f32,
        in_flight: u32::try_from(disk.in_flight).unwrap_or(u32::MAX),
        latency: known(&disk.latency),
        heat,
    }
}

impl Point {
    /// Adds the rates of another disk.
    fn add(&mut self, other: &Self) {
        self.reads_s += other.reads_s;
        self.writes_s += other.writes_s;
        self.others_s += other.others_s;
        self.read_mb_s += other.read_mb_s;
        self.write_mb_s += other.write_mb_s;
        self.in_flight = self.in_flight.saturating_add(other.in_flight);
    }
}

fn row(disk: &DiskFigures) -> Row<'_> {
    let rates = disk.rates.as_ref();
    Row {
        id: disk.id,
        image: &disk.image,
        state: columns::state(disk),
        connected: disk.connected,
        in_flight: disk.in_flight,
        overdue: disk.overdue,
        iops: rates.map(|rates| rates.iops),
        errors_s: rates.map(|rates| rates.errors_s),
        read_mb_s: rates.map(|rates| rates.read_mb_s),
        write_mb_s: rates.map(|rates| rates.write_mb_s),
        p50: disk.latency.p50,
        p99: disk.latency.p99,
        p999: disk.latency.p999,
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::fixture::{Fixture, sample};
    use super::*;
    use anyhow::anyhow;
    use ringway_control::protocol::Happened;
    use serde_json::Value;

    fn board() -> Board {
        Board::new(Path::new("ctl"), Duration::from_secs(1), Duration::from_secs(600))
    }

    fn ask(board: &Board, disk: Option<u64>, since: u64) -> Value {
        serde_json::from_slice(&board.answer(PageQuestion { disk, since }).unwrap()).unwrap()
    }

    fn second(number: u64) -> Fixture {
        Fixture {
            uptime_us: number * 1_000_000,
            reads: number * 1000,
            writes: number * 500,
            fast: number * 100,
            slow: number,
            ..Fixture::default()
        }
    }

    #[test]
    fn a_page_that_comes_later_is_told_the_past_and_then_what_is_new() {
        let mut board = board();
        (0..4).for_each(|at| board.hear(Ok(sample(&second(at)))));
        let all = ask(&board, Some(0), 0);
        assert_eq!(all["points"]["reads_s"], serde_json::json!([1000.0, 1000.0, 1000.0]));
        assert_eq!(all["points"]["heat"][0], serde_json::json!([[6, 100], [21, 1]]));
        assert_eq!(all["points"]["p50"][2], 8191);
        assert_eq!(all["detail"]["counts"]["reads"], 3000);
        assert_eq!(all["detail"]["figures"]["rates"]["writes_s"], 500.0);
        let rows = all["disks"].as_array().unwrap();
        assert_eq!((&rows[0]["iops"], &rows[0]["state"]), (&1500.0.into(), &"connected".into()));
        // Both together: nobody uses the other one.
        let both = ask(&board, None, 0);
        assert_eq!(both["points"], all["points"]);
        assert_eq!(both["detail"], Value::Null);
        let at = all["at"].as_u64().unwrap();
        board.hear(Ok(sample(&second(4))));
        let more = ask(&board, Some(0), at);
        assert_eq!(more["points"]["at"].as_array().unwrap().len(), 1);
        assert_eq!(more["points"]["at"][0], more["at"]);
        // A moment of another process, later than any of ours.
        let stranger = ask(&board, Some(0), u64::MAX);
        assert_eq!(stranger["points"]["at"].as_array().unwrap().len(), 4);
        assert_eq!(ask(&board, Some(99), 0)["detail"], Value::Null);
    }

    #[test]
    fn a_daemon_that_is_lost_is_told_of_and_its_past_stays() {
        let mut board = board();
        assert_eq!(ask(&board, None, 0)["daemon"], Value::Null);
        (1..3).for_each(|at| board.hear(Ok(sample(&second(at)))));
        board.hear(Err(anyhow!("gone")));
        board.hear(Err(anyhow!("gone for good")));
        let lost = ask(&board, Some(0), 0);
        assert_eq!(lost["lost"], "gone for good");
        assert_eq!(lost["points"]["at"].as_array().unwrap().len(), 1);
        board.hear(Ok(sample(&Fixture { pid: 2, ..second(1) })));
        board.hear(Ok(sample(&Fixture { pid: 2, ..second(2) })));
        let back = ask(&board, Some(0), 0);
        assert_eq!((&back["lost"], &back["daemon"]["pid"]), (&Value::Null, &2.into()));
        assert_eq!(back["points"]["at"].as_array().unwrap().len(), 2);
        let kinds = back["events"].as_array().unwrap().iter().map(|entry| &entry["kind"]);
        assert_eq!(kinds.collect::<Vec<_>>(), ["daemon lost", "daemon restarted"]);
    }

    fn event(number: u64, happened: Happened) -> Result<Event, String> {
        let (id, image) = (Some(0), Some("a.img".to_owned()));
        Ok(Event { version: 1, number, time_us: 0, id, image, happened })
    }

    #[test]
    fn events_are_bounded_and_each_is_told_once() {
        let mut board = board();
        let happened = [Happened::Paused, Happened::Resumed];
        (0..EVENTS_MAX + 9).for_each(|at| {
            board.hear_event(event(at as u64, happened[at % 2].clone()));
        });
        let all = ask(&board, None, 0);
        let kinds: Vec<_> =
            all["events"].as_array().unwrap().iter().map(|entry| &entry["kind"]).collect();
        assert_eq!((kinds.len(), kinds[EVENTS_MAX - 1]), (EVENTS_MAX, &"paused".into()));
        // Between two answers of the daemon, and with the next one.
        let at = all["at"].as_u64().unwrap();
        board.hear_event(event(999, Happened::Connected));
        let more = ask(&board, None, at);
        assert_eq!(more["events"].as_array().unwrap().len(), 1);
        assert_eq!(more["events"][0]["of"], "a.img");
        board.hear(Ok(sample(&second(1))));
        let at = more["at"].as_u64().unwrap();
        assert_eq!(ask(&board, None, at)["events"], serde_json::json!([]));
        board.hear_event(Err("too many readers".into()));
        assert_eq!(ask(&board, None, at)["events"][0]["kind"], "no events");
    }
}
