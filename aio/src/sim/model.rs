//! How long a simulated disk takes.

use std::time::{Duration, Instant};

use crate::engine::IoOp;

/// How a simulated disk spends its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Model {
    /// `channels` operations at a time; their bytes then share one link.
    Parallel {
        /// Operations at a time.
        channels: usize,
        /// Time until the first byte of a read.
        read: Duration,
        /// Time until the first byte of a write.
        write: Duration,
        /// Time of a flush or of a durable write's end.
        sync: Duration,
        /// Speed of the link.
        bytes_per_second: u64,
    },
    /// One head over turning platters. It takes the operation that it reaches first (NCQ).
    Head {
        /// Seek to the next track.
        seek_min: Duration,
        /// Seek over the whole disk.
        seek_max: Duration,
        /// One turn.
        turn: Duration,
        /// What each operation takes besides: command, interface, firmware.
        command: Duration,
        /// Speed of the medium under the head.
        bytes_per_second: u64,
        /// Size of the disk.
        bytes: u64,
    },
}

impl Model {
    /// A disk in memory.
    pub const RAM: Self = Self::Parallel {
        channels: 1024,
        read: Duration::from_nanos(500),
        write: Duration::from_nanos(500),
        sync: Duration::ZERO,
        bytes_per_second: 20_000_000_000,
    };

    /// A solid-state disk on a fast link.
    pub const SSD: Self = Self::Parallel {
        channels: 64,
        read: Duration::from_micros(80),
        write: Duration::from_micros(20),
        sync: Duration::from_micros(300),
        bytes_per_second: 3_500_000_000,
    };

    /// A hard disk of 7200 turns a minute; 14,000 reads of 4 KiB in a stream (origin O3: 10,000).
    pub const HDD: Self = Self::Head {
        seek_min: Duration::from_micros(500),
        seek_max: Duration::from_millis(15),
        turn: Duration::from_nanos(8_333_333),
        command: Duration::from_micros(50),
        bytes_per_second: 200_000_000,
        bytes: 1 << 40,
    };
}

/// What an operation is, to the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) op: IoOp,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// The state of the disk: until when what is busy, and where the head is.
#[derive(Debug)]
pub(super) struct Disk {
    channels: Vec<Instant>,
    link: Instant,
    at: u64,
    epoch: Instant,
}

impl Disk {
    pub(super) fn new(model: &Model, epoch: Instant) -> Self {
        let channels = match *model {
            Model::Parallel { channels, .. } => channels.max(1),
            Model::Head { .. } => 1,
        };
        Self { channels: vec![epoch; channels], link: epoch, at: 0, epoch }
    }

    /// When the disk can begin with another operation.
    pub(super) fn idle_at(&self) -> Instant {
        *self.channels.iter().min().expect("at least one channel")
    }

    /// Serves an operation from `begin` on; returns when it ends.
    pub(super) fn serve(&mut self, model: &Model, access: Access, begin: Instant) -> Instant {
        let data = if access.op.moves_data() { access.len } else { 0 };
        match *model {
            Model::Parallel { read, write, sync, bytes_per_second, .. } => {
                let ready = begin
                    + match access.op {
                        IoOp::Read => read,
                        IoOp::Sync => sync,
                        IoOp::WriteDurable => write + sync,
                        IoOp::Write | IoOp::PunchHole | IoOp::ZeroRange | IoOp::Discard => write,
                    };
                self.link = self.link.max(ready) + transfer(data, bytes_per_second);
                let end = if data > 0 { self.link } else { ready };
                *self.channels.iter_mut().min().expect("at least one channel") = end;
                end
            }
            Model::Head { bytes_per_second, command, .. } => {
                let reach = self.reach(model, access, begin);
                let end = begin + command + reach + transfer(data, bytes_per_second);
                if data > 0 {
                    self.at = access.offset + data;
                }
                self.channels[0] = end;
                end
            }
        }
    }

    /// The time from `begin` until the head is where the operation starts.
    pub(super) fn reach(&self, model: &Model, access: Access, begin: Instant) -> Duration {
        let &Model::Head { seek_min, seek_max, turn, bytes_per_second, bytes, .. } = model else {
            return Duration::ZERO;
        };
        if !access.op.moves_data() {
            return turn;
        }
        if access.offset == self.at {
            // Follows on: the disk has read ahead, or has room to write behind.
            return Duration::ZERO;
        }
        // Positions and times are far below 2^52 here, and the model is rough.
        #[allow(clippy::cast_precision_loss)]
        let part = (access.offset.abs_diff(self.at) as f64 / bytes.max(1) as f64).min(1.0);
        let seek = seek_min + seek_max.saturating_sub(seek_min).mul_f64(part.sqrt());
        let turn = turn.as_nanos().max(1);
        let arrive = (begin + seek).saturating_duration_since(self.epoch).as_nanos() % turn;
        let target = transfer(access.offset, bytes_per_second).as_nanos() % turn;
        let rotate = u64::try_from((target + turn - arrive) % turn).expect("below one turn");
        seek + Duration::from_nanos(rotate)
    }

    pub(super) fn stall(&mut self, until: Instant) {
        for channel in &mut self.channels {
            *channel = until.max(*channel);
        }
    }
}

fn transfer(bytes: u64, per_second: u64) -> Duration {
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(per_second.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
