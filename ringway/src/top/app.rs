//! What is on the screen, and what keys do to it. Knows no terminal.

use super::figures::{DiskFigures, Figures, Sample, Samples};
use super::watch::WatchCommand;
use clap::ValueEnum;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::widgets::TableState;
use ringway_terminal::reasons::in_full;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

/// How much of the past is kept to be drawn, in answers.
pub(super) const HISTORY: usize = 60;

/// How often a daemon may be asked.
pub(super) const OFTEN: Duration = Duration::from_millis(100);
pub(super) const SELDOM: Duration = Duration::from_secs(60);

/// What disks are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sort {
    /// Requests per second, the most first.
    Iops,
    /// Bytes per second, the most first.
    Mb,
    /// The 99th percentile, or the median if too few were timed; the slowest first.
    Latency,
    /// The image, by its letters.
    Name,
}

/// Whether the daemon answers.
#[derive(Debug, PartialEq)]
pub(super) enum Link {
    /// Not asked yet.
    New,
    Live,
    /// It does not, and why.
    Lost(String),
}

/// A line of the table: a disk, or one of its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Row {
    pub(super) disk: u64,
    pub(super) queue: Option<usize>,
}

/// The state of the screen.
pub(super) struct App {
    pub(super) socket: String,
    pub(super) every: Duration,
    pub(super) sort: Sort,
    pub(super) paused: bool,
    pub(super) help: bool,
    pub(super) link: Link,
    pub(super) figures: Option<Figures>,
    samples: Samples,
    /// Of each disk: requests per second.
    pub(super) history: HashMap<u64, VecDeque<f64>>,
    pub(super) open: BTreeSet<u64>,
    pub(super) selected: Option<Row>,
    /// Where the table has been scrolled to.
    pub(super) table: TableState,
}

/// What a key asks of others.
#[derive(Default)]
pub(super) struct Wish {
    pub(super) quit: bool,
    pub(super) command: Option<WatchCommand>,
}

impl App {
    pub(super) fn new(socket: String, every: Duration, sort: Sort) -> Self {
        Self {
            socket,
            every,
            sort,
            paused: false,
            help: false,
            link: Link::New,
            figures: None,
            samples: Samples::default(),
            history: HashMap::new(),
            open: BTreeSet::new(),
            selected: None,
            table: TableState::default(),
        }
    }

    /// Takes in what the daemon has answered, or why it has not.
    pub(super) fn hear(&mut self, answer: anyhow::Result<Sample>) {
        let sample = match answer {
            Ok(sample) => sample,
            Err(error) => {
                self.link = Link::Lost(in_full(&error));
                return;
            }
        };
        self.link = Link::Live;
        self.samples.push(sample);
        self.figures = self.samples.figures();
        self.remember();
        self.arrange();
    }

    fn remember(&mut self) {
        let Some(figures) = &self.figures else { return };
        self.history.retain(|id, _| figures.disks.iter().any(|disk| disk.id == *id));
        for disk in &figures.disks {
            let Some(rates) = &disk.rates else { continue };
            let past = self.history.entry(disk.id).or_default();
            if past.len() == HISTORY {
                past.pop_front();
            }
            past.push_back(rates.iops);
        }
    }

    /// Puts the disks in order, and the selection on something that is there.
    fn arrange(&mut self) {
        let Some(figures) = &mut self.figures else { return };
        sort(&mut figures.disks, self.sort);
        let lines = self.lines();
        let chosen = self.selected.filter(|line| lines.contains(line));
        let disk = self.selected.map(|line| Row { queue: None, ..line });
        let chosen = chosen.or(disk.filter(|line| lines.contains(line)));
        self.selected = chosen.or(lines.first().copied());
    }

    /// The lines of the table, from the top.
    pub(super) fn lines(&self) -> Vec<Row> {
        let mut lines = Vec::new();
        for disk in self.figures.iter().flat_map(|figures| &figures.disks) {
            lines.push(Row { disk: disk.id, queue: None });
            if self.open.contains(&disk.id) {
                let queues = disk.queues.iter().map(|queue| Some(queue.queue));
                lines.extend(queues.map(|queue| Row { disk: disk.id, queue }));
            }
        }
        lines
    }

