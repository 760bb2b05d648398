//! The system calls that each kind of thread may make. A test counts them.
//!
//! None of them opens, changes or even looks at anything by its path, none makes a socket or an
//! io_uring, starts a process or reaches another one. Calls of the hot path have no condition: the
//! kernel then remembers that they are allowed and does not run the filter for them.

macro_rules! call {
    ($number:ident, $name:literal) => {
        Call { number: i64::from(libc::$number), name: $name, rule: Rule::Always }
    };
    ($number:ident, $name:literal, $rule:expr) => {
        Call { number: i64::from(libc::$number), name: $name, rule: $rule }
    };
}

mod call;
mod cluster;
mod helper;

use crate::xen;
pub(super) use call::{Call, Rule};
pub(super) use helper::helper;
use std::ffi::{c_int, c_ulong};

/// Who makes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallerKind {
    /// Any thread: what the others may and the control plane needs.
    Process,
    /// `worker-N`.
    Worker,
    /// `io-N`.
    Io,
}

impl CallerKind {
    #[cfg(test)]
    pub(super) const ALL: [Self; 3] = [Self::Process, Self::Worker, Self::Io];
}

/// Whose disks they are, which decides what reaches their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guests {
    /// Over vhost-user: memory comes as files.
    VhostUser,
    /// Of this Xen host: memory is mapped and copied by devices.
    Xen,
    /// None: clients of NBD, whose data comes over their sockets.
    Nbd,
    /// Over vhost-user, and in the same process the library that speaks with a Ceph cluster.
    Cluster,
}

/// True if this file knows the calls of this kind of machine.
pub(super) const KNOWN: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

/// The calls of one kind of thread.
pub(super) fn of(kind: CallerKind, guests: Guests) -> Vec<Call> {
    let mut calls = basics();
    calls.extend(transfers());
    let more = match kind {
        CallerKind::Worker => worker(guests),
        CallerKind::Io => io(),
        CallerKind::Process => {
            let library = if guests == Guests::Cluster { cluster::library() } else { Vec::new() };
            [worker(guests), io(), control(guests), library].concat()
        }
    };
    for call in more {
        match calls.iter_mut().find(|known| known.number == call.number) {
            Some(known) => known.rule = wider(&known.rule, call.rule),
            None => calls.push(call),
        }
    }
    calls
}

/// What either of two rules allows.
fn wider(one: &Rule, other: Rule) -> Rule {
    match (one, other) {
        (Rule::Always, _) | (_, Rule::Always) => Rule::Always,
        (Rule::Refused, Rule::Zero(argument)) => Rule::Zero(argument),
        (Rule::OneOf(argument, one), Rule::OneOf(_, other)) => {
            Rule::OneOf(*argument, union(one, other))
        }
        (Rule::Both(first, one), Rule::Both(_, other)) => Rule::Both(*first, union(one, other)),
        (one, _) => one.clone(),
    }
}

fn union(one: &[u32], other: Vec<u32>) -> Vec<u32> {
    let new = other.into_iter().filter(|value| !one.contains(value));
    one.iter().copied().chain(new).collect()
}

/// What `isatty` asks in glibc 2.42 and newer: `_IOR('T', 0x2A, struct termios2)`.
const TCGETS2: libc::Ioctl = 0x802C_542A;

/// Memory, waiting, the end of a thread.
fn basics() -> Vec<Call> {
    let mut calls = vec![
        call!(SYS_futex, "futex"),
        call!(SYS_read, "read"),
        call!(SYS_write, "write"),
        call!(SYS_close, "close"),
        call!(SYS_mmap, "mmap", not_executable()),
        call!(SYS_mprotect, "mprotect", not_executable()),
        call!(SYS_munmap, "munmap"),
        call!(SYS_brk, "brk"),
        // Without a clock in the vDSO.
        call!(SYS_clock_gettime, "clock_gettime"),
        // Keys of hash maps.
        call!(SYS_getrandom, "getrandom"),
        // The end of the handlers of SIGBUS and of the watchdog's signal.
        call!(SYS_rt_sigreturn, "rt_sigreturn"),
        // After SIGSTOP and SIGCONT.
        call!(SYS_restart_syscall, "restart_syscall"),
        call!(SYS_exit, "exit"),
        call!(SYS_exit_group, "exit_group"),
        // abort: whoever asks how the process ended is told SIGABRT.
        call!(SYS_getpid, "getpid"),
        call!(SYS_gettid, "gettid"),
        tgkill(libc::SIGABRT as u32),
    ];
    calls.extend(refused());
    calls
}

