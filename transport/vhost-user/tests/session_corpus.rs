//! Whole vhost-user sessions from arbitrary bytes: those that the fuzzer found worth keeping, and
//! some more.

use ringway_testkit::Rng;
use ringway_testkit::session_fuzz_case::{Counters, check};
use std::path::{Path, PathBuf};

#[test]
fn the_fuzz_corpus_of_sessions_passes() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/session");
    let mut files: Vec<PathBuf> = std::fs::read_dir(&dir)
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() >= 20, "the corpus has only {} files", files.len());
    let mut counters = Counters::default();
    for file in files {
        println!("{}", file.display());
        counters += check(&std::fs::read(&file).unwrap());
    }
    println!("{counters:?}");
    // One process, one thread: sessions count their descriptors, so the other case is here as well.
    let mut rng = Rng::for_test("the_fuzz_corpus_of_sessions_passes");
    let mut counters = Counters::default();
    for _ in 0..1500 {
        let data: Vec<u8> = (0..300).map(|_| rng.next_u64().to_le_bytes()[0]).collect();
        counters += check(&data);
    }
    println!("{counters:?}");
    assert!(counters.sent > 15_000 && counters.answered > 3000);
    assert!(counters.refused * 2 < counters.answered, "most messages are accepted");
    assert!(counters.refused > 200 && counters.requests > 500);
}
