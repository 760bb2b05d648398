//! An image that goes to another process with its guest, and may come back.
//!
//! ```text
//! hand_over      all that is known of it is in the file, durably; nothing is changed any more
//! (unlock)       whoever has the lock may write the file
//! taken_over     its header is read again, and judged as if nobody had known it before; what else
//!                there is to know is read when it is opened anew
//! ```

use crate::file::BlockFile;
use crate::header::Header;
use crate::image::{Image, Use};
use crate::layer::{Layer, LayerFormat};
use crate::layout::Shape;
use ringway_core::host::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

impl Image {
    /// Whether another process can have it: all that it holds is in one file, or below that, and its header
    /// says so.
    #[must_use]
    pub fn can_be_handed_over(&self) -> bool {
        self.data_file().is_none() && !self.skips_middle()
    }

    /// Has all that is known of it be in its file, durably, and nothing that is taken ahead. Nothing may be
    /// in flight. If it succeeds nothing is changed any more; else it is as before. Gives the files, for
    /// [`Layer::taken_over`]. I/O is in multiples of `unit` bytes.
    ///
    /// # Errors
    /// What the host says.
    pub fn hand_over(&self, unit: u32) -> io::Result<Vec<Layer>> {
        let (mut chain, skips_middle) = (self.chain()?, Arc::clone(&self.skips_middle));
        if let Some(Layer { file, file_bytes, format: LayerFormat::Qcow2 { shape, .. }, .. }) =
            chain.first_mut()
        {
            let (file, bytes) = (Arc::clone(file), *file_bytes);
            // It may have been flattened, and what it is based on merged: nobody does that meanwhile.
            let header = self.in_thread(move |work| {
                if skips_middle.load(SeqCst) {
                    return Err(io::Error::other("its header may name another base by now"));
                }
                let header = read(&file, bytes, unit)?;
                work.hand_over().map(|()| header)
            })??;
            *shape = Shape::from(&header);
            if header.backing.is_none() {
                // What others write where it has nothing is zeroes to them.
                chain.truncate(1);
            }
        }
        Ok(chain)
    }
}

fn read(file: &Arc<File>, file_bytes: u64, unit: u32) -> io::Result<Header> {
    let file = BlockFile::new(Arc::clone(file), unit);
    Header::read(&file, file_bytes)?.map_err(io::Error::other)
}

impl Layer {
    /// The top of a chain as it is by now, after others may have written it. It has to be an image of the
    /// same kind, based on the same files: they were opened by what the header said before. I/O is in
    /// multiples of `unit` bytes.
    ///
    /// # Errors
    /// What the host says, or what is wrong with it and what to do.
    pub fn taken_over(&self, usage: Use, unit: u32) -> io::Result<Self> {
        let LayerFormat::Qcow2 { shape: before, data } = &self.format else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let file_bytes = if usage.grows { self.file.metadata()?.len() } else { self.file_bytes };
        let header = read(&self.file, file_bytes, unit)?;
        if !usage.read_only {
            header.may_write().map_err(io::Error::other)?;
        }
        let shape = Shape::from(&header);
        let differs = if shape.cluster_bits != before.cluster_bits {
            "its clusters have another size by now"
        } else if shape.links != before.links || header.data_file.is_some() != data.is_some() {
            "it is based on other files by now"
        } else {
            let format = LayerFormat::Qcow2 { shape, data: data.clone() };
            let (file, name) = (Arc::clone(&self.file), self.name.clone());
            return Ok(Self { file, file_bytes, format, name });
        };
        Err(io::Error::other(format!("{differs}: start this daemon anew")))
    }
}
