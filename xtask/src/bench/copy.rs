//! `ringway copy` beside `qemu-img convert` and `cp`, in turn, from one half-sparse image.

use crate::bench::lab::Lab;
use crate::bench::report::{Report, Table};
use anyhow::{Context, Result, bail};
use clap::Args;
use ringway_bench::median;
use serde_json::json;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// What is copied, and where.
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// Size of the image, every other MiB of it a hole.
    #[arg(long, default_value_t = 4096, value_name = "MIB")]
    mib: u64,
    /// The folder for the image and its copies, on the disk to measure.
    #[arg(long, default_value = "/var/tmp", value_name = "FOLDER")]
    folder: PathBuf,
    /// Leave the image in the page cache.
    #[arg(long)]
    warm: bool,
    /// Further options of `ringway copy`, separated by blanks.
    #[arg(long, default_value = "", allow_hyphen_values = true, value_name = "OPTIONS")]
    options: String,
}

/// Who copies. The last one is made durable by `sync`, as the others are by themselves; `cp` alone
/// leaves the data in memory.
const CONTESTANTS: [&str; 4] = ["ringway copy", "qemu-img convert", "cp", "cp, then sync"];

/// Measures and tabulates.
pub(crate) fn run(lab: &Lab, args: &CopyArgs) -> Result<Report> {
    // Not only on the core of a client.
    crate::bench::options::pin(&(0..ringway_bench::usage::machine().1).collect::<Vec<_>>())?;
    let home = tempfile::Builder::new().prefix("ringway-copy-").tempdir_in(&args.folder)?;
    let (source, copy) = (home.path().join("source"), home.path().join("copy"));
    make(&source, args.mib).context("cannot make the image")?;
    let mut seconds = vec![Vec::new(); CONTESTANTS.len()];
    for round in 0..lab.common.rounds {
        let mut order: Vec<_> = (0..CONTESTANTS.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for who in order {
            if !args.warm {
                forget(&source)?;
            }
            rustix::fs::sync();
            let begin = Instant::now();
            for mut command in commands(lab, args, who, &source, &copy) {
                let status = command.stdout(Stdio::null()).status();
                let name = command.get_program().to_string_lossy().into_owned();
                let status = status.with_context(|| format!("cannot run {name}"))?;
                if !status.success() {
                    bail!("{name} failed: {status}");
                }
            }
            seconds[who].push(begin.elapsed().as_secs_f64());
            eprintln!("{}: {:.2} s", CONTESTANTS[who], begin.elapsed().as_secs_f64());
            std::fs::remove_file(&copy)?;
        }
    }
    let medians: Vec<_> = seconds.iter().map(|all| median(all.clone()).unwrap_or(0.0)).collect();
    let rows = CONTESTANTS.iter().zip(&seconds).zip(&medians).map(|((name, all), middle)| {
        let (low, high) = all.iter().fold((f64::MAX, 0f64), |(l, h), &s| (l.min(s), h.max(s)));
        vec![
            (*name).to_owned(),
            format!("{middle:.2}"),
            format!("{low:.2}–{high:.2}"),
            format!("{:.0}", args.mib as f64 / middle),
            format!("{:.2}", middle / medians[0]),
        ]
    });
    let cache = if args.warm { "in the page cache" } else { "not in the page cache" };
    let table = Table {
        title: format!("Copy of {} MiB, half of it holes, {cache}", args.mib),
        head: vec!["who", "s", "min–max", "MiB/s", "to ours"],
        rows: rows.collect(),
        notes: vec![
            "qemu-img: -W -m 16 -T none -t none. cp: --sparse=always, which leaves the data in \
             memory; sync makes them durable as the first two are. to ours: times as long."
                .into(),
        ],
    };
    let data = json!(CONTESTANTS.iter().zip(&seconds).collect::<Vec<_>>());
    Ok(Report { name: "copy", tables: vec![table], data })
}

fn commands(lab: &Lab, args: &CopyArgs, who: usize, from: &Path, to: &Path) -> Vec<Command> {
    let make = |program: &Path, words: &[&str], paths: &[&Path]| {
        let mut command = Command::new(program);
        command.args(words).args(paths);
        command
    };
    let cp = || make(Path::new("cp"), &["--sparse=always"], &[from, to]);
    let options: Vec<_> = args.options.split_whitespace().collect();
    let convert =
        ["convert", "-W", "-m", "16", "-T", "none", "-t", "none", "-f", "raw", "-O", "raw"];
    match who {
        0 => vec![make(&lab.daemon, &[&["copy"], &options[..]].concat(), &[from, to])],
        1 => vec![make(Path::new("qemu-img"), &convert, &[from, to])],
        2 => vec![cp()],
        _ => vec![cp(), make(Path::new("sync"), &[], &[to])],
    }
}

/// Every other MiB data that no zeroes are found in.
fn make(path: &Path, mib: u64) -> Result<()> {
    let file = File::create(path)?;
    file.set_len(mib << 20)?;
    let mut data = vec![0; 1 << 20];
    let mut random = 1u64;
    for offset in (0..mib << 20).step_by(2 << 20) {
        for word in data.chunks_exact_mut(8) {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            word.copy_from_slice(&random.to_le_bytes());
        }
        file.write_all_at(&data, offset)?;
    }
    Ok(file.sync_all()?)
}

/// Drops the image from the page cache.
fn forget(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    // SAFETY: no memory takes part.
    let rc = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    if rc == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(rc).into()) }
}
