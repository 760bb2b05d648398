//! What is wrong with a front-end that is connected, as far as only the server can see it: it waits for ever, and
//! nothing else tells why.

use std::time::{Duration, Instant};

/// How long queues may be set up before it is said that none was enabled, or that nothing comes through them.
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
    /// Since when queues run that all began as of a driver that has just started.
    begun: Option<Instant>,
}

impl FrontEnd {
    /// One has connected.
    pub(crate) fn came(&mut self) {
        let soon = self.came.is_some_and(|came| came.elapsed() < RETURNS.0);
        self.returns = if soon { self.returns.saturating_add(1) } else { 0 };
        (self.came, self.lack, self.begun) = (Some(Instant::now()), None, None);
        self.connections += 1;
    }

    /// What it lacks now; what the log is to be told, if it is to be.
    pub(crate) fn lacks(&mut self, lack: Option<Lack>) -> Option<&'static str> {
        self.begun = None;
        if self.lack.map(|(lack, _)| lack) == lack {
            return None;
        }
        self.lack = lack.map(|lack| (lack, Instant::now()));
        let tells = lack == Some(Lack::Memory) && !std::mem::replace(&mut self.logged, true);
        tells.then_some(NO_MEMORY)
    }

    /// It has a queue that runs; whether all that do are `new`, and not of a driver that has used them before.
    pub(crate) fn gets_on(&mut self, new: bool) {
        (self.lack, self.logged, self.returns) = (None, false, 0);
        self.begun = new.then(|| self.begun.unwrap_or_else(Instant::now));
    }

    /// What is wrong with it; `unused` says that its queues run, and that no request has come through them. (Kicks say
    /// nothing: QEMU gives one when it starts a queue.)
    pub(crate) fn trouble(&self, unused: bool) -> Option<String> {
        let silent = self.begun.filter(|_| unused).map(|begun| begun.elapsed());
        if let Some(silent) = silent.filter(|silent| *silent >= ENABLES) {
            return Some(format!(
                "its queues have run for {} s and no request has come: its guest is stopped, has no driver that uses \
                 the disk yet, or its kicks are lost",
                silent.as_secs()
            ));
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e81_a_driver_that_has_used_its_queues_before_may_be_silent() {
        let mut front_end = FrontEnd::default();
        front_end.came();
        front_end.gets_on(true);
        assert_eq!(front_end.trouble(true), None, "not at once");
        front_end.begun = Instant::now().checked_sub(ENABLES);
        front_end.gets_on(true);
        assert!(front_end.trouble(true).is_some() && front_end.trouble(false).is_none());
        front_end.gets_on(false);
        assert_eq!(front_end.trouble(true), None);
        // Another driver, after the queues have stopped.
        front_end.begun = Instant::now().checked_sub(ENABLES);
        front_end.lacks(None);
        front_end.gets_on(true);
        assert_eq!(front_end.trouble(true), None);
    }
}
