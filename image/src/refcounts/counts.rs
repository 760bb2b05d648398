//! Counts in a refcount block.

/// The count at a place of a block. Counts of less than a byte begin at its low bits.
pub(super) fn count(block: &[u8], order: u32, within: usize) -> u64 {
    match order {
        0..3 => {
            let per_byte = 8 >> order;
            let shift = (within % per_byte) << order;
            u64::from(block[within / per_byte] >> shift) & ((1 << (1 << order)) - 1)
        }
        order => {
            let bytes = 1 << (order - 3);
            let at = within * bytes;
            block[at..at + bytes].iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
        }
    }
}

pub(super) fn set_count(block: &mut [u8], order: u32, within: usize, value: u64) {
    if order < 3 {
        let per_byte = 8 >> order;
        let shift = (within % per_byte) << order;
        let mask = u8::MAX >> (8 - (1 << order));
        let byte = &mut block[within / per_byte];
        // The value fits the mask.
        #[allow(clippy::cast_possible_truncation)]
        let value = (value as u8) << shift;
        *byte = *byte & !(mask << shift) | value;
    } else {
        let bytes = 1 << (order - 3);
        let at = within * bytes;
        block[at..at + bytes].copy_from_slice(&value.to_be_bytes()[8 - bytes..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_every_width_lie_where_the_specification_says() {
        for order in 0..7 {
            let mut block = vec![0; 512];
            let most = if order == 6 { u64::MAX } else { (1 << (1 << order)) - 1 };
            for within in 0..17 {
                set_count(&mut block, order, within, most.min(within as u64 + 1));
            }
            for within in 0..17 {
                assert_eq!(count(&block, order, within), most.min(within as u64 + 1), "{order}");
            }
            set_count(&mut block, order, 3, 0);
            assert_eq!((count(&block, order, 2), count(&block, order, 3)), (most.min(3), 0));
        }
        let mut block = vec![0; 512];
        set_count(&mut block, 2, 1, 0xa);
        set_count(&mut block, 4, 1, 0x1234);
        assert_eq!(block[..4], [0xa0, 0, 0x12, 0x34]);
    }
}
