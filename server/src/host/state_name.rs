//! Of which image a state is, and whether that is still the same one.
//!
//! Numbers of files are given again, so the time of its birth belongs to an image's name. Some file systems
//! tell none (NFS and FUSE before they could, ext4 with small inodes). There a new image may have the name
//! of one that was deleted, and is told from it by how that one was left.

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, openat, statx};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// Numbers only, so that it can name nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StateName {
    block_device: bool,
    device: u64,
    inode: u64,
    /// When the file was made, in nanoseconds; 0 if nobody tells.
    born: i128,
}

impl StateName {
    pub(super) fn of(image: &File) -> anyhow::Result<Self> {
        let meta = image.metadata()?;
        if meta.file_type().is_block_device() {
            return Ok(Self { block_device: true, device: meta.rdev(), inode: 0, born: 0 });
        }
        let stat = statx(image, c"", AtFlags::EMPTY_PATH, StatxFlags::BTIME)?;
        let born = match stat.stx_mask & StatxFlags::BTIME.bits() {
            0 => 0,
            _ => {
                i128::from(stat.stx_btime.tv_sec) * 1_000_000_000
                    + i128::from(stat.stx_btime.tv_nsec)
            }
        };
        Ok(Self { block_device: false, device: meta.dev(), inode: meta.ino(), born })
    }

    /// Another image may get the same name.
    pub(super) fn is_ambiguous(&self) -> bool {
        !self.block_device && self.born == 0
    }
}

impl std::fmt::Display for StateName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.block_device { "device" } else { "image" };
        write!(f, "{kind}-{:x}-{:x}-{:x}", self.device, self.inode, self.born)
    }
}

/// How an image was left: its size, and when it was written and changed last. Whoever deletes it and makes
/// another one changes that.
pub(super) type Left = [u64; 3];

/// Looks at an image whose name is ambiguous. It takes part in no lock.
pub(super) struct ImageStat(OwnedFd);

impl ImageStat {
    /// `None` if the name says enough, or if the image cannot be looked at.
    pub(super) fn at(image: &File, name: StateName) -> Option<Self> {
        let path = format!("/proc/self/fd/{}", image.as_raw_fd());
        let open = || openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        name.is_ambiguous().then(open).and_then(Result::ok).map(Self)
    }

    /// `None` if nothing is told.
    #[allow(clippy::cast_sign_loss, reason = "only compared")]
    pub(super) fn left(&self) -> Option<Left> {
        let stat = statx(&self.0, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).ok()?;
        let time = |time: rustix::fs::StatxTimestamp| {
            (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec.into())
        };
        let left = [stat.stx_size, time(stat.stx_mtime), time(stat.stx_ctime)];
        (left[1] != 0 && left[2] != 0).then_some(left)
    }
}
