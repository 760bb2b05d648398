//! Finding zeroes, fast: data of one kind is rarely told by more than its first words.

use std::ops::Range;

/// Zeroes are left out in pieces of this size, aligned to it. Smaller ones would cost more requests
/// and more extents than they save.
pub(super) const UNIT: usize = 64 << 10;

/// True if all bytes are zero.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    /// Few enough to stop early, enough for wide loads.
    const BLOCK: usize = 512;
    // SAFETY: every pattern of bits is a u64.
    let (head, words, tail) = unsafe { bytes.align_to::<u64>() };
    let ends = || head.iter().chain(tail).all(|&byte| byte == 0);
    words.first().is_none_or(|&word| word == 0)
        && ends()
        && words.chunks(BLOCK / 8).all(|block| block.iter().fold(0, |sum, word| sum | word) == 0)
}

/// A part of a chunk, all zeroes or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) bytes: Range<usize>,
    pub(super) zero: bool,
}

/// Cuts `bytes` into runs of whole units of `unit` bytes (the last one may be shorter), zeroes and data
/// in turn.
pub(super) fn runs(bytes: &[u8], unit: usize, out: &mut Vec<Run>) {
    out.clear();
    let mut start = 0;
    for unit in bytes.chunks(unit) {
        let (zero, end) = (is_zero(unit), start + unit.len());
        match out.last_mut() {
            Some(last) if last.zero == zero => last.bytes.end = end,
            _ => out.push(Run { bytes: start..end, zero }),
        }
        start = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_anywhere_is_found() {
        let mut bytes = vec![0u8; 5000];
        for start in 0..9 {
            assert!(is_zero(&bytes[start..]), "{start}");
            assert!(is_zero(&bytes[start..start]));
        }
        for at in (0..5000).step_by(7).chain(4980..5000) {
            bytes[at] = 1;
            assert!(!is_zero(&bytes) && is_zero(&bytes[..at]) && is_zero(&bytes[at + 1..]), "{at}");
            bytes[at] = 0;
        }
    }

    #[test]
    fn runs_alternate_and_cover_everything() {
        let mut bytes = vec![0u8; 5 * UNIT + 100];
        bytes[UNIT + 3] = 1;
        bytes[2 * UNIT] = 1;
        bytes[5 * UNIT + 99] = 1;
        let mut found = Vec::new();
        runs(&bytes, UNIT, &mut found);
        let run = |bytes, zero| Run { bytes, zero };
        assert_eq!(
            found,
            [
                run(0..UNIT, true),
                run(UNIT..3 * UNIT, false),
                run(3 * UNIT..5 * UNIT, true),
                run(5 * UNIT..5 * UNIT + 100, false),
            ]
        );
        runs(&[], UNIT, &mut found);
        assert_eq!(found, []);
    }
}
