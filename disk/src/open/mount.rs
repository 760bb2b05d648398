//! Where a file lives, and who locks it there: told by the kernel in /proc, without touching it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The file system that holds a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Its type: `ext4`, `xfs`, `nfs4`, `fuse.sshfs`.
    pub file_system: String,
    /// Where it is mounted; empty if that is not visible here.
    pub mounted_at: String,
    /// What is mounted there: `/dev/vda1`, `server:/export`.
    pub source: String,
    /// Major and minor number of its device, as lock tables know it.
    pub device: (u32, u32),
    /// Bytes that can still be written to it.
    pub free_bytes: u64,
}

impl Mount {
    /// The mount `file` was opened through.
    #[must_use]
    pub fn of(file: &File) -> Option<Self> {
        let info = read(&format!("/proc/self/fdinfo/{}", file.as_raw_fd()));
        let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().to_owned();
        let table = read("/proc/self/mountinfo");
        let mount = table.lines().find(|line| line.split(' ').next() == Some(&id));
        let mut mount = match mount {
            Some(line) => parse(line)?,
            // Mounted outside of what this process may see (chroot).
            None => Self::by_magic(file)?,
        };
        mount.free_bytes = stat(file).map_or(0, |stat| {
            // Types differ from target to target.
            #[allow(clippy::unnecessary_cast)]
            let (blocks, size) = (stat.f_bavail as u64, stat.f_bsize as u64);
            blocks.saturating_mul(size)
        });
        Some(mount)
    }

    /// Known by its number (`linux/magic.h`) only.
    fn by_magic(file: &File) -> Option<Self> {
        // The type differs from target to target; all numbers fit 32 bits.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let magic = stat(file)?.f_type as u32;
        let name = match magic {
            0xef53 => "ext4",
            0x5846_5342 => "xfs",
            0x9123_683e => "btrfs",
            0x0102_1994 => "tmpfs",
            0x2fc1_2fc1 => "zfs",
            0xf2f5_2010 => "f2fs",
            0x794c_7630 => "overlay",
            0x6969 => "nfs",
            0xff53_4d42 | 0xfe53_4d42 => "cifs",
            0x6573_5546 => "fuse",
            0x0102_1997 => "9p",
            0x00c3_6400 => "ceph",
            0x9584_58f6 => "hugetlbfs",
            0x4d44 => "vfat",
            0x2011_bab0 => "exfat",
            _ => "unknown",
        };
        let device = file.metadata().ok()?.dev();
        Some(Self {
            file_system: name.into(),
            mounted_at: String::new(),
            source: String::new(),
            device: (libc::major(device), libc::minor(device)),
            free_bytes: 0,
        })
    }

    /// Whether holes can be punched, by what is known of the file system; `None` if nothing is.
    pub(super) fn punches_holes(&self) -> Option<bool> {
        match self.file_system.as_str() {
            "ext4" | "xfs" | "btrfs" | "tmpfs" | "f2fs" | "bcachefs" | "gfs2" | "ocfs2"
            | "ceph" | "zfs" | "hugetlbfs" | "devtmpfs" => Some(true),
            "ext2" | "ext3" | "vfat" | "exfat" | "9p" | "nfs" => Some(false),
            _ => None,
        }
    }
}

/// `36 35 98:0 /root /mnt rw,noatime master:1 - ext4 /dev/vda1 rw,errors=continue`, proc(5).
fn parse(line: &str) -> Option<Mount> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(2);
    let mut kind = kind.split(' ');
    let (major, minor) = place.next()?.split_once(':')?;
    Some(Mount {
        device: (major.parse().ok()?, minor.parse().ok()?),
        mounted_at: unescape(place.nth(1)?),
        file_system: kind.next()?.into(),
        source: unescape(kind.next()?),
        free_bytes: 0,
    })
}

/// Blanks and the like are octal there: `\040`.
fn unescape(word: &str) -> String {
    [(r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", r"\")]
        .iter()
        .fold(word.to_owned(), |word, (code, plain)| word.replace(code, plain))
}

/// True if a file system on this block device is mounted where this process can see it.
pub(super) fn is_mounted((major, minor): (u32, u32)) -> bool {
    let number = format!("{major}:{minor}");
    read("/proc/self/mountinfo").lines().any(|line| line.split(' ').nth(2) == Some(&number))
}

fn stat(file: &File) -> Option<libc::statfs> {
    // SAFETY: a plain C struct for which zeroes are valid.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, the struct is ours.
    let rc = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut stat) };
    (rc == 0).then_some(stat)
}

