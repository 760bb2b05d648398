//! The files of a disk, top first, and what each place of the disk is in them.

use crate::ahead::{Ahead, Ranges};
use crate::base::{Base, Bases};
use crate::budget::Budget;
use crate::decompress::Decompressor;
use crate::file::BlockFile;
use crate::l2::Tables;
use crate::layer::{Found, Layer, LayerFormat, Open, piece};
use crate::writer::cluster_write::Piece;
use ringway_core::host::File;
use std::io;
use std::sync::Arc;

/// The most files: what a word of the table can name.
pub(crate) const FILES_MAX: usize = 250;

/// Where the beginning of a range is, and how many bytes of it.
fn find(top: &mut Open, base: Option<&Base>, at: u64, len: u64) -> io::Result<(Found, u64)> {
    let mut len = len;
    match (top.find(at, &mut len)?, base) {
        (Some(found), _) => Ok((found, len)),
        (None, Some(base)) => base.find(at, len),
        (None, None) => Ok((Found::Zero, len)),
    }
}

/// What is on no file of this host: which of the files stands for it, and what was fetched of it.
type Remote = Option<(u8, Arc<Ahead>)>;

/// As the image's thread uses them: the top's own file, those of its base, and its data file.
fn blocks(
    files: &[Arc<File>],
    base: Option<&Base>,
    unit: u32,
) -> io::Result<(Arc<[BlockFile]>, Remote)> {
    let mut ahead = None;
    let mut blocks = Vec::with_capacity(files.len());
    for (file, at) in files.iter().zip(0_u8..) {
        let below = usize::from(at).checked_sub(1);
        let layer = below.and_then(|below| base?.chain.get(below));
        blocks.push(match layer.map(|layer| &layer.format) {
            Some(LayerFormat::Elsewhere(elsewhere)) => {
                let none = || io::Error::other("nobody has said how its base is read");
                let its = Arc::new(Ahead::new(elsewhere.clone().ok_or_else(none)?));
                ahead = Some((at, Arc::clone(&its)));
                BlockFile::elsewhere(Arc::clone(file), its)
            }
            _ => BlockFile::new(Arc::clone(file), unit),
        });
    }
    Ok((blocks.into(), ahead))
}

/// The files of a disk.
#[derive(Debug)]
pub(crate) struct Layers {
    top: Open,
    pub(crate) base: Option<Arc<Base>>,
    /// The top's own file, those that hold the base's data, and the top's data file if it has one.
    pub(crate) files: Vec<Arc<File>>,
    blocks: Arc<[BlockFile]>,
    /// Which of them is on no file of this host, and what was fetched of it.
    pub(crate) ahead: Remote,
    /// Which of them holds the top's data: 0, or the last.
    pub(crate) data: u8,
    /// Bytes of the top's own file, if its data are in another.
    own_end: u64,
    /// What I/O is a multiple of, in bytes.
    pub(crate) unit: u32,
    decompressor: Decompressor,
}

impl Layers {
    /// Reads what is needed to begin with. The first is qcow2. All I/O is in multiples of `unit` bytes.
    ///
    /// # Errors
    /// What the host says, or what is wrong with a file.
    pub(crate) fn open(mut chain: Vec<Layer>, bases: &Bases, unit: u32) -> io::Result<Self> {
        if chain.len() > FILES_MAX {
            return Err(io::Error::other(format!("a chain of more than {FILES_MAX} files")));
        }
        let below = chain.split_off(chain.len().min(1));
        let first = chain.pop();
        let Some(LayerFormat::Qcow2 { shape, .. }) = first.as_ref().map(|first| &first.format)
        else {
            return Err(io::Error::other("the top of a chain must be qcow2"));
        };
        let mut budget = Budget::default();
        let base = bases.open(below, shape.cluster_bits, unit, &mut budget)?;
        let first = first.ok_or(io::ErrorKind::Unsupported)?;
        Self::on(first, base, unit, &mut budget)
    }

    /// The same of a top whose base is open.
    ///
    /// # Errors
    /// As [`Layers::open`].
    pub(crate) fn on(
        first: Layer,
        base: Option<Arc<Base>>,
        unit: u32,
        budget: &mut Budget,
    ) -> io::Result<Self> {
        let others = base.iter().flat_map(|base| base.files.iter().cloned());
        let mut files: Vec<_> = std::iter::once(Arc::clone(&first.file)).chain(others).collect();
        let apart = matches!(first.format, LayerFormat::Qcow2 { data: Some(_), .. });
        let data = if apart { u8::try_from(files.len()).map_err(io::Error::other)? } else { 0 };
        let (own_end, decompressor) = (first.file_bytes, Decompressor::default());
        let (top, data_file) = Open::new(first, data, unit, budget)?;
        files.extend(apart.then_some(data_file));
        let (blocks, ahead) = blocks(&files, base.as_deref(), unit)?;
        Ok(Self { top, base, files, blocks, ahead, data, own_end, unit, decompressor })
    }

    /// What it has nothing of is in this base. It has none yet, and no data file.
    ///
    /// # Errors
    /// That nobody has said how the base is read.
    pub(crate) fn set_base(&mut self, base: Arc<Base>) -> io::Result<()> {
        debug_assert!(self.base.is_none() && !self.has_data_file());
        let files: Vec<_> = self.files.iter().chain(&base.files).cloned().collect();
        (self.blocks, self.ahead) = blocks(&files, Some(&base), self.unit)?;
        (self.files, self.base) = (files, Some(base));
        Ok(())
    }

