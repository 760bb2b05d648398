//! Reads from a served disk, MiB by MiB, into shared memory that nobody has touched, and keeps it: whoever
//! serves the disk has to fill it. `fill-memory SOCKET MIB`

use anyhow::{Context, Result, anyhow, bail, ensure};
use ringway_driver::{BlkQueue, Options};
use std::time::Duration;

const MIB: usize = 1 << 20;

/// A daemon on a busy machine, in a guest, is slow.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let [_, socket, mib] = &args[..] else { bail!("usage: fill-memory SOCKET MIB") };
    let mib: usize = mib.parse()?;
    let options = Options::new().patience(PATIENCE).memory((mib + 1) * MIB);
    let mut device = options.connect(socket)?;
    let mut queue: BlkQueue<()> = device.queue()?;
    let mut held = Vec::new();
    for filled in 0..mib {
        let ended = || format!("it ended after {filled} MiB");
        let buffer = device.pool().alloc(MIB).context("out of shared memory")?;
        queue.read(0, buffer, ()).map_err(|refused| anyhow!("{refused:?}")).with_context(ended)?;
        ensure!(queue.wait(Some(PATIENCE)).with_context(ended)?, "no answer after {filled} MiB");
        let done = queue.pop().with_context(ended)?.context("an answer was announced")?;
        ensure!(done.is_ok(), "read number {filled} fails");
        held.push(done.into_buffer().context("a read has a buffer")?);
    }
    println!("{} MiB were filled", held.len());
    Ok(())
}
