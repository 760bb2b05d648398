//! Images that are merged while nobody serves them: what `ringway commit` and `ringway flatten` have in
//! common.

use crate::copy::bar;
use crate::interrupt;
use crate::new_file::cannot_open;
use crate::waiting::nothing_waits;
use anyhow::{Context, bail, ensure};
use clap::{Args, ValueHint};
use ringway_control::log::LogArgs;
use ringway_control::size::Size;
use ringway_disk::open::repair_counts;
use ringway_disk::{LockError, lock_image, read_as_stored};
use ringway_image::{Chain, CopyRate, Format, Layer, Pulled, Top, printable, write_tables_again};
use ringway_terminal::{logging, output};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The longest time for which a signal is not heard.
const POLL_EVERY: Duration = Duration::from_millis(50);

/// What both are told.
#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// A qcow2 image that is based on another one. Nobody may have it open.
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    pub(crate) image: PathBuf,
    /// How many bytes may be copied in a second (10M, 1G).
    #[arg(long, value_name = "BYTES")]
    bps: Option<Size>,
    /// Allow images to be based on files anywhere in DIR [default: the folder of IMAGE].
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    backing_root: Option<PathBuf>,
    /// Print JSON instead of sentences.
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// What was done. The names of the fields are the keys of the JSON and stay as they are.
#[derive(Debug, Serialize)]
pub(crate) struct Merged {
    pub(crate) image: String,
    /// The one it was, or is, based on.
    pub(crate) base: String,
    /// Bytes of the disk.
    pub(crate) virtual_bytes: u64,
    /// Bytes that were written.
    pub(crate) copied_bytes: u64,
}

/// An image and what it is based on, each of them locked.
pub(crate) struct Images {
    pub(crate) name: String,
    /// Of the image below the first.
    pub(crate) base: String,
    /// Two at least.
    pub(crate) layers: Vec<Layer>,
    /// The first one is a file, and not a device.
    pub(crate) is_file: bool,
}

impl Images {
    /// Opens them; the first one for writing if it `changes`.
    ///
    /// # Errors
    /// What is wrong, or who uses one of them.
    pub(crate) fn open(args: &MergeArgs, changes: bool) -> anyhow::Result<Self> {
        let name = printable(&args.image);
        let file = open(&args.image, changes)?;
        if changes {
            prepare(&args.image, &file)?;
        }
        let is_file =
            file.metadata().with_context(|| format!("{name}: cannot look at it"))?.is_file();
        let path = args.image.clone();
        let top = Top { file, name: path, format: Format::Qcow2, read_only: !changes };
        let chain = Chain::open(top, args.backing_root.as_deref(), &mut lock_named)?;
        nothing_waits(&chain)?;
        let Some(base) = chain.files.get(1) else {
            bail!("{name}: it is based on nothing");
        };
        let base = printable(&base.name);
        let layers = Layer::of_chain(chain);
        let layers =
            layers.with_context(|| format!("{name}: cannot learn the sizes of its files"))?;
        Ok(Self { name, base, layers, is_file })
    }

    /// What is to be said at the end, of so many bytes of disk and so many that were copied.
    pub(crate) fn merged(&self, virtual_bytes: u64, copied_bytes: u64) -> Merged {
        let (image, base) = (self.name.clone(), self.base.clone());
        Merged { image, base, virtual_bytes, copied_bytes }
    }
}

/// Opens the image and locks it.
pub(crate) fn open(path: &Path, changes: bool) -> anyhow::Result<File> {
    let name = printable(path);
    let mut options = OpenOptions::new();
    // A pipe that nobody writes to would be waited for.
    let options = options.read(true).write(changes).custom_flags(libc::O_NONBLOCK);
    let file = options.open(path).map_err(|error| cannot_open(path, error))?;
    let kind = file.metadata().with_context(|| format!("{name}: cannot look at it"))?.file_type();
    ensure!(
        kind.is_file() || kind.is_block_device(),
        "{name}: it is neither a file nor a block device"
    );
    match lock_image(&file, !changes) {
        Ok(()) => Ok(file),
        Err(LockError::Host(error)) => {
            Err(error).with_context(|| format!("{name}: cannot lock it, and others may use it"))
        }
        Err(error) => bail!(
            "{name}: it is in use by {}. Stop that first; a daemon of Ringway merges the images of disks that it \
             serves itself, and makes them larger, not smaller (ringway ctl commit, flatten, resize)",
            error.holder(&file)
        ),
    }
}