/// Locks on a file, as the kernel lists them. Taking one to find out could get in the way of a
/// daemon that starts.
#[derive(Debug, Default)]
pub(super) struct Locks {
    /// Who holds its `flock`, as daemons of this kind do.
    pub(super) pid: Option<u32>,
    /// Somebody holds record locks on it, as programs of QEMU do.
    pub(super) foreign: bool,
}

impl Locks {
    pub(super) fn on(file: &File) -> Self {
        let Some(identity) = identity(file) else { return Self::default() };
        Self::among(&read("/proc/locks"), &identity)
    }

    /// `1: FLOCK  ADVISORY  WRITE 4242 fe:00:1234 0 EOF`; lines with `->` only wait for one.
    fn among(table: &str, identity: &str) -> Self {
        let mut locks = Self::default();
        for line in table.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            match words[..] {
                [_, "FLOCK", _, _, pid, file, ..] if file == identity => {
                    locks.pid = locks.pid.or_else(|| pid.parse().ok());
                }
                [_, "POSIX" | "OFDLCK", _, _, _, file, ..] if file == identity => {
                    locks.foreign = true;
                }
                _ => {}
            }
        }
        locks
    }
}

/// `fe:00:1234`: device and inode as /proc/locks has them.
fn identity(file: &File) -> Option<String> {
    let meta = file.metadata().ok()?;
    let own = (libc::major(meta.dev()), libc::minor(meta.dev()));
    // A btrfs subvolume has a number of its own that only stat tells.
    let (major, minor) = Mount::of(file).map_or(own, |mount| mount.device);
    Some(format!("{major:02x}:{minor:02x}:{}", meta.ino()))
}

/// A process that holds a record lock on this byte of the file; `None` if it is none that can be seen
/// from here. The kernel's table has no number for a lock that belongs to an open file, so all open
/// files of all processes are looked at.
pub(super) fn marker(file: &File, byte: i64) -> Option<u32> {
    let identity = identity(file)?;
    // A lock that belongs to a process (old versions of QEMU) bears its number.
    let table = read("/proc/locks");
    let posix = table.lines().find_map(|line| marks(line, &identity, byte)?.try_into().ok());
    posix.or_else(|| {
        let processes = std::fs::read_dir("/proc").ok()?.flatten();
        let mut pids: Vec<u32> =
            processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        pids.sort_unstable();
        pids.into_iter().find(|&pid| has_marked(pid, &identity, byte))
    })
}

fn has_marked(pid: u32, identity: &str, byte: i64) -> bool {
    let Ok(files) = std::fs::read_dir(format!("/proc/{pid}/fdinfo")) else { return false };
    files.flatten().any(|file| {
        let info = std::fs::read_to_string(file.path()).unwrap_or_default();
        let mut locks = info.lines().filter_map(|line| line.strip_prefix("lock:"));
        locks.any(|lock| marks(lock, identity, byte).is_some())
    })
}

/// Whose record lock this is, if it is one on this byte: `1: OFDLCK ADVISORY READ -1 fe:00:1234 100
/// 101`. An open file's is nobody's, -1.
fn marks(line: &str, identity: &str, byte: i64) -> Option<i64> {
    let words: Vec<_> = line.split_whitespace().collect();
    match words[..] {
        [_, "POSIX" | "OFDLCK", _, _, pid, file, first, last] if file == identity => {
            let within = first.parse::<i64>().is_ok_and(|first| first <= byte)
                && (last == "EOF" || last.parse::<i64>().is_ok_and(|last| byte <= last));
            within.then(|| pid.parse().ok()).flatten()
        }
        _ => None,
    }
}

/// `process 123 (ringway)`.
pub(super) fn process(pid: u32) -> String {
    match comm(pid).trim() {
        "" => format!("process {pid}"),
        name => format!("process {pid} ({name})"),
    }
}

/// True if a process was killed or is ending, and only what it had begun keeps it: a daemon whose
/// threads wait for the disk stays in this state until the last write has landed.
///
/// So is a helper whose daemon has died ([`ENDING`]): it puts what that had answered into the image, as quickly as the
/// disk can.
pub fn is_dying(pid: u32) -> bool {
    let stat = read(&format!("/proc/{pid}/stat"));
    let status = read(&format!("/proc/{pid}/status"));
    ends(&stat) || is_killed(&status) || comm(pid).trim() == ENDING
}

/// What a helper calls itself once its daemon has died: its name, as far as the kernel keeps it.
pub const ENDING: &str = "ringway-ending";

