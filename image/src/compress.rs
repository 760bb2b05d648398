//! Clusters made smaller.

use crate::header::Compression;
use zlib_rs::{DeflateConfig, ReturnCode, compress_slice};
use zstd_safe::CCtx;

/// What QEMU compresses with and expects: raw deflate with a window of 4 KiB. Others may keep no more
/// of what they have unpacked.
const WINDOW_BITS: i32 = -12;

/// The level of zstd that QEMU compresses with.
const ZSTD_LEVEL: i32 = 3;

/// Compresses clusters, and keeps the memory for it.
pub(crate) struct Compressor {
    kind: Compression,
    zstd: CCtx<'static>,
    packed: Vec<u8>,
}

impl Compressor {
    pub(crate) fn new(kind: Compression) -> Self {
        Self { kind, zstd: CCtx::create(), packed: Vec::new() }
    }

    /// The cluster compressed; `None` if that makes it no smaller.
    pub(crate) fn cluster(&mut self, bytes: &[u8]) -> Option<&[u8]> {
        // One that would not be smaller does not fit.
        self.packed.resize(bytes.len() - 1, 0);
        match self.kind {
            Compression::Zlib => {
                let config = DeflateConfig { window_bits: WINDOW_BITS, ..DeflateConfig::default() };
                let (packed, code) = compress_slice(&mut self.packed, bytes, config);
                (code == ReturnCode::Ok).then_some(&*packed)
            }
            Compression::Zstd => {
                let packed = self.zstd.compress(&mut self.packed[..], bytes, ZSTD_LEVEL).ok()?;
                self.packed.get(..packed)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decompress::unpacked;

    #[test]
    fn what_is_compressed_is_the_same_again() {
        for (kind, zstd) in [(Compression::Zlib, false), (Compression::Zstd, true)] {
            let mut compressor = Compressor::new(kind);
            for bits in 9..=21 {
                let cluster: Vec<u8> =
                    (0..1_usize << bits).map(|at| (at / 97 * 7 % 251).to_le_bytes()[0]).collect();
                let packed = compressor.cluster(&cluster).expect("it repeats itself").to_vec();
                assert!(packed.len() < cluster.len());
                // As it lies in an image: others behind it, up to the end of a sector.
                let padded = [&packed[..], &[0xa5; 511]].concat();
                assert!(
                    unpacked(&padded, cluster.len(), zstd).unwrap() == cluster,
                    "{kind:?} {bits}"
                );
            }
        }
    }

    #[test]
    fn noise_is_not_compressed() {
        let mut word = 1_u64;
        let mut noise = || {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            word.to_le_bytes()[3]
        };
        let cluster: Vec<u8> = (0..65536).map(|_| noise()).collect();
        for kind in [Compression::Zlib, Compression::Zstd] {
            assert!(Compressor::new(kind).cluster(&cluster).is_none(), "{kind:?}");
        }
    }

    /// A match farther back than the window would be lost on those who keep 4 KiB.
    #[test]
    fn deflate_looks_back_no_farther_than_the_window() {
        let mut word = 7_u64;
        let mut block: Vec<u8> = (0..8192)
            .map(|_| {
                word ^= word << 13;
                word ^= word >> 7;
                word ^= word << 17;
                word.to_le_bytes()[2]
            })
            .collect();
        block.extend_from_within(..);
        // 8 KiB of noise twice: only matches from 8 KiB back could make it smaller.
        assert!(Compressor::new(Compression::Zlib).cluster(&block).is_none());
    }
}
