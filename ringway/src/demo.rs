//! `ringway demo`: a daemon serves a temporary disk, and this process plays its virtual machine.

mod args;
mod bench;
mod daemon;
mod pump;
mod verify;

use anyhow::{Context, bail};
pub(crate) use args::DemoArgs;
use daemon::Daemon;
use pump::{Interrupted, Queues};
use ringway_control::config;
use ringway_control::log::LogArgs;
use ringway_control::size::Size;
use ringway_server::{Attach, QemuVersion, attach_lines, disk_line};
use ringway_terminal::{logging, output, table};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

/// The smallest disk on which the demo makes sense, in bytes.
const SIZE_MIN: u64 = 16 << 20;

/// Carries out `ringway demo`.
///
/// # Errors
/// Data that is wrong, or anything that keeps the demo from running.
pub(crate) fn run(args: &DemoArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    logging::start(log, None, None);
    let signal = Arc::new(AtomicUsize::new(0));
    for number in ringway_terminal::signals::that_end() {
        let as_usize = usize::try_from(number)?;
        signal_hook::flag::register_usize(number, Arc::clone(&signal), as_usize)?;
    }
    match play(args, log, &signal) {
        Err(error) if error.is::<Interrupted>() => {
            let number = signal.load(std::sync::atomic::Ordering::Relaxed);
            Ok(ExitCode::from(u8::try_from(128 + number).unwrap_or(1)))
        }
        Err(error) => Err(error),
        Ok(()) => Ok(ExitCode::SUCCESS),
    }
}

fn play(args: &DemoArgs, log: &LogArgs, signal: &AtomicUsize) -> anyhow::Result<()> {
    let Size(bytes) = args.size.unwrap_or(Size(if args.quick { 64 << 20 } else { 256 << 20 }));
    if bytes < SIZE_MIN || bytes % 4096 != 0 {
        bail!("--size {}: the demo needs at least {}, in whole KiB", Size(bytes), Size(SIZE_MIN));
    }
    let folder = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    check_space(&folder, bytes)?;
    // Removed when this function returns, however it does.
    let home = tempfile::Builder::new()
        .prefix("ringway-demo-")
        .tempdir_in(&folder)
        .with_context(|| format!("{}: cannot make a folder here", folder.display()))?;
    let queues = args.queues.unwrap_or_else(|| config::cpus().min(4));
    let (mut daemon, socket) = Daemon::start(home.path(), bytes, queues, args, log)?;
    // The daemon has the image open and needs no name: nothing is left behind, whatever happens now.
    home.close().with_context(|| format!("{}: cannot clean up", folder.display()))?;
    let (name, facts) = daemon.disk();
    say(
        log,
        &format!(
            "A daemon serves a temporary disk in {}; this process is its virtual machine.\n",
            folder.display()
        ),
    )?;
    say(log, &disk_line(name, &facts))?;
    let mut device = ringway_driver::Options::new().queues(queues).over(socket)?;
    let rings = device.queues()?;
    let mut rings = Queues::new(rings, device.pool(), device.capacity(), signal);
    verify::run(&mut rings, |line| say(log, line))?;
    let seconds = if args.quick { 0.3 } else { 1.5 };
    let rows = bench::run(&mut rings, Duration::from_secs_f64(seconds))?;
    drop(rings);
    device.stop()?;
    daemon.wait()?;
    say(log, "")?;
    table::print(&bench::HEADER, rows)?;
    if !log.quiet {
        say(log, &next_steps(queues)?)?;
    }
    Ok(())
}

/// Refuses to fill a file system up.
fn check_space(folder: &Path, bytes: u64) -> anyhow::Result<()> {
    let host = rustix::fs::statvfs(folder)
        .with_context(|| format!("{}: cannot be used for the image", folder.display()))?;
    let free = host.f_bavail.saturating_mul(host.f_frsize);
    if free < bytes {
        bail!(
            "{}: the demo's image needs {}, but only {} are free. Use a smaller --size or another \
             --dir",
            folder.display(),
            Size(bytes),
            Size(free)
        );
    }
    Ok(())
}

/// The lines for the same with a real machine.
fn next_steps(queues: u16) -> anyhow::Result<String> {
    let socket = std::env::current_dir()?.join("disk.sock");
    let attach = [Attach { socket: &socket, queues, queue_size: 1024 }];
    Ok(format!(
        "\nThe same for a virtual machine:\n  \
         ringway serve disk.img --size 10G --socket disk.sock --queues {queues}\n\n{}",
        attach_lines(&attach, QemuVersion::installed()).trim_end()
    ))
}

fn say(log: &LogArgs, text: &str) -> anyhow::Result<()> {
    if log.quiet { Ok(()) } else { output::print(&format!("{text}\n")) }
}
