//! Files and block devices of this host.

use super::{Driver, Flush, KeptBy, Nature, Parcel, Size, Storage};
use ringway_core::file::FileShape;
use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// A file, or a block device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local {
    pub(crate) is_device: bool,
}

impl Storage for Local {
    fn nature(&self) -> Nature {
        Nature {
            engine: None,
            flush: Flush::Host,
            size: Size::Asked,
            has_length: !self.is_device,
            kept_by: KeptBy::File,
            max_bytes: u32::MAX,
        }
    }

    fn bytes(&self, file: &File) -> io::Result<u64> {
        if self.is_device {
            device_bytes(file)
        } else {
            FileShape::of(file).map(|shape| shape.bytes)
        }
    }

    fn parcel(&self) -> io::Result<Parcel> {
        let (kind, numbers) = (Locals.kind().to_owned(), vec![self.is_device.into()]);
        Ok(Parcel { kind, numbers, ..Parcel::default() })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(super) struct Locals;

impl Driver for Locals {
    fn kind(&self) -> &'static str {
        "local"
    }

    fn adopt(&self, parcel: Parcel, _: &str, _: &Arc<File>) -> Option<Arc<dyn Storage>> {
        match (&parcel.numbers[..], &parcel.words[..], &parcel.files[..]) {
            (&[is_device @ (0 | 1)], [], []) => Some(Arc::new(Local { is_device: is_device == 1 })),
            _ => None,
        }
    }
}

// <linux/fs.h>; libc does not name it for every target.
const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;

/// The size of a block device.
pub(crate) fn device_bytes(file: &File) -> io::Result<u64> {
    block_ioctl::<u64>(file, BLKGETSIZE64)
}

/// An ioctl of a block device that fills in one integer.
pub(crate) fn block_ioctl<T: Default>(file: &File, request: libc::c_ulong) -> io::Result<T> {
    let mut value = T::default();
    // SAFETY: these requests store one integer of the type the caller names.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut value) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}
