//! A disk behind a socket, one request at a time.

use anyhow::{Context, bail};
use ringway_driver::{BlkQueue, BufferPool, Completion};
use std::time::Duration;

/// How long a request may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Waits for the one request in flight.
///
/// # Errors
/// A server that has gone, that breaks the rules, or does not answer.
pub(crate) fn finish<C>(queue: &mut BlkQueue<C>) -> anyhow::Result<Completion<C>> {
    if !queue.wait(Some(TIMEOUT))? {
        bail!("the server has not answered for {} s", TIMEOUT.as_secs());
    }
    queue.pop()?.context("the server called without an answer")
}

/// The serial number; `None` if the server has none to tell.
///
/// # Errors
/// As [`finish`].
pub(crate) fn serial<C>(
    queue: &mut BlkQueue<C>,
    pool: &BufferPool,
    ctx: C,
) -> anyhow::Result<Option<String>> {
    let buffer = pool.alloc(20).context("out of shared memory")?;
    queue.get_id(buffer, ctx).map_err(|rejected| rejected.why)?;
    let done = finish(queue)?;
    if !done.is_ok() {
        return Ok(None);
    }
    let bytes = done.into_buffer().context("a buffer is lost")?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_end_matches('\0').trim();
    Ok((!text.is_empty()).then(|| text.to_owned()))
}
