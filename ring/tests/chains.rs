//! Chain walking and request decoding against an oracle written from the specification, for
//! arbitrary drivers that mostly keep the rules.
//!
//! A failing case is shrunk, printed, and its seed kept in `chains.proptest-regressions`. The same
//! checks run under cargo-fuzz (targets `chain`, `packed`, `header`,
//! `inflight`); their corpora are replayed here.

mod vmm;

use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence};
use ringway_core::mem::{GuestMap, Mapping, Region, Translator};
use ringway_ring::virtqueue::{
    Chain, ChainError, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, SplitAddresses,
    SplitDevice,
};
use ringway_ring_oracle as oracle;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn config() -> Config {
    let cases = if cfg!(miri) { 3 } else { 4000 };
    let mut config = Config::with_cases(cases);
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

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..if cfg!(miri) { 150 } else { 1500 })
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn pop_and_decode_agree_with_the_oracle(data in bytes()) {
        oracle::check(&data);
    }

    #[test]
    fn packed_rings_agree_with_the_oracle(data in bytes()) {
        oracle::packed::check(&data);
    }

    #[test]
    fn requests_agree_with_the_oracle(data in bytes()) {
        oracle::header::check(&data);
    }

    #[test]
    fn b04_recovery_from_a_record_agrees_with_the_oracle(data in bytes()) {
        oracle::inflight::check(&data);
    }

    /// What is a good chain to the oracle is the same chain to rust-vmm's `virtio-queue`.
    #[test]
    #[cfg_attr(miri, ignore = "maps memory in ways that Miri does not know")]
    fn chains_are_those_of_virtio_queue(data in bytes()) {
        let mut vmm = vmm::Vmm::new();
        oracle::check_with(&data, |memory, queue, head, chain| {
            if let Ok(buffers) = chain {
                assert_eq!(vmm.walk(memory, queue, head), *buffers);
            }
        });
    }
}

