//! The screen, looked at as text.

use super::super::app::{App, Sort};
use super::super::figures::Rates;
use super::super::fixture::{Fixture, sample};
use super::super::watch::WatchCommand;
use super::*;
use anyhow::anyhow;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ringway_control::protocol::State;
use std::time::Duration;

fn app() -> App {
    let mut app = App::new("/run/ctl".into(), Duration::from_secs(1), Sort::Iops);
    let second = |at: u64| Fixture {
        uptime_us: at * 1_000_000,
        reads: at * at * 1000,
        fast: at * 50,
        cpu_us: at * 500_000,
        spin_us: at * 250_000,
        requests: at * 1000,
        syscalls: at * 300,
        batches: at * 100,
        ..Fixture::default()
    };
    (1..=5).for_each(|at| app.hear(Ok(sample(&second(at)))));
    app
}

fn screen(app: &mut App, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, app)).unwrap();
    terminal.backend().buffer().clone()
}

fn lines(buffer: &Buffer) -> Vec<String> {
    let area = buffer.area();
    let line = |y| (0..area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..area.height).map(line).collect()
}

fn text(app: &mut App, width: u16, height: u16) -> String {
    lines(&screen(app, width, height)).join("\n")
}

fn press(app: &mut App, code: KeyCode) {
    app.press(KeyEvent::new(code, KeyModifiers::NONE));
}

