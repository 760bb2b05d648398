//! What was measured of one target.

use crate::outcome::Outcome;

/// One target with all that was measured of it.
pub(crate) struct Measured {
    /// As it was named.
    pub(crate) name: String,
    /// What it is.
    pub facts: String,
    /// One without `--vs`.
    pub rounds: Vec<Outcome>,
}
