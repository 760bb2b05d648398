//! `ringway top`: what a running daemon does, disk by disk, as it happens.
//!
//! `watch.rs` asks over the control socket, `figures.rs` makes rates of what it hears, `app.rs` is
//! the state of the screen, `draw.rs` draws it; `plain.rs` prints the same for those without one,
//! `page.rs` serves it to browsers.

mod app;
mod buckets;
mod columns;
mod draw;
mod figures;
#[cfg(test)]
mod fixture;
mod page;
mod plain;
mod watch;

use crate::ctl;
use anyhow::{Context, ensure};
use app::{App, OFTEN, SELDOM, Sort};
use clap::Args;
use figures::{Figures, Samples};
use page::{Address, Serve};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ringway_bench::seconds;
use ringway_control::log::LogArgs;
use ringway_terminal::logging;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use watch::Watch;

const EXAMPLES: &str = "\
Examples:
  ringway top --control /run/ringway/control.sock
  ringway top --control /run/ringway/control.sock --interval 1s --sort latency
  ringway top --once                              one table, for people
  ringway top --json --interval 10s | jq '.disks[] | [.image, .rates.iops]'
  ringway top --serve 127.0.0.1:9097              a page for browsers
  ringway top --serve unix:/run/ringway/top.sock  the same, behind a proxy

The daemon must have been started with `ringway serve --control PATH`;
RINGWAY_CONTROL may name the socket instead of --control. Press h for keys.
Where standard output is no terminal, one table is printed, as with --once.

--serve goes on until a signal ends it. Its first line is the address to open.
It only asks the daemon and changes nothing, but it has no password: every user
of this host can open it. With unix:PATH only yours can. From another machine:
ssh -L 9097:127.0.0.1:9097 HOST, then open http://localhost:9097/.

Exit status: 0 done, 1 failed, 2 wrong usage, 128+N ended by signal N.";

/// The options of `ringway top`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TopArgs {
    /// The control socket of the daemon: what `ringway serve --control` was told.
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// How often to look; with --once, how long.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// What disks are sorted by.
    #[arg(long, value_enum, default_value = "iops")]
    sort: Sort,
    /// Look once, and print tables.
    #[arg(long, help_heading = "Output")]
    once: bool,
    /// Look once, and print JSON.
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Serve a page for browsers there: an address with a port, such as 127.0.0.1:9097, or unix:PATH.
    ///
    /// Port 0 takes any that is free.
    #[arg(long, value_name = "ADDRESS", help_heading = "Page", conflicts_with_all = ["once", "json", "sort"])]
    serve: Option<Address>,
    /// Let other machines connect. Whoever can sees the names and figures of all disks.
    #[arg(long, help_heading = "Page", requires = "serve")]
    serve_remote: bool,
    /// A host name the page may be opened under, beside addresses and localhost; may be repeated.
    #[arg(long, value_name = "NAME", help_heading = "Page", requires = "serve")]
    serve_name: Vec<String>,
    /// How much of the past the page can show, up to 3600 times --interval.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = seconds,
        help_heading = "Page", requires = "serve")]
    history: Duration,
}

fn interval(word: &str) -> Result<Duration, String> {
    let time = seconds(word)?;
    match (OFTEN..=SELDOM).contains(&time) {
        true => Ok(time),
        false => Err(format!("'{word}' is not between {OFTEN:?} and {SELDOM:?}")),
    }
}

/// Carries out `ringway top`.
///
/// # Errors
/// One message: what is wrong, where, what to do. A daemon that is lost once the screen is there is
/// waited for.
pub(crate) fn run(
    args: TopArgs,
    log: &LogArgs,
    usage: &mut clap::Command,
) -> anyhow::Result<ExitCode> {
    logging::start(log, None, None);
    let socket = ctl::socket(args.control, usage);
    if let Some(address) = args.serve {
        // Who names the wrong socket should not have to look at an empty page.
        watch::take(&socket)?;
        let (remote, names, past) = (args.serve_remote, args.serve_name, args.history);
        let serve = Serve { address, remote, names, past };
        return page::serve(serve, socket, args.interval);
    }
    if args.once || args.json || !std::io::stdout().is_terminal() {
        let mut figures = sample(&socket, args.interval)?;
        app::sort(&mut figures.disks, args.sort);
        let text = match args.json {
            true => serde_json::to_string_pretty(&figures)? + "\n",
            false => plain::text(&figures),
        };
        ringway_terminal::output::print(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    // Who names the wrong socket should not have to look at an empty screen.
    watch::take(&socket)?;
    let app = App::new(socket.display().to_string(), args.interval, args.sort);
    let watch = Watch::start(socket, args.interval).context("cannot start a thread")?;
    let signal = Arc::new(AtomicUsize::new(0));
    // Ctrl-C is a key, as long as the terminal is ours.
    for number in ringway_terminal::signals::that_end() {
        signal_hook::flag::register_usize(number, Arc::clone(&signal), usize::try_from(number)?)?;
    }
    let terminal = ratatui::try_init().context("cannot take over the terminal: try --once")?;
    std::thread::Builder::new()
        .name("terminal".into())
        .spawn(end_with_the_terminal)
        .context("cannot start a thread")?;
    let ended = show(terminal, app, &watch, &signal);
    ratatui::restore();
    ended
}

/// Two answers, so far apart.
fn sample(socket: &Path, time: Duration) -> anyhow::Result<Figures> {
    let mut samples = Samples::default();
    samples.push(watch::take(socket)?);
    std::thread::sleep(time);
    samples.push(watch::take(socket)?);
    let figures = samples.figures().context("the daemon said nothing")?;
    ensure!(
        figures.seconds.is_some(),
        "{}: the daemon was started anew meanwhile",
        socket.display()
    );
    Ok(figures)
}

/// Ends the program once the other end of its terminal is gone: reading keys from it finds no end, and
/// there is nothing to restore. SIGHUP comes to those only whose controlling terminal it is.
fn end_with_the_terminal() {
    let terminal = std::io::stdout();
    loop {
        // Nothing is asked for: a hang-up and errors are reported anyway.
        let mut polled = [PollFd::new(&terminal, PollFlags::empty())];
        match poll(&mut polled, None) {
            Ok(_) => break,
            Err(Errno::INTR) => {}
            // No way to know.
            Err(_) => return,
        }
    }
    std::process::exit(128 + signal_hook::consts::SIGHUP);
}

/// How long a key or an answer may wait before it is looked at.
const TICK: Duration = Duration::from_millis(50);

fn show(
    mut terminal: DefaultTerminal,
    mut app: App,
    watch: &Watch,
    signal: &AtomicUsize,
) -> anyhow::Result<ExitCode> {
    let mut changed = true;
    loop {
        while let Ok(answer) = watch.answers.try_recv() {
            // What was asked before the pause does not count.
            if !app.paused {
                app.hear(answer);
                changed = true;
            }
        }
        if changed {
            terminal.draw(|frame| draw::draw(frame, &mut app))?;
        }
        changed = event::poll(TICK)?;
        if changed {
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => {
                    let wish = app.press(key);
                    if wish.quit {
                        return Ok(ExitCode::SUCCESS);
                    }
                    if let Some(command) = wish.command {
                        watch.send(command);
                    }
                }
                // Most others are a new size of the terminal.
                _ => {}
            }
        }
        let number = signal.load(Relaxed);
        if number != 0 {
            return Ok(ExitCode::from(u8::try_from(128 + number).unwrap_or(1)));
        }
    }
}
