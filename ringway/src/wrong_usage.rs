//! Options that contradict each other or what they are said of, where clap does not see it.

/// Ends the program with status 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct WrongUsage(pub(crate) String);

/// As `anyhow::bail`.
macro_rules! wrong_usage {
    ($($words:tt)*) => {
        return Err($crate::wrong_usage::WrongUsage(format!($($words)*)).into())
    };
}
pub(crate) use wrong_usage;
