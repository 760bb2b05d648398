//! Each class of forbidden call, by each kind of thread: it ends the process. Every case is a process
//! of its own: this test program started again with the name of one test, [`culprit`].

use super::calls::{Call, Guests, Kind, Rule, helper, of};
use super::{HelperNeeds, confine_helper, enter, prepare};
use ringway_control::config::Sandbox as Mode;
use ringway_control::log::LogArgs;
use ringway_core::thread::{DataThread, data_thread_starts};
use ringway_terminal::logging;
use ringway_testkit::{Need, skip};
use std::collections::BTreeSet;
use std::ffi::{c_int, c_long};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};

/// What the process that is started does: `KIND CALL MODE`.
const CASE: &str = "RINGWAY_SANDBOX_CASE";
/// It came as far as to make the call.
const BEGUN: &str = "about to make the call";
/// It lives on.
const ALIVE: &str = "alive after the call";

/// Makes one call and says how it lives on.
type Deed = fn() -> c_long;

fn raw(number: c_long, arguments: [usize; 6]) -> c_long {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: of the calls below, none is given memory that it may write to, or paths that are to
    // stay as they are.
    unsafe { libc::syscall(number, a, b, c, d, e, f) }
}

fn path(path: &'static std::ffi::CStr) -> usize {
    path.as_ptr() as usize
}

fn number(value: c_int) -> usize {
    // Negative ones keep their bits.
    isize::try_from(value).unwrap().cast_unsigned()
}

/// Whose calls they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
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
    const DAEMON: [Self; 3] = [Self::Process, Self::Worker, Self::Io];
    const ALL: [Self; 7] = [
        Self::Process,
        Self::Worker,
        Self::Io,
        Self::XenProcess,
        Self::XenWorker,
        Self::XenIo,
        Self::Helper,
    ];

    /// Becomes it.
    fn enter(self, mode: Mode) {
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

fn xen_ioctl(request: u32) -> c_long {
    raw(libc::SYS_ioctl, [number(-1), request as usize, 0, 0, 0, 0])
}

const NONE: [usize; 6] = [0; 6];
const AT_FDCWD: c_int = libc::AT_FDCWD;

/// What must never be done, by name. Arguments are such that the call would do what it says, or
/// would fail harmlessly where there is no filter.
const DEEDS: &[(&str, Deed)] = &[
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

/// Not a test by itself: it aborts, or panics twice, which aborts.
#[test]
fn last_words() {
    let Ok(case) = std::env::var("RINGWAY_LAST_WORDS") else { return };
    prepare();
    logging::start(&LogArgs::default(), None, None);
    logging::serve_guests();
    // Standard error goes where nobody is, or nobody reads.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    if case.contains("stalled") {
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&writer, false).unwrap();
        std::mem::forget(reader);
    } else {
        drop(reader);
    }
    rustix::stdio::dup2_stderr(&writer).unwrap();
    enter(Mode::On, Guests::VhostUser, None).unwrap();
    logging::start_thread().unwrap();
    for number in 0..10_000 {
        tracing::warn!("a line that nobody takes, {number}");
    }
    let caught = std::thread::spawn(|| panic!("a thread of the daemon")).join();
    assert!(caught.is_err());
    say(ALIVE);
    match case.starts_with("abort") {
        true => std::process::abort(),
        false => {
            struct Bomb;
            impl Drop for Bomb {
                fn drop(&mut self) {
                    panic!("again");
                }
            }
            let _bomb = Bomb;
            panic!("once");
        }
    }
}

/// With a log that cannot be written a panic is caught as any other, an abort is one, and nothing of
/// it blocks.
#[test]
fn e02_e03_a_panic_with_a_broken_log() {
    for case in ["abort", "abort-stalled", "panic", "panic-stalled"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["sandbox::tests::last_words", "--exact", "--nocapture", "--test-threads=1"]);
        child.env("RINGWAY_LAST_WORDS", case).env("MALLOC_ARENA_MAX", "1");
        let output = child.stdin(Stdio::null()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains(ALIVE), "{case}: {}\n{text}", output.status);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{case}: {}", output.status);
    }
}

/// Of the deeds above, what the helper is there for.
const HELPERS_DUTIES: &[&str] = &[
    "open a file",
    "open a file, the new way",
    "look at a file",
    "read a link",
    "remove a file",
    "make a local socket",
    "connect",
    "bind",
];

