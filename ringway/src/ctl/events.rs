//! `ringway ctl events`: copies what the daemon tells, line by line.

use super::{hear, say};
use anyhow::{Context, bail};
use serde_json::Map;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::Path;
use std::time::Duration;

/// How long the daemon may take to begin.
const PATIENCE: Duration = Duration::from_secs(10);

/// Prints events until the daemon ends, or nobody reads any more.
///
/// # Errors
/// One message: there is no such daemon, it refuses, or it has ended.
pub(super) fn print(path: &Path) -> anyhow::Result<()> {
    let stream = say(path, "events", Map::new(), PATIENCE)?;
    let mut lines = BufReader::new(stream.try_clone()?);
    if let Err(problem) = hear(path, &mut lines)? {
        bail!("{}", problem.message);
    }
    stream.set_read_timeout(None)?;
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
