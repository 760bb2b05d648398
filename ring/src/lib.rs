//! Shared-memory rings: virtqueues with the virtio-blk wire format, and Xen's block rings.
//!
//! ```
//! use ringway_core::mem::{Access, GuestMap, Mapping, Region, Segments, Translator};
//! use ringway_ring::virtqueue::{Areas, Device, Driver, Format, Piece};
//! use std::sync::Arc;
//!
//! // Memory that a driver and a device share; the driver calls its first byte 0x8000.
//! let memory = Arc::new(Mapping::anonymous(8192)?);
//! let region = Region { guest: 0x8000, user: 0, len: 8192, mapping: Arc::clone(&memory) };
//! let mut guest = Translator::new(Arc::new(GuestMap::new(vec![region])?));
//!
//! // A queue of 8 descriptors in its first page. `packed: true` is the same.
//! let format = Format { packed: false, size: 8, event_idx: true, indirect: false };
//! let areas = Areas { desc: memory.at(0), driver: memory.at(256), device: memory.at(512) };
//! // SAFETY: the areas lie in the mapping, and no two of them overlap.
//! let mut driver = unsafe { Driver::new(format, areas, 0, None) }?;
//! let mut device = unsafe { Device::new(format, areas, None) }?;
//!
//! // The driver: five bytes that the device may write, in the second page.
//! let sent = driver.add(&[], &[Piece { addr: 0x9000, len: 5 }])?;
//! let _kick = driver.publish();
//!
//! // The device takes the chain, writes, and gives it back.
//! let (head, chain) = device.pop(&mut guest)?.expect("there is one");
//! let mut list = Segments::with_capacity(1);
//! for buffer in chain?.writable() {
//!     assert!(guest.resolve(buffer.addr, buffer.len, Access::Write, &mut list));
//! }
//! // SAFETY: what `resolve` names is mapped.
//! unsafe { list.scatter(0, b"hello") };
//! device.push(head, 5);
//! let _interrupt = device.publish();
//!
//! let used = driver.pop_used()?.expect("it came back");
//! assert_eq!((used.head, used.len), (sent, 5));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! No file descriptor and no system call, so that all of it runs under Miri: kicks and interrupts are the
//! caller's. All that a peer wrote is copied once and then judged.

pub mod blkif;
mod shared;
pub mod virtio_blk;
pub mod virtqueue;
