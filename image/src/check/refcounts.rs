//! Reference counts as they are in refcount blocks: 1 to 64 bits each, big endian, the smaller ones
//! from the low bits of a byte up.

/// How counts of one image are written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    /// Log2 of their bits, 0 to 6.
    order: u32,
}

impl Counts {
    pub(super) const fn new(order: u32) -> Self {
        Self { order }
    }

    /// Bytes of `count` of them, which is a multiple of 8.
    pub(super) const fn bytes(self, count: u64) -> u64 {
        (count << self.order) / 8
    }

    /// How many a block of `bytes` bytes has.
    pub(super) const fn per_block(self, bytes: u64) -> u64 {
        (bytes * 8) >> self.order
    }

    pub(super) fn get(self, block: &[u8], index: usize) -> u64 {
        match self.order {
            0..=2 => {
                let (byte, shift, mask) = self.bits(index);
                u64::from(block[byte] >> shift & mask)
            }
            order => {
                let width = 1 << (order - 3);
                let bytes = &block[index * width..][..width];
                bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
            }
        }
    }

    /// Writes a count, which has no more bits than there are.
    pub(super) fn set(self, block: &mut [u8], index: usize, value: u64) {
        match self.order {
            0..=2 => {
                let (byte, shift, mask) = self.bits(index);
                let value = value.to_le_bytes()[0] & mask;
                block[byte] = block[byte] & !(mask << shift) | value << shift;
            }
            order => {
                let width = 1 << (order - 3);
                block[index * width..][..width].copy_from_slice(&value.to_be_bytes()[8 - width..]);
            }
        }
    }

    /// The byte, how far to shift, and the mask of a count of less than a byte.
    fn bits(self, index: usize) -> (usize, usize, u8) {
        let bits = 1 << self.order;
        let at = index * bits;
        (at / 8, at % 8, u8::MAX >> (8 - bits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_every_width_come_back() {
        for order in 0..=6 {
            let counts = Counts::new(order);
            let per_block = counts.per_block(512);
            let largest = u64::MAX >> (64 - (1 << order));
            let value = |index: u64| index.wrapping_mul(0x9e37_79b9_7f4a_7c15) & largest;
            let mut block = [0; 512];
            for index in 0..per_block {
                counts.set(&mut block, usize::try_from(index).unwrap(), value(index));
            }
            for index in 0..per_block {
                assert_eq!(counts.get(&block, usize::try_from(index).unwrap()), value(index));
            }
            assert_eq!(counts.bytes(per_block), 512);
        }
    }

    #[test]
    fn small_counts_begin_at_the_low_bits() {
        assert_eq!(Counts::new(0).get(&[0b0000_0010], 1), 1);
        assert_eq!(Counts::new(2).get(&[0x21, 0x43], 2), 3);
        assert_eq!(Counts::new(4).get(&[0, 1, 2, 3], 1), 0x203);
    }
}
