//! One sync of a disk at a time, by queues and threads alike, and who is answered by which.
//!
//! ```text
//! join() ─ a number ─► has_ended(number)? ── no ─► try_begin() ─ true ─► the sync ─► end(), which wakes all others
//!                            │ yes                     └─ false: somebody else's sync is under way: sleep
//!                            └─► answered
//! ```
//!
//! Syncs are numbered. Who joins gets the number of the next one to begin, never of the one under way: what was
//! written before is made durable by a sync that began afterwards, and by no other. The host tells of a lost
//! write-back once, so whoever hears it says so, where all others look, before the turn ends.

use crate::host::Instant;
use crate::host::sync::{Condvar, Mutex, MutexGuard};
use crate::host::thread::{panicking, sleep};
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

/// How often a sync is begun again that was interrupted, or that could not be carried out just then: for a minute.
const TRIES: u8 = 250;

/// The first pause before that, and the longest.
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(256);

/// How long to wait before a sync is begun again that was interrupted, or not carried out (EINTR, EAGAIN: paths of a
/// device take seconds to change), `tries` times so far. `None`: that was often enough, and it has failed.
#[must_use]
pub fn pause_before_sync(tries: u8) -> Option<Duration> {
    let pause = PAUSE.saturating_mul(1 << tries.min(16)).min(PAUSE_MAX);
    (tries < TRIES).then_some(pause)
}

/// A sync by a thread, begun again as [`pause_before_sync`] says.
///
/// # Errors
/// What `sync` says otherwise.
pub fn sync_patiently(sync: impl Fn() -> io::Result<()>) -> io::Result<()> {
    use io::ErrorKind::{Interrupted, WouldBlock};
    let mut tries = 0;
    loop {
        let error = match sync() {
            Err(error) if matches!(error.kind(), Interrupted | WouldBlock) => error,
            result => return result,
        };
        let Some(pause) = pause_before_sync(tries) else { return Err(error) };
        tries += 1;
        sleep(pause);
    }
}

/// Who makes a disk durable now, and how often that was done.
///
/// # Invariants
/// 1. `ended` is the number of the last sync that had an outcome: less than `begun` while the turn is taken.
#[derive(Debug, Default)]
pub struct SyncTurn {
    taken: AtomicBool,
    begun: AtomicU64,
    ended: AtomicU64,
    sleepers: Mutex<Vec<Weak<Sleeper>>>,
    ends: Condvar,
}

/// A queue that may have to be woken.
pub struct Sleeper {
    sleeps: AtomicBool,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl Sleeper {
    /// Whether it is woken by the next change. To be said before looking for the last time.
    pub fn sleeps(&self, sleeps: bool) {
        self.sleeps.store(sleeps, SeqCst);
    }
}

impl fmt::Debug for Sleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sleeper({})", self.sleeps.load(SeqCst))
    }
}

impl SyncTurn {
    fn sleepers(&self) -> MutexGuard<'_, Vec<Weak<Sleeper>>> {
        self.sleepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A queue that `wake` wakes, from any thread and without blocking, when it sleeps and something has changed.
    /// Allocates; call at start only.
    pub fn sleeper(&self, wake: impl Fn() + Send + Sync + 'static) -> Arc<Sleeper> {
        let sleeper = Arc::new(Sleeper { sleeps: AtomicBool::new(false), wake: Box::new(wake) });
        let mut sleepers = self.sleepers();
        sleepers.retain(|sleeper| sleeper.strong_count() > 0);
        sleepers.push(Arc::downgrade(&sleeper));
        sleeper
    }

    /// The number of the next sync: what was written before this call is durable once that one has ended, or one
    /// after it, and none has failed.
    #[must_use]
    pub fn join(&self) -> u64 {
        self.begun.load(SeqCst) + 1
    }

    /// True if the sync with this number has ended. Whether it failed is to be looked at after this.
    #[must_use]
    pub fn has_ended(&self, number: u64) -> bool {
        self.ended.load(SeqCst) >= number
    }

