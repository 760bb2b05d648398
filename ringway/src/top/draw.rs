//! The screen.

use super::app::{App, HISTORY, Link, Row as At};
use super::columns::{self, BAR, COLUMNS, Column, PICTURE_OF_WORKER, WORKERS, fitting, room};
use super::figures::{DiskFigures, Effort, WorkerFigures};
use super::plain::{self, latencies};
use crate::happened::held;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Clear, Paragraph, Row, Table, Wrap};
use ringway_control::config::limit_words;
use ringway_control::size::Size;
use ringway_terminal::short::{age, count};

const KEYS: &str = " q quit  ↑↓ select  ⏎ queues  i m l n sort  + - interval  space pause  h help";

/// Lines that fit into a window on a screen of 80 columns and 24 lines: they are not broken further.
const HELP: &str = "\
q, Esc        quit
↑ ↓ j k       select a line; also PgUp, PgDn, Home, End
Enter → ←     show the queues of a disk, or hide them
i m l n       sort by IOPS, MB/s, latency, name; s takes the next one
+ -           ask less or more often
space         stop, and go on

p50 p99       latency of one request in sixty; - are too few of them
in flight     requests just then: 0 is usual for quick disks
req/submit    requests handed to the kernel at a time, on average
done/harvest  completions found at a time, on average
syscalls/IO   system calls of the engine for each request
calls/s       notifications sent to the guest
working       part of a worker's time spent on requests
spinning      part of it spent on looking for more; asleep: neither
serving       no front-end is connected; paused: by ctl pause
held          failed requests wait; no guest: no queue of it is used
no server     its NBD server is away; no flush: flushes fail
overdue       requests have been under way for too long
at limit      requests wait for a limit, which is in no latency

Any key closes this.";

/// Characters of the picture of the past.
const PICTURE: u16 = 20;

/// Draws all of it.
pub(super) fn draw(frame: &mut Frame<'_>, app: &mut App) {
    let workers = app.figures.as_ref().map_or(0, |figures| figures.workers.len());
    let workers = u16::try_from(workers).unwrap_or(u16::MAX).saturating_add(2);
    let height = frame.area().height;
    // Disks come first; then their workers; the details of one need a screen of some size.
    let detail = match frame.area().width {
        _ if height < 24 => 0,
        ..130 => 9,
        _ => 7,
    };
    let workers = if height >= 12 { workers.min(height / 4) } else { 0 };
    let areas = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(3),
        Constraint::Length(detail),
        Constraint::Length(workers),
        Constraint::Length(1),
    ]);
    let [title, disks, detail, workers, keys] = areas.areas(frame.area());
    draw_title(frame, app, title);
    draw_disks(frame, app, disks);
    if detail.height > 0 {
        draw_detail(frame, app, detail);
    }
    if workers.height > 0 {
        draw_workers(frame, app, workers);
    }
    frame.render_widget(Paragraph::new(KEYS).style(Style::new().reversed()), keys);
    if app.help {
        draw_help(frame);
    }
}

fn draw_title(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let mut spans = vec![Span::styled("ringway top ", Modifier::BOLD)];
    if let Link::Lost(why) = &app.link {
        let lost = Style::new().fg(Color::White).bg(Color::Red).bold();
        spans.push(Span::styled(format!(" LOST, trying again: {why} "), lost));
        frame.render_widget(Line::from(spans), area);
        return;
    }
    spans.push(app.socket.clone().into());
    match &app.figures {
        Some(figures) => {
            let up = age(figures.daemon.uptime_us);
            let daemon = &figures.daemon;
            spans.push(format!("  {}  process {}  up {up}", daemon.version, daemon.pid).into());
        }
        None => spans.push("  asking…".into()),
    }
    // Two blanks, as what is left of it may be cut off right there.
    let every = format!("  every {:?}  by {} ", app.every, app.sort.word());
    let every = match app.paused {
        true => Line::from(vec![
            Span::styled(" PAUSED ", Modifier::REVERSED),
            "  ".into(),
            every.into(),
        ]),
        false => Line::from(every),
    };
    let room = u16::try_from(every.width()).unwrap_or(area.width);
    let [left, right] =
        Layout::horizontal([Constraint::Fill(1), Constraint::Length(room)]).areas(area);
    frame.render_widget(Line::from(spans), left);
    frame.render_widget(every.alignment(Alignment::Right), right);
}

fn cell(column: &Column, text: String) -> Cell<'static> {
    let line = Line::from(text);
    Cell::from(if column.words { line } else { line.alignment(Alignment::Right) })
}

