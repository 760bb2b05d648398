//! Log lines: to standard error, for people or for machines.

mod words;

use crate::cli::LogArgs;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tracing::Level;
use tracing_subscriber::EnvFilter;
pub(crate) use words::{LogFormat, LogLevel};

static JSON: AtomicBool = AtomicBool::new(false);

/// True once machines read the log.
pub(crate) fn is_json() -> bool {
    JSON.load(Relaxed)
}

/// Starts logging. Options win over the file, and the environment's RUST_LOG over both.
pub(crate) fn start(args: &LogArgs, format: Option<LogFormat>, level: Option<LogLevel>) {
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
    let color = std::io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(color)
        .with_target(level >= Level::DEBUG);
    // Only a second call could fail, and there is none.
    let _ = if json {
        lines.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    } else {
        lines.try_init()
    };
}