/// Requests.
fn transfers() -> Vec<Call> {
    vec![call!(SYS_preadv2, "preadv2"), call!(SYS_pwritev2, "pwritev2")]
}

/// Engines and queues.
fn worker(guests: Guests) -> Vec<Call> {
    let mut calls = vec![
        call!(SYS_io_uring_enter, "io_uring_enter"),
        // What a ring takes was restricted when it was set up.
        call!(SYS_io_uring_register, "io_uring_register"),
        call!(SYS_io_submit, "io_submit"),
        call!(SYS_io_getevents, "io_getevents"),
        call!(SYS_io_destroy, "io_destroy"),
        epoll_wait(),
        call!(SYS_epoll_ctl, "epoll_ctl"),
        call!(SYS_fcntl, "fcntl", fcntl()),
        // Leaving a CPU that a guest needs.
        // 0 is the thread that asks.
        call!(SYS_sched_getaffinity, "sched_getaffinity", Rule::Zero(0)),
        call!(SYS_sched_setaffinity, "sched_setaffinity", Rule::OneOf(0, vec![0])),
        // Which one that is, without one in the vDSO.
        call!(SYS_getcpu, "getcpu"),
    ];
    if guests == Guests::Xen {
        calls.push(call!(SYS_ioctl, "ioctl", Rule::OneOf(1, xen::worker_ioctls())));
    }
    if guests == Guests::Nbd {
        // Requests and answers. Of sockets that others have made and handed over.
        calls.extend([call!(SYS_recvmsg, "recvmsg"), call!(SYS_sendmsg, "sendmsg")]);
    }
    calls
}

/// What blocks.
fn io() -> Vec<Call> {
    vec![
        call!(SYS_fdatasync, "fdatasync"),
        call!(SYS_fallocate, "fallocate"),
        call!(SYS_ioctl, "ioctl", Rule::OneOf(1, vec![BLKDISCARD])),
    ]
}

/// Connections, disks that come and go, threads that are started.
fn control(guests: Guests) -> Vec<Call> {
    let ioctls = [libc::FIONBIO, libc::TCGETS, TCGETS2, libc::TIOCGWINSZ];
    let mut ioctls: Vec<u32> = ioctls.map(low_bits).into_iter().chain([BLKGETSIZE64]).collect();
    if guests == Guests::Xen {
        ioctls.extend(xen::session_ioctls());
    }
    let mut calls = vec![
        call!(SYS_accept4, "accept4"),
        call!(SYS_recvmsg, "recvmsg"),
        call!(SYS_sendmsg, "sendmsg"),
        call!(SYS_ppoll, "ppoll"),
        call!(SYS_ioctl, "ioctl", Rule::OneOf(1, ioctls)),
        call!(SYS_fstat, "fstat"),
        // What a front-end sends, before it is used or closed.
        call!(SYS_statx, "statx", by_descriptor()),
        call!(SYS_getsockopt, "getsockopt"),
        call!(SYS_shutdown, "shutdown"),
        call!(SYS_flock, "flock"),
        call!(SYS_fcntl, "fcntl", record_locks()),
        // What others wrote before a guest was migrated here.
        call!(SYS_fadvise64, "fadvise64"),
        // Resizing, and records of what is in flight.
        call!(SYS_ftruncate, "ftruncate"),
        call!(SYS_memfd_create, "memfd_create"),
        call!(SYS_eventfd2, "eventfd2"),
        call!(SYS_epoll_create1, "epoll_create1"),
        call!(SYS_io_setup, "io_setup"),
        call!(SYS_clone, "clone", threads_only()),
        call!(SYS_rseq, "rseq"),
        // A thread's name, its own filter, and how late its timers may be.
        call!(
            SYS_prctl,
            "prctl",
            Rule::OneOf(0, vec![PR_SET_NAME, PR_SET_SECCOMP, PR_SET_TIMERSLACK])
        ),
        // The watchdog interrupts a thread that a peer makes wait.
        tgkill(watchdog_signal()),
    ];
    if matches!(guests, Guests::VhostUser | Guests::Cluster) {
        // Pages of a ring that are to adjoin: what is 0 bytes long is mapped once more, and nothing moved.
        calls.push(call!(SYS_mremap, "mremap", Rule::Zero(1)));
    }
    if guests == Guests::Nbd {
        // Where a file has holes.
        calls.push(call!(SYS_lseek, "lseek"));
        // Between the thread that speaks TLS with a client and the worker that serves it.
        let unix = libc::AF_UNIX as u32;
        calls.push(call!(SYS_socketpair, "socketpair", Rule::OneOf(0, vec![unix])));
    }
    calls
}

