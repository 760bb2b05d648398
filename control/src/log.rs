//! What a log can be told: how much to say, and how.

use clap::{ArgAction, Args};

/// How log lines look.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    clap::ValueEnum,
    serde::Deserialize,
    serde::Serialize,
)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "a doc comment would be a line of the help")]
pub enum LogFormat {
    // One line each.
    #[default]
    Text,
    // One object each.
    Json,
}

/// What to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Failures.
    Error,
    /// Also what looks wrong.
    Warn,
    /// Also who comes and goes.
    Info,
    /// Also each message of the control plane.
    Debug,
    /// Everything.
    Trace,
}

/// How much to say, and how.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct LogArgs {
    /// Log more; twice for everything.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// Log warnings and errors only, and print nothing when ready.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// How log lines look (they go to standard error).
    #[arg(long, global = true, value_enum, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
}
