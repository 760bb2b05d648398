//! File systems that tests mount, which only root can.

use crate::skip::{Lack, Need};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A mounted file system. Unmounted when dropped.
#[derive(Debug)]
pub struct Mounted(PathBuf);

impl Mounted {
    /// Makes the folder `at` and mounts there what the arguments of `mount` say.
    ///
    /// # Errors
    /// That this machine does not let us.
    ///
    /// # Panics
    /// If the folder cannot be made.
    pub fn new(at: PathBuf, args: &[&str]) -> Result<Self, Lack> {
        std::fs::create_dir(&at).expect("a new folder");
        if !quiet(Command::new("mount").args(args).arg(&at)) {
            return Err(Lack::new(Need::Mount, format_args!("cannot mount {args:?}")));
        }
        Ok(Self(at))
    }

    /// A file system in memory with room for `bytes` bytes.
    ///
    /// # Errors
    /// As [`Mounted::new`].
    pub fn in_memory(at: PathBuf, bytes: u64) -> Result<Self, Lack> {
        Self::new(at, &["-t", "tmpfs", "-o", &format!("size={bytes}"), "none"])
    }

    /// A file system on a sparse file of `bytes` bytes beside the folder `at`, made by `mkfs.KIND`.
    ///
    /// # Errors
    /// As [`Mounted::new`], and that there is no such program.
    ///
    /// # Panics
    /// If the folder or the file cannot be made.
    pub fn on_file(at: PathBuf, kind: &str, options: &[&str], bytes: u64) -> Result<Self, Lack> {
        let file = at.with_extension("img");
        File::create_new(&file).and_then(|file| file.set_len(bytes)).expect("a new file beside it");
        if !quiet(Command::new(format!("mkfs.{kind}")).args(options).arg(&file)) {
            return Err(Lack::new(Need::Mount, format_args!("mkfs.{kind} {options:?} fails")));
        }
        Self::new(at, &["-o", "loop", "-t", kind, &file.to_string_lossy()])
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Gives one that is in memory room for `bytes` bytes.
    ///
    /// # Panics
    /// If that cannot be done.
    pub fn set_room(&self, bytes: u64) {
        let size = format!("remount,size={bytes}");
        assert!(quiet(Command::new("mount").args(["-o", &size]).arg(&self.0)), "{size}");
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        quiet(Command::new("umount").arg("-l").arg(&self.0));
    }
}

/// A file system on a pool of storage that is full for a while: the host goes on holding what it could not store, as if it
/// were there.
#[derive(Debug)]
pub struct Thin {
    mounted: Option<Mounted>,
    pool: Mounted,
}

impl Thin {
    /// With room for 48 MiB, in the folder `pool` of `dir`.
    ///
    /// # Errors
    /// As [`Mounted::on_file`].
    pub fn new(dir: &Path) -> Result<Self, Lack> {
        let pool = Mounted::in_memory(dir.join("pool"), 48 << 20)?;
        let options = ["-q", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard"];
        let mounted = Mounted::on_file(pool.path().join("fs"), "ext4", &options, 512 << 20)?;
        Ok(Self { mounted: Some(mounted), pool })
    }

    /// Where it is.
    ///
    /// # Panics
    /// If it could not be mounted again.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.mounted.as_ref().expect("it is mounted").path()
    }

    /// Stores what was written so far, and leaves no more than `room` bytes for the rest.
    ///
    /// # Panics
    /// If that cannot be done.
    pub fn fill(&self, room: u64) {
        assert!(quiet(Command::new("sync").arg("-f").arg(self.path())), "it is stored");
        let mut file = File::create(self.pool.path().join("fill")).expect("a new file");
        while file.write_all(&[1; 4096]).is_ok() {}
        let filled = file.metadata().expect("its length").len();
        file.set_len(filled.saturating_sub(room)).expect("a shorter one");
    }

    /// There is room again.
    ///
    /// # Panics
    /// If it was not full.
    pub fn extend(&self) {
        std::fs::remove_file(self.pool.path().join("fill")).expect("what it was filled with");
    }

    /// What the host has in its memory alone is gone. Nobody may use it meanwhile.
    ///
    /// # Errors
    /// That it cannot be mounted again.
    pub fn forget(&mut self) -> Result<(), Lack> {
        let (at, file) = (self.pool.path().join("again"), self.pool.path().join("fs.img"));
        drop(self.mounted.take());
        let args = ["-o", "loop", "-t", "ext4", &file.to_string_lossy()];
        self.mounted = Some(Mounted::new(at, &args)?);
        Ok(())
    }
}

fn quiet(command: &mut Command) -> bool {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