fn comm(pid: u32) -> String {
    read(&format!("/proc/{pid}/comm"))
}

/// True if there is such a process, as far as can be seen from here. To be asked last: it may end
/// between two questions.
pub(super) fn is_here(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// The process of which `pid` is a child; `None` if that cannot be seen from here.
pub fn parent(pid: u32) -> Option<u32> {
    let status = read(&format!("/proc/{pid}/status"));
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// `4242 (ring way) Z 1 …`, proc(5): a zombie, or `PF_EXITING` of `linux/sched.h` in the ninth word.
fn ends(stat: &str) -> bool {
    const PF_EXITING: u64 = 4;
    let Some((_, words)) = stat.rsplit_once(')') else { return false };
    let mut words = words.split_whitespace();
    let gone = matches!(words.next(), Some("Z" | "X"));
    let flags = words.nth(5).and_then(|word| word.parse::<u64>().ok());
    gone || flags.is_some_and(|flags| flags & PF_EXITING != 0)
}

/// `SigPnd:  0000000000000100`: SIGKILL has come, and the thread has not got round to it.
fn is_killed(status: &str) -> bool {
    const SIGKILL: u64 = 1 << (libc::SIGKILL - 1);
    let pending = status.lines().filter_map(|line| {
        let mask = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    pending.fold(0, |all, mask| all | mask) & SIGKILL != 0
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_mount_table_is_read() {
        let line = r"36 35 98:0 /r /mnt/a\040b rw,noatime master:1 - ext4 /dev/vda1 rw,x=y";
        let mount = parse(line).unwrap();
        assert_eq!((mount.file_system.as_str(), mount.device), ("ext4", (98, 0)));
        assert_eq!((mount.mounted_at.as_str(), mount.source.as_str()), ("/mnt/a b", "/dev/vda1"));
        assert_eq!(parse("36 35 broken"), None);
    }

    #[test]
    fn only_locks_on_this_very_file_count() {
        let table = "\
1: FLOCK  ADVISORY  WRITE 999999990 fe:00:12 0 EOF
2: FLOCK  ADVISORY  WRITE 999999991 fe:01:34 0 EOF
3: FLOCK  ADVISORY  WRITE 999999992 fe:00:34 0 EOF
3: -> FLOCK  ADVISORY  WRITE 999999993 fe:00:56 0 EOF
4: OFDLCK ADVISORY  READ -1 fe:00:78 100 101
";
        let of = |identity| Locks::among(table, identity);
        assert_eq!(of("fe:00:34").pid, Some(999_999_992));
        assert_eq!(process(999_999_992), "process 999999992");
        assert_eq!(of("fe:00:56").pid, None);
        assert!(of("fe:00:78").foreign && of("fe:00:78").pid.is_none());
        assert!(!of("fe:00:34").foreign);
        let line = "4: OFDLCK ADVISORY  READ -1 fe:00:78 100 101";
        assert_eq!(marks(line, "fe:00:78", 101), Some(-1));
        assert_eq!(marks(line, "fe:00:78", 102).or(marks(line, "fe:00:78", 99)), None);
        assert_eq!(marks(line, "fe:00:7", 101), None);
        let line = "5: POSIX  ADVISORY  WRITE 42 fe:00:78 0 EOF";
        assert_eq!(marks(line, "fe:00:78", 203), Some(42));
    }

    #[test]
    fn the_dying_are_told_from_the_living() {
        let stat = |state, flags| format!("7 (a) b) {state} 1 7 7 0 -1 {flags} 100 0");
        assert!(!ends(&stat("S", 0x40_0000)) && !ends("") && !ends(&stat("D", 0x40_0100)));
        assert!(ends(&stat("Z", 0)) && ends(&stat("D", 0x40_0004)));
        let status =
            |own, shared| format!("Name:\ta\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\n");
        assert!(!is_killed(&status(0x4000, 0)) && !is_killed(""));
        assert!(is_killed(&status(0x100, 0)) && is_killed(&status(0, 0x4100)));
        assert!(!is_dying(std::process::id()) && is_here(std::process::id()));
        assert!(!is_dying(999_999_999) && !is_here(999_999_999));
    }

    #[test]
    fn our_own_lock_is_found() {
        let path = std::env::temp_dir().join(format!("ringway-lock-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(Locks::on(&file).pid.is_none());
        crate::open::image_lock::try_flock(&file, false).unwrap();
        let holder = Locks::on(&file).pid.unwrap();
        assert_eq!(holder, std::process::id());
        assert!(process(holder).starts_with(&format!("process {holder} (")));
    }
}
