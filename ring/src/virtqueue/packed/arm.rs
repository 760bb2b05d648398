//! How the device side of a packed virtqueue waits, and how it polls.

use super::PackedDevice;
use crate::shared::fence;
use crate::virtqueue::packed_layout::Event;
use crate::virtqueue::types::Armed;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

impl PackedDevice {
    /// Asks the driver for kicks again, then looks once more: drain, re-arm, look again.
    pub fn arm(&mut self) -> Armed {
        let event = if self.event_idx { Event::at(self.next) } else { Event::ALL };
        self.ring.device_event().store(event.0, Relaxed);
        self.armed = true;
        // The wish must be visible before the descriptor is read again; pairs with the driver's fence
        // between its mark and its load of the wish.
        fence(SeqCst);
        if self.next_available().is_some() { Armed::WorkArrived } else { Armed::Quiet }
    }

    /// Asks the driver not to kick: the device is polling.
    #[inline]
    pub fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            self.ring.device_event().store(Event::NONE.0, Relaxed);
        }
    }
}
