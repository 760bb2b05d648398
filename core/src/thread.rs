//! What each thread that carries data does first, if the program has asked for something: narrowing
//! what it may do, for example.

use std::any::Any;
use std::cell::Cell;
use std::sync::OnceLock;

/// The kinds of threads that carry data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataThread {
    /// Serves queues and owns an engine.
    Worker,
    /// Makes blocking calls for an engine.
    Io,
}

/// What is done.
pub type OnStart = fn(DataThread);

static ON_START: OnceLock<OnStart> = OnceLock::new();

/// From now on each thread that begins to carry data calls `act` first: after it has made all it
/// needs, before it sees a request. Only the first call of a process counts.
pub fn on_data_thread(act: OnStart) {
    let _ = ON_START.set(act);
}

/// What a panic said, from what [`std::panic::catch_unwind`] has caught.
#[must_use]
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    match panic.downcast_ref::<&'static str>() {
        Some(message) => message,
        None => panic.downcast_ref::<String>().map_or("without a message", String::as_str),
    }
}

thread_local! {
    static CARRIES_DATA: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread has begun to carry data: it must not block, and its sandbox allows it little.
#[must_use]
pub fn carries_data() -> bool {
    CARRIES_DATA.get()
}

/// For a thread that begins to carry data.
pub fn data_thread_starts(kind: DataThread) {
    CARRIES_DATA.set(true);
    if let Some(act) = ON_START.get() {
        act(kind);
    }
}
