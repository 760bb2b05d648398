//! The one way to leave out a test: it says what this machine lacks, and `./test` counts it.
//!
//! A test that is left out passes for cargo. With `RINGWAY_SKIPS=FILE` each one adds a line to that
//! file, of three fields between tabs: the test, what is lacking, and why. `tools/skips.sh` judges the
//! file: CI fails for what `tools/skips.txt` does not allow.

use std::fmt;
use std::io::Write;

/// What a test may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The io_uring engine.
    IoUring,
    /// A feature of io_uring that came with a later kernel.
    IoUringFeature,
    /// The Linux AIO engine.
    LinuxAio,
    /// Files that can be opened with O_DIRECT.
    Direct,
    /// Loop devices.
    LoopDevice,
    /// File systems in user space.
    Fuse,
    /// The right to mount file systems, and the programs that make them.
    Mount,
    /// The rights of root.
    Root,
    /// A folder of the tests that every user may enter.
    OpenFolder,
    /// A file system that frees the blocks of a hole.
    Holes,
    /// A file system that tells which pages are dirty.
    DirtyPages,
    /// A file system whose files share no blocks when they are copied.
    OwnBlocks,
    /// Landlock with all rights that the daemon drops.
    Landlock,
    /// `/proc/PID/schedstat`.
    SchedStat,
    /// Two CPUs.
    Cpus,
    /// A memory cgroup of the test's own.
    MemoryCgroup,
    /// groff, which reads manual pages.
    Groff,
    /// QEMU's programs: qemu-system-x86_64, qemu-img, qemu-io.
    Qemu,
    /// A newer QEMU than the machine's, unpacked below the target directory.
    NewerQemu,
    /// qemu-storage-daemon.
    StorageDaemon,
    /// systemd-analyze and systemd-socket-activate.
    Systemd,
    /// What installs the Debian package somewhere: the package, mmdebstrap, an archive.
    DebianPackage,
    /// libvirt's daemon and virsh.
    Libvirt,
    /// Guests in QEMU, which `RINGWAY_SKIP_GUEST` switches off.
    Guest,
    /// Prometheus and its promtool.
    Prometheus,
    /// A name of this host in `/etc/hosts` besides localhost, or an address of IPv6.
    HostName,
    /// Clients of NBD: nbdinfo, nbdcopy, nbdsh, and fio's engine of it.
    Nbd,
    /// A Ceph cluster: ceph-mon, ceph-osd, ceph-common, librbd1.
    Ceph,
    /// A Xen host in QEMU: its packages.
    Xen,
    /// Chromium, which shows pages.
    Chromium,
    /// valgrind, which counts instructions.
    Valgrind,
}

impl Need {
    /// The word of `tools/skips.txt`.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::IoUringFeature => "io_uring-feature",
            Self::LinuxAio => "linux-aio",
            Self::Direct => "direct",
            Self::LoopDevice => "loop-device",
            Self::Fuse => "fuse",
            Self::Mount => "mount",
            Self::Root => "root",
            Self::OpenFolder => "open-folder",
            Self::Holes => "holes",
            Self::DirtyPages => "dirty-pages",
            Self::OwnBlocks => "own-blocks",
            Self::Landlock => "landlock",
            Self::SchedStat => "schedstat",
            Self::Cpus => "cpus",
            Self::MemoryCgroup => "memory-cgroup",
            Self::Groff => "groff",
            Self::Qemu => "qemu",
            Self::NewerQemu => "newer-qemu",
            Self::StorageDaemon => "storage-daemon",
            Self::Systemd => "systemd",
            Self::DebianPackage => "debian-package",
            Self::Libvirt => "libvirt",
            Self::Prometheus => "prometheus",
            Self::HostName => "host-name",
            Self::Nbd => "nbd",
            Self::Guest => "guest",
            Self::Ceph => "ceph",
            Self::Xen => "xen",
            Self::Chromium => "chromium",
            Self::Valgrind => "valgrind",
        }
    }
}

/// Something that this machine lacks.
#[derive(Clone, Debug)]
#[must_use = "a test that is left out says so: `skip`"]
pub struct Lack {
    need: Need,
    why: String,
}

impl Lack {
    /// `need` cannot be met because of `why`.
    pub fn new(need: Need, why: impl fmt::Display) -> Self {
        // One line of three fields.
        Self { need, why: why.to_string().split_whitespace().collect::<Vec<_>>().join(" ") }
    }

    /// Leaves out the test of this thread, or the part of it that is meant: says so, and records it.
    ///
    /// # Panics
    /// If `RINGWAY_SKIPS` names a file that cannot be written.
    pub fn skip(&self) {
        println!("skipped: {self}");
        let Some(file) = std::env::var_os("RINGWAY_SKIPS") else { return };
        let line = format!("{}\t{}\t{}\n", test(), self.need.word(), self.why);
        // One write at the end of the file: lines of several processes do not mix.
        let file = std::fs::File::options().append(true).create(true).open(file);
        file.and_then(|mut file| file.write_all(line.as_bytes()))
            .expect("RINGWAY_SKIPS is written");
    }
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.need.word(), self.why)
    }
}

/// Leaves out the test of this thread, or a part of it: `need` cannot be met because of `why`.
///
/// # Panics
/// As [`Lack::skip`].
pub fn skip(need: Need, why: impl fmt::Display) {
    Lack::new(need, why).skip();
}

/// `PACKAGE/BINARY::TEST`, the same in each run. Libtest names a test's thread after it.
fn test() -> String {
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_else(|_| "?".to_owned());
    let mut args = std::env::args();
    let program = args.next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default();
    // Cargo adds a hash to the name.
    let binary = program.rsplit_once('-').map_or(program, |(name, _)| name);
    let thread = std::thread::current();
    let test = match thread.name() {
        // One test alone runs on the main thread, and is named on the command line.
        None | Some("main") => args.find(|arg| !arg.starts_with('-')),
        Some(name) => Some(name.to_owned()),
    };
    format!("{package}/{binary}::{}", test.as_deref().unwrap_or("?"))
}