const THREADS_OF_DAEMONS: &[Who] =
    &[Who::Process, Who::Worker, Who::Io, Who::XenProcess, Who::XenWorker, Who::XenIo];

/// What only some threads may do, which is a deed for the others.
const DUTIES: &[(&str, Deed, &[Who])] = &[
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
    ("read a file", || raw(libc::SYS_preadv2, [number(-1), 0, 0, 0, 0, 0]), THREADS_OF_DAEMONS),
    ("write a file", || raw(libc::SYS_pwritev2, [number(-1), 0, 0, 0, 0, 0]), THREADS_OF_DAEMONS),
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

/// Not a test by itself: one case, in a process of its own.
#[test]
fn culprit() {
    let Ok(case) = std::env::var(CASE) else { return };
    let words: Vec<_> = case.split('/').collect();
    let [who_word, deed, mode] = words[..] else { panic!("{case}") };
    let mode = if mode == "log" { Mode::Log } else { Mode::On };
    let plain = DEEDS.iter().find(|(name, _)| *name == deed).map(|(_, act)| *act);
    let duty = DUTIES.iter().find(|(name, ..)| *name == deed).map(|(_, act, _)| *act);
    let act = plain.or(duty).unwrap();
    // The harness has threads of its own; they do nothing meanwhile, and stay outside.
    prepare();
    let who = Who::ALL.into_iter().find(|who| format!("{who:?}") == who_word);
    who.unwrap().enter(mode);
    say(BEGUN);
    let result = act();
    say(ALIVE);
    say(if result >= 0 { "done" } else { "failed" });
    // Not the way of the harness, which has other threads.
    // SAFETY: ends the process.
    unsafe { libc::_exit(0) };
}

fn say(line: &str) {
    let line = format!("{line}\n");
    // SAFETY: the memory is the line's.
    unsafe { libc::write(1, line.as_ptr().cast(), line.len()) };
}

fn run(who: Who, deed: &str, mode: &str) -> (ExitStatus, String) {
    let name = concat!(module_path!(), "::culprit");
    let name = name.split_once("::").unwrap().1;
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([name, "--exact", "--nocapture", "--test-threads=1"]);
    child.env(CASE, format!("{who:?}/{deed}/{mode}"));
    // As `prepare` does it, which comes too late for the harness.
    child.env("MALLOC_ARENA_MAX", "1");
    let output = child.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(text.contains(BEGUN), "{who:?}, {deed}: {text}");
    (output.status, text)
}

fn dies(who: Who, deed: &str) {
    let (status, text) = run(who, deed, "on");
    assert_eq!(status.signal(), Some(libc::SIGSYS), "{who:?}, {deed}: {status}\n{text}");
    assert!(!text.contains(ALIVE), "{who:?}, {deed}: {text}");
}

fn lives(who: Who, deed: &str, mode: &str) {
    let (status, text) = run(who, deed, mode);
    assert!(status.success() && text.contains(ALIVE), "{who:?}, {deed}: {status}\n{text}");
}

/// Runs cases side by side, a few at a time.
fn each(cases: Vec<(Who, &'static str)>, judge: impl Fn(Who, &str) + Sync) {
    let next = std::sync::Mutex::new(cases.into_iter());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((who, deed)) = { next.lock().unwrap().next() } {
                    judge(who, deed);
                }
            });
        }
    });
}

fn deeds() -> Vec<(Who, &'static str)> {
    let all = |who: Who| {
        let may = if who == Who::Helper { HELPERS_DUTIES } else { &[] };
        let names = DEEDS.iter().map(|(name, _)| *name).filter(move |name| !may.contains(name));
        names.map(move |name| (who, name))
    };
    let others = [Who::XenProcess, Who::XenWorker, Who::Helper];
    Who::DAEMON.into_iter().chain(others).flat_map(all).collect()
}

#[test]
fn whatever_is_forbidden_ends_the_process() {
    each(deeds(), dies);
}

#[test]
fn threads_that_carry_data_may_less_than_others() {
    let others = |(name, _, may): &(&'static str, Deed, &[Who])| {
        let name = *name;
        let may = may.to_vec();
        Who::ALL.into_iter().filter(move |who| !may.contains(who)).map(move |who| (who, name))
    };
    let cases: Vec<_> = DUTIES.iter().flat_map(others).collect();
    assert!(cases.len() > 60);
    each(cases, dies);
}

