//! The system calls of the helper process: files, and the sockets it makes. It reads an image only to
//! see whether it begins or ends as another format does and whether O_DIRECT works; it writes none but new
//! clones, and reference counts of images that were not closed; it starts nothing, and reaches no network but for disks of NBD servers there.

use super::super::HelperNeeds;
use super::{
    BLKGETSIZE64, Call, PR_SET_NAME, Rule, basics, fcntl, record_locks, threads_only, wider,
};

/// From `linux/fs.h`: sizes of blocks.
const BLKSSZGET: u32 = 0x1268;
const BLKPBSZGET: u32 = 0x127b;
const BLKIOOPT: u32 = 0x1279;

/// From `linux/nvme_ioctl.h`: which namespace it is, and commands for its controller, of which Identify is
/// sent.
const NVME_IOCTL_ID: u32 = 0x4e40;
const NVME_IOCTL_ADMIN_CMD: u32 = 0xc048_4e41;

/// All of them.
pub(in crate::sandbox) fn helper(needs: HelperNeeds) -> Vec<Call> {
    let mut calls = basics();
    calls.extend(names());
    calls.extend(files(needs.nvme));
    calls.extend(sockets(needs.network));
    if needs.clones {
        calls.extend(clones());
    }
    if needs.account {
        calls.extend(identities());
    }
    if needs.groups && !needs.account {
        calls.push(call!(SYS_setfsgid, "setfsgid"));
    }
    if needs.gives || needs.clones {
        calls.push(give());
    }
    if needs.iopoll {
        let rings = rings();
        calls.retain(|call| rings.iter().all(|wider| wider.number != call.number));
        calls.extend(rings);
    }
    calls.extend([
        // One thread for each image that is being opened.
        call!(SYS_clone, "clone", threads_only()),
        call!(SYS_rseq, "rseq"),
        call!(SYS_prctl, "prctl", Rule::OneOf(0, vec![PR_SET_NAME])),
        // Waiting for a lock.
        call!(SYS_clock_nanosleep, "clock_nanosleep"),
        call!(SYS_geteuid, "geteuid"),
        // Standard error that does not block.
        call!(SYS_ppoll, "ppoll"),
    ]);
    calls
}

/// What is looked up, opened and removed.
fn names() -> Vec<Call> {
    let mut calls = vec![
        call!(SYS_openat, "openat"),
        // Backing files, within a folder.
        call!(SYS_openat2, "openat2"),
        call!(SYS_statx, "statx"),
        call!(SYS_newfstatat, "newfstatat"),
        call!(SYS_readlinkat, "readlinkat"),
        call!(SYS_unlinkat, "unlinkat"),
        call!(SYS_faccessat, "faccessat"),
        call!(SYS_faccessat2, "faccessat2"),
        call!(SYS_getcwd, "getcwd"),
        call!(SYS_getdents64, "getdents64"),
        call!(SYS_statfs, "statfs"),
    ];
    #[cfg(target_arch = "x86_64")]
    calls.extend([call!(SYS_readlink, "readlink"), call!(SYS_unlink, "unlink")]);
    // The mode of sockets: on a thread with a umask of its own.
    calls.push(call!(SYS_umask, "umask"));
    let own_folder = libc::CLONE_FS as u32;
    calls.push(call!(SYS_unshare, "unshare", Rule::OneOf(0, vec![own_folder])));
    calls
}

/// What is found out about an image, and what a new file needs.
fn files(nvme: bool) -> Vec<Call> {
    let mut ioctls = vec![BLKGETSIZE64, BLKSSZGET, BLKPBSZGET, BLKIOOPT];
    if nvme {
        ioctls.extend([NVME_IOCTL_ID, NVME_IOCTL_ADMIN_CMD]);
    }
    vec![
        call!(SYS_fstat, "fstat"),
        call!(SYS_fstatfs, "fstatfs"),
        call!(SYS_lseek, "lseek"),
        call!(SYS_pread64, "pread64"),
        call!(SYS_ioctl, "ioctl", Rule::OneOf(1, ioctls)),
        call!(SYS_fallocate, "fallocate"),
        call!(SYS_ftruncate, "ftruncate"),
        call!(SYS_flock, "flock"),
        // What programs have written to an NVMe namespace through the host's page cache, and what an earlier repair of
        // reference counts has left there.
        call!(SYS_fdatasync, "fdatasync"),
        call!(SYS_fadvise64, "fadvise64"),
        // Whether a daemon that died has lost data.
        call!(SYS_sync_file_range, "sync_file_range"),
        call!(SYS_preadv2, "preadv2"),
        call!(SYS_fcntl, "fcntl", wider(&fcntl(), record_locks())),
    ]
}

/// A clone is written, made durable, and gets its name when it is complete. Landlock keeps what is renamed
/// in its folder.
fn clones() -> Vec<Call> {
    vec![
        call!(SYS_pwrite64, "pwrite64"),
        call!(SYS_fsync, "fsync"),
        call!(SYS_renameat2, "renameat2"),
        // What was an image gets the name of a snapshot, and the new one what belongs to it: its owner (`give`) and
        // its access control lists.
        call!(SYS_linkat, "linkat"),
        call!(SYS_flistxattr, "flistxattr"),
        call!(SYS_fgetxattr, "fgetxattr"),
        call!(SYS_fsetxattr, "fsetxattr"),
    ]
}

/// Those of disks, of the control plane, and of the daemon itself.
fn sockets(network: bool) -> Vec<Call> {
    let local = || Rule::OneOf(0, vec![libc::AF_UNIX as u32]);
    let mut calls = vec![
        call!(SYS_recvmsg, "recvmsg"),
        call!(SYS_sendmsg, "sendmsg"),
        call!(SYS_socket, "socket", if network { any_host() } else { local() }),
        call!(SYS_socketpair, "socketpair", local()),
        call!(SYS_bind, "bind"),
        call!(SYS_listen, "listen"),
        // Whether anybody listens on a socket that is there; xenstore.
        call!(SYS_connect, "connect"),
        // The mode of a private socket, which has no name yet.
        call!(SYS_fchmod, "fchmod"),
    ];
    if network {
        // Small packets go at once, and a peer that has gone is found out.
        calls.push(call!(SYS_setsockopt, "setsockopt"));
        // The end of a connection within TLS.
        calls.push(call!(SYS_shutdown, "shutdown"));
    }
    calls
}

/// NBD servers may be anywhere.
fn any_host() -> Rule {
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6];
    Rule::OneOf(0, families.map(|family| family as u32).into())
}

/// The daemon's user.
fn identities() -> Vec<Call> {
    vec![
        call!(SYS_setgroups, "setgroups"),
        call!(SYS_setresgid, "setresgid"),
        call!(SYS_setresuid, "setresuid"),
        call!(SYS_setfsgid, "setfsgid"),
        call!(SYS_setfsuid, "setfsuid"),
        call!(SYS_getegid, "getegid"),
        call!(SYS_capget, "capget"),
        call!(SYS_capset, "capset"),
    ]
}

/// The group of a socket, set by a user who may only name groups of its own, and the owner of a new image: of an open
/// file, not by a path.
fn give() -> Call {
    call!(SYS_fchownat, "fchownat", Rule::OneOf(4, vec![libc::AT_EMPTY_PATH as u32]))
}

/// For one read.
fn rings() -> Vec<Call> {
    vec![
        call!(SYS_io_uring_setup, "io_uring_setup"),
        call!(SYS_io_uring_enter, "io_uring_enter"),
        call!(SYS_io_uring_register, "io_uring_register"),
        // Its memory is not for children.
        call!(SYS_madvise, "madvise"),
    ]
}
