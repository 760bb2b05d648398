//! Where a new image is going to be, what it may overwrite, and how large its clusters are; and why an
//! image that should be there cannot be opened.

use anyhow::{Context, anyhow, bail, ensure};
use ringway_control::config::missing_folder;
use ringway_control::size::{NotASize, Size};
use ringway_disk::{LockError, lock_image};
use ringway_image::{CLUSTER_BITS, Format, printable};
use ringway_server::named_format;
use rustix::fs::XattrFlags;
use std::ffi::CString;
use std::fs::{File, Metadata, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

/// Bytes of all extended attributes of a file, by their names, and of one of them: the kernel's limit.
const XATTRS_MAX: usize = 64 << 10;

/// Why the image at `path` could not be opened, in the same words of all commands.
#[cold]
pub(crate) fn cannot_open(path: &Path, error: std::io::Error) -> anyhow::Error {
    let name = printable(path);
    match (error.kind(), path.symlink_metadata().map_err(|error| error.kind())) {
        (ErrorKind::PermissionDenied, Ok(_)) => {
            anyhow!("{name}: no permission to open it. Run as a user who may")
        }
        (ErrorKind::PermissionDenied, Err(ErrorKind::NotFound)) => anyhow!(
            "{name}: no permission to make files in its folder. Choose another one, or run as a user who may"
        ),
        _ => cannot_look(path, error, "open it"),
    }
}

/// Why it could not be done with what is at `path`, or is not there.
#[cold]
pub(crate) fn cannot_look(path: &Path, error: std::io::Error, what: &str) -> anyhow::Error {
    let name = printable(path);
    match (error.kind(), missing_folder(path)) {
        (ErrorKind::PermissionDenied, _) => anyhow!(
            "{name}: no permission to look into its folder. Choose another one, or run as a user who may"
        ),
        (ErrorKind::NotFound, Some(folder)) => anyhow!("{name}: there is no such folder: {folder}"),
        (ErrorKind::NotFound, None) => anyhow!("{name}: there is no such file. Check the path"),
        _ => anyhow::Error::new(error).context(format!("{name}: cannot {what}")),
    }
}

/// Says that a file whose name ends as those of another format do will be raw, if nobody has said that.
pub(crate) fn warn_of_raw(path: &Path, format: Format) {
    let ending = named_format(path).filter(|ending| format == Format::Raw && ending != "qcow2");
    if let Some(ending) = ending {
        tracing::warn!(
            "{}: it will be a raw image: of its name only .qcow2 says a format. For another one make this one of \
             it: `qemu-img convert -f raw -O {ending}`",
            printable(path),
        );
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
        Err(error) => return Err(cannot_look(image, error, "look at it")),
    }
    ensure!(!image.is_symlink(), "{name}: it is a link to a file that is not there");
    let last = image.file_name().with_context(|| format!("{name}: it names no file"))?;
    let folder = image.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new(".")).canonicalize();
    let folder = folder.map_err(|error| cannot_look(image, error, "find its folder"))?;
    Ok(folder.join(last))
}

/// Refuses to overwrite what was not meant, or what is in use. What may be overwritten stays locked until
/// what is returned is dropped: nobody begins to use what is about to lose its name.
///
/// # Errors
/// Why it is not overwritten.
pub(crate) fn spare(image: &Path, target: &Path, force: bool) -> anyhow::Result<Option<File>> {
    let name = printable(image);
    let meta = match target.symlink_metadata() {
        Ok(meta) => meta,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(cannot_look(image, error, "look at it")),
    };
    ensure!(meta.is_file(), "{name}: it is there, and it is no file: it is not overwritten");
    ensure!(force, "{name}: it is there already. Overwrite it with --force");
    // Network file systems lock for writing only what is open for writing.
    let writable = File::options().read(true).write(true).open(target);
    let file =
        writable.or_else(|_| File::open(target)).map_err(|error| cannot_open(image, error))?;
    match lock_image(&file, false) {
        Ok(()) => Ok(Some(file)),
        Err(LockError::Host(error)) => bail!(
            "{name}: it cannot be locked ({error}), so nobody can tell whether it is in use: it is not overwritten. If \
             nobody uses it remove it first"
        ),
        Err(error) => {
            bail!("{name}: it is in use by {}: it is not overwritten", error.holder(&file))
        }
    }
}

/// Gives a new file what belongs to the one whose place it takes: owner, group, mode, access control lists and
/// other attributes. Before anything is written to it.
///
/// # Errors
/// That `old` has other names, which would go on naming what was to be overwritten; what the host says.
pub(crate) fn take_after(new: &File, old: &File) -> anyhow::Result<()> {
    let (meta, now) = (old.metadata()?, new.metadata()?);
    ensure!(
        meta.nlink() == 1,
        "it has {} names (hard links), and the others would keep what is there: remove it first, or copy to \
         another name",
        meta.nlink()
    );
    let owner = |meta: &Metadata| (meta.uid(), meta.gid());
    if owner(&meta) != owner(&now) {
        let (uid, gid) = owner(&meta);
        fchown(new, Some(uid), Some(gid)).with_context(|| {
            format!(
                "its owner (user {uid}, group {gid}) cannot be kept: remove it first, if it is to be yours"
            )
        })?;
    }
    let mut names = vec![0; XATTRS_MAX];
    let len = rustix::fs::flistxattr(old, &mut names[..]).unwrap_or(0);
    let mut value = vec![0; XATTRS_MAX];
    for name in names[..len].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        let name = CString::new(name)?;
        let copied = rustix::fs::fgetxattr(old, &*name, &mut value[..])
            .and_then(|len| rustix::fs::fsetxattr(new, &*name, &value[..len], XattrFlags::empty()));
        // Labels and the like are the host's to give.
        let of_the_owner =
            [&b"user."[..], b"system."].iter().any(|s| name.to_bytes().starts_with(s));
        if of_the_owner {
            copied.with_context(|| {
                format!("its attribute {} cannot be kept", name.to_string_lossy())
            })?;
        }
    }
    // Last: to change an owner or a list may change it.
    new.set_permissions(Permissions::from_mode(meta.mode() & 0o7777))?;
    Ok(())
}
