//! Where a new image is going to be, what it may overwrite, and how large its clusters are; and why an
//! image that should be there cannot be opened.

use anyhow::{Context, anyhow, bail, ensure};
use ringway_control::config::missing_folder;
use ringway_control::size::{NotASize, Size};
use ringway_disk::{LockError, lock_image};
use ringway_image::{CLUSTER_BITS, printable};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Why the image at `path` could not be opened, in the same words of all commands.
#[cold]
pub(crate) fn cannot_open(path: &Path, error: std::io::Error) -> anyhow::Error {
    let name = printable(path);
    match (error.kind(), missing_folder(path)) {
        (ErrorKind::NotFound, Some(folder)) => anyhow!("{name}: there is no such folder: {folder}"),
        (ErrorKind::NotFound, None) => anyhow!("{name}: there is no such file. Check the path"),
        _ => anyhow::Error::new(error).context(format!("{name}: cannot open it")),
    }
}

/// The bits of a cluster of so many bytes, for the command line.
pub(crate) fn cluster_bits(word: &str) -> Result<u32, String> {
    let Size(bytes) = word.parse().map_err(|error: NotASize| error.to_string())?;
    match bytes.is_power_of_two() && CLUSTER_BITS.contains(&bytes.ilog2()) {
        true => Ok(bytes.ilog2()),
        false => Err("a cluster has 512, 1K, 2K, … or 2M bytes".into()),
    }
}

/// Where an image is going to be: a name in a folder without links. A link to an image is followed.
///
/// # Errors
/// That it cannot be anywhere.
pub(crate) fn place(image: &Path) -> anyhow::Result<PathBuf> {
    let name = printable(image);
    match image.canonicalize() {
        Ok(path) => return Ok(path),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("{name}: cannot look at it")),
    }
    ensure!(!image.is_symlink(), "{name}: it is a link to a file that is not there");
    let last = image.file_name().with_context(|| format!("{name}: it names no file"))?;
    let folder = image.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new(".")).canonicalize();
    let folder = folder.with_context(|| format!("{name}: its folder cannot be found"))?;
    Ok(folder.join(last))
}

/// Refuses to overwrite what was not meant, or what is in use.
///
/// # Errors
/// Why it is not overwritten.
pub(crate) fn spare(image: &Path, target: &Path, force: bool) -> anyhow::Result<()> {
    let name = printable(image);
    let context = || format!("{name}: cannot look at it");
    let meta = match target.symlink_metadata() {
        Ok(meta) => meta,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(context),
    };
    ensure!(meta.is_file(), "{name}: it is there, and it is no file: it is not overwritten");
    ensure!(force, "{name}: it is there already. Overwrite it with --force");
    let file = File::open(target).with_context(context)?;
    match lock_image(&file, false) {
        Ok(()) => Ok(()),
        Err(LockError::Host(error)) => {
            tracing::warn!("cannot lock {name}: {error}");
            Ok(())
        }
        Err(error) => {
            bail!("{name}: it is in use by {}: it is not overwritten", error.holder(&file))
        }
    }
}
