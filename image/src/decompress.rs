//! Compressed clusters.

use crate::file::BlockFile;
use crate::layout::corrupt;
use std::io;

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
        // Something else may lie behind its frame.
        let frame = zstd_safe::find_frame_compressed_size(bytes).map_err(|_| corrupt())?;
        let frame = bytes.get(..frame).ok_or_else(corrupt)?;
        // No more is unpacked than there is room for, whatever the frame says.
        let unpacked = zstd_safe::decompress(&mut cluster[..], frame).map_err(|_| corrupt())?;
        if unpacked != len {
            return Err(corrupt());
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// One block of so many sequences, each of a literal and a match of 131,074 bytes (RFC 8878): all codes
    /// are the same, and the bits of each length are ones.
    fn frame(sequences: u16) -> Vec<u8> {
        let [high, low] = sequences.to_be_bytes();
        let literals = 0b1101 | u32::from(sequences) << 4;
        let mut block = literals.to_le_bytes()[..3].to_vec();
        block.push(b'A');
        block.extend([high | 0x80, low, 0b0101_0100, 1, 0, 52]);
        block.resize(block.len() + 2 * usize::from(sequences), 0xff);
        block.push(1);
        let header = 0b101 | u32::try_from(block.len()).unwrap() << 3;
        [&[0x28, 0xb5, 0x2f, 0xfd, 0, 11 << 3], &header.to_le_bytes()[..3], &block].concat()
    }

    /// A cluster of 128 KiB could take gigabytes of memory.
    #[test]
    fn a_frame_with_more_than_a_cluster_is_refused() {
        let bomb = frame(256);
        assert!(bomb.len() < 1024, "it is to be 33 MB");
        for len in [512, 1 << 16, 1 << 21] {
            assert_eq!(unpacked(&bomb, len, true).unwrap_err().raw_os_error(), Some(libc::EIO));
        }
    }

    #[test]
    fn a_frame_with_less_than_a_cluster_is_refused() {
        let mut packed = vec![0; 1024];
        let bytes = zstd_safe::compress(&mut packed[..], &[7; 511], 3).unwrap();
        assert_eq!(unpacked(&packed[..bytes], 511, true).unwrap(), [7; 511]);
        for len in [512, 510] {
            assert!(unpacked(&packed[..bytes], len, true).is_err());
        }
        assert!(unpacked(&packed[..bytes - 1], 511, true).is_err());
    }
}
