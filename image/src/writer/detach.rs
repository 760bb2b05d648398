//! The header of an image names no backing file any more.

use super::Writer;
use crate::extension::Extensions;
use crate::layout::corrupt;
use crate::map::Map;
use std::io;

/// Header fields backing_file_offset and backing_file_size: neighbours in one sector.
const BACKING_AT: u64 = 8;
const BACKING_BYTES: usize = 12;
/// Header field nb_snapshots.
const SNAPSHOTS_AT: usize = 60;
/// Header field header_length, since version 3.
const LENGTH_AT: usize = 100;
/// Bytes of a header of version 2.
const LENGTH_V2: usize = 72;

impl Writer {
    /// Takes the name of the backing file away by one write within a sector, after all that was copied is
    /// durable. The name itself stays where it is: without the offset nobody reads it. So does the extension with its
    /// format, which tells whoever opens it that it was based on something (`Header::is_flattened`).
    ///
    /// # Errors
    /// What the host says; both that the name is there and that it is not mean the same data.
    pub(crate) fn detach(&mut self, map: &mut Map) -> io::Result<()> {
        self.may_detach(map)?;
        self.sync()?;
        map.layers.top().file.write_at(&[0; BACKING_BYTES], BACKING_AT)?;
        self.sync()
    }

    /// Refuses an image whose header has to name a backing file to be understood, and one with internal
    /// snapshots: what these lack is looked for in the backing file, too.
    pub(crate) fn may_detach(&mut self, map: &mut Map) -> io::Result<()> {
        if self.is_broken() {
            return Err(corrupt());
        }
        let tables = map.layers.top();
        let mut head = vec![0; 1 << tables.shape.cluster_bits];
        tables.file.read_or_zero(&mut head, 0)?;
        let word =
            |at: usize| head[at..].first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
        let offset = u64::from(word(8)) << 32 | u64::from(word(12));
        let length = if tables.shape.version < 3 { LENGTH_V2 } else { word(LENGTH_AT) as usize };
        let refuse = |text| Err(io::Error::new(io::ErrorKind::Unsupported, text));
        if word(SNAPSHOTS_AT) != 0 {
            return refuse(
                "it has internal snapshots, which need its backing file, too. Delete them when it is not \
                 served (qemu-img snapshot -d), or copy it (ringway copy)",
            );
        }
        if offset == 0 || Extensions::end_by_mark(&head, length, offset) {
            return Ok(());
        }
        refuse(
            "nothing but the name of its backing file ends the extensions of its header. Stop serving it, \
             then `qemu-img rebase -b \"\"`",
        )
    }
}
