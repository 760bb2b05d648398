//! What threads do to find out whether they may: calls that must end the process, and calls that some are there for.

use super::super::calls::Guests;
use super::super::{HelperNeeds, confine_helper, enter};
use ringway_control::config::Sandbox as Mode;
use ringway_core::thread::{DataThread, data_thread_starts};
use std::ffi::{c_int, c_long};

/// Makes one call and says how it lives on.
pub(super) type Deed = fn() -> c_long;

pub(super) fn raw(number: c_long, arguments: [usize; 6]) -> c_long {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: of the calls below, none is given memory that it may write to, or paths that are to
    // stay as they are.
    unsafe { libc::syscall(number, a, b, c, d, e, f) }
}

pub(super) fn path(path: &'static std::ffi::CStr) -> usize {
    path.as_ptr() as usize
}

pub(super) fn number(value: c_int) -> usize {
    // Negative ones keep their bits.
    isize::try_from(value).unwrap() as usize
}

/// Whose calls they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    Process,
    Worker,
    Io,
    XenProcess,
    XenWorker,
    XenIo,
    Helper,
}

impl Who {
    /// Those that meet guests over vhost-user.
    pub(super) const DAEMON: [Self; 3] = [Self::Process, Self::Worker, Self::Io];
    pub(super) const ALL: [Self; 7] = [
        Self::Process,
        Self::Worker,
        Self::Io,
        Self::XenProcess,
        Self::XenWorker,
        Self::XenIo,
        Self::Helper,
    ];

    /// Becomes it.
    pub(super) fn enter(self, mode: Mode) {
        let guests = match self {
            Self::Helper => {
                rustix::thread::set_no_new_privs(true).unwrap();
                return confine_helper(mode, HelperNeeds::default()).unwrap();
            }
            Self::XenProcess | Self::XenWorker | Self::XenIo => Guests::Xen,
            _ => Guests::VhostUser,
        };
        enter(mode, guests, None).unwrap();
        match self {
            Self::Worker | Self::XenWorker => data_thread_starts(DataThread::Worker),
            Self::Io | Self::XenIo => data_thread_starts(DataThread::Io),
            _ => {}
        }
    }
}

pub(super) fn xen_ioctl(request: u32) -> c_long {
    raw(libc::SYS_ioctl, [number(-1), request as usize, 0, 0, 0, 0])
}

pub(super) const NONE: [usize; 6] = [0; 6];
pub(super) const AT_FDCWD: c_int = libc::AT_FDCWD;

