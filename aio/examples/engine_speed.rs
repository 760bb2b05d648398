//! How fast each engine is: random reads (or writes) of 4 KiB on one file, and the CPU time of each.
//!
//! ```text
//! engine_speed [--write] [--cached] [--seconds N] [--size MIB] [--depth N,N] [--engine NAME,NAME]
//!              [--block BYTES] [--map] [--without FEATURE,FEATURE] FILE...
//! ```
//!
//! `iopoll` is io_uring that polls the device; of a file that cannot be polled it is io_uring as ever.
//!
//! A FILE that is missing is made, filled and removed again. CPU time is the whole process's: that
//! of the owner and of all threads that work for it, those of the kernel's pool included.

use ringway_aio::io_uring::{Feature, can_poll};
use ringway_aio::{
    Engine, Io, IoMemory, IoOp, IoUring, IoUringSetup, LinuxAio, Null, Reaped, Threads,
    ThreadsSetup,
};
use ringway_core::Segment;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

struct Options {
    op: IoOp,
    direct: bool,
    seconds: f64,
    mib: usize,
    block: usize,
    map: bool,
    without: Vec<Feature>,
    depths: Vec<u32>,
    engines: Vec<String>,
    files: Vec<String>,
}

fn main() -> io::Result<()> {
    let options = parse();
    println!(
        "{:>20} {:>10} {:>6} {:>12} {:>10} {:>10} {:>10} {:>9}",
        "file", "engine", "depth", "IOPS", "CPU ns/IO", "owner ns", "calls/IO", "per reap"
    );
    for path in &options.files {
        let made = !fs::exists(path)?;
        if made {
            make(path, options.mib)?;
        }
        for &depth in &options.depths {
            for name in &options.engines {
                if let Err(e) = measure(path, name, depth, &options) {
                    println!("{path:>20} {name:>10} {depth:>6} {e}");
                }
            }
        }
        if made {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

fn parse() -> Options {
    let list = |s: &str| s.split(',').map(str::to_owned).collect::<Vec<_>>();
    let mut options = Options {
        op: IoOp::Read,
        direct: true,
        seconds: 2.0,
        mib: 256,
        block: 4096,
        map: false,
        without: Vec::new(),
        depths: vec![1, 64, 128],
        engines: list("null,threads,io_uring,linux-aio"),
        files: Vec::new(),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().expect("an option's value");
        match argument.as_str() {
            "--write" => options.op = IoOp::Write,
            "--cached" => options.direct = false,
            "--seconds" => options.seconds = value().parse().expect("seconds"),
            "--size" => options.mib = value().parse().expect("MiB"),
            "--block" => options.block = value().parse().expect("bytes"),
            "--without" => options.without = list(&value()).iter().map(|n| feature(n)).collect(),
            "--map" => options.map = true,
            "--depth" => {
                options.depths = list(&value()).iter().map(|d| d.parse().expect("depth")).collect();
            }
            "--engine" => options.engines = list(&value()),
            _ => options.files.push(argument),
        }
    }
    options
}

fn feature(name: &str) -> Feature {
    Feature::ALL.into_iter().find(|f| f.name() == name).expect("a feature of io_uring")
}

fn make(path: &str, mib: usize) -> io::Result<()> {
    let mut file = File::create(path)?;
    let piece = vec![0x5a; 1 << 20];
    for _ in 0..mib {
        file.write_all(&piece)?;
    }
    file.sync_all()
}

fn engine(name: &str, depth: u32, without: &[Feature]) -> io::Result<Box<dyn Engine>> {
    Ok(match name {
        "null" => Box::new(Null::new(depth)?),
        "threads" => {
            Box::new(Threads::new(ThreadsSetup { depth, threads: 8, cached_inline: true })?)
        }
        "io_uring" => Box::new(IoUring::new(IoUringSetup { without, ..IoUringSetup::new(depth) })?),
        "iopoll" => Box::new(IoUring::new(IoUringSetup {
            without,
            iopoll: true,
            ..IoUringSetup::new(depth)
        })?),
        "linux-aio" => Box::new(LinuxAio::new(depth)?),
        _ => return Err(io::Error::new(io::ErrorKind::Unsupported, "no such engine")),
    })
}

fn measure(path: &str, name: &str, depth: u32, options: &Options) -> io::Result<()> {
    let block = options.block;
    let flags = if options.direct { libc::O_DIRECT } else { 0 };
    let mut file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    // Of devices too.
    let blocks = file.seek(SeekFrom::End(0))? / block as u64;
    if name == "iopoll" {
        can_poll(&file)?;
    }
    let mut engine = engine(name, depth, &options.without)?;
    let file = engine.attach(&Arc::new(file))?;
    let slots = depth as usize;
    let mut memory = vec![0u8; slots * block + 4096];
    let base = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(4096));
    let segments: Vec<_> =
        (0..slots).map(|i| [Segment { base: base.wrapping_add(i * block), len: block }]).collect();
    if options.map {
        // SAFETY: nothing is in flight, and the engine is dropped before the memory.
        unsafe { engine.map_memory(&[Segment { base, len: slots * block }]) }?;
    }
    let mut free: Vec<u64> = (0..depth.into()).collect();
    let mut out = Reaped::with_capacity(slots, 1);
    let (mut random, mut done, mut reaps) = (fastrand::Rng::with_seed(1), 0u64, 0u64);
    let (start, before) = (Instant::now(), (cpu(libc::RUSAGE_SELF), cpu(libc::RUSAGE_THREAD)));
    let mut turns = 0u64;
    while turns % 16 != 0 || start.elapsed().as_secs_f64() < options.seconds {
        turns += 1;
        while let Some(tag) = free.pop() {
            let slot = usize::try_from(tag).expect("a slot");
            let offset = random.u64(..blocks) * block as u64;
            let (len, memory) = (block as u64, IoMemory::Segments(&segments[slot]));
            let io = Io { tag, op: options.op, file, offset, len, memory };
            // SAFETY: a slot is free, so nothing else uses its memory; the engine is dropped first.
            unsafe { engine.queue(&io) }.expect("as many slots as depth");
        }
        engine.submit()?;
        let mut found = engine.reap(&mut out);
        if found == 0 {
            engine.wait(None)?;
            found = engine.reap(&mut out);
        }
        reaps += u64::from(found > 0);
        done += found as u64;
        for one in out.done.drain(..) {
            assert!(one.result > 0, "{}", io::Error::from_raw_os_error(-one.result));
            free.push(one.tag);
        }
    }
    let took = start.elapsed();
    let all = cpu(libc::RUSAGE_SELF) - before.0;
    let owner = cpu(libc::RUSAGE_THREAD) - before.1;
    let counters = engine.counters();
    drop(engine);
    #[allow(clippy::cast_precision_loss)]
    let (done, reaps, calls) = (done as f64, reaps as f64, counters.syscalls as f64);
    println!(
        "{path:>20} {name:>10} {depth:>6} {:>12.0} {:>10.0} {:>10.0} {:>10.4} {:>9.1}",
        done / took.as_secs_f64(),
        all.as_secs_f64() * 1e9 / done,
        owner.as_secs_f64() * 1e9 / done,
        calls / done,
        done / reaps,
    );
    Ok(())
}

fn cpu(who: i32) -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills the structure in; zeroes are valid if it does not.
    let usage = unsafe {
        libc::getrusage(who, usage.as_mut_ptr());
        usage.assume_init()
    };
    let time = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec.unsigned_abs())
            + Duration::from_micros(t.tv_usec.unsigned_abs())
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}
