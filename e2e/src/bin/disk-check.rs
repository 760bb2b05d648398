//! `disk-check SEED DISK…`: writes to disks of a guest, reads back, discards.
//!
//! Each CPU has a quarter of each disk and a thread that is bound to it, so that each queue has work.
//! A quarter gets one long write, which the driver cuts into as many requests as the ring holds or
//! the disk allows, and small ones at odd places; then a flush. It is read by the next CPU in other
//! shapes and compared, with the gaps between; a sum is told. Then the disk is discarded, and has to
//! read as zeroes: the next call finds nothing of this one.
//!
//! One line for each disk: its name, then `ok` and a checksum of what was read, or what is wrong.
//!
//! It is one program because programs are what is dear on an emulated CPU.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Mutex;

/// What each CPU has of each disk, in bytes.
const QUARTER: usize = 1 << 20;
const CPUS: usize = 4;
/// The long write.
const LONG: usize = 768 << 10;
/// What one read asks for: every second one begins amid a long request.
const READ: usize = 256 << 10;
/// `BLKDISCARD`.
const BLKDISCARD: libc::c_ulong = 0x1277;

/// Memory as O_DIRECT wants it.
#[repr(align(4096))]
struct Page(#[allow(dead_code)] [u8; 4096]);

struct Buffer(Vec<Page>);

impl Buffer {
    fn new(bytes: usize) -> Self {
        Self((0..bytes.div_ceil(4096)).map(|_| Page([0; 4096])).collect())
    }

    fn bytes(&mut self) -> &mut [u8] {
        self.0.as_flattened_pages()
    }
}

trait Flat {
    fn as_flattened_pages(&mut self) -> &mut [u8];
}

impl Flat for [Page] {
    fn as_flattened_pages(&mut self) -> &mut [u8] {
        // SAFETY: a page is 4096 bytes and nothing else, and pages of a slice lie end to end.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), self.len() * 4096) }
    }
}

/// The writes of a quarter: where in it, and how long.
fn pieces() -> impl Iterator<Item = (usize, usize)> {
    let pages = (0..6).map(|at| (LONG + at * (12 << 10), 4096));
    let sectors = (0..5).map(|at| (LONG + (128 << 10) + 512 * (3 * at + 1), 512));
    let odd = [(LONG + (192 << 10) + 1536, 1536)];
    [(0, LONG)].into_iter().chain(pages).chain(sectors).chain(odd)
}

/// What stands at byte `at` of a disk: a word that no other place, disk or round has.
fn word(seed: u64, disk: usize, at: usize) -> u64 {
    let mut mixed = seed ^ ((disk as u64) << 56) ^ (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 32)
}

fn fill(bytes: &mut [u8], seed: u64, disk: usize, from: usize) {
    for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        chunk.copy_from_slice(&word(seed, disk, from + 8 * at).to_ne_bytes());
    }
}

/// FNV-1a over words.
fn sum(sum: u64, bytes: &[u8]) -> u64 {
    bytes.chunks_exact(8).fold(sum, |sum, chunk| {
        let mut word = [0; 8];
        word.copy_from_slice(chunk);
        (sum ^ u64::from_ne_bytes(word)).wrapping_mul(0x0100_0000_01b3)
    })
}

struct Disk {
    name: String,
    file: File,
    sum: u64,
    trouble: Vec<String>,
}

fn open(name: &str) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_DIRECT);
    options.open(format!("/dev/{name}"))
}