/// What must never be done, by name. Arguments are such that the call would do what it says, or
/// would fail harmlessly where there is no filter.
pub(super) const DEEDS: &[(&str, Deed)] = &[
    ("open a file", || raw(libc::SYS_openat, [number(AT_FDCWD), path(c"/etc/passwd"), 0, 0, 0, 0])),
    ("open a file, the new way", || {
        raw(libc::SYS_openat2, [number(AT_FDCWD), path(c"/etc"), 0, 0, 0, 0])
    }),
    ("look at a file", || raw(libc::SYS_statx, [number(AT_FDCWD), path(c"/etc"), 0, 0, 0, 0])),
    ("read a link", || {
        raw(libc::SYS_readlinkat, [number(AT_FDCWD), path(c"/proc/self/exe"), 0, 0, 0, 0])
    }),
    ("remove a file", || {
        raw(libc::SYS_unlinkat, [number(AT_FDCWD), path(c"/nowhere/at/all"), 0, 0, 0, 0])
    }),
    ("rename a file", || {
        raw(
            libc::SYS_renameat2,
            [number(AT_FDCWD), path(c"/nowhere/a"), number(AT_FDCWD), path(c"/nowhere/b"), 0, 0],
        )
    }),
    ("change a file's mode", || {
        raw(libc::SYS_fchmodat, [number(AT_FDCWD), path(c"/nowhere/a"), 0o777, 0, 0, 0])
    }),
    ("run a program", || raw(libc::SYS_execve, [path(c"/nowhere/at/all"), 0, 0, 0, 0, 0])),
    ("run a program by descriptor", || {
        raw(libc::SYS_execveat, [number(-1), path(c""), 0, 0, number(libc::AT_EMPTY_PATH), 0])
    }),
    ("fork", || {
        // SAFETY: where it is let, the child ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::_exit(0) };
        }
        child.into()
    }),
    ("make a namespace", || raw(libc::SYS_unshare, [number(libc::CLONE_NEWUSER), 0, 0, 0, 0, 0])),
    ("make a network socket", || {
        raw(libc::SYS_socket, [number(libc::AF_INET), number(libc::SOCK_STREAM), 0, 0, 0, 0])
    }),
    ("make a local socket", || {
        raw(libc::SYS_socket, [number(libc::AF_UNIX), number(libc::SOCK_STREAM), 0, 0, 0, 0])
    }),
    ("connect", || raw(libc::SYS_connect, [number(-1), 0, 0, 0, 0, 0])),
    ("bind", || raw(libc::SYS_bind, [number(-1), 0, 0, 0, 0, 0])),
    ("trace a process", || raw(libc::SYS_ptrace, [number(-1), 1, 0, 0, 0, 0])),
    ("read another's memory", || raw(libc::SYS_process_vm_readv, [1, 0, 0, 0, 0, 0])),
    ("write another's memory", || raw(libc::SYS_process_vm_writev, [1, 0, 0, 0, 0, 0])),
    ("take another's descriptor", || raw(libc::SYS_pidfd_getfd, [number(-1), 0, 0, 0, 0, 0])),
    ("kill a process", || raw(libc::SYS_kill, [number(c_int::MAX), 0, 0, 0, 0, 0])),
    ("kill another's thread", || {
        raw(libc::SYS_tgkill, [number(c_int::MAX), 1, number(libc::SIGKILL), 0, 0, 0])
    }),
    ("kill a thread of ours", || {
        raw(
            libc::SYS_tgkill,
            [std::process::id() as usize, number(c_int::MAX), number(libc::SIGKILL), 0, 0, 0],
        )
    }),
    ("mount", || raw(libc::SYS_mount, [0, path(c"/nowhere/at/all"), 0, 0, 0, 0])),
    ("change the root", || raw(libc::SYS_chroot, [path(c"/nowhere/at/all"), 0, 0, 0, 0, 0])),
    ("load a BPF program", || raw(libc::SYS_bpf, [number(-1), 0, 0, 0, 0, 0])),
    ("watch the CPU", || raw(libc::SYS_perf_event_open, [0, 0, 0, number(-1), 0, 0])),
    ("load a module", || raw(libc::SYS_finit_module, [number(-1), path(c""), 0, 0, 0, 0])),
    ("use keys", || raw(libc::SYS_keyctl, [number(-1), 0, 0, 0, 0, 0])),
    ("become root", || raw(libc::SYS_setuid, [0, 0, 0, 0, 0, 0])),
    ("take capabilities", || raw(libc::SYS_capset, [0, 0, 0, 0, 0, 0])),
    ("handle faults", || raw(libc::SYS_userfaultfd, [number(-1), 0, 0, 0, 0, 0])),
    ("set an io_uring up", || raw(libc::SYS_io_uring_setup, [0, 0, 0, 0, 0, 0])),
    ("map executable memory", || {
        let (rwx, flags) =
            (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        raw(libc::SYS_mmap, [0, 4096, number(rwx), number(flags), number(-1), 0])
    }),
    ("make memory executable", || {
        raw(libc::SYS_mprotect, [0, 0, number(libc::PROT_EXEC), 0, 0, 0])
    }),
    ("make a descriptor send signals", || {
        raw(libc::SYS_fcntl, [0, number(libc::F_SETOWN), 1, 0, 0, 0])
    }),
    ("type on the terminal", || {
        raw(libc::SYS_ioctl, [number(-1), libc::TIOCSTI.try_into().unwrap(), 0, 0, 0, 0])
    }),
    ("ask the grant device for an address", || xen_ioctl(0x18_4702)),
    ("make an event channel", || xen_ioctl(0x4_4502)),
    ("reset event channels", || xen_ioctl(0x4505)),
    ("give a file away", || {
        raw(libc::SYS_fchownat, [number(AT_FDCWD), path(c"/nowhere/a"), 1, 1, 0, 0])
    }),
    ("say where another runs", || raw(libc::SYS_sched_setaffinity, [1, 0, 0, 0, 0, 0])),
    ("set the clock", || raw(libc::SYS_settimeofday, NONE)),
    ("reboot", || raw(libc::SYS_reboot, NONE)),
    ("make core dumps possible", || {
        raw(libc::SYS_prctl, [number(libc::PR_SET_DUMPABLE), 1, 0, 0, 0, 0])
    }),
];

/// Of the deeds above, what the helper is there for.
pub(super) const HELPERS_DUTIES: &[&str] = &[
    "open a file",
    "open a file, the new way",
    "look at a file",
    "read a link",
    "remove a file",
    "make a local socket",
    "connect",
    "bind",
];

const EVERYBODY: &[Who] = &Who::ALL;

