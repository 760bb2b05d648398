//! What the log can be told. The fuzzers take this file by its path: it needs nothing of the program.

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
pub(crate) enum LogFormat {
    // One line each.
    #[default]
    Text,
    // One object each.
    Json,
}

/// What to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogLevel {
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
