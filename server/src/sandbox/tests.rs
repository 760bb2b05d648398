//! Each class of forbidden call, by each kind of thread: it ends the process. Every case is a process
//! of its own: this test program started again with the name of one test, [`culprit`].

mod deeds;

use super::calls::{Call, CallerKind, Guests, Rule, helper, of};
use super::{HelperNeeds, enter, prepare};
use deeds::{DEEDS, DUTIES, Deed, HELPERS_DUTIES, Who};
use ringway_control::config::Sandbox as Mode;
use ringway_control::log::LogArgs;
use ringway_terminal::logging;
use ringway_testkit::{Need, skip};
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};

/// What the process that is started does: `KIND CALL MODE`.
const CASE: &str = "RINGWAY_SANDBOX_CASE";
/// It came as far as to make the call.
const BEGUN: &str = "about to make the call";
/// It lives on.
const ALIVE: &str = "alive after the call";

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
    let calls = of(CallerKind::Process, Guests::Cluster);
    let all = names(&calls);
    println!("{} calls: {all:?}", all.len());
    assert!(all.len() <= 83);
    let numbers: BTreeSet<_> = calls.iter().map(|call| call.number).collect();
    assert_eq!(numbers.len(), calls.len(), "each is listed once");
    for word in ["open", "openat", "unlink", "bind", "listen", "execve", "ptrace", "io_uring_setup"]
    {
        assert!(!all.contains(word), "{word}");
    }
    let rule = |name| calls.iter().find(|call| call.name == name).map(|call| call.rule.clone());
    let families = [libc::AF_INET, libc::AF_INET6].map(|family| family as u32);
    assert_eq!(rule("socket"), Some(Rule::OneOf(0, families.into())));
    // The signal that is none.
    assert_eq!(rule("kill"), Some(Rule::OneOf(1, vec![0])));
    // What others may is not less.
    for call in of(CallerKind::Process, Guests::VhostUser) {
        let here = calls.iter().find(|known| known.number == call.number).unwrap();
        assert!(here.is_allowed() || !call.is_allowed(), "{}", call.name);
    }
}

fn lists_are_short(guests: Guests) {
    let [process, worker, io] = CallerKind::ALL.map(|kind| of(kind, guests));
    println!(
        "{guests:?}: process {}, worker {}, io {}",
        names(&process).len(),
        names(&worker).len(),
        names(&io).len()
    );
    let most = match guests {
        // Where a file has holes, and the line between TLS and a worker.
        Guests::Nbd => 54,
        // Rings behind an IOMMU.
        Guests::VhostUser => 52,
        _ => 51,
    };
    assert!(names(&process).len() <= most, "{:?}", names(&process));
    assert!(names(&worker).len() <= 32, "{:?}", names(&worker));
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
        nvme: true,
        account: true,
        iopoll: true,
        groups: true,
        clones: true,
        gives: true,
        network: true,
    };
    for (needs, most) in [(HelperNeeds::default(), 59), (all, 81)] {
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
                "fchownat" => needs.gives || needs.clones,
                "renameat2" | "pwrite64" | "linkat" => needs.clones,
                _ => false,
            };
            let found = names.iter().find(|name| name.contains(word) && !given(name));
            assert_eq!(found, None, "{word}");
        }
        assert_eq!(names.contains("io_uring_setup"), needs.iopoll);
        assert_eq!(names.contains("setsockopt"), needs.network);
        assert_eq!(names.contains("shutdown"), needs.network);
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
