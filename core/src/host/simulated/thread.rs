//! Threads, of which one runs at a time.

use super::world::{SLEEPS, World, here, thread_key};
use std::any::Any;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use std::thread::panicking;

/// A thread of a world.
#[derive(Clone, Debug)]
pub struct Thread(Arc<World>, usize);

impl Thread {
    /// Has it go on if it is parked, or the next time that it parks.
    pub fn unpark(&self) {
        self.0.unpark(self.1);
        if let Some((world, me)) = here() {
            world.event(me, format_args!("unpark {}", self.1));
        }
    }
}

/// A thread that can be waited for.
#[derive(Debug)]
pub struct JoinHandle<T> {
    thread: Thread,
    result: Arc<Mutex<Option<T>>>,
}

impl<T> JoinHandle<T> {
    /// The thread.
    #[must_use]
    pub fn thread(&self) -> &Thread {
        &self.thread
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.0.is_over(self.thread.1)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// None: a thread that panics ends its world.
    ///
    /// # Panics
    /// If this is no thread of a world.
    pub fn join(self) -> Result<T, Box<dyn Any + Send>> {
        let (world, me) = here().expect("a thread of a world");
        while !self.is_finished() {
            world.wait(me, thread_key(self.thread.1), None);
        }
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        result.ok_or_else(|| Box::new("it has ended otherwise") as Box<dyn Any + Send>)
    }
}

/// As of std.
#[derive(Debug, Default)]
pub struct Builder(Option<String>);

impl Builder {
    /// As of std.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// As of std.
    #[must_use]
    pub fn name(self, name: String) -> Self {
        Self(Some(name))
    }

    /// As of std.
    ///
    /// # Errors
    /// None.
    ///
    /// # Panics
    /// If this is no thread of a world.
    pub fn spawn<T: Send + 'static>(
        self,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let (world, me) = here().expect("a thread of a world");
        let result = Arc::new(Mutex::new(None));
        let told = Arc::clone(&result);
        let thread = world.spawn(self.0.unwrap_or_default(), move || {
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(body());
        });
        world.event(me, format_args!("spawn {thread}"));
        Ok(JoinHandle { thread: Thread(world, thread), result })
    }
}

fn park_for(nanos: Option<u64>) {
    let (world, me) = here().expect("a thread of a world");
    world.event(me, format_args!("park"));
    world.park(me, nanos);
}

/// As of std.
pub fn park() {
    park_for(None);
}

/// As of std.
pub fn park_timeout(timeout: Duration) {
    park_for(Some(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)));
}

/// As of std.
///
/// # Panics
/// If this is no thread of a world.
pub fn sleep(time: Duration) {
    let (world, me) = here().expect("a thread of a world");
    world.event(me, format_args!("sleep"));
    world.wait(me, SLEEPS, Some(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)));
}