fn draw_disks(frame: &mut Frame<'_>, app: &mut App, area: Rect) {
    let fits = fitting(&COLUMNS, area.width);
    let has_picture = area.width > room(&COLUMNS, &fits) + PICTURE;
    let lines = app.lines();
    let rows: Vec<Row<'_>> = lines.iter().map(|line| row(app, *line, &fits, has_picture)).collect();
    let mut head: Vec<_> =
        fits.iter().map(|&at| cell(&COLUMNS[at], COLUMNS[at].title.to_owned())).collect();
    let mut widths: Vec<_> = fits.iter().map(|&at| Constraint::Length(COLUMNS[at].width)).collect();
    widths[0] = Constraint::Min(COLUMNS[0].width);
    if has_picture {
        head.push(Cell::from("IOPS of late"));
        widths.push(Constraint::Length(PICTURE));
    }
    let head = Row::new(head).style(Style::new().fg(Color::Cyan).bold());
    // What is shown of a daemon that is gone is no longer so.
    let style = match app.link {
        Link::Lost(_) => Style::new().add_modifier(Modifier::DIM),
        _ => Style::new(),
    };
    let table = Table::new(rows, widths)
        .header(head)
        .column_spacing(1)
        .style(style)
        .row_highlight_style(Modifier::REVERSED);
    app.table.select(app.selected.and_then(|line| lines.iter().position(|other| *other == line)));
    frame.render_stateful_widget(table, area, &mut app.table);
}

fn row(app: &App, line: At, fits: &[usize], has_picture: bool) -> Row<'static> {
    let disks = app.figures.iter().flat_map(|figures| &figures.disks);
    let Some(disk) = disks.into_iter().find(|disk| disk.id == line.disk) else {
        return Row::default();
    };
    let (mut cells, style) = match line.queue {
        None => {
            let mark = if app.open.contains(&disk.id) { '▾' } else { '▸' };
            let mut cells = columns::disk(disk);
            cells[0] = format!("{mark} {}", cells[0]);
            (cells, tone(disk))
        }
        Some(number) => {
            let Some(queue) = disk.queues.iter().find(|queue| queue.queue == number) else {
                return Row::default();
            };
            let broken = if queue.broken { Color::Red } else { Color::Reset };
            (columns::queue(queue), Style::new().fg(broken))
        }
    };
    let mut shown: Vec<_> =
        fits.iter().map(|&at| cell(&COLUMNS[at], std::mem::take(&mut cells[at]))).collect();
    if has_picture && line.queue.is_none() {
        let past = app.history.get(&disk.id).map(|past| past.iter().copied().collect::<Vec<_>>());
        let picture = Span::styled(picture(&past.unwrap_or_default()), Color::Blue);
        shown.push(Cell::from(picture));
    }
    Row::new(shown).style(style)
}

/// A disk that needs somebody to look at it stands out.
fn tone(disk: &DiskFigures) -> Style {
    match columns::state(disk) {
        "stuck" | "overdue" | "held" | "no guest" | "no server" | "no flush" => {
            Style::new().fg(Color::Red).bold()
        }
        "paused" | "unlocked" | "leaving" | "at limit" => Style::new().fg(Color::Yellow),
        "serving" => Style::new().fg(Color::DarkGray),
        _ => Style::new(),
    }
}

/// The last values as bars of eight heights, the latest at the right; the highest is full.
fn picture(past: &[f64]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let shown = &past[past.len().saturating_sub(usize::from(PICTURE))..];
    // Of all that is remembered, so that the bars do not jump when a peak leaves the picture.
    let most = past.iter().copied().fold(0.0, f64::max);
    debug_assert!(past.len() <= HISTORY);
    let bar = |&value: &f64| {
        let height = if most > 0.0 { value / most * 7.0 } else { 0.0 };
        // Between 0 and 7.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let at = height.round() as usize;
        BARS[at.min(7)]
    };
    let bars: String = shown.iter().map(bar).collect();
    format!("{bars:>width$}", width = usize::from(PICTURE))
}

