//! Random numbers for tests: every run prints its seed, and the seed repeats the run.

/// A small generator (SplitMix64); good enough to shuffle test cases.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Seeded from `RINGWAY_SEED` if it is set, else from the clock. Prints the seed.
    ///
    /// # Panics
    /// If `RINGWAY_SEED` is not a number.
    #[must_use]
    pub fn for_test(name: &str) -> Self {
        let seed = match std::env::var("RINGWAY_SEED") {
            Ok(word) => word.parse().expect("RINGWAY_SEED is a number"),
            Err(_) => std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(1, |since| since.as_secs() ^ u64::from(since.subsec_nanos()) << 20),
        };
        println!("{name}: RINGWAY_SEED={seed}");
        Self(seed)
    }

    /// With this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    /// One of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        // An index below a slice's length.
        #[allow(clippy::cast_possible_truncation)]
        let index = self.below(choices.len() as u64) as usize;
        choices[index]
    }
}
