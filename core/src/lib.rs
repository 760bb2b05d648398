//! The vocabulary of Ringway: requests, geometry, tags and guest memory.
//!
//! ```
//! use ringway_core::{ByteRange, Op, Request, Segment, TagList};
//!
//! // What a guest asks for: sectors 8 to 15, to be read into memory of two pieces.
//! let mut bytes = [0u8; 4096];
//! let mut request = Request::with_capacity(2);
//! request.op = Op::Read;
//! request.range = ByteRange::from_sector(8, 8 * 512).expect("within 64 bits");
//! for half in bytes.chunks_mut(2048) {
//!     assert!(request.segments.push(Segment { base: half.as_mut_ptr(), len: half.len() }));
//! }
//! assert_eq!((request.range.offset(), request.segments.bytes()), (4096, 4096));
//!
//! // Requests are found by small numbers; no number free means wait.
//! let mut tags = TagList::new(1);
//! let tag = tags.acquire().expect("one is free");
//! assert_eq!(tags.acquire(), None);
//! tags.release(tag);
//! ```
//!
//! Every other crate speaks these words; wire formats (virtio, blkif, io_uring) are translated in the
//! crate that knows them. [`mem`] has the memory: a guest's ([`mem::GuestMap`]), which may vanish under
//! the reader without ending the process, and our own ([`mem::Pool`]).

pub mod file;
pub mod geometry;
pub mod host;
pub mod kill_points;
pub mod mem;
pub mod request;
pub mod sync_turn;
pub mod thread;

pub use geometry::{Geometry, SECTOR_BYTES};
pub use request::{ByteRange, DataOp, Op, Request, Segment, Segments, Status, TagList};
