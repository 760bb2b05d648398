//! A user-space front-end for vhost-user-blk servers: Ringway's own, qemu-storage-daemon, SPDK.
//!
//! A [`Device`] connects and shares memory. Its [`BlkQueue`]s carry requests: queue many, submit
//! once, pop completions. [`Buffer`]s come from the device's [`BufferPool`]; a request takes its
//! buffers and the completion gives them back, along with a context of the caller's own type. A queue
//! belongs to one thread; different queues share nothing.
//!
//! ```no_run
//! use ringway_driver::{Device, Error};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let mut device = Device::connect("/run/disk.sock")?;
//!     let mut queue = device.queue::<&str>()?;
//!     let mut buffer = device.pool().alloc(4096).ok_or("out of shared memory")?;
//!
//!     buffer.fill(0x55);
//!     queue.write(8192, buffer, "the write")?; // the buffer is in flight now
//!     queue.wait(None)?; // submits, then sleeps
//!     let done = queue.pop()?.ok_or("nothing came back")?;
//!     assert!(done.is_ok(), "{} failed: {:?}", done.ctx, done.status);
//!
//!     queue.flush("the flush")?;
//!     queue.wait_polling(None)?; // the same without sleeping
//!     for done in queue.completions() {
//!         println!("{}: {:?}", done.ctx, done.status);
//!     }
//!     Ok(())
//! }
//! ```

mod completion;
mod device;
mod error;
mod info;
mod keeper;
mod layout;
mod line;
mod link;
mod memory;
mod options;
mod queue;
mod slots;
mod vhost_user;

pub use completion::{Completion, Data, QueueStats};
pub use device::Device;
pub use error::{Error, Refusal, Rejected};
pub use info::DiskInfo;
pub use memory::{Buffer, BufferPool};
pub use options::{Indirect, Options};
pub use queue::BlkQueue;
pub use ringway_core::Status;
pub use ringway_ring::virtqueue::Piece;
