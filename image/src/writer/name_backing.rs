//! The header of an image names another backing file.

use super::Writer;
use crate::extension::Extensions;
use crate::fields::LENGTH_V3;
use crate::format::Format;
use crate::header::NAME_MAX;
use crate::layout::corrupt;
use crate::map::Map;
use std::io;

/// Header fields backing_file_offset and backing_file_size.
const BACKING_AT: usize = 8;
/// Header field header_length, since version 3.
const LENGTH_AT: usize = 100;
/// Bytes of a header of version 2.
const LENGTH_V2: usize = 72;
/// What a disk writes as a whole, whatever happens meanwhile.
const SECTOR: usize = 512;
/// Bytes that a format's name has in its extension, with what fills it up.
const FORMAT_BYTES: usize = 8;

/// What is to be written where.
struct Renaming {
    name_at: usize,
    /// From [`BACKING_AT`] on, within the first sector.
    fields: Vec<u8>,
}

impl Writer {
    /// Has the header name `name`, of `format`, as the backing file. The name goes to where nothing is,
    /// and is durable before one write within a sector makes it the one that holds: place, length and
    /// format. So a kill or a power cut leaves either file named as it should be.
    ///
    /// # Errors
    /// What the host says, and the header may name either then; or why it cannot be.
    pub(crate) fn name_backing(
        &mut self,
        map: &mut Map,
        name: &[u8],
        format: Format,
    ) -> io::Result<()> {
        let Renaming { name_at, fields } = self.renaming(map, name, format)?;
        self.sync()?;
        map.layers.top().file.write_at(name, name_at as u64)?;
        self.sync()?;
        ringway_core::kill_point!(NameWritten);
        map.layers.top().file.write_at(&fields, BACKING_AT as u64)?;
        self.sync()
    }

    /// Refuses a header that has no room for the name, or no place for the format.
    ///
    /// # Errors
    /// Why it cannot be, or what the host says.
    pub(crate) fn may_name_backing(
        &mut self,
        map: &mut Map,
        name: &[u8],
        format: Format,
    ) -> io::Result<()> {
        self.renaming(map, name, format).map(drop)
    }

    fn renaming(&self, map: &mut Map, name: &[u8], format: Format) -> io::Result<Renaming> {
        if self.is_broken() {
            return Err(corrupt());
        }
        let tables = map.layers.top();
        let mut head = vec![0; 1 << tables.shape.cluster_bits];
        tables.file.read_or_zero(&mut head, 0)?;
        let word =
            |at: usize| head[at..].first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
        let length = match tables.shape.version {
            2 => LENGTH_V2,
            _ => (word(LENGTH_AT) as usize).max(LENGTH_V3),
        };
        let offset = u64::from(word(BACKING_AT)) << 32 | u64::from(word(BACKING_AT + 4));
        let old = usize::try_from(offset).map_err(|_| corrupt())?;
        let old_end = old.saturating_add(word(BACKING_AT + 8) as usize);
        let refuse = |text| io::Error::new(io::ErrorKind::Unsupported, text);
        let Some((format_at, end)) = Extensions::backing_format(&head, length, offset) else {
            return Err(refuse(
                "its header says in an unusual way what its backing file is. Stop serving it, then \
                 `qemu-img commit`, and `qemu-img rebase`",
            ));
        };
        if format_at + FORMAT_BYTES > SECTOR {
            return Err(refuse(
                "other extensions of its header come before the format of its backing file. Stop serving \
                 it, then `qemu-img commit`, and `qemu-img rebase`",
            ));
        }
        let fits_before = end + name.len() <= old;
        let name_at = if fits_before { end } else { old_end.max(end) };
        if name.len() > NAME_MAX as usize || name_at.saturating_add(name.len()) > head.len() {
            return Err(refuse("its header has no room for the name of what it would be based on"));
        }
        let number = |value: usize| u32::try_from(value).map_err(io::Error::other);
        let mut put = |at: usize, bytes: &[u8]| head[at..at + bytes.len()].copy_from_slice(bytes);
        put(BACKING_AT, &(name_at as u64).to_be_bytes());
        put(BACKING_AT + 8, &number(name.len())?.to_be_bytes());
        let word = format.name().as_bytes();
        put(format_at - 4, &number(word.len())?.to_be_bytes());
        put(format_at, &[0; FORMAT_BYTES]);
        put(format_at, word);
        let fields = head[BACKING_AT..format_at + FORMAT_BYTES].to_vec();
        Ok(Renaming { name_at, fields })
    }
}
