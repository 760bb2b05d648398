//! Lines on their way to standard error: a queue of bounded size, and a thread that writes.
//!
//! Whoever logs puts a line into the queue and goes on. It never fails, and waits for nobody but
//! for others who do the same. What the reader of standard error does, or a full disk behind it, is
//! met by the writing thread alone:
//!
//! ```text
//! any thread ── push ──► queue ──► "log" ── write ──► standard error
//!                └ full: counted   └ fails: keeps the lines, tries again with the next one
//! ```
//!
//! Why not a library: docs/adr/0026-metrics.md.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Condvar, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// Lines that wait at most.
const LINES_MAX: usize = 8192;
/// And their bytes.
const BYTES_MAX: usize = 1 << 20;
/// What a panic may have beyond that, in bytes.
const RESERVE: usize = 64 << 10;

/// Lines are written together up to so many bytes: a pipe takes these in one piece (PIPE_BUF), so
/// that lines of two processes do not mix.
const BATCH: usize = 4096;

/// How long to leave standard error alone after it has failed.
const PAUSE: Duration = Duration::from_secs(1);

/// How a line says that `lost` of them are missing at its place.
pub(super) type Notice = fn(lost: u64) -> Vec<u8>;

/// A queue of lines.
pub(super) struct Lines {
    state: Mutex<State>,
    /// For the writer: there is something to do.
    arrived: Condvar,
    /// For those who wait for it: it has got on, or has failed.
    progress: Condvar,
}

/// What is in it.
struct State {
    lines: VecDeque<Vec<u8>>,
    /// Of `lines`.
    bytes: usize,
    /// What the writer has taken and not written yet.
    in_hand: Vec<u8>,
    /// Its thread has them out of here, and writes.
    is_writing: bool,
    /// Lines that came while there was no room. As long as it is not 0 no other one gets in, so that
    /// the count can be logged where they are missing.
    lost: u64,
    /// Lines that came, with room or without.
    given: u64,
    /// `given` when the last attempt failed, and when that was.
    failed: Option<(u64, Instant)>,
    /// Attempts that failed.
    failures: u64,
    /// Somebody waits for the lines to be written: try at once.
    hurry: bool,
    writer: Writer,
}

/// Who writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writer {
    /// Whoever logs, who waits as long as it takes: a program that serves nobody.
    Caller,
    /// Whoever logs, as far as that does not block: a daemon that may have one thread only.
    CallerNow,
    /// A thread of its own.
    Thread,
}

impl Lines {
    pub(super) const fn new() -> Self {
        let state = State {
            lines: VecDeque::new(),
            bytes: 0,
            in_hand: Vec::new(),
            is_writing: false,
            lost: 0,
            given: 0,
            failed: None,
            failures: 0,
            hurry: false,
            writer: Writer::Caller,
        };
        Self { state: Mutex::new(state), arrived: Condvar::new(), progress: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// From now on `writer` writes. [`Writer::Thread`] is set by [`Lines::write_all`].
    pub(super) fn set_writer(&self, writer: Writer) {
        self.lock().writer = writer;
    }

    /// Forgets what waits: for a process that was forked, whose parent writes it.
    pub(super) fn forget(&self) {
        let mut state = self.lock();
        (state.bytes, state.lost, state.failed) = (0, 0, None);
        state.lines.clear();
        state.in_hand.clear();
    }

    /// Takes one or more whole lines.
    pub(super) fn push(&self, line: Vec<u8>, out: BorrowedFd<'_>, notice: Notice) {
        self.put(self.lock(), line, 0, out, notice);
    }

    /// As [`Lines::push`], for a thread that panics, and may do so anywhere: there is room when others
    /// find none, and a queue that is held for longer than a moment is given up (false).
    pub(super) fn push_last_words(
        &self,
        line: Vec<u8>,
        out: BorrowedFd<'_>,
        notice: Notice,
    ) -> bool {
        for _ in 0..100 {
            let state = match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(state)) => state.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    // Nobody unparks this thread.
                    std::thread::park_timeout(Duration::from_millis(1));
                    continue;
                }
            };
            self.put(state, line, RESERVE, out, notice);
            return true;
        }
        false
    }

    fn put(
        &self,
        mut state: MutexGuard<'_, State>,
        line: Vec<u8>,
        reserve: usize,
        out: BorrowedFd<'_>,
        notice: Notice,
    ) {
        state.take_in(line, reserve);
        match state.writer {
            Writer::Thread => self.arrived.notify_one(),
            Writer::Caller => state.write_now(out, notice, None),
            Writer::CallerNow => state.write_now(out, notice, Some(Duration::ZERO)),
        }
    }

    /// Writes lines for ever. It sleeps while there are none, and while the last attempt has failed
    /// and no other line has come since.
    pub(super) fn write_all(&self, out: BorrowedFd<'_>, notice: Notice) -> ! {
        let mut state = self.lock();
        state.writer = Writer::Thread;
        loop {
            while !state.is_due() {
                state = self.arrived.wait(state).unwrap_or_else(|e| e.into_inner());
            }
            if let Some(rest) = state.must_rest() {
                state = self.arrived.wait_timeout(state, rest).unwrap_or_else(|e| e.into_inner()).0;
                continue;
            }
            state.hurry = false;
            state.fill(notice);
            let given = state.given;
            let mut bytes = std::mem::take(&mut state.in_hand);
            state.is_writing = true;
            drop(state);
            let result = write(out, &mut bytes);
            state = self.lock();
            state.is_writing = false;
            state.in_hand = bytes;
            state.ended(result, given);
            self.progress.notify_all();
        }
    }

    /// Waits until all lines that came before are written, until that fails, or for `limit`.
    pub(super) fn flush(&self, limit: Duration, out: BorrowedFd<'_>, notice: Notice) {
        let begun = Instant::now();
        let mut state = self.lock();
        if state.writer != Writer::Thread {
            return state.write_now(out, notice, Some(limit));
        }
        let failures = state.failures;
        state.hurry = true;
        self.arrived.notify_one();
        while !state.is_empty() && state.failures == failures {
            let left = limit.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return;
            }
            state = self.progress.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }
}

