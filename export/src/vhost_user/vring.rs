//! What a connection knows of one queue, running or not.

use super::queue::{Layout, Queue};
use crate::command::LaneId;
use ringway_core::mem::GuestMap;
use ringway_ring::virtqueue::{LayoutError, SplitAddresses, avail_bytes, desc_bytes, used_bytes};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The three addresses of SET_VRING_ADDR, in the address space of the front-end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UserAddresses {
    pub(super) desc: u64,
    pub(super) avail: u64,
    pub(super) used: u64,
}

/// Why a queue could not start.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("the {0} ring is not in shared memory")]
    NotShared(&'static str),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("the worker refuses it: {0}")]
    Worker(std::io::Error),
}

/// One queue.
#[derive(Debug, Default)]
pub(super) struct Vring {
    /// 0 until SET_VRING_NUM.
    pub(super) size: u16,
    pub(super) addresses: Option<UserAddresses>,
    /// The next available entry, while the queue does not run.
    pub(super) base: u16,
    pub(super) kick: Option<OwnedFd>,
    pub(super) call: Option<OwnedFd>,
    pub(super) err: Option<OwnedFd>,
    pub(super) enabled: bool,
    /// The kick and call descriptors are with the worker while this is `Some`.
    pub(super) lane: Option<LaneId>,
}

impl Vring {
    pub(super) fn is_running(&self) -> bool {
        self.lane.is_some()
    }

    /// True once everything is known that a queue needs to run.
    pub(super) fn is_ready(&self) -> bool {
        !self.is_running()
            && self.enabled
            && self.size != 0
            && self.addresses.is_some()
            && self.kick.is_some()
    }

    /// The queue for a worker. Takes the descriptors.
    pub(super) fn make_queue(
        &mut self,
        map: &Arc<GuestMap>,
        event_idx: bool,
        indirect: bool,
    ) -> Result<Queue, StartError> {
        let user = self.addresses.ok_or(StartError::NotShared("descriptor"))?;
        let find = |name, address, len: usize| {
            map.user_to_host(address, len as u64).ok_or(StartError::NotShared(name))
        };
        let at = SplitAddresses {
            desc: find("descriptor", user.desc, desc_bytes(self.size))?,
            avail: find("available", user.avail, avail_bytes(self.size))?,
            used: find("used", user.used, used_bytes(self.size))?,
        };
        let layout = Layout { size: self.size, next_avail: self.base, event_idx, indirect };
        let kick = self.kick.take().ok_or(StartError::NotShared("kick"))?;
        // SAFETY: the addresses were resolved in `map`, each with the length its ring needs.
        Ok(unsafe { Queue::new(layout, at, Arc::clone(map), kick, self.call.take())? })
    }

    /// Takes back what the worker had.
    pub(super) fn take_back(&mut self, queue: Queue) {
        self.lane = None;
        self.base = queue.next_avail();
        let (kick, call) = queue.into_fds();
        self.kick = Some(kick);
        self.call = call;
    }
}
