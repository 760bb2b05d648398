//! Image formats: what an image says of itself, and which files it is made of.
//!
//! Floor 1a of the house. A [`Header`] is judged before anything else of an image is believed; a
//! [`Chain`] is an image with those it is based on, each opened within the bounds that its owner has
//! set. [`NewImage`] writes one, [`check()`] goes through one. Nothing here knows a guest.
//!
//! An [`Image`] is one that is served: each cluster of its disk has a word in a table, which says where
//! it is. Queues look there without a lock ([`Image::place`]), and ask the image's thread for what is
//! more than a look-up ([`ImageClient`]).
//!
//! An image that is written, opened with those it is based on, and read:
//!
//! ```
//! use ringway_image::{Builder, Chain, Format, Layer, NewImage, Reader, Top};
//! use std::path::Path;
//! use std::{fs::File, sync::Arc};
//!
//! let folder = tempfile::tempdir()?;
//! let (base, top) = (folder.path().join("base.qcow2"), folder.path().join("top.qcow2"));
//! // 1 MiB of disk in clusters of 64 KiB, with something in the third one.
//! let builder = Builder::new(Arc::new(File::create_new(&base)?), 1 << 20, 16, None)?;
//! builder.filler().write(128 << 10, &[0x5a; 64 << 10])?;
//! builder.finish()?;
//! // Another one on top of it, with nothing of its own.
//! let backing = Some((Path::new("base.qcow2"), Format::Qcow2));
//! let image = NewImage { virtual_size: 1 << 20, cluster_bits: 16, backing };
//! image.write(&File::create_new(&top)?)?;
//!
//! let file = File::open(&top)?;
//! let top = Top { file, name: top, format: Format::Qcow2, read_only: true };
//! // Whatever headers say, no file beyond the folder of the image is opened; each could be locked here.
//! let chain = Chain::open(top, None, &mut |_, _, _| Ok(()))?;
//! assert_eq!(chain.files.len(), 2);
//! let mut reader = Reader::open(Layer::of_chain(chain)?)?;
//! assert_eq!(reader.next_data(0)?, Some(128 << 10));
//! assert_eq!(reader.next_hole(128 << 10)?, 192 << 10);
//! let mut sector = [0; 512];
//! reader.read(128 << 10, &mut sector)?;
//! assert_eq!(sector, [0x5a; 512]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod ahead;
mod aligned;
mod ask;
mod base;
mod beneath;
mod budget;
mod builder;
mod chain;
mod check;
mod client;
mod commit;
mod compress;
mod copy_rate;
mod create;
mod decompress;
mod extension;
mod failure;
mod fields;
mod file;
mod flatten;
mod format;
#[cfg(not(simulated))]
pub mod fuzz_case;
mod header;
mod image;
mod journal;
mod kept;
mod l2;
mod layer;
mod layers;
mod layout;
mod locate;
mod map;
mod missing;
mod printable;
mod read_at;
mod reader;
mod refcounts;
mod refused;
mod snapshot;
mod table;
mod thread;
mod units;
mod writer;

pub use ask::{Answer, Ask, Pulled, Room};
pub use base::{Bases, OpenBase};
pub use beneath::{Identity, identity};
pub use builder::{Builder, Filler};
pub use chain::{
    CHAIN_MAX, Chain, ChainError, DataFile, Elsewhere, ImageFile, LinkFault, LinkKind, Lock, Top,
    is_based_on,
};
pub use check::{CheckOptions, Findings, check, repair_counts, repair_leaks};
pub use client::{ImageClient, ThreadLost};
pub use commit::Commit;
pub use copy_rate::CopyRate;
pub use create::{CLUSTER_BITS_DEFAULT, CreateError, NewImage};
pub use extension::Bitmaps;
pub use failure::read_as_stored;
pub use format::{Format, UnknownFormat};
pub use header::{BackingName, CLUSTER_BITS, Compression, DataFileName, Header, L1_BYTES_MAX};
pub use image::{BelowLost, Image, ImageMemory, OnTop, Use};
pub use journal::{Journal, Replayed, learn_boot, leave_unwritten, replay, write_tables_again};
pub use layer::{Layer, LayerFormat, NOT_WHOLE};
pub use layout::Shape;
pub use locate::Locator;
pub use printable::printable;
pub use read_at::{ReadAt, ReadElsewhere};
pub use reader::Reader;
pub use refused::Refused;
pub use snapshot::Snapshot;
pub use table::Place;
