//! Threads that carry out what a batch writes together with the image's thread, where several reads and
//! writes in flight are faster than one: with direct I/O. Through the page cache they are copies of
//! memory, and the image's thread makes them alone.
//!
//! They are started when there is something to do for more than one, and end when there was nothing for
//! a while: an idle disk has none.

use super::cluster_write::ClusterWrite;
use crate::aligned::Aligned;
use crate::file::BlockFile;
use ringway_core::host::sync::{Condvar, Mutex, MutexGuard};
use ringway_core::host::thread::Builder;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// The most that is in flight, one by the image's thread.
const IN_FLIGHT: usize = 8;

/// How long a thread waits for more before it ends.
const PATIENCE: Duration = Duration::from_secs(5);

/// What became of one.
pub(crate) type Done = (ClusterWrite, io::Result<()>);

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<ClusterWrite>,
    /// Carried out by threads now.
    running: usize,
    done: Vec<Done>,
    /// Threads that there are, and those of them that have nothing to do.
    threads: usize,
    idle: usize,
    ends: bool,
}

#[derive(Debug)]
struct Shared {
    files: Arc<[BlockFile]>,
    /// Which of the files is written.
    data: u8,
    state: Mutex<State>,
    /// Something waits, or all is over.
    more: Condvar,
    /// Nothing waits and nothing runs, or a thread has ended.
    less: Condvar,
}

/// The threads of an image.
#[derive(Debug)]
pub(crate) struct Crew {
    shared: Arc<Shared>,
    buffer: Aligned,
}

impl Crew {
    /// No thread yet. They are to write file number `data`.
    pub(crate) fn new(files: Arc<[BlockFile]>, data: u8) -> Self {
        let (state, more, less) = (Mutex::default(), Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { files, data, state, more, less });
        Self { shared, buffer: Aligned::default() }
    }

    /// Carries all of them out, and says what became of each, in any order.
    pub(crate) fn carry_out(&mut self, writes: Vec<ClusterWrite>) -> Vec<Done> {
        let shared = &self.shared;
        let is_direct = shared.files[usize::from(shared.data)].unit() > 1;
        if writes.len() < 2 || !is_direct {
            let buffer = &mut self.buffer;
            let carry_out = |write: ClusterWrite| {
                let result = write.carry_out(&shared.files, shared.data, buffer);
                (write, result)
            };
            return writes.into_iter().map(carry_out).collect();
        }
        let mut state = shared.lock();
        let wanted = writes.len().min(IN_FLIGHT) - 1;
        state.waiting.extend(writes);
        for _ in 0..wanted.min(state.idle) {
            shared.more.notify_one();
        }
        for _ in state.idle..wanted {
            if state.threads == IN_FLIGHT - 1 || !start(shared) {
                break;
            }
            state.threads += 1;
        }
        while let Some(write) = state.waiting.pop_front() {
            drop(state);
            let result = write.carry_out(&shared.files, shared.data, &mut self.buffer);
            state = shared.lock();
            state.done.push((write, result));
        }
        while state.running > 0 {
            state = shared.less.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::take(&mut state.done)
    }
}

impl Drop for Crew {
    /// Waits until nobody uses memory of a request any more.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ends = true;
        state.waiting.clear();
        self.shared.more.notify_all();
        while state.threads > 0 {
            state = self.shared.less.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out what waits, until nothing came for a while.
    fn run(&self) {
        let mut buffer = Aligned::default();
        let mut state = self.lock();
        loop {
            while let Some(write) = state.waiting.pop_front() {
                state.running += 1;
                drop(state);
                let carry_out =
                    AssertUnwindSafe(|| write.carry_out(&self.files, self.data, &mut buffer));
                // What has panicked has said so.
                let result = catch_unwind(carry_out)
                    .unwrap_or_else(|_| Err(io::Error::from_raw_os_error(libc::EIO)));
                state = self.lock();
                state.running -= 1;
                state.done.push((write, result));
                if state.running == 0 {
                    self.less.notify_one();
                }
            }
            if state.ends {
                break;
            }
            state.idle += 1;
            let (woken, timeout) =
                self.more.wait_timeout(state, PATIENCE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if timeout.timed_out() && state.waiting.is_empty() {
                break;
            }
        }
        state.threads -= 1;
        self.less.notify_one();
    }
}

/// Starts a thread. False if there is no more to be had: it goes without.
fn start(shared: &Arc<Shared>) -> bool {
    let shared = Arc::clone(shared);
    Builder::new().name("image-io".into()).spawn(move || shared.run()).is_ok()
}
