//! What a line says of a disk or a queue, and which of it a narrow screen leaves out.

use super::buckets::Percentiles;
use super::figures::{DiskFigures, Effort, QueueFigures, Rates};
use ringway_control::protocol::State;
use ringway_terminal::short::{self, count};

/// A column.
pub(super) struct Column {
    pub(super) title: &'static str,
    /// Characters.
    pub(super) width: u16,
    /// It holds words, which begin at its left; numbers end at its right.
    pub(super) words: bool,
    /// Columns of the highest rank are left out first.
    rank: u8,
}

const fn words(title: &'static str, width: u16, rank: u8) -> Column {
    Column { title, width, words: true, rank }
}

const fn number(title: &'static str, width: u16, rank: u8) -> Column {
    Column { title, width, words: false, rank }
}

/// How many columns there are.
const COUNT: usize = 18;

/// The columns, in their order. The first one also gets the room that is left.
pub(super) const COLUMNS: [Column; COUNT] = [
    words("disk", 18, 0),
    words("state", 9, 1),
    words("path", 13, 3),
    number("IOPS", 7, 0),
    number("rd MB/s", 7, 0),
    number("wr MB/s", 7, 0),
    number("p50", 8, 0),
    number("p99", 8, 1),
    number("p99.9", 8, 2),
    number("in flight", 9, 1),
    number("req/submit", 10, 4),
    number("done/harvest", 12, 5),
    number("syscalls/IO", 11, 4),
    number("spinning", 8, 5),
    number("calls/s", 8, 6),
    words("engine", 12, 6),
    words("cache", 12, 7),
    number("throttled", 9, 3),
];

/// Which of the columns fit into so many characters, in their order.
pub(super) fn fitting(all: &[Column], width: u16) -> Vec<usize> {
    let mut columns: Vec<usize> = (0..all.len()).collect();
    while room(all, &columns) > width {
        let last = columns.iter().copied().max_by_key(|&at| (all[at].rank, at));
        let Some(at) = last.filter(|&at| all[at].rank > 0) else { break };
        columns.retain(|&other| other != at);
    }
    columns
}

/// The titles of those that may be left out, from what matters least on.
pub(super) fn least(all: &[Column]) -> Vec<&'static str> {
    let mut columns: Vec<usize> = (0..all.len()).filter(|&at| all[at].rank > 0).collect();
    columns.sort_by_key(|&at| std::cmp::Reverse((all[at].rank, at)));
    columns.into_iter().map(|at| all[at].title).collect()
}

/// The characters that some of the columns take, with a blank in between.
pub(super) fn room(all: &[Column], some: &[usize]) -> u16 {
    some.iter().map(|&at| all[at].width + 1).sum::<u16>().saturating_sub(1)
}

/// The columns of a worker, in their order.
pub(super) const WORKERS: [Column; 12] = [
    words("worker", 14, 0),
    number("queues", 6, 1),
    number("requests/s", 10, 0),
    words("work spin sleep", BAR, 0),
    number("working", 7, 3),
    number("spinning", 8, 3),
    number("asleep", 6, 4),
    number("sleeps/s", 8, 3),
    number("req/submit", 10, 1),
    number("done/harvest", 12, 2),
    number("harvest p99", 11, 4),
    number("syscalls/IO", 11, 2),
];

/// Which of these is the picture, for screens only, and its width.
pub(super) const PICTURE_OF_WORKER: usize = 3;
pub(super) const BAR: u16 = 20;

/// The line of a disk.
pub(super) fn disk(disk: &DiskFigures) -> [String; COUNT] {
    let mut cells = figures(disk.rates.as_ref(), &disk.latency, disk.effort.as_ref());
    cells[0] = format!("{} {}", disk.id, disk.image);
    cells[1] = state(disk).into();
    cells[2] = disk.path.words();
    cells[9] = disk.in_flight.to_string();
    cells[15].clone_from(&disk.engine);
    cells[16].clone_from(&disk.cache);
    cells
}

/// The line of a queue, below that of its disk.
pub(super) fn queue(queue: &QueueFigures) -> [String; COUNT] {
    let mut cells = figures(queue.rates.as_ref(), &queue.latency, queue.effort.as_ref());
    cells[0] = format!("  queue {}", queue.queue);
    cells[1] = match queue {
        queue if queue.broken => "broken",
        queue if queue.held > 0 => "held",
        queue if queue.overdue > 0 => "overdue",
        _ => "",
    }
    .into();
    cells[9] = queue.in_flight.to_string();
    cells[15].clone_from(&queue.worker);
    cells
}

