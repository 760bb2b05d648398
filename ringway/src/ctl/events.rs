//! `ringway ctl events`: copies what the daemon tells, line by line.

use anyhow::{Context, bail};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Prints the events that come on a connection to the daemon at `path`, until that ends, or nobody reads any
/// more.
///
/// # Errors
/// One message: the daemon has ended.
pub(super) fn print(path: &Path, mut lines: BufReader<UnixStream>) -> anyhow::Result<()> {
    lines.get_ref().set_read_timeout(None)?;
    let mut line = Vec::new();
    let mut out = std::io::stdout().lock();
    loop {
        line.clear();
        let got = lines.read_until(b'\n', &mut line);
        if got.with_context(|| path.display().to_string())? == 0 {
            bail!("{}: the daemon has ended", path.display());
        }
        match out.write_all(&line).and_then(|()| out.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            written => written.context("cannot write to standard output")?,
        }
    }
}
