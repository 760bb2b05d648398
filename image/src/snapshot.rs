//! Internal snapshots of a qcow2 image: their table, read entry by entry.

use crate::fields::{field, wide, wrong};
use crate::header::{Header, l1_entries};
use crate::read_at::ReadAt;
use crate::refused::Refused;
use std::io;

/// Bytes of an entry before its variable part.
const FIXED: usize = 40;
/// Bytes of the largest table: QEMU's limit.
const TABLE_BYTES_MAX: u64 = 64 << 20;
/// Bytes of the extra data of one entry: QEMU's limit.
const EXTRA_MAX: u32 = 1024;
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
    /// The snapshots of an image, in the order of their table, and the bytes of that. An entry that was
    /// damaged, or is read from the wrong place because one before it was, is not taken for a snapshot:
    /// whoever believed that it refers to little would free what it refers to.
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
                    if let Err(refused) = snapshot.judge(header) {
                        return Ok(Err(refused));
                    }
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
        if extra_bytes > EXTRA_MAX {
            let why = "the extra data of a snapshot has at most 1024 bytes";
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

    /// Refuses what cannot be a snapshot of this image.
    fn judge(&self, header: &Header) -> Result<(), Refused> {
        if self.id.is_empty() || self.id.contains('\0') || self.name.contains('\0') {
            let why = "an entry of the snapshot table has no id, or zeroes in its id or name";
            return Err(wrong("id_str_size", self.id.len() as u64, why));
        }
        // The state of a machine lies behind the disk, and begins with an L2 table of its own.
        let disk = self.virtual_size.unwrap_or(1);
        let needed = l1_entries(disk, header.cluster_bits)
            .saturating_add(l1_entries(self.vm_state_bytes, header.cluster_bits));
        if u64::from(self.l1_entries) < needed {
            let why =
                "the disk of a snapshot, with the state of its machine, needs a larger L1 table";
            return Err(wrong("l1_size", self.l1_entries, why));
        }
        Ok(())
    }
}
