//! Which ioctls of Xen's devices are asked for: what a sandbox has to allow.

use super::{evtchn, gntdev};

/// What workers ask of Xen's devices: to copy, map and forget pages, to ring a guest's bell. The
/// numbers of ioctls, of which the kernel takes 32 bits.
#[must_use]
pub fn worker_ioctls() -> Vec<u32> {
    let asked =
        [gntdev::GRANT_COPY, gntdev::MAP_GRANT_REF, gntdev::UNMAP_GRANT_REF, evtchn::NOTIFY];
    asked.map(low_bits).into()
}

/// What only sessions ask of them: to bind a bell, and to have it rung once they are gone.
#[must_use]
pub fn session_ioctls() -> Vec<u32> {
    [gntdev::SET_UNMAP_NOTIFY, evtchn::BIND_INTERDOMAIN].map(low_bits).into()
}

/// All of them fit.
#[allow(clippy::cast_possible_truncation)]
fn low_bits(request: u64) -> u32 {
    request as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_headers() {
        assert_eq!(worker_ioctls(), [0x10_4708, 0x18_4700, 0x10_4701, 0x4_4504]);
        assert_eq!(session_ioctls(), [0x10_4707, 0x8_4501]);
    }
}
