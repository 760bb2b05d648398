//! What librbd needs besides, in the process of a disk of a Ceph cluster: sockets of its own to other hosts,
//! threads that wait in older ways, and to be told that there are no files.
//!
//! Found by strace and `--sandbox log` with Ceph 16.2 on glibc 2.36. Of all threads of such a process, its
//! workers included, which call the library.

use super::call::{Call, Rule};

/// The calls of the library.
pub(super) fn library() -> Vec<Call> {
    let internet = [libc::AF_INET, libc::AF_INET6].map(|family| family as u32);
    let mut calls = vec![
        // Monitors and OSDs: stream sockets are made and connected, never listened at.
        call!(SYS_socket, "socket", Rule::OneOf(0, internet.into())),
        call!(SYS_connect, "connect"),
        call!(SYS_getsockname, "getsockname"),
        call!(SYS_getpeername, "getpeername"),
        call!(SYS_getsockopt, "getsockopt"),
        call!(SYS_setsockopt, "setsockopt"),
        call!(SYS_sendto, "sendto"),
        call!(SYS_recvfrom, "recvfrom"),
        call!(SYS_readv, "readv"),
        call!(SYS_writev, "writev"),
        call!(SYS_pipe2, "pipe2"),
        call!(SYS_timerfd_create, "timerfd_create"),
        call!(SYS_timerfd_settime, "timerfd_settime"),
        // Pauses before a connection is tried again.
        call!(SYS_clock_nanosleep, "clock_nanosleep"),
        call!(SYS_clock_getres, "clock_getres"),
        // Its threads hear no signals. Without an answer it ends the process.
        call!(SYS_rt_sigprocmask, "rt_sigprocmask"),
        // What it tells the monitors of this host, and names of its threads.
        call!(SYS_uname, "uname"),
        call!(SYS_sysinfo, "sysinfo"),
        call!(SYS_getuid, "getuid"),
        call!(SYS_geteuid, "geteuid"),
        call!(SYS_getgid, "getgid"),
        call!(SYS_getegid, "getegid"),
        call!(SYS_getrusage, "getrusage"),
        call!(SYS_prlimit64, "prlimit64", Rule::OneOf(0, vec![0])),
        call!(SYS_prctl, "prctl", Rule::OneOf(0, vec![libc::PR_GET_NAME as u32])),
        // Whether the process that had the lock before is still there: the signal 0 is none.
        call!(SYS_kill, "kill", Rule::OneOf(1, vec![0])),
        // Files are not to be had: it does without.
        call!(SYS_openat, "openat", Rule::Refused),
        call!(SYS_newfstatat, "newfstatat", Rule::Refused),
        call!(SYS_readlinkat, "readlinkat", Rule::Refused),
        call!(SYS_faccessat, "faccessat", Rule::Refused),
        call!(SYS_faccessat2, "faccessat2", Rule::Refused),
        call!(SYS_unlinkat, "unlinkat", Rule::Refused),
        call!(SYS_statfs, "statfs", Rule::Refused),
        call!(SYS_fstatfs, "fstatfs", Rule::Refused),
        call!(SYS_getdents64, "getdents64", Rule::Refused),
        call!(SYS_sched_setscheduler, "sched_setscheduler", Rule::Refused),
        call!(SYS_setpriority, "setpriority", Rule::Refused),
        call!(SYS_bind, "bind", Rule::Refused),
        call!(SYS_listen, "listen", Rule::Refused),
        // An orderly end of the process writes what is left to be written, and asks again for nothing.
        call!(SYS_rt_sigaction, "rt_sigaction", Rule::Refused),
    ];
    #[cfg(target_arch = "x86_64")]
    calls.extend([
        call!(SYS_epoll_create, "epoll_create"),
        call!(SYS_epoll_wait, "epoll_wait"),
        call!(SYS_poll, "poll"),
        call!(SYS_select, "select"),
        call!(SYS_open, "open", Rule::Refused),
        call!(SYS_stat, "stat", Rule::Refused),
        call!(SYS_lstat, "lstat", Rule::Refused),
        call!(SYS_access, "access", Rule::Refused),
        call!(SYS_readlink, "readlink", Rule::Refused),
        call!(SYS_unlink, "unlink", Rule::Refused),
    ]);
    calls.extend([call!(SYS_epoll_pwait, "epoll_pwait"), call!(SYS_pselect6, "pselect6")]);
    calls
}