fn draw_detail(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let Some(disk) = app.disk() else { return };
    let socket = disk.socket.as_ref().map(|path| path.display().to_string());
    let place = socket.or_else(|| disk.device.clone()).unwrap_or("inherited".into());
    let mode = if disk.read_only { ", read-only" } else { "" };
    let title = format!(" {}  {}{mode}  at {place} ", disk.image, Size(disk.size));
    let cached = if disk.write_cache { "on" } else { "off" };
    let mut lines = vec![
        format!(
            "engine {} ({})   cache {} ({}), the guest's write cache {cached}   path {}, {} switches",
            disk.engine,
            disk.engine_why,
            disk.cache,
            disk.cache_why,
            disk.path.words(),
            disk.path.switches
        ),
        format!("reads   {}", latencies(&disk.reads)),
        format!("writes  {}", latencies(&disk.writes)),
        format!("others  {}", latencies(&disk.others)),
    ];
    if let Some(words) = &disk.holding {
        // What is below may have no room: little goes on.
        lines.insert(0, held(words));
    }
    if let Some(words) = &disk.front_end {
        lines.insert(0, words.clone());
    }
    disk.storage.words().into_iter().for_each(|words| lines.insert(0, words));
    if let Some(words) = limits(disk) {
        lines.push(format!("limits  {words}"));
    }
    if let Some(rates) = &disk.rates {
        let parts = [
            ("reads", rates.reads_s),
            ("writes", rates.writes_s),
            ("flushes", rates.flushes_s),
            ("erases", rates.erases_s),
            ("merged", rates.merged_s),
            ("bounced", rates.bounced_s),
            ("split", rates.split_s),
            ("errors", rates.errors_s),
            ("kicks", rates.kicks_s),
            ("notifications", rates.calls_s),
        ];
        let parts = parts.map(|(what, rate)| format!("{what} {}", count(rate)));
        lines.push(format!("per second: {}", parts.join("  ")));
    }
    let lines: Vec<Line<'_>> = lines.into_iter().map(Line::from).collect();
    let block = Block::new().borders(Borders::TOP).title(title);
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: true }).block(block), area);
}

/// What a guest may ask of a disk, if that is limited.
fn limits(disk: &DiskFigures) -> Option<String> {
    let group = disk.limit_group.as_ref().map(|group| format!("group {group}"));
    let own = Some(limit_words(&disk.limits)).filter(|own| !own.is_empty());
    let all: Vec<_> = own.into_iter().chain(group).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

fn draw_workers(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let Some(figures) = &app.figures else { return };
    let fits = fitting(&WORKERS, area.width);
    let mut widths: Vec<_> = fits.iter().map(|&at| Constraint::Length(WORKERS[at].width)).collect();
    widths[0] = Constraint::Min(WORKERS[0].width);
    let head = fits.iter().map(|&at| cell(&WORKERS[at], WORKERS[at].title.to_owned()));
    let head = Row::new(head).style(Style::new().fg(Color::Cyan).bold());
    let rows = figures.workers.iter().map(|worker| {
        let cells = plain::worker(worker);
        let cells = fits.iter().map(|&at| match at {
            PICTURE_OF_WORKER => Cell::from(bar(worker)),
            _ => cell(&WORKERS[at], cells[at].clone()),
        });
        let tone = if worker.answers { Color::Reset } else { Color::Red };
        Row::new(cells).style(Style::new().fg(tone))
    });
    let block = Block::new().borders(Borders::TOP).title(" workers ");
    let table = Table::new(rows, widths).header(head).column_spacing(1).block(block);
    frame.render_widget(table, area);
}

/// A worker's time: working, spinning, asleep.
fn bar(worker: &WorkerFigures) -> Line<'static> {
    let Some(Effort { working, spinning, .. }) = worker.effort else { return Line::default() };
    // Between 0 and BAR.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let cells = |part: f64| ((part * f64::from(BAR)).round() as usize).min(BAR.into());
    let busy = cells(working);
    let spins = cells(working + spinning).saturating_sub(busy);
    let rest = usize::from(BAR) - busy - spins;
    Line::from(vec![
        Span::styled("█".repeat(busy), Color::Green),
        Span::styled("▒".repeat(spins), Color::Yellow),
        Span::styled("·".repeat(rest), Color::DarkGray),
    ])
}

fn draw_help(frame: &mut Frame<'_>) {
    let area = frame.area();
    let lines = u16::try_from(HELP.lines().count()).unwrap_or(u16::MAX).saturating_add(2);
    let [area] =
        Layout::vertical([Constraint::Max(lines)]).flex(ratatui::layout::Flex::Center).areas(area);
    let [area] =
        Layout::horizontal([Constraint::Max(72)]).flex(ratatui::layout::Flex::Center).areas(area);
    frame.render_widget(Clear, area);
    let block = Block::bordered().title(" keys and words ");
    frame.render_widget(Paragraph::new(HELP).wrap(Wrap { trim: false }).block(block), area);
}

#[cfg(test)]
mod tests;
