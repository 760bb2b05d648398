//! The vocabulary of Ringway: requests, geometry, tags and guest memory.
//!
//! Floor 0 of the house. Every other crate speaks these words; wire formats (virtio, blkif, io_uring)
//! are translated at the door of the crate that knows them and never come in here.

pub mod file;
pub mod geometry;
pub mod kill_points;
pub mod mem;
pub mod request;
pub mod tag;
pub mod thread;

pub use geometry::{Geometry, SECTOR_BYTES};
pub use mem::{Segment, Segments};
pub use request::{ByteRange, DataOp, Op, Request, Status};
pub use tag::TagList;