    /// Takes the turn, if it is nobody's: nobody joins that sync from now on, and none of it has begun.
    #[must_use]
    pub fn try_begin(&self) -> bool {
        let begins = !self.taken.swap(true, SeqCst);
        if begins {
            self.begun.fetch_add(1, SeqCst);
        }
        begins
    }

    /// The sync of whoever has the turn is over. If it failed, all who look know that already.
    pub fn end(&self) {
        self.ended.store(self.begun.load(SeqCst), SeqCst);
        self.taken.store(false, SeqCst);
        self.wake();
    }

    /// The sync of whoever has the turn could not be asked for, and has neither made anything durable nor lost it: who
    /// joined it waits for the next.
    pub fn end_in_vain(&self) {
        self.taken.store(false, SeqCst);
        self.wake();
    }

    /// Wakes all who sleep: something has ended for which they may wait.
    pub fn wake(&self) {
        let sleepers = self.sleepers();
        // Whoever looked before has the list, or is waiting by now.
        self.ends.notify_all();
        for sleeper in sleepers.iter().filter_map(Weak::upgrade) {
            if sleeper.sleeps.swap(false, SeqCst) {
                (sleeper.wake)();
            }
        }
    }

    /// A sync by the calling thread, in its turn; `None` if one of somebody else has begun after this call and
    /// has ended. Blocks until then. If `sync` fails, it says so to all who look before it returns.
    pub fn by_thread<T>(&self, sync: impl FnOnce() -> T) -> Option<T> {
        let number = self.join();
        let mut sleepers = self.sleepers();
        loop {
            if self.has_ended(number) {
                return None;
            }
            if self.try_begin() {
                break;
            }
            sleepers = self.ends.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
        }
        drop(sleepers);
        let _turn = EndsTurn(self, Self::end);
        Some(sync())
    }