fn bind(cpu: usize) -> io::Result<()> {
    // SAFETY: a set of CPUs is bits, all of which may be 0.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is ours, and `cpu` is far below its size.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the set lives for the call, which copies it.
    let bound = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
    if bound == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Writes and flushes a quarter.
fn write(file: &File, seed: u64, disk: usize, cpu: usize, memory: &mut [u8]) -> io::Result<()> {
    for (at, len) in pieces() {
        let from = cpu * QUARTER + at;
        fill(&mut memory[..len], seed, disk, from);
        file.write_all_at(&memory[..len], from as u64)?;
    }
    file.sync_data()
}

/// Reads a quarter and compares it; its sum, and what is wrong.
fn read(
    file: &File,
    seed: u64,
    disk: usize,
    cpu: usize,
    (memory, wanted): (&mut [u8], &mut [u8]),
) -> io::Result<(u64, Option<String>)> {
    wanted.fill(0);
    for (at, len) in pieces() {
        fill(&mut wanted[at..at + len], seed, disk, cpu * QUARTER + at);
    }
    for at in (0..QUARTER).step_by(READ) {
        file.read_exact_at(&mut memory[at..at + READ], (cpu * QUARTER + at) as u64)?;
    }
    let place = || memory.iter().zip(&*wanted).position(|(is, should)| is != should);
    let differs = if memory == wanted { None } else { place() };
    let differs = differs.map(|at| format!("differs at byte {}", cpu * QUARTER + at));
    Ok((sum(0, memory), differs))
}

/// Discards all, and looks at the first part of each quarter.
fn discard(file: &File, memory: &mut [u8]) -> io::Result<Option<String>> {
    let range = [0u64, (CPUS * QUARTER) as u64];
    // SAFETY: the argument is two numbers, which the call reads.
    if unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    for cpu in 0..CPUS {
        file.read_exact_at(&mut memory[..READ], (cpu * QUARTER) as u64)?;
        if let Some(at) = memory[..READ].iter().position(|&byte| byte != 0) {
            return Ok(Some(format!("byte {} is there after a discard", cpu * QUARTER + at)));
        }
    }
    Ok(None)
}

/// What one CPU does to one disk: its number, its file, the CPU, two buffers of a quarter.
type Step<'a> = &'a (
        dyn Fn(usize, &File, usize, (&mut [u8], &mut [u8])) -> io::Result<(u64, Option<String>)>
            + Sync
    );

/// Has each CPU do `step` to all disks.
fn on_each_cpu(disks: &Mutex<Vec<Disk>>, files: &[File], step: Step<'_>) {
    std::thread::scope(|scope| {
        for cpu in 0..CPUS {
            scope.spawn(move || {
                let bound = bind(cpu);
                let (mut memory, mut other) = (Buffer::new(QUARTER), Buffer::new(QUARTER));
                for (at, file) in files.iter().enumerate() {
                    let done = step(at, file, cpu, (memory.bytes(), other.bytes()));
                    let mut disks = disks.lock().expect("no thread panics");
                    let disk = &mut disks[at];
                    match done {
                        Ok((sum, trouble)) => {
                            disk.sum ^= sum;
                            disk.trouble.extend(trouble);
                        }
                        Err(error) => disk.trouble.push(format!("CPU {cpu}: {error}")),
                    }
                    if let Err(error) = &bound {
                        disk.trouble.push(format!("cannot run on CPU {cpu}: {error}"));
                    }
                }
            });
        }
    });
}

fn main() -> Result<(), String> {
    let mut words = std::env::args().skip(1);
    let seed = words.next().and_then(|word| word.parse().ok());
    let seed: u64 = seed.ok_or("usage: disk-check SEED DISK…")?;
    let seed = seed.wrapping_mul(0x94d0_49bb_1331_11eb);
    let mut disks = Vec::new();
    let mut files = Vec::new();
    for name in words {
        let file = open(&name).map_err(|error| format!("{name}: {error}"))?;
        files.push(file.try_clone().map_err(|error| format!("{name}: {error}"))?);
        disks.push(Disk { name, file, sum: 0, trouble: Vec::new() });
    }
    let disks = Mutex::new(disks);
    on_each_cpu(&disks, &files, &|disk, file, cpu, (memory, _)| {
        write(file, seed, disk, cpu, memory).map(|()| (0, None))
    });
    on_each_cpu(&disks, &files, &|disk, file, cpu, memory| {
        read(file, seed, disk, (cpu + 1) % CPUS, memory)
    });
    let mut memory = Buffer::new(READ);
    let mut said = String::new();
    let mut disks = disks.into_inner().map_err(|error| error.to_string())?;
    for disk in &mut disks {
        match discard(&disk.file, memory.bytes()) {
            Ok(trouble) => disk.trouble.extend(trouble),
            Err(error) => disk.trouble.push(format!("discard: {error}")),
        }
        let Disk { name, sum, trouble, .. } = disk;
        let _ = if trouble.is_empty() {
            writeln!(said, "{name} ok {sum:016x}")
        } else {
            writeln!(said, "{name} {}", trouble.join("; "))
        };
    }
    print!("{said}");
    Ok(())
}
