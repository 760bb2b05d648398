//! What the process of a disk was asked.

use super::process::PendingAnswer;
use ringway_control::protocol::{Problem, ProblemKind};
use serde_json::Value;
use std::time::Duration;

/// An answer that is to come.
pub(crate) struct Pending {
    pub(super) image: String,
    pub(super) answer: Option<PendingAnswer>,
}

impl Pending {
    /// Waits for it.
    ///
    /// # Errors
    /// What the process finds wrong, or that it does not answer.
    pub(crate) fn wait(self, timeout: Duration) -> Result<Value, Problem> {
        let silent =
            |what: &str| Problem::new(ProblemKind::Failed, format!("{}: {what}", self.image));
        let Some(answer) = self.answer else {
            return Err(silent(
                "its process has ended and is being started again: try again later",
            ));
        };
        use std::sync::mpsc::RecvTimeoutError::{Disconnected, Timeout};
        match answer.recv_timeout(timeout) {
            Ok(outcome) => outcome,
            Err(Timeout) => Err(silent("its process does not answer")),
            Err(Disconnected) => Err(silent("its process has ended meanwhile: see list")),
        }
    }
}
