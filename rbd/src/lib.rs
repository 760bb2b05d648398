//! Images of Ceph clusters (RBD) behind the three verbs of an engine: queue, submit, reap.
//!
//! ```no_run
//! use ringway_aio::{Engine, Handle};
//! use ringway_rbd::{Access, Configured, Rbd, Target};
//!
//! let target: Target = "rbd:pool/image".parse()?;
//! // Reads files: the library, the configuration of the cluster, a key.
//! let configured = Configured::new(&target, &Access::default())?;
//! // Reads none any more: threads and sockets of the library begin here.
//! let image = configured.open(false, None)?;
//! let mut engine = Rbd::new(128)?;
//! let file = engine.attach_handle(image.file(), &(image.clone() as Handle))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! librbd and librados are loaded by their names when the first image is opened (`library.rs`), so
//! that nobody needs them who has none. `cluster.rs` is the way to an image, `lock.rs` keeps a second writer
//! away, `engine.rs` is the engine, `landed.rs` the way of completions from the library's threads to it.

mod allocated;
mod cluster;
mod engine;
mod error;
mod facts;
mod image;
mod key;
mod landed;
mod library;
mod lock;
mod owner;
mod target;
mod within;
mod writable;

pub use allocated::Allocated;
pub use cluster::{Access, Configured};
pub use engine::Rbd;
pub use error::RbdError;
pub use facts::Facts;
pub use image::Image;
pub use lock::Holder;
pub use target::{Target, TargetError};
