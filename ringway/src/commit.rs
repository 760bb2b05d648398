//! `ringway commit`: an image goes into the one that it is based on, while nobody serves it.

use crate::merge::{Copying, Images, MergeArgs};
use anyhow::{Context, bail};
use clap::Args;
use ringway_control::log::LogArgs;
use ringway_control::size::Size;
use ringway_disk::{LockedBase, reopen_for_writing};
use ringway_image::{Bases, Commit, Layer, LayerFormat};
use std::fs::File;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  ringway commit vm7.qcow2                   as qemu-img commit -d
  ringway commit --bps 100M vm7.qcow2        and leave the disk to others
  ringway commit --json vm7.qcow2 | jq .copied_bytes

What IMAGE holds is copied into the image that it is based on, which holds the
disk by itself then. IMAGE stays as it is, and is not needed any more.
The base changes: whatever else is based on it is spoiled. It is refused while
a daemon or QEMU has it locked, and if its mode forbids to write it (chmod a-w).
It can be stopped and killed at any time: IMAGE on top of its base holds what it
did, the base by itself is a mixture, and the same command begins again. Of a
disk that is served: ringway ctl commit.
Exit status: 0 done, 1 failed, 2 wrong usage, 128+N ended by signal N.";

/// The options of `ringway commit`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CommitArgs {
    #[command(flatten)]
    merge: MergeArgs,
}

/// A file that is only read so far, for whoever is to write it alone.
fn lock(file: &Arc<File>, name: Option<&Path>, bases: &Bases) -> anyhow::Result<LockedBase> {
    let writable = reopen_for_writing(file, name, None)?;
    Ok(LockedBase::new(Arc::clone(file), writable, bases)?)
}

/// Carries out `ringway commit`.
///
/// # Errors
/// One message: what is wrong, where, what to do.
pub(crate) fn run(args: &CommitArgs, log: &LogArgs) -> anyhow::Result<ExitCode> {
    let copying = Copying::begin(&args.merge, log)?;
    let images = Images::open(&args.merge, false)?;
    let (name, base) = (&images.name, &images.base);
    let [top, below @ ..] = &images.layers[..] else { bail!("{name}: it has no file") };
    let [first, further @ ..] = below else { bail!("{name}: it is based on nothing") };
    Commit::judge(top, first, 1).with_context(|| format!("{name}, based on {base}"))?;
    let bases = Bases::default();
    let locked = lock(&first.file, Some(&first.name), &bases).with_context(|| base.clone())?;
    let mut format = first.format.clone();
    // Its data may be in another file, which others could use as a raw image.
    let mut locked_data = None;
    if let LayerFormat::Qcow2 { data: Some((data, _)), .. } = &mut format {
        let lock = lock(data, None, &bases).with_context(|| format!("{base}: its data file"))?;
        *data = Arc::clone(locked_data.insert(lock).writable());
    }
    let file = Arc::clone(locked.writable());
    let mut below = vec![Layer { file, format, ..first.clone() }];
    below.extend_from_slice(further);
    let mut commit = Commit::open(top.clone(), below, &bases, 1, true)
        .with_context(|| format!("{base}: cannot be written"))?;
    let size = commit.size();
    let copied = copying.all("commit", size, |at, most| commit.copy(at, most));
    // Also if it has failed. Nobody reads by the tables that the base had.
    let settled = commit.finish().and_then(|_| commit.give_back());
    let again = "the two together hold what they did, and the same command begins again";
    let copied = copied.with_context(|| format!("{base}: cannot go on; {again}"))?;
    settled.with_context(|| format!("{base}: cannot be made durable; {again}"))?;
    let Some(copied) = copied else {
        return Ok(
            copying.stopped(&format!("interrupted; {base} is a mixture without {name}: {again}"))
        );
    };
    // By its name it will be opened next.
    reopen_for_writing(&first.file, Some(&first.name), None).with_context(|| base.clone())?;
    let merged = images.merged(size, copied);
    let line = format!(
        "{name}: what it holds is in {base} by now, {} were copied. It is not needed any more\n",
        Size(copied)
    );
    copying.done(&merged, &line)
}
