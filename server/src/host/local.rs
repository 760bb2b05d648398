//! Names, looked up by this very process.

use crate::image::{check_iopoll, open_disk};
use anyhow::{Context, bail};
use ringway_control::config::{DiskSpec, Format as Said};
use ringway_disk::{Base, Disk, EngineKind, OpenError, OpenOptions, Qcow2, Source};
use ringway_export::engines_to_choose;
use ringway_image::Format;
use ringway_vhost_user::{Access, bind};
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Engines for files: why to take them, or why not.
pub(super) type Engines = Vec<(EngineKind, Result<String, String>)>;

/// What there is to know before.
pub(super) struct Local {
    pub(super) engines: Engines,
    pub(super) iopoll: bool,
}

impl Local {
    pub(super) fn new(iopoll: bool) -> Self {
        Self { engines: engines_to_choose(None), iopoll }
    }

    pub(super) fn has_io_uring(&self) -> bool {
        let works =
            |(kind, works): &(_, Result<_, _>)| *kind == EngineKind::IoUring && works.is_ok();
        self.engines.iter().any(works)
    }

    /// How a disk of a plan is to be opened.
    pub(super) fn options(&self, spec: &DiskSpec) -> OpenOptions {
        OpenOptions {
            source: spec.source.clone(),
            read_only: spec.read_only,
            cache: spec.cache,
            engine: spec.engine,
            engines: self.engines(spec.engine),
            serial: spec.serial.clone(),
            block_size: spec.block_size,
            create_bytes: spec.create_bytes,
            lock_wait: spec.lock_wait,
            incoming: spec.incoming,
            path: spec.path,
            raw: spec.raw,
            qcow2: spec.qcow2.then(|| Qcow2 {
                backing_root: spec.backing_root.clone(),
                cache_base: spec.cache_base,
                never_repair: spec.never_repair,
                base: spec.base.as_ref().map(|(path, format)| Base {
                    path: path.clone(),
                    format: format.map(|format| match format {
                        Said::Raw => Format::Raw,
                        Said::Qcow2 => Format::Qcow2,
                    }),
                }),
            }),
        }
    }

    /// Those to choose from; one that is asked for is left to its workers to try.
    pub(super) fn engines(&self, asked: Option<EngineKind>) -> Engines {
        asked.map_or_else(|| self.engines.clone(), |engine| engines_to_choose(Some(engine)))
    }

    pub(super) fn open(&self, options: &OpenOptions, ephemeral: bool) -> anyhow::Result<Opened> {
        open(options, ephemeral, self.iopoll)
    }
}

/// A disk that was opened here.
pub(super) struct Opened {
    pub(super) disk: Disk,
    /// Its file if that is new.
    pub(super) new: Option<OwnFile>,
    /// Its file if that is a clone that goes with the disk.
    pub(super) clone: Option<OwnFile>,
}

/// Opens a disk.
pub(super) fn open(options: &OpenOptions, ephemeral: bool, iopoll: bool) -> anyhow::Result<Opened> {
    let disk = open_disk(options)?;
    if options.read_only && !options.incoming && disk.top_waits_for_journal() {
        // Only a daemon that writes can put into it what is missing.
        bail!(OpenError::Waits(disk.name().into()));
    }
    let new = match &options.source {
        Source::Path(path) if disk.created() => Some(OwnFile::new(path)?),
        _ => None,
    };
    if iopoll {
        check_iopoll(&disk)?;
    }
    let clone = match &options.source {
        Source::Path(path) if ephemeral => Some(OwnFile::new(path)?),
        _ => None,
    };
    Ok(Opened { disk, new, clone })
}

/// Opens the configuration file. Nobody is waited for, should it be a pipe by now.
pub(super) fn configuration(path: &Path) -> anyhow::Result<File> {
    let mut options = File::options();
    let opened = options.read(true).custom_flags(libc::O_NONBLOCK).open(path);
    opened.context("cannot read the configuration")
}

/// Listens on a new socket file.
pub(super) fn listen(path: &Path, access: Access) -> anyhow::Result<(UnixListener, OwnFile)> {
    let mut tries = 0;
    loop {
        let listener = bind(path, access)?;
        match OwnFile::new(path) {
            Ok(file) => return Ok((listener, file)),
            // The helper of a daemon that was killed removes what it has made, and looks a moment before.
            Err(_) if tries < 3 => tries += 1,
            Err(error) => return Err(error),
        }
    }
}

/// A file that this process has made, and removes when this is dropped.
#[derive(Debug)]
pub(super) struct OwnFile {
    pub(super) path: PathBuf,
    /// File system and inode: what has the name at the end may be somebody else's.
    identity: (u64, u64),
    kept: bool,
}

impl OwnFile {
    /// One that was just made at `path`.
    fn new(path: &Path) -> anyhow::Result<Self> {
        // A later change of the working folder would not matter.
        let path = std::path::absolute(path)?;
        let identity =
            identity(&path).with_context(|| format!("{}: it has vanished", path.display()))?;
        Ok(Self { path, identity, kept: false })
    }

    /// Lets it stay.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }

    /// Removes it, unless another one has its name.
    pub(super) fn remove(mut self) -> anyhow::Result<()> {
        self.kept = true;
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            std::fs::remove_file(&self.path).with_context(|| self.path.display().to_string())?;
        }
        Ok(())
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        if !self.kept && identity(&self.path).is_ok_and(|now| now == self.identity) {
            // Best effort: a socket that stays is replaced by the next daemon.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    path.symlink_metadata().map(|meta| (meta.dev(), meta.ino()))
}
