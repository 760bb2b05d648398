//! Log lines: to standard error, for people or for machines. Nobody who logs can be made to fail or
//! to wait by whoever reads them.

mod lines;
mod output;

use crate::reasons::in_full;
use anstream::{AutoStream, ColorChoice, adapter::strip_str};
use anstyle::{AnsiColor, Style};
use lines::{Lines, Writer};
use ringway_control::log::LogArgs;
use std::fmt::Write as _;
use std::io;
use std::os::fd::BorrowedFd;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tracing::Level;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

pub use output::print;
use ringway_control::log::{LogFormat, LogLevel};

static JSON: AtomicBool = AtomicBool::new(false);
static LINES: Lines = Lines::new();

/// How long the end of the program waits for its last lines to be written, and its start for the
/// first.
const LAST_LINES: Duration = Duration::from_secs(1);
/// How long a panic does.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// True once machines read the log.
pub fn is_json() -> bool {
    JSON.load(Relaxed)
}

/// Starts logging. Options win over the file, and the environment's RUST_LOG over both.
pub fn start(args: &LogArgs, format: Option<LogFormat>, level: Option<LogLevel>) {
    let level = match (args.quiet, args.verbose) {
        (true, _) => Level::WARN,
        (_, 1) => Level::DEBUG,
        (_, 2..) => Level::TRACE,
        _ => match level.unwrap_or(LogLevel::Info) {
            LogLevel::Error => Level::ERROR,
            LogLevel::Warn => Level::WARN,
            LogLevel::Info => Level::INFO,
            LogLevel::Debug => Level::DEBUG,
            LogLevel::Trace => Level::TRACE,
        },
    };
    let filter = EnvFilter::builder().with_default_directive(level.into()).from_env_lossy();
    let json = args.log_format.or(format).unwrap_or_default() == LogFormat::Json;
    JSON.store(json, Relaxed);
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Sink)
        .with_ansi(is_colored())
        // It would print them, and panic if it cannot.
        .log_internal_errors(false)
        .with_target(level >= Level::DEBUG);
    // Only a second call could fail, and there is none.
    let _ = if json {
        lines.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    } else {
        lines.try_init()
    };
}

/// This process is to serve guests: from now on logging blocks nobody. Until [`start_thread`] is
/// called, what standard error does not take at once waits.
pub fn serve_guests() {
    LINES.set_writer(Writer::CallerNow);
}

/// This process was forked: what its parent has logged is not its own to write.
pub fn after_fork() {
    LINES.forget();
}

/// Starts the thread that writes.
///
/// # Errors
/// What the host says to a thread.
pub fn start_thread() -> io::Result<()> {
    let write = || LINES.write_all(standard_error(), notice);
    std::thread::Builder::new().name("log".into()).spawn(write).map(drop)
}

/// Has panics written as lines of the log, on one line each and without a backtrace, which would read
/// the program's own file.
pub fn tell_panics() {
    std::panic::set_hook(Box::new(tell_panic));
}

/// The panics of the standard library after which it aborts.
const NO_WAY_ON: [&str; 2] =
    ["panic in a destructor during cleanup", "panic in a function that cannot unwind"];

/// Must neither panic nor block, wherever the panic came from: so it goes past `tracing`.
fn tell_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    let words = format!("thread '{name}' {panic}").replace('\n', " ");
    if LINES.push_last_words(line(Level::ERROR, &words, &[]), standard_error(), notice) {
        LINES.flush(LAST_WORDS, standard_error(), notice);
    }
    // Here the runtime would say once more that it aborts: to standard error, which may block.
    if NO_WAY_ON.iter().any(|reason| words.ends_with(reason)) {
        std::process::abort();
    }
}

/// Says what went wrong: to the log if it is for machines, else to the person.
pub fn complain(error: &anyhow::Error) {
    if is_json() {
        tracing::error!("{}", in_full(error));
        return;
    }
    let red: Style = AnsiColor::Red.on_default().bold();
    say(&format!("{red}error:{red:#} {}", in_full(error)));
}

/// Puts text of its own form between the lines.
pub fn say(text: &str) {
    let mut text = if is_colored() { text.to_owned() } else { strip_str(text).to_string() };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    LINES.push(text.into_bytes(), standard_error(), notice);
}

/// Waits a moment for all lines to be written: to be called before the process ends, or says that it
/// is ready.
pub fn finish() {
    LINES.flush(LAST_LINES, standard_error(), notice);
}

fn standard_error() -> BorrowedFd<'static> {
    rustix::stdio::stderr()
}

fn is_colored() -> bool {
    AutoStream::choice(&io::stderr()) != ColorChoice::Never
}

/// What `tracing` writes to, a whole line at a time.
struct Sink;

impl io::Write for Sink {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        LINES.push(line.to_vec(), standard_error(), notice);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn notice(lost: u64) -> Vec<u8> {
    let words = match lost {
        1 => "1 log line was lost here: nobody took it".to_owned(),
        _ => format!("{lost} log lines were lost here: nobody took them"),
    };
    line(Level::WARN, &words, &[("lost", lost)])
}

/// A line as `tracing` would make it.
fn line(level: Level, words: &str, fields: &[(&str, u64)]) -> Vec<u8> {
    let mut time = String::new();
    // Writing to a string cannot fail.
    let _ = SystemTime.format_time(&mut format::Writer::new(&mut time));
    let mut text = if is_json() {
        let mut object = serde_json::Map::new();
        object.insert("timestamp".into(), time.into());
        object.insert("level".into(), level.as_str().into());
        object.insert("message".into(), words.into());
        object.extend(fields.iter().map(|(name, value)| ((*name).into(), (*value).into())));
        serde_json::Value::from(object).to_string()
    } else {
        let mut text = String::new();
        let _ = write!(text, "{time} {:>5} {words}", level.as_str());
        text
    };
    text.push('\n');
    text.into_bytes()
}
