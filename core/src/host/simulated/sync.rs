//! Locks, and lines between threads.

use super::world::here;
use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, PoisonError, TryLockError};
use std::time::Duration;

/// What waits for something waits for its place in memory.
fn key<T: ?Sized>(what: &T) -> usize {
    std::ptr::from_ref(what).cast::<u8>() as usize
}

/// As of std, and never poisoned: a panic ends the world.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

/// As of std.
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
    guard: Option<std::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// As of std.
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }
}

impl<T: ?Sized> Mutex<T> {
    /// As of std.
    ///
    /// # Errors
    /// None.
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        if let Some((world, me)) = here() {
            world.event(me, format_args!("lock"));
        }
        Ok(self.lock_now())
    }

    fn lock_now(&self) -> MutexGuard<'_, T> {
        let guard = loop {
            match (self.0.try_lock(), here()) {
                (Ok(guard), _) => break guard,
                (Err(TryLockError::Poisoned(poisoned)), _) => break poisoned.into_inner(),
                (Err(TryLockError::WouldBlock), Some((world, me))) => {
                    world.wait(me, key(self), None);
                }
                (Err(TryLockError::WouldBlock), None) => std::thread::yield_now(),
            }
        };
        MutexGuard { mutex: self, guard: Some(guard) }
    }

    /// As of std.
    ///
    /// # Errors
    /// None.
    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        Ok(self.0.get_mut().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_ref().expect("it is locked")
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("it is locked")
    }
}

impl<T: ?Sized> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        self.guard = None;
        if let Some((world, _)) = here() {
            world.wake(key(self.mutex), false);
        }
    }
}

/// As of std.
#[derive(Debug, Default)]
pub struct Condvar {
    /// What has a size has a place of its own.
    _place: u8,
}

/// As of std.
#[derive(Clone, Copy, Debug)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// As of std.
    #[must_use]
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

impl Condvar {
    /// As of std.
    #[must_use]
    pub const fn new() -> Self {
        Self { _place: 0 }
    }

    fn wait_for<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        after: Option<u64>,
    ) -> (MutexGuard<'a, T>, bool) {
        let (world, me) = here().expect("a thread of a world");
        let mutex = guard.mutex;
        drop(guard);
        let woken = world.wait(me, key(self), after);
        (mutex.lock_now(), woken)
    }

    /// As of std.
    ///
    /// # Errors
    /// None.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        Ok(self.wait_for(guard, None).0)
    }

    /// As of std.
    ///
    /// # Errors
    /// None.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let nanos = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let (guard, woken) = self.wait_for(guard, Some(nanos));
        Ok((guard, WaitTimeoutResult(!woken)))
    }

    /// As of std.
    pub fn notify_one(&self) {
        if let Some((world, _)) = here() {
            world.wake(key(self), true);
        }
    }

    /// As of std.
    pub fn notify_all(&self) {
        if let Some((world, _)) = here() {
            world.wake(key(self), false);
        }
    }
}

/// Lines between threads.
pub mod mpsc {
    use super::super::world::here;
    use std::collections::VecDeque;
    use std::fmt;
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
    use std::time::Duration;

    pub use std::sync::mpsc::{RecvError, RecvTimeoutError, SendError, TryRecvError, TrySendError};

    struct Line<T> {
        items: VecDeque<T>,
        room: usize,
        has_sender: bool,
        has_receiver: bool,
    }

    /// As of std.
    pub struct SyncSender<T>(Arc<Mutex<Line<T>>>);

    /// As of std.
    pub struct Receiver<T>(Arc<Mutex<Line<T>>>);

    fn lock<T>(line: &Mutex<Line<T>>) -> MutexGuard<'_, Line<T>> {
        line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake<T>(line: &Arc<Mutex<Line<T>>>) {
        if let Some((world, _)) = here() {
            world.wake(super::key(&**line), false);
        }
    }

    fn event(what: &str) {
        if let Some((world, me)) = here() {
            world.event(me, format_args!("{what}"));
        }
    }

    /// As of std, but for `room`, which is at least 1.
    #[must_use]
    pub fn sync_channel<T>(room: usize) -> (SyncSender<T>, Receiver<T>) {
        let line = Line { items: VecDeque::new(), room, has_sender: true, has_receiver: true };
        let line = Arc::new(Mutex::new(line));
        (SyncSender(Arc::clone(&line)), Receiver(line))
    }

    impl<T> SyncSender<T> {
        /// As of std.
        ///
        /// # Errors
        /// As of std.
        pub fn try_send(&self, item: T) -> Result<(), TrySendError<T>> {
            event("send");
            let mut line = lock(&self.0);
            if !line.has_receiver {
                return Err(TrySendError::Disconnected(item));
            }
            if line.items.len() >= line.room {
                return Err(TrySendError::Full(item));
            }
            line.items.push_back(item);
            drop(line);
            wake(&self.0);
            Ok(())
        }

        /// As of std, where there is room for all that may be under way.
        ///
        /// # Errors
        /// As of std.
        ///
        /// # Panics
        /// If there is no room.
        pub fn send(&self, item: T) -> Result<(), SendError<T>> {
            self.try_send(item).map_err(|error| match error {
                TrySendError::Disconnected(item) => SendError(item),
                TrySendError::Full(_) => panic!("there is room for all that may be under way"),
            })
        }
    }

    impl<T> Receiver<T> {
        /// As of std.
        ///
        /// # Errors
        /// As of std.
        pub fn try_recv(&self) -> Result<T, TryRecvError> {
            event("take");
            self.take()
        }

        fn take(&self) -> Result<T, TryRecvError> {
            let mut line = lock(&self.0);
            let has_sender = line.has_sender;
            line.items.pop_front().ok_or(match has_sender {
                true => TryRecvError::Empty,
                false => TryRecvError::Disconnected,
            })
        }

        fn recv_for(&self, after: Option<u64>) -> Result<T, RecvTimeoutError> {
            event("receive");
            let (world, me) = here().expect("a thread of a world");
            let mut in_time = true;
            loop {
                match self.take() {
                    Ok(item) => return Ok(item),
                    Err(TryRecvError::Disconnected) => return Err(RecvTimeoutError::Disconnected),
                    Err(TryRecvError::Empty) if !in_time => return Err(RecvTimeoutError::Timeout),
                    Err(TryRecvError::Empty) => {
                        in_time = world.wait(me, super::key(&*self.0), after);
                    }
                }
            }
        }

        /// As of std.
        ///
        /// # Errors
        /// As of std.
        pub fn recv(&self) -> Result<T, RecvError> {
            self.recv_for(None).map_err(|_| RecvError)
        }

        /// As of std.
        ///
        /// # Errors
        /// As of std.
        pub fn recv_timeout(&self, timeout: Duration) -> Result<T, RecvTimeoutError> {
            self.recv_for(Some(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)))
        }
    }

    impl<T> Drop for SyncSender<T> {
        fn drop(&mut self) {
            lock(&self.0).has_sender = false;
            wake(&self.0);
        }
    }

    impl<T> Drop for Receiver<T> {
        fn drop(&mut self) {
            let items = {
                let mut line = lock(&self.0);
                line.has_receiver = false;
                std::mem::take(&mut line.items)
            };
            drop(items);
        }
    }

    impl<T> fmt::Debug for SyncSender<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("SyncSender")
        }
    }

    impl<T> fmt::Debug for Receiver<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Receiver")
        }
    }
}
