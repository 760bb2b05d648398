//! The socket file: that of a dead daemon is replaced, that of a living one is not.

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::umask;
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Front-ends that may wait to be accepted.
const BACKLOG: i32 = 128;

/// Why a socket could not be made: what is wrong, where, what to do.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Somebody listens there.
    #[error("{0}: another process is listening on this socket. Choose another path, or stop it")]
    Busy(PathBuf),
    /// Something else has the name.
    #[error("{0}: there is a file of this name and it is not a socket. Choose another path")]
    NotASocket(PathBuf),
    /// The folder is missing.
    #[error(
        "{0}: cannot make the socket, because its folder does not exist: make it, or choose another path"
    )]
    NoFolder(PathBuf),
    /// A limit of `struct sockaddr_un`.
    #[error("{0}: the path is too long for a socket (at most 107 bytes). Choose a shorter one")]
    TooLong(PathBuf),
    /// Permission.
    #[error("{0}: no permission to make a socket here. Choose another path or user")]
    Permission(PathBuf),
    /// It cannot belong to the group that was named.
    #[error(
        "{path}: this user may not give the socket to group {group}: {source}. Only root may name any \
         group, others one that they are in, and a folder with the setgid bit has its own way"
    )]
    Group {
        /// The path.
        path: PathBuf,
        /// The number of the group.
        group: u32,
        /// What the host says.
        source: io::Error,
    },
    /// Anything else the host says.
    #[error("{path}: cannot make the socket: {source}")]
    Host {
        /// The path.
        path: PathBuf,
        /// What the host says.
        source: io::Error,
    },
}

/// Who may connect to a socket file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Mode of the file, such as 0o660. To connect takes the right to write (unix(7)).
    pub mode: u32,
    /// Group of the file; `None` is whichever it gets by itself.
    pub group: Option<u32>,
}

impl Access {
    /// For its owner alone.
    pub const PRIVATE: Self = Self { mode: 0o600, group: None };
}

/// Listens on a socket file at `path`. From its first moment nobody else can connect than `access`
/// says, whatever the umask of this process is.
///
/// # Errors
/// [`BindError`]; a file that was there is untouched unless it is the socket of a dead process.
pub fn bind(path: &Path, access: Access) -> Result<UnixListener, BindError> {
    make_room(path)?;
    // The umask belongs to all threads of a process, and others may be making files. This one gets
    // its own.
    let bound = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: no other thread is affected, and this one has no files open by relative paths
            // that it could lose: the folder it is in is copied.
            if unsafe { unshare_unsafe(UnshareFlags::FS) }.is_ok() {
                umask(Mode::empty());
                return bind_here(path, access);
            }
            // A container may forbid that. The owner's rights survive any umask that makes sense.
            if access.mode & 0o077 == 0 {
                return bind_here(path, access);
            }
            let before = umask(Mode::from_raw_mode(!access.mode & 0o777));
            let bound = bind_here(path, access);
            umask(before);
            bound
        });
        thread.join().unwrap_or(Err(Step::Bind(Errno::CANCELED)))
    });
    match bound {
        Ok(socket) => Ok(socket.into()),
        Err(Step::Bind(errno)) => Err(refused(path, errno.into())),
        Err(Step::Group(errno)) => {
            // It was made just now, and nobody could connect.
            let _ = std::fs::remove_file(path);
            let group = access.group.unwrap_or_default();
            Err(BindError::Group { path: path.into(), group, source: errno.into() })
        }
    }
}

/// Where it failed: before there was a file, or after.
enum Step {
    Bind(Errno),
    Group(Errno),
}

fn bind_here(path: &Path, access: Access) -> Result<OwnedFd, Step> {
    if let Some(group) = access.group {
        // What this thread makes has the group from the first moment, if it may do so. It tells no
        // errors: the file says what has become of it.
        // SAFETY: it takes a number, and is for this thread alone, which ends with the socket.
        unsafe { libc::syscall(libc::SYS_setfsgid, group) };
    }
    let made = || -> rustix::io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // The file takes its mode from the socket (Linux), so that there is no moment in between.
        rustix::fs::fchmod(&socket, Mode::from_raw_mode(access.mode))?;
        net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    };
    let socket = made().map_err(Step::Bind)?;
    // Until somebody listens, nobody can connect.
    if let Some(group) = access.group {
        give_to_group(path, group).map_err(Step::Group)?;
    }
    net::listen(&socket, BACKLOG).map_err(Step::Bind)?;
    Ok(socket)
}

/// A user who is no root may give it to the groups that the user is in, but only afterwards.
fn give_to_group(path: &Path, group: u32) -> rustix::io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(rustix::fs::CWD, path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if stat.st_gid == group {
        return Ok(());
    }
    // Root has made it with the group, unless its folder gives it another one, and gives nothing
    // away.
    if rustix::process::geteuid().is_root() {
        return Err(Errno::PERM);
    }
    // By the file and not by its name, which may lead to another one by now.
    if !FileType::from_raw_mode(stat.st_mode).is_socket() {
        return Err(Errno::STALE);
    }
    let group = Some(Gid::from_raw(group));
    rustix::fs::chownat(&file, "", None, group, AtFlags::EMPTY_PATH)
}

