//! A user-space front-end for vhost-user-blk servers: Ringway's own, qemu-storage-daemon, SPDK.
//!
//! A [`Device`] connects and shares memory. Its [`BlkQueue`]s carry requests: queue many, submit
//! once, pop completions. [`Buffer`]s come from the device's [`BufferPool`]; a request takes its
//! buffers and the completion gives them back, along with a context of the caller's own type. A queue
//! belongs to one thread; different queues share nothing.
//!
//! ```
//! # use ringway_disk::{EngineKind::Sim, SimModel::Ram, Source};
//! # use ringway_testkit::rig::{Rig, RigOptions};
//! # let ram = Source::Sim { model: Ram, bytes: 1 << 20 };
//! # let mut rig = Rig::start(&RigOptions::new(ram, Sim(Ram)));
//! let mut device = ringway_driver::Options::new().over(rig.connect())?; // or Device::connect(path)?
//! let mut queue = device.queue::<&str>()?;
//! let mut buffer = device.pool().alloc(4096).ok_or("out of shared memory")?;
//!
//! buffer.fill(0x55);
//! queue.write(8192, buffer, "the write")?; // the buffer is in flight now
//! queue.discard(65536, 4096, "the discard")?; // several at once
//! queue.wait_for(2, None)?; // submits, then sleeps
//! for done in queue.completions() {
//!     assert!(done.is_ok(), "{} failed: {:?}", done.ctx, done.status);
//! }
//! queue.flush("the flush")?;
//! queue.wait_polling(None)?; // the same without sleeping
//! let done = queue.pop()?.ok_or("nothing came back")?;
//! assert_eq!((done.ctx, done.is_ok()), ("the flush", true));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`blkif`] is the same over Xen's block rings, with both ends in one process.

mod backoff;
pub mod blkif;
mod completion;
mod connect;
mod connection;
mod device;
mod error;
mod headers;
mod info;
mod layout;
mod link;
mod memory;
mod names;
mod options;
mod queue;
mod reconnector;
mod rejected;
mod vhost_user;

pub use completion::{Completion, Data, QueueStats};
pub use device::Device;
pub use error::{Error, Refusal};
pub use info::DiskInfo;
pub use memory::{Buffer, BufferPool};
pub use names::{vhost_user_feature_name, virtio_feature_name};
pub use options::{Indirect, Options};
pub use queue::BlkQueue;
pub use rejected::Rejected;
pub use ringway_core::Status;
pub use ringway_ring::virtqueue::Piece;
pub use ringway_scheduler::{Policy, SchedulerMode, SchedulerStats, UnknownMode};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