/// What the C library asks for with another way to go if there is no such call.
fn refused() -> Vec<Call> {
    vec![
        // Its flags are in memory, out of a filter's sight: clone is asked instead.
        call!(SYS_clone3, "clone3", Rule::Refused),
        // Stacks of threads that have ended stay in memory for the next.
        call!(SYS_madvise, "madvise", Rule::Refused),
        // A larger block is copied.
        call!(SYS_mremap, "mremap", Rule::Refused),
        // A stack that overflows ends the process without a word.
        call!(SYS_sigaltstack, "sigaltstack", Rule::Refused),
        // For mutexes of other processes; nobody has any.
        call!(SYS_set_robust_list, "set_robust_list", Rule::Refused),
        // For telling where a thread may run, which workers may ask for themselves; nobody else does.
        call!(SYS_sched_getaffinity, "sched_getaffinity", Rule::Refused),
        // Channels of the standard library, behind a sender that was interrupted: it looks again.
        call!(SYS_sched_yield, "sched_yield", Rule::Refused),
        // All signals that are waited for are blocked already, and for all threads.
        call!(SYS_rt_sigprocmask, "rt_sigprocmask", Rule::Refused),
    ]
}

const BLKDISCARD: u32 = 0x1277;
const BLKGETSIZE64: u32 = 0x8008_1272;
const PR_SET_NAME: u32 = libc::PR_SET_NAME as u32;
const PR_SET_SECCOMP: u32 = libc::PR_SET_SECCOMP as u32;
const PR_SET_TIMERSLACK: u32 = libc::PR_SET_TIMERSLACK as u32;

/// The kernel looks at 32 bits of the command of an ioctl.
#[allow(clippy::cast_possible_truncation)]
fn low_bits(command: c_ulong) -> u32 {
    command as u32
}

fn not_executable() -> Rule {
    Rule::Bits { argument: 2, set: 0, clear: bits(libc::PROT_EXEC) }
}

/// Nothing by its path: it is the empty one, in memory that is not written.
fn by_descriptor() -> Rule {
    let at = ringway_core::file::NO_PATH.as_ptr() as u64;
    Rule::Bits { argument: 1, set: at, clear: !at }
}

fn threads_only() -> Rule {
    Rule::Bits {
        argument: 0,
        set: bits(libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD),
        clear: bits(
            libc::CLONE_NEWNS
                | libc::CLONE_NEWCGROUP
                | libc::CLONE_NEWUTS
                | libc::CLONE_NEWIPC
                | libc::CLONE_NEWUSER
                | libc::CLONE_NEWPID
                | libc::CLONE_NEWNET,
        ),
    }
}

fn bits(flags: c_int) -> u64 {
    (flags as u32).into()
}

/// Not those that send signals (F_SETOWN, F_SETLEASE, F_NOTIFY) or lock.
fn fcntl() -> Rule {
    let commands = [
        libc::F_GETFD,
        libc::F_SETFD,
        libc::F_GETFL,
        libc::F_SETFL,
        libc::F_DUPFD_CLOEXEC,
        libc::F_ADD_SEALS,
        libc::F_GET_SEALS,
    ];
    Rule::OneOf(1, commands.map(|command| command as u32).into())
}

/// The locks that QEMU looks at. Only those that wait for nobody.
fn record_locks() -> Rule {
    Rule::OneOf(1, [libc::F_OFD_GETLK, libc::F_OFD_SETLK].map(|command| command as u32).into())
}

/// One signal to a thread of this process.
fn tgkill(signal: u32) -> Call {
    call!(SYS_tgkill, "tgkill", Rule::Both(std::process::id(), vec![signal]))
}

/// `export/src/peer_eventfd.rs`.
fn watchdog_signal() -> u32 {
    ringway_export::watchdog_signal() as u32
}

/// Since Linux 5.11 it takes nanoseconds.
fn epoll_wait() -> Call {
    // SAFETY: no descriptor and no memory: the kernel says EBADF if it knows the call.
    let known = unsafe {
        let none = std::ptr::null_mut::<libc::epoll_event>();
        libc::epoll_pwait2(-1, none, 1, std::ptr::null(), std::ptr::null()) == 0
            || std::io::Error::last_os_error().raw_os_error() != Some(libc::ENOSYS)
    };
    if known {
        return call!(SYS_epoll_pwait2, "epoll_pwait2");
    }
    #[cfg(target_arch = "x86_64")]
    return call!(SYS_epoll_wait, "epoll_wait");
    #[cfg(not(target_arch = "x86_64"))]
    return call!(SYS_epoll_pwait, "epoll_pwait");
}
