//! What an open file says of itself, without a path.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The path of what has none. The sandbox lets `statx` look at this one, and so at descriptors only.
pub static NO_PATH: &CStr = c"";

/// The part of `struct stat` that Ringway asks open files for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileShape {
    /// Its length in bytes; 0 for what has none, such as block devices.
    pub bytes: u64,
    /// Bytes of the blocks that it has, holes left out: less than `bytes` if it is sparse.
    pub allocated: u64,
    /// The block its file system likes best, in bytes. For huge pages: their size.
    pub block: u64,
    /// How many names it has: none once it was deleted.
    pub links: u64,
    /// Its device, and its number there: as long as it is open, no other file has both.
    pub inode: (u64, u64),
    /// The type bits of its mode (`S_IFMT`); 0 for descriptors of the kernel's own (eventfd).
    pub kind: u32,
}

impl FileShape {
    /// Of `file`.
    ///
    /// This is fstat(2) itself. `File::metadata` calls statx(2), which takes a path too, and which
    /// a sandbox should not have to allow.
    ///
    /// # Errors
    /// What the host says.
    pub fn of(file: &File) -> io::Result<Self> {
        // SAFETY: a plain C struct for which zeroes are valid.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open; libc's struct is the kernel's on 64-bit targets.
        let rc = unsafe { libc::syscall(libc::SYS_fstat, file.as_raw_fd(), &raw mut stat) };
        if rc < 0 {
            return Err(io::Error::last_os_error());
        }
        // Neither is negative; their types differ from target to target.
        #[allow(clippy::unnecessary_cast, clippy::cast_sign_loss)]
        let (bytes, block) = (stat.st_size as u64, stat.st_blksize as u64);
        // Its type differs from target to target.
        #[allow(clippy::unnecessary_cast)]
        let links = stat.st_nlink as u64;
        #[allow(clippy::unnecessary_cast, clippy::cast_sign_loss)]
        let allocated = 512 * stat.st_blocks as u64;
        // Their types differ from target to target.
        #[allow(clippy::unnecessary_cast)]
        let inode = (stat.st_dev as u64, stat.st_ino as u64);
        Ok(Self { bytes, allocated, block, links, inode, kind: stat.st_mode & libc::S_IFMT })
    }
}

/// The node of a block device that all programs of this host have, as sysfs says, if it is there: locks belong to nodes,
/// and a device may have others.
#[must_use]
pub fn usual_node(device: u64) -> Option<PathBuf> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let facts = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/uevent")).ok()?;
    let name = facts.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    let node = Path::new("/dev").join(name);
    let meta = node.metadata().ok()?;
    (meta.file_type().is_block_device() && meta.rdev() == device).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "a system call that Miri does not know")]
    fn agrees_with_the_standard_library() {
        use std::os::unix::fs::MetadataExt;
        let path = std::env::temp_dir().join(format!("ringway-shape-{}", std::process::id()));
        std::fs::write(&path, [7; 4711]).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let (shape, meta) = (FileShape::of(&file).unwrap(), file.metadata().unwrap());
        assert_eq!((shape.bytes, shape.block), (4711, meta.blksize()));
        assert_eq!(shape.allocated, 512 * meta.blocks());
        assert_eq!((shape.kind, shape.links), (libc::S_IFREG, 0));
    }
}