    /// The same for a sync that others carry out, as engines do, and that may not be carried out at all, or not end
    /// in time: where `sync` has an error, who joined it waits for the next.
    ///
    /// # Errors
    /// What `sync` says, and that syncs of others have not ended within `limit`.
    pub fn by_others(
        &self,
        limit: Duration,
        sync: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let (begun, number) = (Instant::now(), self.join());
        let mut sleepers = self.sleepers();
        loop {
            if self.has_ended(number) {
                return Ok(());
            }
            if self.try_begin() {
                break;
            }
            let left = limit.saturating_sub(begun.elapsed());
            if left.is_zero() {
                let why = "another flush of the disk has not ended in time";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            let woken = self.ends.wait_timeout(sleepers, left);
            sleepers = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(sleepers);
        let mut turn = EndsTurn(self, Self::end_in_vain);
        let synced = sync();
        if synced.is_ok() {
            turn.1 = Self::end;
        }
        synced
    }
}

/// Whoever has the turn gives it back, also by a panic, after which nobody is answered by that sync.
struct EndsTurn<'a>(&'a SyncTurn, fn(&SyncTurn));

impl Drop for EndsTurn<'_> {
    fn drop(&mut self) {
        let end = if panicking() { SyncTurn::end_in_vain } else { self.1 };
        end(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn who_joins_waits_for_a_sync_that_begins_later() {
        let turn = SyncTurn::default();
        let first = turn.join();
        assert!(turn.try_begin() && !turn.try_begin());
        let second = turn.join();
        assert!(second > first && !turn.has_ended(first));
        turn.end();
        assert!(turn.has_ended(first) && !turn.has_ended(second));
        assert!(turn.try_begin());
        turn.end();
        assert!(turn.has_ended(second) && !turn.has_ended(turn.join()));
    }

    #[test]
    fn who_joined_a_sync_that_was_in_vain_waits_for_the_next() {
        let turn = SyncTurn::default();
        let first = turn.join();
        assert!(turn.try_begin());
        turn.end_in_vain();
        assert!(!turn.has_ended(first) && turn.try_begin());
        turn.end();
        assert!(turn.has_ended(first));
        assert!(turn.by_thread(|| ()).is_some(), "it is nobody's turn");
    }

    #[test]
    fn a_sync_that_panics_answers_nobody() {
        let turn = SyncTurn::default();
        let joined = turn.join();
        let panics = || turn.by_thread(|| panic!("so it shall"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert!(!turn.has_ended(joined), "nobody knows what it did");
        assert!(turn.by_thread(|| ()).is_some(), "it is nobody's turn");
    }

    #[test]
    fn who_sleeps_is_woken_once() {
        let (turn, woken) = (SyncTurn::default(), Arc::new(AtomicU32::new(0)));
        let counts = Arc::clone(&woken);
        let sleeper = turn.sleeper(move || {
            counts.fetch_add(1, SeqCst);
        });
        let passes = || {
            assert!(turn.try_begin());
            turn.end();
            woken.load(SeqCst)
        };
        assert_eq!(passes(), 0, "it does not sleep");
        sleeper.sleeps(true);
        assert_eq!((passes(), passes()), (1, 1));
        sleeper.sleeps(true);
        drop(sleeper);
        assert_eq!(passes(), 1, "it has gone");
    }

    #[test]
    fn threads_take_turns_or_share_one() {
        let (turn, under_way, syncs) = (SyncTurn::default(), AtomicU32::new(0), AtomicU32::new(0));
        let sync = || {
            assert_eq!(under_way.fetch_add(1, SeqCst), 0, "one at a time");
            syncs.fetch_add(1, SeqCst);
            under_way.fetch_sub(1, SeqCst);
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        turn.by_thread(sync);
                    }
                });
            }
        });
        assert_eq!(u64::from(syncs.load(SeqCst)) + 1, turn.join());
    }

    #[test]
    fn c86_a_sync_by_others_answers_nobody_unless_it_succeeds() {
        let turn = SyncTurn::default();
        let long = Duration::from_secs(60);
        // Whoever joins before it begins.
        let first = turn.join();
        let refused = turn.by_others(long, || {
            assert!(!turn.try_begin(), "it has the turn");
            Err(io::Error::from_raw_os_error(libc::ENOTCONN))
        });
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
        assert!(!turn.has_ended(first));
        turn.by_others(long, || Ok(())).unwrap();
        assert!(turn.has_ended(first));
        // A queue's sync that does not end is not waited for longer than was said.
        assert!(turn.try_begin());
        let late = turn.by_others(Duration::from_millis(10), || panic!("two at a time"));
        assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
        turn.end();
        // Of two at a time one waits for the other's turn.
        let under_way = AtomicU32::new(0);
        let sync = || {
            assert_eq!(under_way.fetch_add(1, SeqCst), 0, "one at a time");
            under_way.fetch_sub(1, SeqCst);
            Ok(())
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..500).for_each(|_| turn.by_others(long, sync).unwrap()));
            }
        });
    }

    #[test]
    fn what_is_interrupted_is_begun_again_after_a_pause() {
        let tries = AtomicU32::new(0);
        let again = || match tries.fetch_add(1, SeqCst) {
            0 => Err(io::Error::from_raw_os_error(libc::EAGAIN)),
            1 => Err(io::Error::from_raw_os_error(libc::EINTR)),
            _ => Err(io::Error::from_raw_os_error(libc::EIO)),
        };
        assert_eq!(sync_patiently(again).unwrap_err().raw_os_error(), Some(libc::EIO));
        assert_eq!(tries.load(SeqCst), 3);
        let pauses: Vec<_> = (0..=u8::MAX).map_while(pause_before_sync).collect();
        assert_eq!((pauses[0], pauses[249], pauses.len()), (PAUSE, PAUSE_MAX, 250));
        assert!(pauses.iter().sum::<Duration>() > Duration::from_secs(60));
    }
}
