//! Internal snapshots of a qcow2 image: their table, read entry by entry.

use crate::fields::{field, wide, wrong};
use crate::header::Header;
use crate::read_at::ReadAt;
use crate::refused::Refused;
use std::io;

/// Bytes of an entry before its variable part.
const FIXED: usize = 40;
/// Bytes of the largest table: QEMU's limit.
const TABLE_BYTES_MAX: u64 = 64 << 20;
/// Bytes of extra data that have a meaning: the size of the VM state, and that of the disk.
const EXTRA_KNOWN: usize = 16;

/// A snapshot that is kept within its image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// A unique word, mostly a number.
    pub id: String,
    /// What people call it.
    pub name: String,
    /// When it was taken, in seconds since 1970.
    pub seconds: u32,
    /// Bytes of memory and devices that are kept with it; 0 if it has the disk only.
    pub vm_state_bytes: u64,
    /// Bytes of disk, where the image says so.
    pub virtual_size: Option<u64>,
    /// Where its L1 table is, in bytes.
    pub(crate) l1_offset: u64,
    /// Entries of it.
    pub(crate) l1_entries: u32,
}

impl Snapshot {
    /// The snapshots of an image, in the order of their table, and the bytes of that.
    ///
    /// # Errors
    /// The outer one: what reading says. The inner one: a table that cannot be.
    pub fn read_all<R: ReadAt + ?Sized>(
        source: &R,
        header: &Header,
        file_bytes: u64,
    ) -> io::Result<Result<(Vec<Self>, u64), Refused>> {
        let (mut found, mut end) = (Vec::new(), 0_u64);
        for _ in 0..header.snapshots {
            // The next one begins at a multiple of 8; behind the last one nobody has to write anything.
            let at = end.next_multiple_of(8);
            match Self::read(source, header.snapshots_offset + at)? {
                Ok((snapshot, bytes)) => {
                    found.push(snapshot);
                    end = at + bytes;
                }
                Err(refused) => return Ok(Err(refused)),
            }
            if end > TABLE_BYTES_MAX || header.snapshots_offset + end > file_bytes {
                let why = "the table is larger than 64 MiB, or not within the file";
                return Ok(Err(wrong("nb_snapshots", header.snapshots, why)));
            }
        }
        Ok(Ok((found, end)))
    }

    /// One entry, and its bytes without what makes them a multiple of 8.
    fn read<R: ReadAt + ?Sized>(source: &R, at: u64) -> io::Result<Result<(Self, u64), Refused>> {
        let mut fixed = [0; FIXED];
        source.read_padded(&mut fixed, at)?;
        let short = |at: usize| usize::from(u16::from_be_bytes([fixed[at], fixed[at + 1]]));
        let (id_bytes, name_bytes) = (short(12), short(14));
        let extra_bytes = field(&fixed, 36, "").unwrap_or(0);
        if u64::from(extra_bytes) > TABLE_BYTES_MAX {
            let why = "the extra data of a snapshot is larger than a whole table may be";
            return Ok(Err(wrong("extra_data_size", extra_bytes, why)));
        }
        let mut extra = [0; EXTRA_KNOWN];
        let known = EXTRA_KNOWN.min(extra_bytes as usize);
        source.read_padded(&mut extra[..known], at + FIXED as u64)?;
        let mut words = vec![0; id_bytes + name_bytes];
        source.read_padded(&mut words, at + FIXED as u64 + u64::from(extra_bytes))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let vm_state = match known {
            8.. => wide(&extra, 0, ""),
            _ => field(&fixed, 32, "").map(u64::from),
        };
        let snapshot = Self {
            id: text(&words[..id_bytes]),
            name: text(&words[id_bytes..]),
            seconds: field(&fixed, 16, "").unwrap_or(0),
            vm_state_bytes: vm_state.unwrap_or(0),
            virtual_size: (known == EXTRA_KNOWN).then(|| wide(&extra, 8, "").unwrap_or(0)),
            l1_offset: wide(&fixed, 0, "").unwrap_or(0),
            l1_entries: field(&fixed, 8, "").unwrap_or(0),
        };
        let bytes = FIXED + extra_bytes as usize + id_bytes + name_bytes;
        Ok(Ok((snapshot, bytes as u64)))
    }
}
