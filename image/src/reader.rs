//! Reading all of a disk, without serving it: where its data are, and what they are.

use crate::base::Bases;
use crate::layer::{Found, Layer, LayerFormat};
use crate::layers::Layers;
use crate::read_at::is_cut_off;
use rustix::fs::{SeekFrom, seek};
use std::io;
use std::ops::Range;

/// What a place of a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExtentKind {
    Data,
    Zero,
}

/// A range of a file of which it is known whether it is data or a hole.
#[derive(Clone, Copy, Debug)]
struct KnownExtent {
    file: u8,
    kind: ExtentKind,
    start: u64,
    end: u64,
}

/// Reads a disk of a chain whose first file is qcow2, for tools. Nothing is written, nothing is started.
#[derive(Debug)]
pub struct Reader {
    layers: Layers,
    size: u64,
    /// What was asked last of a file.
    known: Option<KnownExtent>,
    /// Bytes of the smallest clusters of the chain.
    step: u64,
    /// What is lost reads as zeroes.
    salvages: bool,
}

impl Reader {
    /// Reads what is needed to begin with. The first layer is the top, which is qcow2, and whose
    /// header has been judged.
    ///
    /// # Errors
    /// What the host says, or what is wrong with the metadata.
    pub fn open(chain: Vec<Layer>) -> io::Result<Self> {
        let clusters = chain.iter().filter_map(|layer| match &layer.format {
            LayerFormat::Raw | LayerFormat::Elsewhere(_) => None,
            LayerFormat::Qcow2 { shape, .. } => Some(shape.cluster()),
        });
        let step = clusters.min().unwrap_or(512);
        let mut layers = Layers::open(chain, &Bases::default(), 1)?;
        let size = layers.top().shape.size;
        Ok(Self { layers, size, known: None, step, salvages: false })
    }

    /// Ranges of the disk that are lost, because a file of the chain lacks its end: reading them is an error.
    ///
    /// # Errors
    /// What the host says, or EIO where the metadata make no sense.
    pub fn lost(&mut self) -> io::Result<Vec<Range<u64>>> {
        let (mut lost, mut at): (Vec<Range<u64>>, _) = (Vec::new(), 0);
        if self.layers.missing().is_none() {
            return Ok(lost);
        }
        while at < self.size {
            let end = match self.layers.find(at, self.size - at) {
                Ok((_, len)) => at + len,
                Err(error) if is_cut_off(&error) => {
                    let end = ((at / self.step + 1) * self.step).min(self.size);
                    match lost.last_mut() {
                        Some(last) if last.end == at => last.end = end,
                        _ => lost.push(at..end),
                    }
                    end
                }
                Err(error) => return Err(error),
            };
            at = end;
        }
        Ok(lost)
    }

    /// What is lost ([`Reader::lost`]) reads as zeroes from now on.
    pub fn salvage(&mut self) {
        self.salvages = true;
    }

    /// Bytes of the disk.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Fills `buffer` with what is at `at`.
    ///
    /// # Errors
    /// What the host says, or EIO where the metadata make no sense.
    pub fn read(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self.layers.read(at, buffer) {
            Err(error) if self.salvages && is_cut_off(&error) => {}
            result => return result,
        }
        for (sector, at) in buffer.chunks_mut(512).zip((at..).step_by(512)) {
            match self.layers.read(at, sector) {
                Err(error) if is_cut_off(&error) => sector.fill(0),
                result => result?,
            }
        }
        Ok(())
    }

    /// The first byte from `at` on that may be something else than zero; `None` if there is none. As
    /// lseek(2) with SEEK_DATA, holes of the files included.
    ///
    /// # Errors
    /// As [`Reader::read`].
    pub fn next_data(&mut self, at: u64) -> io::Result<Option<u64>> {
        let at = self.end_of(ExtentKind::Zero, at)?;
        Ok((at < self.size).then_some(at))
    }

    /// The first byte from `at` on that is known to be zero, or the end of the disk. As lseek(2) with
    /// SEEK_HOLE.
    ///
    /// # Errors
    /// As [`Reader::read`].
    pub fn next_hole(&mut self, at: u64) -> io::Result<u64> {
        self.end_of(ExtentKind::Data, at)
    }

    fn end_of(&mut self, kind: ExtentKind, mut at: u64) -> io::Result<u64> {
        while at < self.size {
            let (found, len) = self.kind_at(at)?;
            if found != kind {
                break;
            }
            at += len;
        }
        Ok(at.min(self.size))
    }

    /// What begins at a place, and at least how far it goes.
    fn kind_at(&mut self, at: u64) -> io::Result<(ExtentKind, u64)> {
        let (found, len) = match self.layers.find(at, self.size - at) {
            // Reading tells what is so.
            Err(error) if is_cut_off(&error) => {
                return Ok((ExtentKind::Data, self.step - at % self.step));
            }
            found => found?,
        };
        let (file, offset) = match found {
            Found::Zero => return Ok((ExtentKind::Zero, len)),
            Found::Packed(..) => return Ok((ExtentKind::Data, len)),
            Found::Data { file, offset } => (file, offset),
        };
        let known = match self.known {
            Some(known) if known.file == file && (known.start..known.end).contains(&offset) => {
                known
            }
            _ => self.ask(file, offset)?,
        };
        Ok((known.kind, len.min(known.end - offset)))
    }

    /// Asks a file whether it has a hole there. One that cannot tell has none.
    fn ask(&mut self, file: u8, offset: u64) -> io::Result<KnownExtent> {
        let from = &self.layers.files[usize::from(file)];
        let known = |kind, end| KnownExtent { file, kind, start: offset, end };
        let known = match seek(from, SeekFrom::Data(offset)) {
            Ok(data) if data > offset => known(ExtentKind::Zero, data),
            Ok(_) => {
                let hole = seek(from, SeekFrom::Hole(offset)).unwrap_or(u64::MAX);
                known(ExtentKind::Data, hole.max(offset + 1))
            }
            // Nothing but a hole up to the end. If the file has become shorter, reading tells.
            Err(rustix::io::Errno::NXIO) => {
                let end = seek(from, SeekFrom::End(0))?;
                let kind = if end > offset { ExtentKind::Zero } else { ExtentKind::Data };
                known(kind, end.max(offset + 1))
            }
            // A socket stands for what is elsewhere.
            Err(
                rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::SPIPE,
            ) => known(ExtentKind::Data, u64::MAX),
            Err(error) => return Err(error.into()),
        };
        self.known = Some(known);
        Ok(known)
    }
}
