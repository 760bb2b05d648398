//! What goes to standard output: all of it arrives, or the command fails.

use anyhow::Context;
use std::io::{ErrorKind, Write};

/// Prints `text` as it is. A reader that has gone (`| head`) is no failure.
///
/// # Errors
/// Standard output that takes no more: a full disk, say.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = anstream::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}