#[test]
fn whatever_is_a_duty_is_done() {
    let own = |(name, _, may): &(&'static str, Deed, &'static [Who])| {
        let name = *name;
        may.iter().map(move |who| (*who, name))
    };
    let helpers = HELPERS_DUTIES.iter().map(|name| (Who::Helper, *name));
    each(DUTIES.iter().flat_map(own).chain(helpers).collect(), |who, deed| lives(who, deed, "on"));
}

#[test]
fn log_lets_it_go() {
    each(deeds(), |who, deed| lives(who, deed, "log"));
    let (_, text) = run(Who::Process, "open a file", "log");
    assert!(text.contains("done"), "{text}");
}

fn names(calls: &[Call]) -> BTreeSet<&'static str> {
    calls.iter().filter(|call| call.is_allowed()).map(|call| call.name).collect()
}

#[test]
fn there_are_few_and_none_takes_a_path() {
    for guests in [Guests::VhostUser, Guests::Xen, Guests::Nbd] {
        lists_are_short(guests);
    }
}

#[test]
fn a_clusters_library_gets_sockets_of_the_internet_and_no_files() {
    let calls = of(Kind::Process, Guests::Cluster);
    let all = names(&calls);
    println!("{} calls: {all:?}", all.len());
    assert!(all.len() <= 82);
    let numbers: BTreeSet<_> = calls.iter().map(|call| call.number).collect();
    assert_eq!(numbers.len(), calls.len(), "each is listed once");
    for word in ["open", "openat", "unlink", "bind", "listen", "execve", "ptrace", "io_uring_setup"]
    {
        assert!(!all.contains(word), "{word}");
    }
    let rule = |name| calls.iter().find(|call| call.name == name).map(|call| call.rule.clone());
    let families = [libc::AF_INET, libc::AF_INET6].map(c_int::cast_unsigned);
    assert_eq!(rule("socket"), Some(Rule::OneOf(0, families.into())));
    // The signal that is none.
    assert_eq!(rule("kill"), Some(Rule::OneOf(1, vec![0])));
    // What others may is not less.
    for call in of(Kind::Process, Guests::VhostUser) {
        let here = calls.iter().find(|known| known.number == call.number).unwrap();
        assert!(here.is_allowed() || !call.is_allowed(), "{}", call.name);
    }
}

fn lists_are_short(guests: Guests) {
    let [process, worker, io] = Kind::ALL.map(|kind| of(kind, guests));
    println!(
        "{guests:?}: process {}, worker {}, io {}",
        names(&process).len(),
        names(&worker).len(),
        names(&io).len()
    );
    // Where a file has holes, and the line between TLS and a worker.
    let most = if guests == Guests::Nbd { 54 } else { 52 };
    assert!(names(&process).len() <= most, "{:?}", names(&process));
    assert!(names(&worker).len() <= 33, "{:?}", names(&worker));
    assert!(names(&io).len() <= 30, "{:?}", names(&io));
    for calls in [&process, &worker, &io] {
        let numbers: BTreeSet<_> = calls.iter().map(|call| call.number).collect();
        assert_eq!(numbers.len(), calls.len(), "each is listed once");
        let all = names(calls);
        for word in ["open", "exec", "stat", "link", "socket", "connect", "bind", "kill", "at"] {
            let known = [
                // Of one path, which is empty: of a descriptor.
                "statx",
                "fstat",
                "fstatfs",
                "tgkill",
                "ftruncate",
                "fallocate",
                "fdatasync",
                "io_uring_register",
                // Of this process alone: it leads to nobody else.
                "socketpair",
            ];
            let found = all.iter().find(|name| {
                name.contains(word)
                    && !known.contains(name)
                    && (word != "at" || name.ends_with("at"))
            });
            assert_eq!(found, None, "{word}");
        }
        assert!(!all.contains("io_uring_setup") && !all.contains("clone3"));
    }
    // What data threads may, the process may: filters only ever add to each other.
    for calls in [&worker, &io] {
        for call in calls.iter() {
            let wide = process.iter().find(|wide| wide.number == call.number).unwrap();
            match (&call.rule, &wide.rule) {
                (Rule::OneOf(_, few), Rule::OneOf(_, many)) => {
                    assert!(few.iter().all(|value| many.contains(value)), "{}", call.name);
                }
                (Rule::Both(one, few), Rule::Both(other, many)) => {
                    let within = few.iter().all(|value| many.contains(value));
                    assert!(one == other && within, "{}", call.name);
                }
                (Rule::Refused, _) => {}
                (few, many) => assert_eq!(few, many, "{}", call.name),
            }
        }
    }
    // The kernel caches that they are allowed only if that depends on nothing.
    let hot =
        ["io_uring_enter", "io_submit", "io_getevents", "epoll_pwait2", "read", "write", "futex"];
    for name in hot {
        let call = worker.iter().find(|call| call.name == name);
        assert_eq!(call.map(|call| &call.rule), Some(&Rule::Always), "{name}");
    }
}

