//! Hammers a vhost-user-blk server with random reads and prints IOPS and CPU time.
//!
//! `cargo run --release -p ringway-driver --example hammer -- SOCKET [name=value…]` with
//! depth (32), queues (1), seconds (3), size (4096 bytes), poll (1: spin, 0: sleep), write (0),
//! indirect (scarce, never, always), event_idx (1), packed (0), cpu (pin queue I to CPU cpu + I).

use ringway_driver::{BlkQueue, Buffer, BufferPool, Indirect, Options, QueueStats};
use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

#[derive(Clone, Copy)]
struct Load {
    depth: u64,
    size: u64,
    blocks: u64,
    seconds: f64,
    poll: bool,
    write: bool,
}

struct Outcome {
    seconds: f64,
    cpu_seconds: f64,
    errors: u64,
    stats: QueueStats,
}

fn main() -> std::process::ExitCode {
    match hammer() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hammer: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn hammer() -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut args = std::env::args().skip(1);
    let socket = args.next().ok_or("usage: hammer SOCKET [depth=32 queues=1 seconds=3 …]")?;
    let given: HashMap<String, String> =
        args.filter_map(|arg| arg.split_once('=').map(|(k, v)| (k.into(), v.into()))).collect();
    let number = |name: &str, default: u64| -> Result<u64, String> {
        given.get(name).map_or(Ok(default), |v| v.parse().map_err(|e| format!("{name}: {e}")))
    };
    let indirect = match given.get("indirect").map(String::as_str) {
        Some("never") => Indirect::Never,
        Some("always") => Indirect::Always,
        _ => Indirect::WhenScarce,
    };
    let (depth, size) = (number("depth", 32)?, number("size", 4096)?);
    let queues = u16::try_from(number("queues", 1)?)?;
    let mut device = Options::new()
        .queues(queues)
        .queue_size(u16::try_from(number("queue_size", 256)?)?)
        .indirect(indirect)
        .event_idx(number("event_idx", 1)? != 0)
        .packed(number("packed", 0)? != 0)
        .memory(usize::try_from((depth * size * u64::from(queues)).max(1 << 20) * 2)?)
        .patience(Duration::from_secs(2))
        .connect(&socket)?;
    let load = Load {
        depth,
        size,
        blocks: (device.capacity() / size).max(1),
        seconds: number("seconds", 3)? as f64,
        poll: number("poll", 1)? != 0,
        write: number("write", 0)? != 0,
    };
    let cpu = given.get("cpu").map(|cpu| cpu.parse::<usize>()).transpose()?;
    let threads: Vec<_> = device
        .queues::<()>()?
        .into_iter()
        .enumerate()
        .map(|(index, queue)| {
            let (pool, cpu) = (device.pool(), cpu.map(|cpu| cpu + index));
            std::thread::spawn(move || run(queue, &pool, load, cpu, index as u64))
        })
        .collect();
    let (mut iops, mut cpu_ns, mut all) = (0.0, 0.0, QueueStats::default());
    let mut errors = 0;
    for thread in threads {
        let outcome = thread.join().map_err(|_| "a queue's thread panicked")??;
        iops += outcome.stats.completed as f64 / outcome.seconds;
        cpu_ns += outcome.cpu_seconds * 1e9;
        errors += outcome.errors;
        all.completed += outcome.stats.completed;
        all.kicks += outcome.stats.kicks;
        all.sleeps += outcome.stats.sleeps;
    }
    let per_io = |count: f64| count / (all.completed.max(1) as f64);
    println!(
        "{iops:.0} IOPS  {:.1} client CPU ns/IO  {:.4} kicks/IO  {:.4} sleeps/IO  {errors} errors",
        per_io(cpu_ns),
        per_io(all.kicks as f64),
        per_io(all.sleeps as f64),
    );
    Ok(())
}

fn run(
    mut queue: BlkQueue<()>,
    pool: &BufferPool,
    load: Load,
    cpu: Option<usize>,
    seed: u64,
) -> Result<Outcome, Box<dyn Error + Send + Sync>> {
    if let Some(cpu) = cpu {
        pin(cpu);
    }
    let mut random = fastrand::Rng::with_seed(seed);
    let mut offset = || random.u64(..load.blocks) * load.size;
    let mut start = |queue: &mut BlkQueue<()>, buffer: Buffer| {
        if load.write {
            queue.write(offset(), buffer, ())
        } else {
            queue.read(offset(), buffer, ())
        }
    };
    let len = usize::try_from(load.size)?;
    for _ in 0..load.depth {
        let mut buffer = pool.alloc(len).ok_or("out of shared memory")?;
        buffer.fill(1);
        start(&mut queue, buffer).map_err(|e| e.why)?;
    }
    let (begin, cpu_begin) = (Instant::now(), thread_cpu());
    let (mut turns, mut errors) = (0u32, 0);
    loop {
        if load.poll {
            queue.wait_polling(None)?
        } else {
            queue.wait(None)?
        };
        while let Some(done) = queue.pop()? {
            errors += u64::from(!done.is_ok());
            let buffer = done.into_buffer().ok_or("a buffer is lost")?;
            start(&mut queue, buffer).map_err(|e| e.why)?;
        }
        turns += 1;
        if turns % 256 == 0 && begin.elapsed().as_secs_f64() >= load.seconds {
            break;
        }
    }
    let (seconds, cpu_seconds) = (begin.elapsed().as_secs_f64(), thread_cpu() - cpu_begin);
    let stats = queue.stats();
    queue.submit()?;
    while queue.wait(Some(Duration::from_secs(5)))? {
        queue.completions().for_each(drop);
    }
    Ok(Outcome { seconds, cpu_seconds, errors, stats })
}

/// CPU time of this thread, in seconds.
fn thread_cpu() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is ours to write.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn pin(cpu: usize) {
    // SAFETY: a cpu_set_t of zeroes is empty; the calls only touch it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
    }
}
