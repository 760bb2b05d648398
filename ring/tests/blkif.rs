//! The back side of Xen's block rings against an oracle written from the C headers, for arbitrary
//! front-ends that mostly keep the rules. The same check runs under cargo-fuzz (target `blkif`).

use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence};
use ringway_ring_oracle::blkif::{Counters, check};
use std::path::Path;

fn config() -> Config {
    let mut config = Config::with_cases(if cfg!(miri) { 3 } else { 4000 });
    // PROPTEST_CASES asks for more.
    if let Some(more) = std::env::var("PROPTEST_CASES").ok().and_then(|word| word.parse().ok()) {
        config.cases = more;
    }
    if cfg!(miri) {
        config.failure_persistence = None;
        config.rng_seed = proptest::test_runner::RngSeed::Fixed(42);
    } else {
        config.failure_persistence =
            Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions")));
    }
    config
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn blkif_rings_agree_with_the_oracle(
        data in prop::collection::vec(any::<u8>(), 0..if cfg!(miri) { 200 } else { 3000 })
    ) {
        check(&data);
    }
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn the_fuzz_corpus_of_blkif_rings_passes() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/blkif");
    let mut files: Vec<_> =
        std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 20, "the corpus has only {} files", files.len());
    let mut counters = Counters::default();
    for file in files {
        // The name of the last one is that of the one that fails.
        println!("{}", file.display());
        counters += check(&std::fs::read(&file).unwrap());
    }
    println!("{counters:?}");
    assert!(
        counters.indirect > 0 && counters.discards > 0 && counters.broken > 0 && counters.laps > 0
    );
}

/// Inputs of `len` bytes, always the same ones.
fn noise(count: usize, len: usize) -> impl Iterator<Item = Vec<u8>> {
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut byte = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random.to_le_bytes()[4]
    };
    (0..count).map(move |_| (0..len).map(|_| byte()).collect())
}

/// The generator reaches deep: most requests are well formed, and every outcome occurs.
#[test]
#[cfg_attr(miri, ignore = "too many cases")]
fn blkif_cases_are_mostly_valid_and_reach_everything() {
    let mut counters = Counters::default();
    for data in noise(1000, 3000) {
        counters += check(&data);
    }
    println!("{counters:?}");
    assert!(counters.requests > 20_000 && counters.indirect > 1000 && counters.discards > 500);
    assert!(
        (counters.failed + counters.unsupported) * 2 < counters.requests,
        "most requests are good"
    );
    assert!(counters.failed > 500 && counters.unsupported > 500 && counters.broken > 20);
    assert!(counters.calls > 500 && counters.silences > 500 && counters.laps > 200);
    assert_eq!(counters.longest, 4096);
}
