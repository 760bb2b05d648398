//! The simulated disk as its engines and its test see it.

use super::setup::SimulatedSetup;
use super::state::State;
use ringway_aio::{Done, Io};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A simulated disk with a volatile cache, shared by the engines of all queues.
#[derive(Clone, Debug)]
pub struct SimulatedDisk(Arc<Mutex<State>>);

impl SimulatedDisk {
    /// A disk that holds `image`, all of it durable.
    ///
    /// # Panics
    /// If `image` is not as long as the disk.
    #[must_use]
    pub fn new(setup: SimulatedSetup, image: &[u8]) -> Self {
        Self(Arc::new(Mutex::new(State::new(setup, image))))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names another engine.
    pub(super) fn add_engine(&self) -> usize {
        let mut state = self.state();
        state.done.push(Vec::new());
        state.done.len() - 1
    }

    /// An engine goes: the disk lets go of its memory.
    pub(super) fn remove_engine(&self, engine: usize) {
        let mut state = self.state();
        state.flying.retain(|flying| flying.engine != engine);
        state.zombies.retain(|flying| flying.engine != engine);
    }

    /// Takes an operation in. Its memory stays valid until it was reaped or the engine removed.
    pub(super) fn start(&self, engine: usize, io: &Io<'_>) {
        self.state().start(engine, io);
    }

    /// Moves completions of `engine` to `out`.
    pub(super) fn take_done(&self, engine: usize, out: &mut Vec<Done>) -> usize {
        let mut state = self.state();
        let found = state.done[engine].len();
        out.append(&mut state.done[engine]);
        found
    }

    /// Lets the disk do a little, of any operation. False if there is nothing to do.
    pub fn step(&self) -> bool {
        self.state().step()
    }

    /// Cuts the power; what is on the disk afterwards. Every operation fails from now on.
    #[must_use]
    pub fn cut(&self) -> Vec<u8> {
        self.state().cut()
    }

    /// What somebody asked of the disk that must never be asked, if so.
    #[must_use]
    pub fn complaint(&self) -> Option<String> {
        self.state().complaint.clone()
    }
}
