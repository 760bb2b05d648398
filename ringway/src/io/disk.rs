//! A disk behind a socket, one request at a time.

use anyhow::{Context, ensure};
use ringway_driver::{BlkQueue, BufferPool, Completion};
use std::time::Duration;

/// How long a server may take to say what it is called, which asks no storage.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Waits for the one request in flight, as long as its server is there: a disk may take minutes to flush.
///
/// # Errors
/// A server that has gone, or that breaks the rules.
pub(crate) fn finish<C>(queue: &mut BlkQueue<C>) -> anyhow::Result<Completion<C>> {
    loop {
        queue.wait(None)?;
        if let Some(done) = queue.pop()? {
            return Ok(done);
        }
        ensure!(queue.in_flight() > 0, "the server called without an answer");
    }
}

/// The serial number; `None` if the server has none to tell.
///
/// # Errors
/// As [`finish`], and a server that does not answer.
pub(crate) fn serial<C>(
    queue: &mut BlkQueue<C>,
    pool: &BufferPool,
    ctx: C,
) -> anyhow::Result<Option<String>> {
    let buffer = pool.alloc(20).context("out of shared memory")?;
    queue.get_id(buffer, ctx).map_err(|rejected| rejected.why)?;
    ensure!(queue.wait(Some(TIMEOUT))?, "the server has not answered for {} s", TIMEOUT.as_secs());
    let done = queue.pop()?.context("the server called without an answer")?;
    if !done.is_ok() {
        return Ok(None);
    }
    let bytes = done.into_buffer().context("a buffer is lost")?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_end_matches('\0').trim();
    Ok((!text.is_empty()).then(|| text.to_owned()))
}
