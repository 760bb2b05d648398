//! Chance that can be repeated.

/// Random numbers that are the same in each run (xorshift64).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// A stream of its own for each `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The product's upper half: no division. It is below `limit`.
        #[allow(clippy::cast_possible_truncation)]
        let number = ((u128::from(self.0) * u128::from(limit)) >> 64) as u64;
        number
    }
}
