//! What is wrong with a front-end that is connected, as far as only the server can see it: it waits for ever, and
//! nothing else tells why.

use super::{Export, lock};
use crate::queue::QueueLifecycle;
use std::time::{Duration, Instant};

/// How long queues may be set up before it is said that none was enabled.
const ENABLES: Duration = Duration::from_secs(5);
/// A front-end that comes back so soon, so often in a row, does not get on.
const RETURNS: (Duration, u32) = (Duration::from_secs(5), 5);

/// What a front-end lacks that has set queues up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// It has told of no memory.
    Memory,
    /// It has enabled none of its queues.
    Enabled,
}

/// What is known of it.
#[derive(Debug, Default)]
pub(super) struct FrontEnd {
    lack: Option<(Lack, Instant)>,
    /// That is in the log, for this one and those that come after it without having got on.
    logged: bool,
    /// How many have come, and how many of them in a row each soon after the one before.
    connections: u64,
    returns: u32,
    came: Option<Instant>,
}

impl<Q: QueueLifecycle> Export<Q> {
    /// One has connected.
    pub fn front_end_came(&self) {
        let mut known = lock(&self.front_end);
        let soon = known.came.is_some_and(|came| came.elapsed() < RETURNS.0);
        known.returns = if soon { known.returns.saturating_add(1) } else { 0 };
        (known.came, known.lack) = (Some(Instant::now()), None);
        known.connections += 1;
    }

    /// What it lacks now; said in the log once if it is memory.
    pub fn front_end_lacks(&self, lack: Option<Lack>) {
        let mut known = lock(&self.front_end);
        if known.lack.map(|(lack, _)| lack) == lack {
            return;
        }
        known.lack = lack.map(|lack| (lack, Instant::now()));
        if lack == Some(Lack::Memory) && !std::mem::replace(&mut known.logged, true) {
            tracing::warn!(disk = self.disk().name(), "{NO_MEMORY}");
        }
    }

    /// It has a queue that runs: all is well.
    pub fn front_end_gets_on(&self) {
        let mut known = lock(&self.front_end);
        (known.lack, known.logged, known.returns) = (None, false, 0);
    }

    /// How many have connected so far.
    #[must_use]
    pub fn connections(&self) -> u64 {
        lock(&self.front_end).connections
    }

    /// What is wrong with the one that is there, or that comes and goes; nothing if all is well.
    #[must_use]
    pub fn front_end_trouble(&self) -> Option<String> {
        let known = lock(&self.front_end);
        match known.lack {
            Some((Lack::Memory, _)) => return Some(NO_MEMORY.to_owned()),
            Some((Lack::Enabled, since)) if since.elapsed() >= ENABLES => {
                return Some("its front-end has set queues up and enabled none of them".to_owned());
            }
            _ => {}
        }
        let lately = known.came.is_some_and(|came| came.elapsed() < RETURNS.0 * 2);
        (lately && known.returns >= RETURNS.1).then(|| {
            format!(
                "its front-end has come back {} times, each within {} s, and no queue of it ran: its own log says why, \
                 or this daemon's",
                known.returns,
                RETURNS.0.as_secs()
            )
        })
    }
}

const NO_MEMORY: &str = "its front-end has set queues up without any memory, so its guest waits for ever: the guest's \
                         memory has to be shared. QEMU: -object memory-backend-memfd,id=mem,size=…,share=on \
                         -machine memory-backend=mem; libvirt: <memoryBacking><source type='memfd'/><access \
                         mode='shared'/></memoryBacking>";
