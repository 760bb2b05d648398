//! Writes to a served disk, whose server is killed and started again meanwhile, and then reads all of it
//! back: each block has what was last acknowledged. `survive-kills SOCKET MIB STOP` writes until there is a
//! file STOP, and makes STOP.begun once a first write is done: from then on its server may be killed.

use anyhow::{Context, Result, anyhow, bail, ensure};
use ringway_driver::{BlkQueue, BufferPool, Options};
use std::path::Path;
use std::time::Duration;

const BLOCK: usize = 4096;
/// Bytes of the first piece of writes in two pieces.
const FIRST: usize = 1024;
/// Writes in flight, all the time.
const DEPTH: usize = 32;
/// VIRTIO_BLK_F_FLUSH.
const FLUSH: u64 = 1 << 9;
/// A daemon on a busy machine, in a guest, is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// One write: its block, and which one of that block it is.
type Write = (usize, u32);

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let [_, socket, mib, stop] = &args[..] else { bail!("usage: survive-kills SOCKET MIB STOP") };
    let blocks = (mib.parse::<usize>()? << 20) / BLOCK;
    let options = Options::new().patience(PATIENCE).reconnect(PATIENCE).queue_size(256);
    // Without flushes each write has to be durable by itself.
    let options = options.without_features(FLUSH);
    let mut device = options.memory(4 * DEPTH * BLOCK + (1 << 20)).connect(socket)?;
    let mut queue: BlkQueue<Write> = device.queue()?;
    let mut written = vec![0u32; blocks];
    let mut busy = vec![false; blocks];
    let (mut random, mut count) = (1u64, 0u64);
    loop {
        let stopped = Path::new(stop).exists();
        if stopped && queue.in_flight() == 0 {
            break;
        }
        while usize::from(queue.in_flight()) < DEPTH && !stopped {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let block = usize::try_from(random >> 33)? % blocks;
            if std::mem::replace(&mut busy[block], true) {
                continue;
            }
            let write = (block, written[block] + 1);
            start(&mut queue, &device.pool(), write)?;
        }
        ensure!(queue.wait(Some(PATIENCE))?, "no answer after {count} writes");
        while let Some(done) = queue.pop()? {
            let (block, version) = done.ctx;
            ensure!(done.is_ok(), "write {version} of block {block} fails");
            (written[block], busy[block], count) = (version, false, count + 1);
            if count == 1 {
                std::fs::write(format!("{stop}.begun"), "")?;
            }
        }
    }
    for (block, &version) in written.iter().enumerate().filter(|(_, version)| **version > 0) {
        let buffer = device.pool().alloc(BLOCK).context("out of shared memory")?;
        let at = (block * BLOCK) as u64;
        queue.read(at, buffer, (block, version)).map_err(|refused| anyhow!("{refused:?}"))?;
        ensure!(queue.wait(Some(PATIENCE))?, "no answer to a read");
        let done = queue.pop()?.context("an answer was announced")?;
        ensure!(done.is_ok(), "reading block {block} fails");
        let buffer = done.into_buffer().context("a read has a buffer")?;
        // Two pieces that change places: the memory's first one is the block's last one.
        let shift = if block % 3 == 0 { FIRST / 8 } else { 0 };
        let place_of = |at| (at + shift) % (BLOCK / 8);
        let mut words = buffer.chunks(8).enumerate();
        ensure!(
            words.all(|(at, word)| word == content(block, version, place_of(at))),
            "block {block} does not have write {version} of {count} writes in all"
        );
    }
    println!("{count} writes are all there");
    Ok(())
}

/// What the word at `place` of a block is.
fn content(block: usize, version: u32, place: usize) -> [u8; 8] {
    ((block as u64) << 48 | (place as u64) << 32 | u64::from(version)).to_le_bytes()
}

/// Some writes are in two pieces that neither begin nor end with a page.
fn start(queue: &mut BlkQueue<Write>, pool: &BufferPool, (block, version): Write) -> Result<()> {
    let mut buffer = pool.alloc(BLOCK).context("out of shared memory")?;
    for (place, word) in buffer.chunks_mut(8).enumerate() {
        word.copy_from_slice(&content(block, version, place));
    }
    let (at, write) = ((block * BLOCK) as u64, (block, version));
    let queued = if block % 3 == 0 {
        let (first, second) = buffer.split_at(FIRST);
        queue.write_vectored(at, vec![second, first], write)
    } else {
        queue.write(at, buffer, write)
    };
    queued.map_err(|refused| anyhow!("{refused:?}"))?;
    queue.submit()?;
    Ok(())
}