/// Takes the socket of a dead process away.
fn make_room(path: &Path) -> Result<(), BindError> {
    if path.as_os_str().len() > 107 {
        return Err(BindError::TooLong(path.into()));
    }
    if let Ok(meta) = path.symlink_metadata() {
        if !meta.file_type().is_socket() {
            return Err(BindError::NotASocket(path.into()));
        }
        match connect_at_once(path) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(|e| refused(path, e))?;
            }
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                return Err(BindError::Permission(path.into()));
            }
            _ => return Err(BindError::Busy(path.into())),
        }
    }
    Ok(())
}

/// Connects to who listens at `path`, without waiting for anybody: whose listener has as many connections as it
/// takes, and accepts none, is there all the same ([`io::ErrorKind::WouldBlock`]).
///
/// # Errors
/// What the host says.
pub fn connect_at_once(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

fn refused(path: &Path, source: io::Error) -> BindError {
    match source.kind() {
        io::ErrorKind::NotFound => BindError::NoFolder(path.into()),
        io::ErrorKind::PermissionDenied => BindError::Permission(path.into()),
        io::ErrorKind::AddrInUse => BindError::Busy(path.into()),
        _ => BindError::Host { path: path.into(), source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::net::UnixDatagram;
    use std::sync::{Mutex, PoisonError};

    const ALL: Access = Access { mode: 0o666, group: None };

    /// Held by a test that changes the umask of the process.
    static UMASK: Mutex<()> = Mutex::new(());

    fn mode(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().mode() & 0o777
    }

    #[test]
    fn the_socket_of_the_dead_is_replaced_and_that_of_the_living_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v.sock");
        let living = bind(&path, ALL).unwrap();
        assert!(matches!(bind(&path, ALL), Err(BindError::Busy(_))));
        // As many connections wait as may, and nobody accepts them.
        let mut waiting = Vec::new();
        let full = loop {
            match connect_at_once(&path) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        assert!(matches!(bind(&path, ALL), Err(BindError::Busy(_))));
        drop((waiting, living));
        assert!(path.exists(), "a killed daemon leaves its socket file behind");
        bind(&path, ALL).unwrap();
    }

    /// The umask of the process stays what it is, and decides nothing.
    #[test]
    fn b17_a_socket_has_its_mode_whatever_the_umask_is() {
        let _alone = UMASK.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().unwrap();
        let others = umask(Mode::from_raw_mode(0o022));
        for mask in [0, 0o077, 0o777] {
            umask(Mode::from_raw_mode(mask));
            for wanted in [0o600, 0o660, 0o666] {
                let path = dir.path().join(format!("{mask:o}.{wanted:o}"));
                let listener = bind(&path, Access { mode: wanted, group: None });
                let left = umask(Mode::from_raw_mode(mask));
                assert_eq!(left.as_raw_mode(), mask, "it is put back");
                listener.unwrap();
                assert_eq!(mode(&path), wanted, "umask {mask:o}");
            }
        }
        umask(others);
    }

    /// From now on this thread, and those that it begins, may not have an umask of their own.
    fn forbid_unshare() {
        use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
        let step = |code: u32, k: u32, not_so: u8| libc::sock_filter {
            code: u16::try_from(code).unwrap(),
            jt: 0,
            jf: not_so,
            k,
        };
        let unshare = u32::try_from(libc::SYS_unshare).unwrap();
        let mut steps = [
            step(BPF_LD | BPF_W | BPF_ABS, 0, 0),
            step(BPF_JMP | BPF_JEQ | BPF_K, unshare, 1),
            step(BPF_RET | BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0),
            step(BPF_RET | BPF_K, libc::SECCOMP_RET_ALLOW, 0),
        ];
        let program = libc::sock_fprog { len: 4, filter: steps.as_mut_ptr() };
        // SAFETY: the program lives until it was copied.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) == 0
        };
        assert!(done, "{}", io::Error::last_os_error());
    }

    /// Containers may forbid what keeps the umask of the process out of this.
    #[test]
    fn b17_a_socket_has_its_mode_where_the_process_has_one_umask() {
        let _alone = UMASK.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().unwrap();
        let others = umask(Mode::from_raw_mode(0o027));
        let listeners = std::thread::scope(|scope| {
            let made = scope.spawn(|| {
                forbid_unshare();
                [0o600, 0o660, 0o666].map(|wanted| {
                    let path = dir.path().join(format!("{wanted:o}"));
                    bind(&path, Access { mode: wanted, group: None })
                })
            });
            made.join().unwrap()
        });
        let left = umask(others);
        assert!(listeners.iter().all(Result::is_ok), "{listeners:?}");
        assert_eq!(left.as_raw_mode(), 0o027, "it is put back");
        for wanted in [0o600, 0o660, 0o666] {
            assert_eq!(mode(&dir.path().join(format!("{wanted:o}"))), wanted);
        }
    }

    #[test]
    fn b17_a_socket_has_its_group_or_is_not_made() {
        if !rustix::process::geteuid().is_root() {
            return ringway_testkit::skip(ringway_testkit::Need::Root, "to give a group away");
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let path = dir.path().join("root's");
        let access = Access { mode: 0o660, group: Some(54321) };
        let _listener = bind(&path, access).unwrap();
        assert_eq!((path.metadata().unwrap().gid(), mode(&path)), (54321, 0o660));
        // One who is no root, but in a group: to that one, and to no other.
        let refused = std::thread::scope(|scope| {
            let made = scope.spawn(|| {
                let (user, group) = (rustix::process::Uid::from_raw(65534), Gid::from_raw(65534));
                rustix::thread::set_thread_groups(&[Gid::from_raw(54321)]).unwrap();
                rustix::thread::set_thread_res_gid(group, group, group).unwrap();
                rustix::thread::set_thread_res_uid(user, user, user).unwrap();
                let path = dir.path().join("its");
                let _listener = bind(&path, access).unwrap();
                assert_eq!((path.metadata().unwrap().gid(), mode(&path)), (54321, 0o660));
                bind(&dir.path().join("none"), Access { group: Some(12345), ..access })
            });
            made.join().unwrap().unwrap_err()
        });
        assert!(
            refused.to_string().contains("may not give the socket to group 12345"),
            "{refused}"
        );
        assert!(!dir.path().join("none").exists());
        // A folder may give what is in it to a group of its own.
        let folder = dir.path().join("setgid");
        std::fs::create_dir(&folder).unwrap();
        std::os::unix::fs::chown(&folder, None, Some(777)).unwrap();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o2755)).unwrap();
        let refused = bind(&folder.join("its"), access).unwrap_err();
        assert!(matches!(refused, BindError::Group { group: 54321, .. }), "{refused}");
        assert!(!folder.join("its").exists());
        let _listener = bind(&folder.join("its"), Access { group: Some(777), ..access }).unwrap();
        // Who has put a link in the place of a socket gets nothing of what it leads to.
        std::os::unix::fs::symlink(folder.join("its"), dir.path().join("link")).unwrap();
        assert_eq!(give_to_group(&folder.join("its"), 777), Ok(()));
        assert_eq!(give_to_group(&dir.path().join("link"), 777), Err(Errno::PERM));
    }

    /// Where somebody may not make a socket, or not even ask whether another one is alive.
    #[test]
    fn who_has_no_permission_is_told() {
        if !rustix::process::geteuid().is_root() {
            return ringway_testkit::skip(ringway_testkit::Need::Root, "to be somebody else");
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let _root = bind(&dir.path().join("root's"), Access::PRIVATE).unwrap();
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| {
                let (user, group) = (rustix::process::Uid::from_raw(65534), Gid::from_raw(65534));
                rustix::thread::set_thread_res_gid(group, group, group).unwrap();
                rustix::thread::set_thread_res_uid(user, user, user).unwrap();
                ["mine", "root's"].map(|name| bind(&dir.path().join(name), ALL).unwrap_err())
            });
            for refused in asks.join().unwrap() {
                assert!(matches!(refused, BindError::Permission(_)), "{refused}");
            }
        });
    }

    /// Of another kind, or made between the look and the attempt.
    #[test]
    fn a_name_that_somebody_uses_is_busy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("datagrams");
        let _other = UnixDatagram::bind(&path).unwrap();
        assert!(matches!(bind(&path, ALL), Err(BindError::Busy(_))));
        assert!(path.exists());
        assert!(matches!(refused(&path, Errno::ADDRINUSE.into()), BindError::Busy(_)));
        let other = refused(&path, Errno::NOMEM.into());
        assert!(matches!(other, BindError::Host { .. }), "{other}");
    }

    /// struct sockaddr_un has room for 108 bytes, the last of which is a zero.
    #[test]
    fn a_path_may_be_as_long_as_there_is_room() {
        let dir = tempfile::tempdir().unwrap();
        let name = "x".repeat(107 - dir.path().as_os_str().len() - 1);
        let _longest = bind(&dir.path().join(&name), ALL).unwrap();
        assert!(matches!(bind(&dir.path().join(name + "x"), ALL), Err(BindError::TooLong(_))));
    }

    #[test]
    fn other_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        std::fs::write(&path, "data").unwrap();
        let bind = |path: &Path| bind(path, ALL);
        assert!(matches!(bind(&path), Err(BindError::NotASocket(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
        assert!(matches!(bind(&dir.path().join("no/v.sock")), Err(BindError::NoFolder(_))));
        assert!(matches!(bind(&dir.path().join("x".repeat(200))), Err(BindError::TooLong(_))));
    }
}
