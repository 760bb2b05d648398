//! Sharing: the destination refers to the blocks of the source until one of the two is written.
//!
//! By FICLONERANGE and by nothing else: copy_file_range(2) may copy the bytes itself, slower than
//! `flow.rs` does, and does not tell.

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};
use std::fs::File;
use std::os::fd::AsRawFd;

/// Bytes of one call: a multiple of every block size, and so few that signals are heard in between.
const STEP: u64 = 1 << 30;

/// A resumed copy begins at a multiple of this, which is one of every block size.
pub(super) const ALIGNED: u64 = 1 << 20;

/// `struct file_clone_range`, linux/fs.h.
#[repr(C)]
struct CloneRange {
    source: i64,
    source_offset: u64,
    /// Bytes; up to the end of the source only if it ends in the middle of a block.
    len: u64,
    destination_offset: u64,
}

const _: () = assert!(size_of::<CloneRange>() == 32);

/// `FICLONERANGE`, linux/fs.h.
const CLONE_RANGE: Opcode = opcode::write::<CloneRange>(0x94, 13);

/// How far sharing came, and why not further.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shared {
    /// Everything before this byte is shared.
    pub(super) to: u64,
    pub(super) end: End,
}

/// Why it ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// All of it is shared.
    All,
    /// The caller said so.
    Stopped,
    /// These files cannot share; the destination is as it was from there on.
    Refused(Errno),
    /// The host failed.
    Failed(Errno),
}

/// Shares bytes `start..bytes` of `source`, which are all of it from `start` on, with the same place
/// of `destination`. `progress` hears how far it is and stops it by true.
pub(super) fn share(
    source: &File,
    destination: &File,
    start: u64,
    bytes: u64,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Shared {
    let mut to = start / ALIGNED * ALIGNED;
    let end = loop {
        if to >= bytes {
            break End::All;
        }
        if progress(to) {
            break End::Stopped;
        }
        let len = STEP.min(bytes - to);
        match clone_range(source, destination, to, len) {
            Ok(()) => to += len,
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Half a block at the end of a longer file would have to keep its other half.
            Err(Errno::INVAL) if destination.metadata().is_ok_and(|meta| meta.len() > bytes) => {
                if destination.set_len(bytes).is_err() {
                    break End::Refused(Errno::INVAL);
                }
            }
            Err(errno) if is_refusal(errno) => break End::Refused(errno),
            Err(errno) => break End::Failed(errno),
        }
    };
    Shared { to: to.min(bytes), end }
}

fn clone_range(source: &File, destination: &File, offset: u64, len: u64) -> rustix::io::Result<()> {
    let source = i64::from(source.as_raw_fd());
    let range = CloneRange { source, source_offset: offset, len, destination_offset: offset };
    // SAFETY: the kernel reads one `struct file_clone_range`; both descriptors are open.
    unsafe { ioctl(destination, Setter::<CLONE_RANGE, CloneRange>::new(range)) }
}

/// True if it says that these two files, or this file system, cannot: ioctl_ficlonerange(2), and
/// what kernels say to an ioctl they do not know.
fn is_refusal(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::OPNOTSUPP
            | Errno::NOTTY
            | Errno::NOSYS
            | Errno::XDEV
            | Errno::INVAL
            | Errno::BADF
            | Errno::PERM
            | Errno::ACCESS
            | Errno::TXTBSY
    )
}

/// A refusal in words.
pub(super) fn why(errno: Errno) -> &'static str {
    match errno {
        Errno::XDEV => "they are on different file systems",
        Errno::OPNOTSUPP | Errno::NOTTY | Errno::NOSYS => "the file system cannot share blocks",
        Errno::INVAL => {
            "the file system refuses it for these two (on btrfs one with and one without \
             checksums cannot share)"
        }
        Errno::TXTBSY => "one of them is in use as swap space",
        _ => "the host does not permit it",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// Whether or not the file system of temporary files can share, what is said is true.
    #[test]
    fn what_is_said_to_be_shared_is_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: u64| {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .open(dir.path().join(name))
                .unwrap();
            file.set_len(bytes).unwrap();
            file
        };
        let (from, to) = (file("from", 0), file("to", 9000));
        from.write_all_at(&[7; 5000], 0).unwrap();
        to.write_all_at(&[9; 9000], 0).unwrap();
        let shared = share(&from, &to, 0, 5000, &mut |_| false);
        let mut have = vec![0; 5000];
        to.read_exact_at(&mut have, 0).unwrap();
        match shared {
            Shared { to: 5000, end: End::All } => assert_eq!(have, [7; 5000]),
            Shared { to: 0, end: End::Refused(errno) } => {
                assert_eq!(have, [9; 5000], "{errno}");
                assert!(!why(errno).is_empty());
            }
            other => panic!("{other:?}"),
        }
        let stopped = share(&from, &to, 0, 5000, &mut |_| true);
        assert_eq!(stopped, Shared { to: 0, end: End::Stopped });
        assert_eq!(share(&from, &to, 0, 0, &mut |_| true), Shared { to: 0, end: End::All });
    }

    #[test]
    fn memory_files_refuse_and_closed_doors_do_not_count_as_failures() {
        let memory = |name| {
            File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap())
        };
        let (from, to) = (memory("from"), memory("to"));
        from.set_len(1 << 20).unwrap();
        let shared = share(&from, &to, 0, 1 << 20, &mut |_| false);
        assert!(matches!(shared, Shared { to: 0, end: End::Refused(_) }), "{shared:?}");
        assert!(!is_refusal(Errno::NOSPC) && !is_refusal(Errno::IO) && !is_refusal(Errno::DQUOT));
    }
}
