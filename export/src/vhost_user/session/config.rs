//! GET_CONFIG and SET_CONFIG: the configuration space.

use super::{Answer, Refusal, Session};
use crate::vhost_user::message::{CONFIG_BYTES_MAX, Message};
use ringway_ring::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, WRITEBACK_OFFSET};

impl Session<'_> {
    /// An empty answer says that there is no such part (vhost-user, GET_CONFIG).
    pub(super) fn get_config(&self, message: &Message) -> Answer {
        let (offset, size) = (message.u32(0), message.u32(4));
        let Ok(range) = config_range(offset, size) else { return Answer::Reply(Vec::new()) };
        let mut space = [0; CONFIG_BYTES_MAX];
        let config = self.export.config(self.writeback).to_bytes();
        space[..config.len()].copy_from_slice(&config);
        let mut payload = message.payload()[..12].to_vec();
        payload.extend_from_slice(&space[range]);
        Answer::Reply(payload)
    }

    /// Only `writeback` can be written, with CONFIG_WCE.
    pub(super) fn set_config(&mut self, message: &Message) -> Result<Answer, Refusal> {
        let (offset, size) = (message.u32(0), message.u32(4));
        let range = config_range(offset, size)?;
        if range != (WRITEBACK_OFFSET..WRITEBACK_OFFSET + 1) || !self.has(VIRTIO_BLK_F_CONFIG_WCE) {
            return Err(Refusal::Config(size, offset));
        }
        self.writeback = message.payload()[12] != 0 && self.export.may_write_back();
        let durable = self.durable_writes();
        for (at, vring) in self.vrings.iter().enumerate() {
            if let Some(lane) = vring.lane {
                self.export.worker(at).set_durable(lane, durable).map_err(Refusal::Worker)?;
            }
        }
        Ok(Answer::Ack)
    }
}

fn config_range(offset: u32, size: u32) -> Result<std::ops::Range<usize>, Refusal> {
    let (start, len) = (offset as usize, size as usize);
    match start.checked_add(len) {
        Some(end) if end <= CONFIG_BYTES_MAX && len > 0 => Ok(start..end),
        _ => Err(Refusal::Config(size, offset)),
    }
}
