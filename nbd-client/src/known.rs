//! What is known of an export before its server is asked.

use crate::handshake::Negotiated;

/// What was agreed upon with a server, for as long as it is away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// What was agreed upon.
    pub negotiated: Negotiated,
    /// What the server called the export, if it told.
    pub export: Option<String>,
    /// How many connections there were.
    pub connections: u16,
}
