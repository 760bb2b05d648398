//! What is wrong with a front-end that is connected, as far as only the server can see it: it waits for ever, and
//! nothing else tells why.

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
pub(crate) struct FrontEnd {
    lack: Option<(Lack, Instant)>,
    /// That is in the log, for this one and those that come after it without having got on.
    logged: bool,
    /// How many have come, and how many of them in a row each soon after the one before.
    pub(crate) connections: u64,
    returns: u32,
    came: Option<Instant>,
}

impl FrontEnd {
    /// One has connected.
    pub(crate) fn came(&mut self) {
        let soon = self.came.is_some_and(|came| came.elapsed() < RETURNS.0);
        self.returns = if soon { self.returns.saturating_add(1) } else { 0 };
        (self.came, self.lack) = (Some(Instant::now()), None);
        self.connections += 1;
    }

    /// What it lacks now; what the log is to be told, if it is to be.
    pub(crate) fn lacks(&mut self, lack: Option<Lack>) -> Option<&'static str> {
        if self.lack.map(|(lack, _)| lack) == lack {
            return None;
        }
        self.lack = lack.map(|lack| (lack, Instant::now()));
        let tells = lack == Some(Lack::Memory) && !std::mem::replace(&mut self.logged, true);
        tells.then_some(NO_MEMORY)
    }

    /// It has a queue that runs: all is well.
    pub(crate) fn gets_on(&mut self) {
        (self.lack, self.logged, self.returns) = (None, false, 0);
    }

    /// What is wrong with it.
    pub(crate) fn trouble(&self) -> Option<String> {
        match self.lack {
            Some((Lack::Memory, _)) => return Some(NO_MEMORY.to_owned()),
            Some((Lack::Enabled, since)) if since.elapsed() >= ENABLES => {
                return Some("its front-end has set queues up and enabled none of them".to_owned());
            }
            _ => {}
        }
        let lately = self.came.is_some_and(|came| came.elapsed() < RETURNS.0 * 2);
        (lately && self.returns >= RETURNS.1).then(|| {
            format!(
                "its front-end has come back {} times, each within {} s, and no queue of it ran: its own log says why, \
                 or this daemon's",
                self.returns,
                RETURNS.0.as_secs()
            )
        })
    }
}

const NO_MEMORY: &str = "its front-end has set queues up without any memory, so its guest waits for ever: the guest's \
                         memory has to be shared. QEMU: -object memory-backend-memfd,id=mem,size=…,share=on \
                         -machine memory-backend=mem; libvirt: <memoryBacking><source type='memfd'/><access \
                         mode='shared'/></memoryBacking>";