/// The inputs of a fuzz target.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() >= 20, "the corpus of {target} has only {} files", files.len());
    let read = |file: PathBuf| {
        // The name of the last one is that of the one that fails.
        println!("{}", file.display());
        std::fs::read(&file).unwrap()
    };
    files.into_iter().map(read).collect()
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn the_fuzz_corpus_passes() {
    let mut counters = oracle::Counters::default();
    for data in corpus("chain") {
        counters += oracle::check(&data);
    }
    println!("{counters:?}");
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn the_fuzz_corpora_of_packed_rings_and_headers_pass() {
    let mut counters = oracle::packed::Counters::default();
    for data in corpus("packed") {
        counters += oracle::packed::check(&data);
    }
    println!("{counters:?}");
    for data in corpus("header") {
        oracle::header::check(&data);
    }
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn b04_the_fuzz_corpus_of_inflight_regions_passes() {
    let mut counters = oracle::inflight::Counters::default();
    for data in corpus("inflight") {
        counters += oracle::inflight::check(&data);
    }
    println!("{counters:?}");
}

/// A table that begins at the end of the address space does not go on at its beginning. Found by
/// `pop_and_decode_agree_with_the_oracle`.
#[test]
fn b02_an_indirect_table_does_not_wrap() {
    const TOP: u64 = u64::MAX - 4096;
    let region = |guest| {
        let mapping = Arc::new(Mapping::anonymous(4096).unwrap());
        Region { guest, user: 0, len: 4096, mapping }
    };
    let (bottom, top) = (region(0), region(TOP));
    let put = |region: &Region, at: u64, desc: Desc| {
        let at = region.mapping.at(usize::try_from(at - region.guest).unwrap());
        // SAFETY: the descriptor lies in the region; it need not be aligned.
        unsafe { at.cast::<Desc>().write_unaligned(desc) };
    };
    // The ring has one descriptor. Its table begins 17 bytes before the end: entry 0 is memory,
    // entry 2 would be at 2^64 + 14.
    let table = u64::MAX - 17;
    put(&bottom, 0, Desc { addr: table, len: 48, flags: DESC_F_INDIRECT, next: 0 });
    put(&top, table, Desc { addr: 64, len: 16, flags: DESC_F_NEXT, next: 2 });
    put(&bottom, table.wrapping_add(32), Desc { addr: 64, len: 1, flags: DESC_F_WRITE, next: 0 });
    let (avail, used) = (bottom.mapping.at(256), bottom.mapping.at(512));
    // SAFETY: avail.idx lies in the region, aligned.
    unsafe { avail.add(2).write(1) };
    let at = SplitAddresses { desc: bottom.mapping.at(0), avail, used };
    // SAFETY: the three parts lie in the region, which outlives the queue.
    let mut queue = unsafe { SplitDevice::new(1, at, 0, false, true) }.unwrap();
    let map = GuestMap::new(vec![bottom.clone(), top]).unwrap();
    let popped = queue.pop(&mut Translator::new(Arc::new(map))).unwrap();
    let (_head, chain) = popped.expect("a chain was made available");
    assert_eq!(chain.unwrap_err(), ChainError::TableUnmapped);
}

/// The lengths of a chain add up to less than 2^32, to the byte.
#[test]
fn a03_a_chain_holds_less_than_4_gib() {
    let mut chain = Chain::for_queue(4);
    chain.assemble(&[(0, u32::MAX - 5)], &[(0, 5)]).unwrap();
    assert_eq!(chain.assemble(&[(0, u32::MAX - 5)], &[(0, 6)]), Err(ChainError::TooManyBytes));
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

/// The generator reaches deep: most chains are well formed, and every outcome occurs.
#[test]
#[cfg_attr(miri, ignore = "too many cases")]
fn the_cases_are_mostly_valid_and_reach_everything() {
    let mut counters = oracle::Counters::default();
    for data in noise(1000, 700) {
        counters += oracle::check(&data);
    }
    println!("{counters:?}");
    assert!(counters.chains > 2000);
    assert!(counters.requests * 2 > counters.chains, "half of the chains are good requests");
    assert!(
        counters.refused > 20
            && counters.malformed > 20
            && counters.broken > 20
            && counters.calls > 100
    );
    assert!(counters.longest > 500, "long indirect tables occur");
}

#[test]
#[cfg_attr(miri, ignore = "too many cases")]
fn packed_cases_are_mostly_valid_and_reach_everything() {
    let mut counters = oracle::packed::Counters::default();
    for data in noise(1000, 1200) {
        counters += oracle::packed::check(&data);
    }
    println!("{counters:?}");
    assert!(counters.chains > 5000);
    assert!(counters.malformed * 2 < counters.chains, "most chains are good");
    assert!(counters.malformed > 20 && counters.broken > 20 && counters.tables > 20);
    assert!(counters.calls > 100 && counters.silences > 100 && counters.laps > 500);
}

#[test]
#[cfg_attr(miri, ignore = "too many cases")]
fn headers_are_mostly_valid_and_reach_everything() {
    let mut sum = oracle::header::Counters::default();
    for data in noise(1000, 500) {
        let counters = oracle::header::check(&data);
        sum.requests += counters.requests;
        sum.failed += counters.failed;
        sum.unsupported += counters.unsupported;
        sum.without_answer += counters.without_answer;
    }
    println!("{sum:?}");
    assert!(sum.requests > 3000 && sum.failed > 500);
    assert!(sum.unsupported > 200 && sum.without_answer > 50);
}

#[test]
#[cfg_attr(miri, ignore = "too many cases")]
fn records_are_mostly_valid_and_reach_everything() {
    let mut counters = oracle::inflight::Counters::default();
    for data in noise(2000, 400) {
        counters += oracle::inflight::check(&data);
    }
    println!("{counters:?}");
    assert!(counters.plain > 4000 && counters.recovered > 4000);
    assert!(counters.refused > 300 && counters.taken > 300 && counters.hostile > 300);
}