    /// The disk that is selected, or one of whose queues is.
    pub(super) fn disk(&self) -> Option<&DiskFigures> {
        let chosen = self.selected?.disk;
        self.figures.as_ref()?.disks.iter().find(|disk| disk.id == chosen)
    }

    /// Does what a key says.
    pub(super) fn press(&mut self, key: KeyEvent) -> Wish {
        let mut wish = Wish::default();
        if self.help {
            // Any key takes the help away, and does nothing else but for Ctrl-C.
            self.help = false;
            let ends = key.modifiers.contains(KeyModifiers::CONTROL);
            wish.quit = ends && key.code == KeyCode::Char('c');
            return wish;
        }
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => wish.quit = true,
            KeyCode::Char('q') | KeyCode::Esc => wish.quit = true,
            KeyCode::Char('h' | '?') | KeyCode::F(1) => self.help = true,
            KeyCode::Char('i') => self.sort = Sort::Iops,
            KeyCode::Char('m') => self.sort = Sort::Mb,
            KeyCode::Char('l') => self.sort = Sort::Latency,
            KeyCode::Char('n') => self.sort = Sort::Name,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char(' ' | 'p') => {
                self.paused = !self.paused;
                wish.command = Some(WatchCommand::Pause(self.paused));
            }
            KeyCode::Char('+') => wish.command = Some(self.every(|time| time * 2)),
            KeyCode::Char('-') => wish.command = Some(self.every(|time| time / 2)),
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::PageUp => self.step(-10),
            KeyCode::PageDown => self.step(10),
            KeyCode::Home => self.step(isize::MIN),
            KeyCode::End => self.step(isize::MAX),
            KeyCode::Enter => self.unfold(None),
            KeyCode::Right => self.unfold(Some(true)),
            KeyCode::Left => self.unfold(Some(false)),
            _ => {}
        }
        self.arrange();
        wish
    }

    fn every(&mut self, change: impl Fn(Duration) -> Duration) -> WatchCommand {
        self.every = change(self.every).clamp(OFTEN, SELDOM);
        WatchCommand::Every(self.every)
    }

    fn step(&mut self, lines: isize) {
        let all = self.lines();
        let at = self.selected.and_then(|line| all.iter().position(|other| *other == line));
        let to = at.unwrap_or(0).saturating_add_signed(lines).min(all.len().saturating_sub(1));
        self.selected = all.get(to).copied();
    }

    /// Shows the queues of the selected disk, or no longer; the other way round if not told.
    fn unfold(&mut self, open: Option<bool>) {
        let Some(Row { disk, .. }) = self.selected else { return };
        let open = open.unwrap_or(!self.open.contains(&disk));
        if open {
            self.open.insert(disk);
        } else {
            self.open.remove(&disk);
        }
    }
}

impl Sort {
    fn next(self) -> Self {
        match self {
            Self::Iops => Self::Mb,
            Self::Mb => Self::Latency,
            Self::Latency => Self::Name,
            Self::Name => Self::Iops,
        }
    }

    /// As it is called on the screen.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Iops => "IOPS",
            Self::Mb => "MB/s",
            Self::Latency => "latency",
            Self::Name => "name",
        }
    }
}

/// Disks that are alike keep the order of their numbers.
pub(super) fn sort(disks: &mut [DiskFigures], by: Sort) {
    let rate = |disk: &DiskFigures| -> f64 {
        let latency = disk.latency.p99.or(disk.latency.p50).unwrap_or(0);
        match (by, &disk.rates) {
            (Sort::Latency, _) => latency as f64,
            (Sort::Iops, Some(rates)) => rates.iops,
            (Sort::Mb, Some(rates)) => rates.read_mb_s + rates.write_mb_s,
            _ => 0.0,
        }
    };
    disks.sort_by_key(|disk| disk.id);
    match by {
        Sort::Name => disks.sort_by(|a, b| a.image.cmp(&b.image)),
        _ => disks.sort_by(|a, b| rate(b).total_cmp(&rate(a))),
    }
}