/// What only some threads may do, which is a deed for the others.
pub(super) const DUTIES: &[(&str, Deed, &[Who])] = &[
    (
        "make a thread's stack and start it",
        || {
            std::thread::Builder::new().spawn(|| {}).unwrap().join().unwrap();
            0
        },
        &[Who::Process, Who::XenProcess, Who::Helper],
    ),
    ("make an eventfd", || raw(libc::SYS_eventfd2, NONE), &[Who::Process, Who::XenProcess]),
    (
        "make memory to share",
        || raw(libc::SYS_memfd_create, [path(c"x"), 0, 0, 0, 0, 0]),
        &[Who::Process, Who::XenProcess],
    ),
    (
        "hear a message",
        || raw(libc::SYS_recvmsg, [number(-1), 0, 0, 0, 0, 0]),
        &[Who::Process, Who::XenProcess, Who::Helper],
    ),
    (
        "take a connection",
        || raw(libc::SYS_accept4, [number(-1), 0, 0, 0, 0, 0]),
        &[Who::Process, Who::XenProcess],
    ),
    (
        "change a file's length",
        || raw(libc::SYS_ftruncate, [number(-1), 0, 0, 0, 0, 0]),
        &[Who::Process, Who::XenProcess, Who::Helper],
    ),
    (
        "put on a filter",
        || raw(libc::SYS_prctl, [number(libc::PR_SET_SECCOMP), number(-1), 0, 0, 0, 0]),
        &[Who::Process, Who::XenProcess],
    ),
    (
        "enter an io_uring",
        || raw(libc::SYS_io_uring_enter, [number(-1), 0, 0, 0, 0, 0]),
        &[Who::Process, Who::Worker, Who::XenProcess, Who::XenWorker],
    ),
    (
        "submit to Linux AIO",
        || raw(libc::SYS_io_submit, NONE),
        &[Who::Process, Who::Worker, Who::XenProcess, Who::XenWorker],
    ),
    (
        "listen to a doorbell",
        || raw(libc::SYS_epoll_ctl, [number(-1), 0, 0, 0, 0, 0]),
        &[Who::Process, Who::Worker, Who::XenProcess, Who::XenWorker],
    ),
    (
        "sync a file",
        || raw(libc::SYS_fdatasync, [number(-1), 0, 0, 0, 0, 0]),
        &[Who::Process, Who::Io, Who::XenProcess, Who::XenIo, Who::Helper],
    ),
    (
        "punch a hole",
        || raw(libc::SYS_fallocate, [number(-1), 0, 0, 1, 0, 0]),
        &[Who::Process, Who::Io, Who::XenProcess, Who::XenIo, Who::Helper],
    ),
    ("read a file", || raw(libc::SYS_preadv2, [number(-1), 0, 0, 0, 0, 0]), EVERYBODY),
    (
        "write a file",
        || raw(libc::SYS_pwritev2, [number(-1), 0, 0, 0, 0, 0]),
        &[Who::Process, Who::Worker, Who::Io, Who::XenProcess, Who::XenWorker, Who::XenIo],
    ),
    (
        "map memory",
        || {
            raw(
                libc::SYS_mmap,
                [0, 4096, 3, number(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS), number(-1), 0],
            )
        },
        &Who::ALL,
    ),
    (
        "allocate much and give it back",
        || {
            for _ in 0..3 {
                let many: Vec<Vec<u8>> = (0..64).map(|i| vec![1; 100_000 + i]).collect();
                let mut grows = many.concat();
                grows.reserve(64 << 20);
            }
            0
        },
        &Who::ALL,
    ),
    (
        "ask for the time and the size of a page by a library",
        || {
            assert!(crate::clock::clock(libc::CLOCK_MONOTONIC).is_some());
            ringway_core::mem::page_size().try_into().unwrap()
        },
        &Who::ALL,
    ),
    (
        "take a key for a hash map",
        || {
            use std::hash::{BuildHasher, RandomState};
            RandomState::new().hash_one(1).count_ones().into()
        },
        &Who::ALL,
    ),
    (
        "leave a CPU",
        || {
            let cpus = rustix::thread::sched_getaffinity(None).unwrap_or_default();
            rustix::thread::sched_setaffinity(None, &cpus).unwrap();
            // SAFETY: it takes nothing and touches no memory.
            unsafe { libc::sched_getcpu().into() }
        },
        &[Who::Process, Who::Worker, Who::XenProcess, Who::XenWorker],
    ),
    (
        "be told nothing of where others may run",
        || {
            let mut cpus = [0u64; 128];
            let size = size_of_val(&cpus);
            let into = cpus.as_mut_ptr() as usize;
            assert_eq!(raw(libc::SYS_sched_getaffinity, [1, size, into, 0, 0, 0]), -1);
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOSYS));
            0
        },
        &Who::ALL,
    ),
    ("clone a thread the new way", || raw(libc::SYS_clone3, [0, 0, 0, 0, 0, 0]), &Who::ALL),
    #[cfg(feature = "xen")]
    (
        "copy granted pages",
        || xen_ioctl(ringway_xen_blkback::worker_ioctls()[0]),
        &[Who::XenProcess, Who::XenWorker],
    ),
    #[cfg(feature = "xen")]
    (
        "map granted pages",
        || xen_ioctl(ringway_xen_blkback::worker_ioctls()[1]),
        &[Who::XenProcess, Who::XenWorker],
    ),
    #[cfg(feature = "xen")]
    (
        "ring a guest's bell",
        || xen_ioctl(ringway_xen_blkback::worker_ioctls()[3]),
        &[Who::XenProcess, Who::XenWorker],
    ),
    #[cfg(feature = "xen")]
    (
        "bind a guest's bell",
        || xen_ioctl(ringway_xen_blkback::session_ioctls()[1]),
        &[Who::XenProcess],
    ),
];