/// Locks a file that an image names, and reads it as it is stored if it is to be written.
///
/// # Errors
/// Why not.
pub(crate) fn lock_named(file: &File, _: &Path, read_only: bool) -> Result<(), String> {
    lock_image(file, read_only).map_err(|error| error.to_string())?;
    if read_only { Ok(()) } else { as_stored(file).map_err(|error| format!("{error:#}")) }
}

/// What is done may have been tried before, until a sync failed: what the host could not write then, it may hold still.
pub(crate) fn as_stored(file: &File) -> anyhow::Result<()> {
    read_as_stored(file).context("what was written to it cannot be made durable")
}

/// A qcow2 image for whoever changes it: its tables are in storage, its reference counts right if it was not closed.
pub(crate) fn prepare(path: &Path, mut file: &File) -> anyhow::Result<()> {
    let name = printable(path);
    // What others have mapped stays in the host's cache: to write it is sure. Before any of it is dropped.
    let bytes = file.seek(SeekFrom::End(0)).with_context(|| name.clone())?;
    let again = file.try_clone().and_then(|file| write_tables_again(&Arc::new(file), bytes, 1));
    match again {
        // What is wrong with its tables is told by whoever reads them.
        Err(error) if error.raw_os_error().is_none() => {}
        again => again.with_context(|| format!("{name}: cannot write its tables once more"))?,
    }
    as_stored(file).with_context(|| name.clone())?;
    repair_counts(path, file)
        .with_context(|| format!("{name}: cannot make its reference counts right"))
}

/// A copy on its way.
pub(crate) struct Copying<'a> {
    args: &'a MergeArgs,
    signal: Arc<AtomicUsize>,
    quiet: bool,
}

impl<'a> Copying<'a> {
    /// From now on signals are heard.
    ///
    /// # Errors
    /// What the host says, or that it would never be done.
    pub(crate) fn begin(args: &'a MergeArgs, log: &LogArgs) -> anyhow::Result<Self> {
        logging::start(log, None, None);
        ensure!(args.bps != Some(Size(0)), "--bps 0: it would never be done");
        Ok(Self { args, signal: interrupt::listen()?, quiet: log.quiet || args.json })
    }

    /// Copies all of a disk; how many bytes were written, or `None` if a signal came first.
    ///
    /// # Errors
    /// As `copy`.
    pub(crate) fn all(
        &self,
        name: &'static str,
        size: u64,
        mut copy: impl FnMut(u64, u64) -> io::Result<Pulled>,
    ) -> io::Result<Option<u64>> {
        let bar = bar(name, 0, size, self.quiet);
        let mut rate = CopyRate::new(self.args.bps.map(|Size(bytes)| bytes));
        while rate.done < size {
            loop {
                if self.signal.load(Relaxed) != 0 {
                    bar.abandon();
                    return Ok(None);
                }
                let left = rate.due().saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                std::thread::sleep(left.min(POLL_EVERY));
            }
            rate.next(&mut copy)?;
            bar.set_position(rate.done);
        }
        bar.finish_and_clear();
        Ok(Some(rate.copied))
    }

    /// Says what was done, by `line` or as JSON.
    ///
    /// # Errors
    /// What the host says to printing.
    pub(crate) fn done(&self, merged: &Merged, line: &str) -> anyhow::Result<ExitCode> {
        let text = match self.args.json {
            true => Some(serde_json::to_string_pretty(merged)? + "\n"),
            false => (!self.quiet).then(|| line.to_owned()),
        };
        text.map_or(Ok(()), |text| output::print(&text)).context("it is done, but")?;
        Ok(ExitCode::SUCCESS)
    }

    /// Says that a signal has ended it, and how it is left.
    pub(crate) fn stopped(&self, line: &str) -> ExitCode {
        eprintln!("{line}");
        ExitCode::from(u8::try_from(128 + self.signal.load(Relaxed)).unwrap_or(1))
    }
}
