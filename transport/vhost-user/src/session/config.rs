//! The configuration space, and how the front-end learns that it has changed.

use super::{Answer, Protocol, Refusal, Session};
use crate::device;
use crate::message::{CONFIG_BYTES_MAX, Message};
use ringway_export::GuestNotice;
use ringway_ring::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, WRITEBACK_OFFSET};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::io::IoSlice;
use tracing::{debug, info};
use vhost::vhost_user::message::BackendReq;

/// `capacity`, at the beginning of the configuration space (VIRTIO 1.2 §5.2.4).
const CAPACITY_BYTES: usize = 8;

impl Session {
    /// An empty answer says that there is no such part (vhost-user, GET_CONFIG).
    pub(super) fn get_config(&mut self, message: &Message) -> Answer {
        let (offset, size) = (message.u32(0), message.u32(4));
        let Ok(range) = config_range(offset, size) else { return Answer::Reply(Vec::new()) };
        if range.start == 0 && range.end >= CAPACITY_BYTES {
            // Before the size is read: a change in between is told once more, not missed.
            self.resizes_known = Some(self.export.resizes());
        }
        let mut space = [0; CONFIG_BYTES_MAX];
        let config =
            device::config(self.export.disk(), self.export.options(), self.writeback).to_bytes();
        space[..config.len()].copy_from_slice(&config);
        if range.contains(&WRITEBACK_OFFSET) {
            self.write_cache_was_read();
        }
        let mut payload = message.payload()[..12].to_vec();
        payload.extend_from_slice(&space[range]);
        Answer::Reply(payload)
    }

    /// Only `writeback` can be written, with CONFIG_WCE.
    ///
    /// What is written holds beyond this connection: for the guest a reconnection is none. A front-end
    /// that is new reads the configuration space and finds the truth there. That it is off can be said at
    /// any time, also before features are negotiated: a guest may switch it off before its front-end
    /// tells of them (QEMU), and durable writes are right for whatever comes.
    pub(super) fn set_config(&mut self, message: &Message) -> Result<Answer, Refusal> {
        let (offset, size) = (message.u32(0), message.u32(4));
        let range = config_range(offset, size)?;
        let on = message.payload().get(12).is_some_and(|&byte| byte != 0);
        let offered = device::features(self.export.disk()) >> VIRTIO_BLK_F_CONFIG_WCE & 1 != 0;
        let may = self.has(VIRTIO_BLK_F_CONFIG_WCE) || (offered && !on);
        if range != (WRITEBACK_OFFSET..WRITEBACK_OFFSET + 1) || !may {
            return Err(Refusal::Config(size, offset));
        }
        self.set_write_cache(on)?;
        Ok(Answer::Ack)
    }

    /// Tells the front-end that the configuration space has changed
    /// (VHOST_USER_BACKEND_CONFIG_CHANGE_MSG). It answers by reading it, on the main connection: so
    /// nobody waits here.
    pub(super) fn announce(&mut self) -> GuestNotice {
        let listens = self.protocol.contains(Protocol::BACKEND_REQ | Protocol::CONFIG);
        let Some(channel) = self.backend_channel.as_ref().filter(|_| listens) else {
            return GuestNotice::NotListening;
        };
        // QEMU up to 7.2 dies of a change of a device that its guest has not started. What is missed
        // now is told when a queue starts.
        if !self.vrings.iter().any(|vring| vring.is_running() || vring.is_ready()) {
            return GuestNotice::Later;
        }
        self.resizes_known = Some(self.export.resizes());
        self.announced = true;
        let disk = self.export.disk().name();
        // Header only: request, flags (version 1, no answer wanted), no payload.
        let words = [BackendReq::CONFIG_CHANGE_MSG as u32, 1, 0];
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = loop {
            // As all messages are sent, so that a sandbox has one call to allow.
            let mut none = SendAncillaryBuffer::default();
            match sendmsg(channel, &[IoSlice::new(&bytes)], &mut none, flags) {
                Err(Errno::INTR) => {}
                sent => break sent,
            }
        };
        if sent == Ok(bytes.len()) {
            debug!(disk, "front-end told that the configuration space has changed");
            return GuestNotice::Yes;
        }
        if let Some(pass) = self.export.limits().undelivered.pass() {
            let suppressed = pass.suppressed;
            info!(disk, suppressed, "front-end cannot be told of a change: {sent:?}");
        }
        // After half a message the rest would be misread.
        self.backend_channel = None;
        GuestNotice::Undelivered
    }

    /// A front-end whose queues did not run when the disk changed its size, and that did not read it
    /// since, may go on in an old belief. So may one that has not read it in this connection at all: QEMU
    /// does not when it reconnects, and the disk may have changed while another process served it, or none.
    /// That goes for guests that begin afresh, too: what they are shown is what QEMU has kept.
    pub(super) fn announce_what_was_missed(&mut self) {
        if self.resizes_known != Some(self.export.resizes()) {
            self.announce();
        }
    }
}

pub(super) fn config_range(offset: u32, size: u32) -> Result<std::ops::Range<usize>, Refusal> {
    let (start, len) = (offset as usize, size as usize);
    match start.checked_add(len) {
        Some(end) if end <= CONFIG_BYTES_MAX && len > 0 => Ok(start..end),
        _ => Err(Refusal::Config(size, offset)),
    }
}
