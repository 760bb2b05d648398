//! File systems that tests mount, which only root can.

use crate::skip::{Lack, Need};
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
        std::fs::File::create_new(&file)
            .and_then(|file| file.set_len(bytes))
            .expect("a new file beside it");
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

fn quiet(command: &mut Command) -> bool {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
