//! What the daemon gives up before it meets a guest: rights, the file system, system calls.
//!
//! Entered by the only thread there is, before any other is started, so that all of them inherit it.
//! What a daemon needs later by its name a small process opens for it (`serve/host.rs`). Why it is
//! built this way: docs/adr/0013-sandbox.md; what is allowed: docs/sandbox.md.

mod calls;
mod files;
mod filter;
mod helper;
#[cfg(test)]
mod tests;
mod user;

use anyhow::Context;
use ringway_control::config::Sandbox as Mode;
use ringway_core::thread::{DataThread, on_data_thread};
use ringway_terminal::logging;
use ringway_terminal::reasons::in_full;
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};
use std::sync::OnceLock;

pub(crate) use calls::Guests;
pub(crate) use helper::{HelperNeeds, confine_helper, confine_resolver};
pub use user::group_number;
pub(crate) use user::{Account, acting_as};

/// True if system calls are filtered, on this machine.
pub(crate) fn filters(mode: Mode) -> bool {
    mode != Mode::Off && calls::KNOWN
}

/// The filters of threads that carry data, compiled beforehand.
static DATA_FILTERS: OnceLock<[filter::Program; 2]> = OnceLock::new();

/// To be called before there is a second thread, and before anything else here.
///
/// With more than one arena glibc's malloc reads a file in /proc when it gives memory back
/// (malloc/arena.c, `check_may_shrink_heap`). Arenas are there for threads that allocate much at a
/// time, which is none of ours.
pub(crate) fn prepare() {
    #[cfg(target_env = "gnu")]
    // SAFETY: there is no other thread that could allocate meanwhile.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
    // With the first thread the C library installs a handler, once.
    let first = std::thread::Builder::new().spawn(|| {});
    let _ = first.map(std::thread::JoinHandle::join);
}

/// Enters the sandbox, for good. There must be no other thread.
///
/// Gives back what it is, in one line.
///
/// # Errors
/// What the host refuses; the process should end then.
pub(crate) fn enter(
    mode: Mode,
    guests: Guests,
    account: Option<&Account>,
) -> anyhow::Result<String> {
    forbid_core_dumps()?;
    if mode == Mode::Off {
        if let Some(account) = account {
            account.become_it()?;
        }
        return Ok(format!("sandbox off{}", whose(account)));
    }
    rustix::thread::set_no_new_privs(true).context("cannot set no_new_privs")?;
    let files = match mode {
        Mode::Log => "files not restricted".to_owned(),
        _ => files::close_the_file_system(guests == Guests::Cluster)?,
    };
    if let Some(account) = account {
        account.become_it()?;
        // A change of user may have switched them on again.
        forbid_core_dumps()?;
    }
    logging::tell_panics();
    let (word, whose) = (if mode == Mode::Log { "log" } else { "on" }, whose(account));
    // Last, as it leaves nothing of the above possible.
    let calls = filter_calls(mode, guests)?;
    Ok(format!("sandbox {word}: {calls}, {files}{whose}"))
}

fn whose(account: Option<&Account>) -> String {
    match account {
        Some(account) => format!(", user {account}"),
        None if rustix::process::geteuid().is_root() => {
            ", user root (--user gives its rights up)".into()
        }
        None => String::new(),
    }
}

/// Guests' data is in our memory: it must not end up in a file, nor be read by a debugger of the
/// same user.
fn forbid_core_dumps() -> anyhow::Result<()> {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    let limit = getrlimit(Resource::Core);
    if (limit.current, limit.maximum) != (none.current, none.maximum) {
        setrlimit(Resource::Core, none).context("cannot switch core dumps off")?;
    }
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("cannot switch core dumps off")
}

fn filter_calls(mode: Mode, guests: Guests) -> anyhow::Result<String> {
    if !calls::KNOWN {
        let here = std::env::consts::ARCH;
        tracing::warn!("there is no filter of system calls for {here}: none is in force");
        return Ok(format!("no filter of system calls for {here}"));
    }
    let of = |kind| filter::compile(&calls::of(kind, guests), mode);
    let data = [of(calls::CallerKind::Worker)?, of(calls::CallerKind::Io)?];
    let _ = DATA_FILTERS.set(data);
    if guests != Guests::Cluster {
        on_data_thread(narrow_data_thread);
    }
    let count = |kind| calls::of(kind, guests).iter().filter(|call| call.is_allowed()).count();
    let all = count(calls::CallerKind::Process);
    let summary = match guests {
        // The library's threads are not told apart, and workers call it.
        Guests::Cluster => format!("{all} system calls for all threads"),
        _ => format!(
            "{all} system calls (workers {} of them, their helpers {})",
            count(calls::CallerKind::Worker),
            count(calls::CallerKind::Io)
        ),
    };
    let process = of(calls::CallerKind::Process)?;
    let refusals = filter::compile_refusals(&calls::of(calls::CallerKind::Process, guests))?;
    filter::install(&refusals)?;
    filter::install(&process)?;
    Ok(summary)
}

fn narrow_data_thread(kind: DataThread) {
    let Some([worker, io]) = DATA_FILTERS.get() else { return };
    let program = if kind == DataThread::Worker { worker } else { io };
    if let Err(error) = filter::install(program) {
        let why = in_full(&error);
        tracing::error!("a thread cannot be confined, so the daemon ends: {why}");
        logging::finish();
        std::process::exit(1);
    }
}