impl State {
    fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.in_hand.is_empty() && !self.is_writing && self.lost == 0
    }

    fn take_in(&mut self, line: Vec<u8>, reserve: usize) {
        self.given += 1;
        let room = self.lines.len() < LINES_MAX && self.bytes + line.len() <= BYTES_MAX;
        let last_words = self.bytes + line.len() <= BYTES_MAX + reserve && reserve > 0;
        if (self.lost == 0 && room) || last_words {
            self.bytes += line.len();
            self.lines.push_back(line);
        } else {
            self.lost += 1;
        }
    }

    /// There is something to write, and a reason to try it.
    fn is_due(&self) -> bool {
        let news = self.hurry || self.failed.is_none_or(|(given, _)| given != self.given);
        !self.is_empty() && news
    }

    /// How long to leave standard error alone.
    fn must_rest(&self) -> Option<Duration> {
        let (_, at) = self.failed.filter(|_| !self.hurry)?;
        PAUSE.checked_sub(at.elapsed()).filter(|rest| !rest.is_zero())
    }

    /// Takes the next lines in hand, unless there is a rest of others.
    fn fill(&mut self, notice: Notice) {
        while self.in_hand.is_empty()
            || self.lines.front().is_some_and(|line| self.in_hand.len() + line.len() <= BATCH)
        {
            let Some(line) = self.lines.pop_front() else { break };
            self.bytes -= line.len();
            self.in_hand.extend_from_slice(&line);
        }
        if self.lines.is_empty() && self.lost > 0 {
            self.in_hand.extend_from_slice(&notice(self.lost));
            self.lost = 0;
        }
    }

    fn ended(&mut self, result: Result<(), Errno>, given: u64) {
        self.failed = result.is_err().then(|| (given, Instant::now()));
        self.failures += u64::from(result.is_err());
    }

    /// Writes what there is: as far as it goes within `limit`, or as long as it takes.
    fn write_now(&mut self, out: BorrowedFd<'_>, notice: Notice, limit: Option<Duration>) {
        let begun = Instant::now();
        while !self.is_empty() {
            if limit.is_some_and(|limit| !takes_more(out, limit.saturating_sub(begun.elapsed()))) {
                return;
            }
            self.fill(notice);
            let mut bytes = std::mem::take(&mut self.in_hand);
            let result = write(out, &mut bytes);
            self.in_hand = bytes;
            if result.is_err() {
                return;
            }
        }
    }
}

/// Whether a write of [`BATCH`] bytes would not block; waits for that for `limit`.
fn takes_more(out: BorrowedFd<'_>, limit: Duration) -> bool {
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    poll(&mut [PollFd::new(&out, PollFlags::OUT)], Some(&limit)) != Ok(0)
}

/// Writes all; what was not written stays in `bytes`.
fn write(out: BorrowedFd<'_>, bytes: &mut Vec<u8>) -> Result<(), Errno> {
    let (mut at, mut waited) = (0, false);
    let result = loop {
        if at == bytes.len() {
            break Ok(());
        }
        match rustix::io::write(out, &bytes[at..]) {
            Ok(0) => break Err(Errno::IO),
            Ok(written) => (at, waited) = (at + written, false),
            Err(Errno::INTR) => {}
            // Somebody else who has it made it non-blocking.
            Err(Errno::AGAIN) if !waited => {
                let _ = poll(&mut [PollFd::new(&out, PollFlags::OUT)], None);
                waited = true;
            }
            Err(error) => break Err(error),
        }
    };
    bytes.drain(..at);
    result
}

#[cfg(test)]
mod tests;