/// What matters most: a disk that takes no requests, one with requests that it has failed and that
/// wait, one whose storage is in trouble, one that does not answer some, or one without a front-end.
pub(super) fn state(disk: &DiskFigures) -> &'static str {
    match (disk.state, disk.connected) {
        (State::Serving, _) if disk.held > 0 => "held",
        (State::Serving, _) if disk.storage.server_away.is_some() => "no server",
        (State::Serving, _) if disk.storage.flushes_fail => "no flush",
        (State::Serving, _) if disk.front_end.is_some() => "no guest",
        (State::Serving, true) if disk.overdue > 0 => "overdue",
        (State::Serving, true) if is_throttled(disk) => "at limit",
        (State::Serving, true) => "connected",
        (state, _) => state.word(),
    }
}

/// True if its queues have waited for a limit for a hundredth of the time.
fn is_throttled(disk: &DiskFigures) -> bool {
    disk.rates.as_ref().is_some_and(|rates| rates.throttled >= 0.01)
}

fn figures(
    rates: Option<&Rates>,
    latency: &Percentiles,
    effort: Option<&Effort>,
) -> [String; COUNT] {
    let rate = |of: fn(&Rates) -> f64| rates.map_or_else(none, |rates| count(of(rates)));
    let mb = |of: fn(&Rates) -> f64| rates.map_or_else(none, |rates| format!("{:.1}", of(rates)));
    let mean = |of: fn(&Effort) -> Option<f64>| {
        effort.and_then(of).map_or_else(none, |value| format!("{value:.2}"))
    };
    let mut cells: [String; COUNT] = Default::default();
    cells[3] = rate(|rates| rates.iops);
    cells[4] = mb(|rates| rates.read_mb_s);
    cells[5] = mb(|rates| rates.write_mb_s);
    cells[6] = time(latency.p50);
    cells[7] = time(latency.p99);
    cells[8] = time(latency.p999);
    cells[10] = mean(|effort| effort.requests_per_submit);
    cells[11] = mean(|effort| effort.completions_per_harvest);
    cells[12] = mean(|effort| effort.syscalls_per_io);
    cells[13] = effort.map_or_else(none, |effort| percent(effort.spinning));
    cells[14] = rate(|rates| rates.calls_s);
    cells[17] = rates.map_or_else(none, |rates| percent(rates.throttled));
    cells
}

/// A part of 1.
pub(super) fn percent(part: f64) -> String {
    format!("{:.0} %", 100.0 * part)
}

fn none() -> String {
    "-".into()
}

/// A latency, short; `-` where too few were timed.
pub(super) fn time(nanos: Option<u64>) -> String {
    nanos.map_or_else(none, |nanos| short::time(nanos as f64))
}

#[cfg(test)]
mod tests {
    use super::super::figures::Samples;
    use super::super::fixture::{Fixture, sample};
    use super::*;

    #[test]
    fn a_narrow_screen_leaves_out_what_matters_least() {
        assert_eq!(fitting(&COLUMNS, u16::MAX), (0..COUNT).collect::<Vec<_>>());
        let titles = |width| {
            fitting(&COLUMNS, width).iter().map(|&at| COLUMNS[at].title).collect::<Vec<_>>()
        };
        assert!(!titles(150).contains(&"cache"));
        let on_80 = ["disk", "state", "IOPS", "rd MB/s", "wr MB/s", "p50", "p99", "in flight"];
        assert_eq!(titles(80), on_80);
        assert_eq!(titles(10), ["disk", "IOPS", "rd MB/s", "wr MB/s", "p50"]);
        for width in 51..250 {
            let room = room(&COLUMNS, &fitting(&COLUMNS, width));
            assert!(room <= width, "{width}: {room}");
        }
    }

    /// `ctl list` has these words, too.
    #[test]
    fn a_state_has_the_name_that_ctl_list_gives_it() {
        for state in State::ALL {
            let case = Fixture { state, ..Fixture::default() };
            let mut samples = Samples::default();
            samples.push(sample(&case));
            let disks = samples.figures().unwrap().disks;
            // The first one has a front-end, which `list` says in a column of its own.
            let word = if state == State::Serving { "connected" } else { state.word() };
            assert_eq!(super::state(&disks[0]), word);
            assert_eq!(super::state(&disks[1]), "serving", "nobody uses it");
        }
    }
}
