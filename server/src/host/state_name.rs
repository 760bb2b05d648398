//! Of which image a state is, and whether that is still the same one.
//!
//! An export of an NBD server is known by its name: where its server is, and what that calls it.
//!
//! Numbers of files are given again, so the time of its birth belongs to an image's name. Some file systems
//! tell none (NFS and FUSE before they could, ext4 with small inodes). There a new image may have the name
//! of one that was deleted, and is told from it by how that one was left.

use ringway_control::config::Location;
use ringway_disk::storage;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, openat, statx};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Numbers only, so that it can name nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StateName {
    Image {
        device: u64,
        inode: u64,
        /// When the file was made, in nanoseconds; 0 if nobody tells.
        born: i128,
    },
    Device(u64),
    /// The hash of its name.
    Export(u128),
    /// The same, of what is known of an export.
    KnownExport(u128),
    /// The same, of the path of an image that would be made if it were missing.
    ServedImage(u128),
}

impl StateName {
    pub(super) fn of(image: &File) -> anyhow::Result<Self> {
        let meta = image.metadata()?;
        if meta.file_type().is_block_device() {
            return Ok(Self::Device(meta.rdev()));
        }
        let stat = statx(image, c"", AtFlags::EMPTY_PATH, StatxFlags::BTIME)?;
        let born = match stat.stx_mask & StatxFlags::BTIME.bits() {
            0 => 0,
            _ => {
                i128::from(stat.stx_btime.tv_sec) * 1_000_000_000
                    + i128::from(stat.stx_btime.tv_nsec)
            }
        };
        Ok(Self::Image { device: meta.dev(), inode: meta.ino(), born })
    }

    /// That of an export, by what it is ([`identity`]).
    pub(super) fn of_export(identity: &str) -> Self {
        Self::Export(hash(identity.as_bytes()))
    }

    /// That of what is known of it.
    pub(super) fn known_export(identity: &str) -> Self {
        Self::KnownExport(hash(identity.as_bytes()))
    }

    /// That of what says that the image at this path was served.
    pub(super) fn served_image(path: &[u8]) -> Self {
        Self::ServedImage(hash(path))
    }

    /// Another image may get the same name.
    pub(super) fn is_ambiguous(&self) -> bool {
        matches!(self, Self::Image { born: 0, .. })
    }
}

/// What an export is, by the name that its user gives it. Links are followed with the rights of who asks this.
pub(super) fn identity(name: &[u8]) -> String {
    let locate = |path: &Path| Location::of(path).real().to_owned();
    storage::identity_of(&String::from_utf8_lossy(name), &locate)
}

/// FNV-1a: the same in every release. Who names exports is who names images, so nobody is kept from naming two of
/// them alike.
fn hash(name: &[u8]) -> u128 {
    name.iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, &byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b)
    })
}

impl std::fmt::Display for StateName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Image { device, inode, born } => write!(f, "image-{device:x}-{inode:x}-{born:x}"),
            Self::Device(number) => write!(f, "device-{number:x}-0-0"),
            Self::Export(hash) => write!(f, "export-{hash:032x}"),
            Self::KnownExport(hash) => write!(f, "known-{hash:032x}"),
            Self::ServedImage(hash) => write!(f, "served-{hash:032x}"),
        }
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
