//! Compressed clusters.

use crate::file::BlockFile;
use crate::layout::corrupt;
use std::io::{self, Read};

/// How many clusters are kept: readers of a compressed image ask for each several times.
const KEPT: usize = 8;

/// Reads compressed clusters, and keeps the last ones.
#[derive(Debug, Default)]
pub(crate) struct Decompressor {
    /// Which file, where in it, the cluster; the latest last.
    kept: Vec<(u8, u64, Vec<u8>)>,
    packed: Vec<u8>,
}

/// A compressed cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    /// Its file among those of the image.
    pub(crate) file: u8,
    /// Where it begins, in bytes.
    pub(crate) host: u64,
    /// At most how many bytes it has.
    pub(crate) bytes: u64,
    /// How many it has when it is not compressed.
    pub(crate) cluster: usize,
    pub(crate) zstd: bool,
}

impl Decompressor {
    /// The bytes of a compressed cluster.
    ///
    /// # Errors
    /// What reading says, or EIO if they cannot be made out.
    pub(crate) fn cluster(&mut self, file: &BlockFile, packed: Packed) -> io::Result<&[u8]> {
        let known = |kept: &(u8, u64, Vec<u8>)| (kept.0, kept.1) == (packed.file, packed.host);
        if let Some(at) = self.kept.iter().position(known) {
            let found = self.kept.remove(at);
            self.kept.push(found);
        } else {
            let cluster = self.unpack(file, packed)?;
            if self.kept.len() == KEPT {
                self.kept.remove(0);
            }
            self.kept.push((packed.file, packed.host, cluster));
        }
        self.kept.last().map(|kept| &kept.2[..]).ok_or_else(corrupt)
    }

    fn unpack(&mut self, file: &BlockFile, packed: Packed) -> io::Result<Vec<u8>> {
        // At most twice a cluster by the width of the field, whatever an image says.
        let bytes = usize::try_from(packed.bytes).map_err(|_| corrupt())?;
        self.packed.resize(bytes, 0);
        let read = file.read_at(&mut self.packed, packed.host)?;
        unpacked(&self.packed[..read], packed.cluster, packed.zstd)
    }
}

/// The `len` bytes that were compressed to what `bytes` begins with.
///
/// # Errors
/// EIO if they cannot be made out.
pub(crate) fn unpacked(bytes: &[u8], len: usize, zstd: bool) -> io::Result<Vec<u8>> {
    let mut cluster = vec![0; len];
    if zstd {
        let mut decoder = ruzstd::decoding::StreamingDecoder::new(bytes).map_err(|_| corrupt())?;
        decoder.read_exact(&mut cluster).map_err(|_| corrupt())?;
    } else {
        let parts = std::iter::once(bytes);
        let unpacked =
            miniz_oxide::inflate::decompress_slice_iter_to_slice(&mut cluster, parts, false, true);
        if unpacked.map_err(|_| corrupt())? != len {
            return Err(corrupt());
        }
    }
    Ok(cluster)
}
