//! The bare file through an engine of `ringway-aio`: no device, no ring, no second process.

use anyhow::{Context, Result, bail};
use ringway_aio::{
    Engine, Io, IoMemory, IoOp, IoUring, IoUringSetup, LinuxAio, Reaped, Threads, ThreadsSetup,
};
use ringway_core::Segment;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is asked of the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Direct {
    pub(crate) depth: u32,
    pub(crate) size: usize,
    pub(crate) write: bool,
    pub(crate) sequential: bool,
    /// Load that is not counted.
    pub(crate) warmup: Duration,
    pub(crate) time: Duration,
}

/// Requests done, and the time they took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ran {
    pub(crate) done: u64,
    pub(crate) seconds: f64,
}

fn engine(name: &str, depth: u32) -> Result<Box<dyn Engine>> {
    Ok(match name {
        "threads" => {
            Box::new(Threads::new(ThreadsSetup { depth, threads: 16, cached_inline: true })?)
        }
        "io_uring" => Box::new(IoUring::new(IoUringSetup::new(depth))?),
        "linux-aio" => Box::new(LinuxAio::new(depth)?),
        _ => bail!("'{name}' is none of io_uring, linux-aio, threads"),
    })
}

/// Runs on this thread.
pub(crate) fn run(name: &str, path: &Path, direct: &Direct) -> Result<Ran> {
    let &Direct { depth, size, write, sequential, warmup, time } = direct;
    let options =
        OpenOptions::new().read(true).write(write).custom_flags(libc::O_DIRECT).open(path);
    let file = options.with_context(|| format!("cannot open {} with O_DIRECT", path.display()))?;
    let units = file.metadata()?.len() / size as u64;
    // A buffer per slot, each at the beginning of a page.
    let stride = size.next_multiple_of(4096);
    let slots = depth as usize;
    let mut memory = vec![0u8; slots * stride + 4096];
    memory.fill(0x5a);
    let first = memory.as_ptr().align_offset(4096);
    let base = memory.as_mut_ptr().wrapping_add(first);
    let segments: Vec<_> =
        (0..slots).map(|i| [Segment { base: base.wrapping_add(i * stride), len: size }]).collect();
    // Declared after memory and segments, so dropped before them.
    let mut engine = engine(name, depth)?;
    let file = engine.attach(&Arc::new(file))?;
    let mut free: Vec<u64> = (0..depth.into()).collect();
    let mut out = Reaped::with_capacity(slots, 1);
    let (mut random, mut next) = (fastrand::Rng::with_seed(1), 0);
    let (mut done, mut before, mut turns) = (0u64, 0u64, 0u64);
    let (mut start, mut warm) = (Instant::now(), false);
    loop {
        turns += 1;
        if !warm && start.elapsed() >= warmup {
            (warm, start, before) = (true, Instant::now(), done);
        } else if warm && turns % 16 == 0 && start.elapsed() >= time {
            break;
        }
        while let Some(tag) = free.pop() {
            next = if next + 1 < units { next + 1 } else { 0 };
            let offset = if sequential { next } else { random.u64(..units) } * size as u64;
            let op = if write { IoOp::Write } else { IoOp::Read };
            let memory = IoMemory::Segments(&segments[usize::try_from(tag)?]);
            let io = Io { tag, op, file, offset, len: size as u64, memory };
            // SAFETY: the slot is free, so nothing else uses its memory; the engine is dropped before
            // memory and segments. Reads and writes are offered by every engine, and these are small.
            if unsafe { engine.queue(&io) }.is_err() {
                bail!("an engine of depth {depth} takes fewer requests");
            }
        }
        engine.submit()?;
        if engine.reap(&mut out) == 0 {
            engine.wait(None)?;
            engine.reap(&mut out);
        }
        for one in out.done.drain(..) {
            if usize::try_from(one.result) != Ok(size) {
                let error = io::Error::from_raw_os_error(one.result.saturating_neg());
                return Err(error).with_context(|| format!("{name} on {}", path.display()));
            }
            done += 1;
            free.push(one.tag);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(Ran { done: done - before, seconds })
}
