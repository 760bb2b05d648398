//! Names that others chose, for people to read.

use std::path::Path;

/// A name from a header as text that does nothing to a terminal: control characters are escaped.
#[must_use]
pub fn printable(name: &Path) -> String {
    let mut text = String::new();
    for c in name.to_string_lossy().chars() {
        if c.is_control() { text.extend(c.escape_default()) } else { text.push(c) }
    }
    text
}