    /// The top as the first of a base. All that is known of it is in its file, and it has no data file.
    pub(crate) fn top_beneath(&self) -> Open {
        self.top.fresh(0)
    }

    /// True if there is another file below the top.
    pub(crate) fn has_backing(&self) -> bool {
        self.base.is_some()
    }

    /// What is missing of its files, in words: of the first of them that lacks its end.
    pub(crate) fn missing(&self) -> Option<&str> {
        let of_base = || self.base.as_ref().and_then(|base| base.missing.as_deref());
        self.top.missing.as_deref().or_else(of_base)
    }

    /// The tables of the top.
    pub(crate) fn top(&mut self) -> &mut Tables {
        self.top.tables.as_mut().expect("the top is qcow2")
    }

    /// True if the top's data are in another file than its tables. There they lie where they do on the
    /// disk.
    pub(crate) fn has_data_file(&self) -> bool {
        self.data != 0
    }

    /// All files, as [`Found::Data`] names them.
    pub(crate) fn blocks(&self) -> Arc<[BlockFile]> {
        Arc::clone(&self.blocks)
    }

    /// The file with the top's data.
    pub(crate) fn data(&self) -> &BlockFile {
        &self.blocks[usize::from(self.data)]
    }

    /// Bytes of that file.
    pub(crate) fn data_end(&self) -> u64 {
        self.top.end
    }

    /// The top's data file has so many bytes now.
    pub(crate) fn set_data_end(&mut self, end: u64) {
        self.top.end = end;
    }

    /// Bytes of the top's own file.
    pub(crate) fn top_end(&self) -> u64 {
        if self.has_data_file() { self.own_end } else { self.top.end }
    }

    /// The top's own file has so many bytes now.
    pub(crate) fn set_top_end(&mut self, end: u64) {
        match self.has_data_file() {
            true => self.own_end = end,
            false => self.top.end = end,
        }
    }

    /// The disk has so many bytes from now on, for which its L1 table is long enough.
    pub(crate) fn set_size(&mut self, bytes: u64) {
        self.top.bytes = bytes;
        self.top().shape.size = bytes;
    }

    /// Bytes of what it is based on.
    pub(crate) fn base_bytes(&self) -> u64 {
        self.base.as_ref().map_or(0, |base| base.bytes())
    }

    /// Where the beginning of a range is, and how many bytes of it.
    pub(crate) fn find(&mut self, at: u64, len: u64) -> io::Result<(Found, u64)> {
        find(&mut self.top, self.base.as_deref(), at, len)
    }

    /// A range in one piece: zeroes, or wholly within one file.
    pub(crate) fn piece(&mut self, at: u64, len: u64) -> io::Result<Option<Found>> {
        let (top, base) = (&mut self.top, self.base.as_deref());
        piece(|at, len| find(top, base, at, len), at, len)
    }

    /// True if a range reads as zeroes because nothing holds it.
    pub(crate) fn is_zero(&mut self, at: u64, len: u64) -> io::Result<bool> {
        let mut known = 0;
        while known < len {
            match self.find(at + known, len - known)? {
                (Found::Zero, more) => known += more,
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// What a range is made of; `None` if some of it is compressed.
    pub(crate) fn pieces(&mut self, at: u64, len: u64) -> io::Result<Option<Vec<Piece>>> {
        let (mut pieces, mut known) = (Vec::new(), 0);
        while known < len {
            let (found, more) = self.find(at + known, len - known)?;
            let from = match found {
                Found::Zero => None,
                Found::Data { file, offset } => Some((file, offset)),
                Found::Packed(..) => return Ok(None),
            };
            known += more;
            pieces.push(Piece { from, end: usize::try_from(known).map_err(io::Error::other)? });
        }
        Ok(Some(pieces))
    }

    /// What a range needs of what is on no file of this host. What cannot be told is found by whoever reads.
    pub(crate) fn needs_ahead(&mut self, at: u64, len: u64) -> Ranges {
        let Some((elsewhere, _)) = self.ahead else { return Ranges::new() };
        let (mut ranges, mut known) = (Ranges::new(), 0);
        while known < len {
            let Ok((found, more)) = self.find(at + known, len - known) else { break };
            match found {
                // Within a cluster, or what a job takes at a time.
                #[allow(clippy::cast_possible_truncation)]
                Found::Data { file, offset } if file == elsewhere => {
                    ranges.push((offset, more as usize));
                }
                _ => {}
            }
            known += more;
        }
        ranges
    }

    /// Reads a range.
    pub(crate) fn read(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let rest = (buffer.len() - done) as u64;
            let (found, len) = self.find(at + done as u64, rest)?;
            // Not more than the buffer has.
            #[allow(clippy::cast_possible_truncation)]
            let into = &mut buffer[done..done + len as usize];
            match found {
                Found::Zero => into.fill(0),
                Found::Data { file, offset } => {
                    self.blocks[usize::from(file)].read_whole(into, offset)?;
                }
                Found::Packed(packed, within) => {
                    let file = &self.blocks[usize::from(packed.file)];
                    let cluster = self.decompressor.cluster(file, packed)?;
                    into.copy_from_slice(&cluster[within..within + into.len()]);
                }
            }
            done += into.len();
        }
        Ok(())
    }
}
