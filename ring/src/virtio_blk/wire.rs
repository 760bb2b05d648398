//! Numbers of the wire: feature bits, request types, statuses.

pub use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_GEOMETRY, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_ID_BYTES,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
pub use virtio_bindings::virtio_config::{
    VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_NOTIFICATION_DATA, VIRTIO_F_RING_PACKED,
    VIRTIO_F_RING_RESET, VIRTIO_F_VERSION_1,
};
pub use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use ringway_core::Status;

/// The most 512-byte sectors of one discard or write-zeroes request: 2 GiB.
pub const ERASE_SECTORS_MAX: u32 = 1 << 22;

/// The feature word with the bits `numbers` set.
#[must_use]
pub const fn feature_bits(numbers: &[u32]) -> u64 {
    let (mut word, mut i) = (0, 0);
    while i < numbers.len() {
        word |= 1 << numbers[i];
        i += 1;
    }
    word
}

/// `VIRTIO_BLK_S_*`, §5.2.6.
#[inline]
#[must_use]
pub const fn status_byte(status: Status) -> u8 {
    match status {
        Status::Ok => 0,
        Status::IoError | Status::NoSpace => 1,
        Status::Unsupported => 2,
    }
}

/// The meaning of a status byte; anything unknown is an I/O error.
#[must_use]
pub const fn status_of(byte: u8) -> Status {
    match byte {
        0 => Status::Ok,
        2 => Status::Unsupported,
        _ => Status::IoError,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_those_of_the_specification() {
        for (status, byte) in [(Status::Ok, 0), (Status::IoError, 1), (Status::Unsupported, 2)] {
            assert_eq!(status_byte(status), byte);
            assert_eq!(status_of(byte), status);
        }
        // Nothing that a device should not say counts as success.
        assert!((3..=255).all(|byte| status_of(byte) == Status::IoError));
    }

    #[test]
    fn a_feature_word_has_the_bits_that_are_named() {
        assert_eq!(feature_bits(&[]), 0);
        assert_eq!(feature_bits(&[0, 5, 32]), 0x1_0000_0021);
        // Named twice is named.
        assert_eq!(feature_bits(&[63, 63]), 1 << 63);
    }
}