/// It opens what it is said to. What it opens it neither reads nor gives away, and it runs nothing. Only one
/// that makes clones writes and names files.
#[test]
fn the_helper_has_few_of_its_own() {
    let all = HelperNeeds {
        account: true,
        iopoll: true,
        groups: true,
        clones: true,
        gives: true,
        network: true,
    };
    for (needs, most) in [(HelperNeeds::default(), 58), (all, 75)] {
        let calls = helper(needs);
        let numbers: BTreeSet<_> = calls.iter().map(|call| call.number).collect();
        assert_eq!(numbers.len(), calls.len(), "each is listed once");
        let names = names(&calls);
        println!("helper, {needs:?}: {}", names.len());
        assert!(names.len() <= most, "{names:?}");
        for word in
            ["exec", "fork", "chown", "chmodat", "rename", "kill", "ptrace", "pwrite", "link"]
        {
            let given = |name: &str| match name {
                "unlink" | "unlinkat" | "readlink" | "readlinkat" => true,
                // One signal, to itself: abort.
                "tgkill" => true,
                "fchownat" => needs.gives,
                "renameat2" | "pwrite64" | "linkat" => needs.clones,
                _ => false,
            };
            let found = names.iter().find(|name| name.contains(word) && !given(name));
            assert_eq!(found, None, "{word}");
        }
        assert_eq!(names.contains("io_uring_setup"), needs.iopoll);
        assert_eq!(names.contains("setsockopt"), needs.network);
        assert_eq!(names.contains("setresuid"), needs.account);
        assert_eq!(names.contains("setfsgid"), needs.account || needs.groups);
    }
}

#[test]
fn nothing_of_the_file_system_is_left_even_without_the_filter() {
    let Ok(case) = std::env::var("RINGWAY_LANDLOCK_CASE") else {
        let name = "sandbox::tests::nothing_of_the_file_system_is_left_even_without_the_filter";
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([name, "--exact", "--nocapture", "--test-threads=1"]);
        let output = child.env("RINGWAY_LANDLOCK_CASE", "1").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        return;
    };
    assert_eq!(case, "1");
    let folder = tempfile::tempdir().unwrap();
    let mine = folder.path().join("mine");
    std::fs::write(&mine, "before").unwrap();
    let open = std::fs::File::options().read(true).write(true).open(&mine).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    rustix::thread::set_no_new_privs(true).unwrap();
    let said = super::files::close_the_file_system(false).unwrap();
    if !said.starts_with("no files") {
        return skip(Need::Landlock, said);
    }
    let refused = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    };
    refused(std::fs::read("/etc/passwd").map(drop));
    refused(std::fs::read(&mine).map(drop));
    refused(std::fs::write(&mine, "after"));
    refused(std::fs::remove_file(&mine));
    refused(std::fs::create_dir(folder.path().join("new")));
    refused(std::fs::read_dir("/").map(drop));
    refused(std::os::unix::net::UnixListener::bind(folder.path().join("s")).map(drop));
    refused(Command::new("/bin/true").status().map(drop));
    if said == "no files" {
        refused(std::net::TcpStream::connect(port).map(drop));
        refused(std::net::TcpListener::bind(port).map(drop));
    }
    // What was open before is as it was.
    use std::os::unix::fs::FileExt;
    open.write_all_at(b"after", 0).unwrap();
    open.set_len(3).unwrap();
    assert_eq!(open.metadata().unwrap().len(), 3);
}
