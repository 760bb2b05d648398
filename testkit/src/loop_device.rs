//! Block devices for tests: loop devices, which only root gets.

use crate::skip::{Lack, Need};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A block device over a sparse file. Gone when dropped.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    backing: PathBuf,
}

impl LoopDevice {
    /// A device of `bytes` bytes in blocks of `block` bytes, over a new file in `folder`.
    ///
    /// # Errors
    /// What this machine lacks.
    pub fn new(folder: &Path, bytes: u64, block: u32) -> Result<Self, Lack> {
        let backing = folder.join(format!("loop-{block}.img"));
        let make = || -> io::Result<String> {
            std::fs::File::create(&backing)?.set_len(bytes)?;
            let made = Command::new("losetup")
                .args(["--find", "--show", "--sector-size", &block.to_string()])
                .arg(&backing)
                .output()?;
            let text = if made.status.success() { made.stdout } else { made.stderr };
            let text = String::from_utf8_lossy(&text).trim().to_owned();
            if made.status.success() { Ok(text) } else { Err(io::Error::other(text)) }
        };
        match make() {
            Ok(path) => Ok(Self { path: path.into(), backing }),
            Err(error) => {
                Err(Lack::new(Need::LoopDevice, format_args!("it takes root and losetup: {error}")))
            }
        }
    }

    /// The device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file behind it, which shows what was written to the device.
    #[must_use]
    pub fn backing(&self) -> &Path {
        &self.backing
    }

    /// Flushes that the device was sent since the host started (`/sys/block/…/stat`, field 16).
    ///
    /// # Panics
    /// If the host does not tell.
    #[must_use]
    pub fn flushes(&self) -> u64 {
        let name = self.path.file_name().expect("a device has a name");
        let stat = Path::new("/sys/block").join(name).join("stat");
        let text = std::fs::read_to_string(stat).expect("counters of the device");
        text.split_whitespace().nth(15).and_then(|word| word.parse().ok()).expect("a count")
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}
