//! What is written, and expected to be read: a function of the place, so that data of another place
//! or another time is told.

use std::str::FromStr;

/// Content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// The same byte everywhere.
    Byte(u8),
    /// Each eight bytes a mixture of their place and a seed.
    Place(u64),
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        };
        let pattern = match word.split_once(':') {
            None if word == "place" => Some(Self::Place(0)),
            Some(("place", seed)) => number(seed).map(Self::Place),
            None => number(word).and_then(|number| u8::try_from(number).ok()).map(Self::Byte),
            Some(_) => None,
        };
        pattern.ok_or_else(|| "a byte (0 to 255, 0x00 to 0xff), `place` or `place:SEED`".into())
    }
}

impl Pattern {
    /// Fills `bytes`, which lie at `offset` of the disk.
    pub(crate) fn fill(self, offset: u64, bytes: &mut [u8]) {
        match self {
            Self::Byte(byte) => bytes.fill(byte),
            Self::Place(seed) => {
                for (at, byte) in (offset..).zip(bytes) {
                    *byte = word(seed, at / 8).to_le_bytes()[usize::try_from(at % 8).unwrap_or(0)];
                }
            }
        }
    }

    /// The first byte that is not as expected, with what was expected, and how many there are.
    pub(crate) fn check(self, offset: u64, bytes: &[u8]) -> Option<Difference> {
        let mut wanted = vec![0; bytes.len()];
        self.fill(offset, &mut wanted);
        if wanted == bytes {
            return None;
        }
        let differ = || wanted.iter().zip(bytes).enumerate().filter(|(_, (a, b))| a != b);
        let (at, (&wanted_byte, &found)) = differ().next()?;
        let count = differ().count() as u64;
        Some(Difference { at: offset + at as u64, wanted: wanted_byte, found, count })
    }
}

/// Bytes that are not those expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) at: u64,
    pub(crate) wanted: u8,
    pub(crate) found: u8,
    pub(crate) count: u64,
}

/// SplitMix64 of place and seed.
fn word(seed: u64, index: u64) -> u64 {
    let mut z =
        seed.wrapping_mul(0xd134_2543_de82_ef95) ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read() {
        assert_eq!("0x5a".parse(), Ok(Pattern::Byte(0x5a)));
        assert_eq!("255".parse(), Ok(Pattern::Byte(255)));
        assert_eq!("place".parse(), Ok(Pattern::Place(0)));
        assert_eq!("place:7".parse(), Ok(Pattern::Place(7)));
        for word in ["", "256", "0x", "place:", "x:1", "-1"] {
            assert!(word.parse::<Pattern>().is_err(), "{word}");
        }
    }

    #[test]
    fn content_depends_on_the_place_and_the_seed_alone() {
        let mut whole = vec![0; 4096];
        Pattern::Place(3).fill(8192, &mut whole);
        for (skip, len) in [(0, 1), (3, 100), (511, 1025), (4095, 1)] {
            let mut part = vec![0; len];
            Pattern::Place(3).fill(8192 + skip as u64, &mut part);
            assert_eq!(part, whole[skip..skip + len]);
        }
        assert_eq!(Pattern::Place(3).check(8192, &whole), None);
        assert!(Pattern::Place(4).check(8192, &whole).is_some());
        assert!(Pattern::Place(3).check(8192 + 512, &whole).is_some());
        whole[100] ^= 1;
        whole[200] ^= 1;
        let found = Pattern::Place(3).check(8192, &whole).unwrap();
        assert_eq!((found.at, found.count, found.found ^ found.wanted), (8292, 2, 1));
    }
}