/// The line that holds this, without its blanks.
fn line(app: &mut App, what: &str) -> Vec<String> {
    let all = lines(&screen(app, 220, 30));
    let line = all.iter().find(|line| line.contains(what));
    let line = line.unwrap_or_else(|| panic!("no {what}:\n{}", all.join("\n")));
    line.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn a_disk_has_a_line_and_its_details() {
    let mut app = app();
    let disk = line(&mut app, "▸ 0 /srv/vm1.img").join(" ");
    // 9000 reads of 4 KiB came in the last second, 200 of all were timed.
    let figures = "connected auto: bio 9.00 k 36.9 0.0 8.19 µs 8.19 µs - 32 10.00 - 0.30 25 % 0";
    assert!(disk.contains(figures), "{disk}");
    assert!(disk.contains('█'), "the present is the highest of the past: {disk}");
    let idle = line(&mut app, "▸ 1 /srv/vm2.img").join(" ");
    assert!(idle.contains("serving auto: bio 0 0.0 0.0 - - - 0 - - - - 0"), "{idle}");
    let all = text(&mut app, 200, 30);
    for what in [
        "/srv/vm1.img  10 GiB  at /run/vm1.sock",
        "engine io_uring (fastest)   cache none (O_DIRECT works), the guest's write cache on",
        "reads   p50 8.19 µs  p99 8.19 µs  p99.9 -  max 8.19 µs  (200 timed)",
        "ringway top /run/ctl  0.1.0  process 1  up 5s",
        "every 1s  by IOPS",
        "q quit",
    ] {
        assert!(all.contains(what), "{what}:\n{all}");
    }
}

#[test]
fn what_is_held_is_said_with_its_reason() {
    let mut app = app();
    let disk = &mut app.figures.as_mut().unwrap().disks[0];
    disk.held = 3;
    disk.holding = Some(ringway_control::protocol::HeldFacts {
        count: 3,
        age_us: 12_500_000,
        operation: "write".into(),
        errno: Some(28),
        error: "No space left on device".into(),
        retry_us: Some(2_100_000),
    });
    for (width, height) in [(80, 30), (200, 30)] {
        let all = text(&mut app, width, height);
        let words = all.split_whitespace().collect::<Vec<_>>().join(" ");
        let what = "3 requests are held for 12 s: write failed: No space left on device; tried again in 3 s, \
                    or by ctl retry";
        assert!(words.contains(what), "{all}");
    }
}

#[test]
fn a_worker_shows_how_it_spends_its_time() {
    let mut app = app();
    let buffer = screen(&mut app, 200, 30);
    let all = lines(&buffer);
    let at = all.iter().position(|line| line.starts_with("io_uring/0")).unwrap();
    assert!(all[at].contains("█████▒▒▒▒▒··········"), "{}", all[at]);
    for what in ["25 %", "50 %", "10.00", "0.30"] {
        assert!(all[at].contains(what), "{what}: {}", all[at]);
    }
}

#[test]
fn keys_unfold_select_and_sort() {
    let mut app = app();
    assert!(!text(&mut app, 120, 30).contains("queue 0"));
    press(&mut app, KeyCode::Enter);
    let queue = line(&mut app, "queue 0").join(" ");
    assert!(queue.starts_with("queue 0 9.00 k 36.9"), "{queue}");
    assert!(queue.contains("io_uring/0"), "{queue}");
    press(&mut app, KeyCode::Down);
    assert_eq!(app.selected.unwrap().queue, Some(0));
    press(&mut app, KeyCode::Left);
    assert_eq!(app.selected.unwrap().queue, None, "its line has gone, its disk is selected");
    press(&mut app, KeyCode::Down);
    assert!(text(&mut app, 120, 30).contains("/srv/vm2.img  10 GiB"), "the details are its own");
    press(&mut app, KeyCode::End);
    press(&mut app, KeyCode::Home);
    assert_eq!(app.selected.unwrap().disk, 0);
    let order = |app: &mut App| {
        let all = lines(&screen(app, 120, 30));
        ["vm1.img", "vm2.img"].map(|disk| all.iter().position(|line| line.contains(disk)).unwrap())
    };
    for (key, word) in [('m', "MB/s"), ('l', "latency"), ('n', "name"), ('i', "IOPS")] {
        press(&mut app, KeyCode::Char(key));
        assert!(text(&mut app, 120, 30).contains(&format!("by {word} ")), "{word}");
        let [first, second] = order(&mut app);
        assert!(first < second, "{word}");
    }
    // Now the other one is busier, and slower.
    let figures = app.figures.as_mut().unwrap();
    let other = figures.disks.iter_mut().find(|disk| disk.id == 1).unwrap();
    other.rates = Some(Rates { iops: 1e6, write_mb_s: 1e4, ..Rates::default() });
    other.latency.p50 = Some(1_000_000_000);
    for (key, first) in [('m', 1), ('n', 0), ('l', 1), ('s', 0), ('s', 1), ('s', 1), ('s', 1)] {
        press(&mut app, KeyCode::Char(key));
        assert_eq!(app.figures.as_ref().unwrap().disks[0].id, first, "{key}, {:?}", app.sort);
    }
}

#[test]
fn keys_ask_for_less_more_and_nothing() {
    let mut app = app();
    let press = |app: &mut App, code| app.press(KeyEvent::new(code, KeyModifiers::NONE)).command;
    assert!(
        matches!(press(&mut app, KeyCode::Char('+')), Some(WatchCommand::Every(t)) if t.as_secs() == 2)
    );
    for _ in 0..9 {
        press(&mut app, KeyCode::Char('-'));
    }
    assert_eq!(app.every, Duration::from_millis(100), "not more often than makes sense");
    assert!(matches!(press(&mut app, KeyCode::Char(' ')), Some(WatchCommand::Pause(true))));
    assert!(text(&mut app, 120, 30).contains("PAUSED"));
    assert!(matches!(press(&mut app, KeyCode::Char(' ')), Some(WatchCommand::Pause(false))));
    press(&mut app, KeyCode::Char('h'));
    assert!(text(&mut app, 120, 40).contains("no front-end is connected"));
    press(&mut app, KeyCode::Char('x'));
    assert!(!text(&mut app, 120, 40).contains("no front-end is connected"));
    for (code, modifiers) in [
        (KeyCode::Char('q'), KeyModifiers::NONE),
        (KeyCode::Esc, KeyModifiers::NONE),
        (KeyCode::Char('c'), KeyModifiers::CONTROL),
    ] {
        assert!(app.press(KeyEvent::new(code, modifiers)).quit);
    }
}

#[test]
fn a_lost_daemon_is_said_and_found_again() {
    let mut app = app();
    app.hear(Err(anyhow!("no one listens at /run/ctl")));
    let all = text(&mut app, 160, 30);
    assert!(all.contains("LOST, trying again: no one listens at /run/ctl"), "{all}");
    let buffer = screen(&mut app, 160, 30);
    assert!(buffer[(4, 2)].modifier.contains(Modifier::DIM), "old figures are no news");
    // Another daemon, which has only begun.
    let case = Fixture { pid: 7, uptime_us: 10, ..Fixture::default() };
    app.hear(Ok(sample(&case)));
    let all = text(&mut app, 160, 30);
    assert!(!all.contains("LOST") && all.contains("process 7"), "{all}");
}

#[test]
fn states_that_need_a_look_stand_out() {
    for (state, word, color) in [
        (State::Stuck, "stuck", Color::Red),
        (State::Paused, "paused", Color::Yellow),
        (State::Unlocked, "unlocked", Color::Yellow),
        (State::Leaving, "leaving", Color::Yellow),
    ] {
        let mut app = app();
        app.hear(Ok(sample(&Fixture { uptime_us: 6_000_000, state, ..Fixture::default() })));
        // The selected line is reversed, and still has its colour.
        let buffer = screen(&mut app, 120, 30);
        let y = lines(&buffer).iter().position(|line| line.contains(word)).unwrap();
        assert_eq!(buffer[(1, u16::try_from(y).unwrap())].fg, color, "{word}");
    }
}

#[test]
fn no_screen_is_too_small() {
    let mut app = app();
    press(&mut app, KeyCode::Enter);
    press(&mut app, KeyCode::Char('h'));
    for (width, height) in [(1, 1), (10, 3), (30, 8), (60, 15), (79, 24), (300, 100)] {
        screen(&mut app, width, height);
    }
    press(&mut app, KeyCode::Char('x'));
    let narrow = text(&mut app, 80, 24);
    let parts =
        ["▾ 0 /srv/vm1.img", "IOPS", "p99", "in flight", "9.00 k", "q quit", "notifications 0"];
    for what in [&parts[..], &["req/submit", "█████▒▒▒▒▒", "10.00"]].concat() {
        assert!(narrow.contains(what), "{what}:\n{narrow}");
    }
}

/// Each line of the help is read whole where a terminal has its usual size.
#[test]
fn the_help_fits_into_80_columns_and_24_lines() {
    for (width, height) in [(80, 24), (120, 30)] {
        let mut app = app();
        press(&mut app, KeyCode::Char('h'));
        let all = text(&mut app, width, height);
        for line in HELP.lines() {
            assert!(all.contains(line), "{line}:\n{all}");
        }
    }
}

/// Keys that do something else do nothing but that, the one that opens the help too.
#[test]
fn any_key_closes_the_help() {
    let mut app = App::new("/run/c".into(), Duration::from_secs(1), Sort::Iops);
    for key in ['h', 'q', '?', 'n', ' ', 'x'] {
        press(&mut app, KeyCode::Char('h'));
        assert!(app.help);
        let wish = app.press(KeyEvent::new(KeyCode::Char(key), KeyModifiers::NONE));
        assert!(!app.help && !wish.quit && wish.command.is_none(), "{key}");
        assert!(app.sort == Sort::Iops && !app.paused, "{key}");
    }
    press(&mut app, KeyCode::Char('h'));
    let end = app.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
    assert!(end.quit, "but for Ctrl-C");
}
