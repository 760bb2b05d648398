//! Whole vhost-user sessions from arbitrary bytes: those that the fuzzer found worth keeping, and
//! some more.

use ringway_testkit::Rng;
use ringway_testkit::session_case::{Tally, check};
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
    let mut tally = Tally::default();
    for file in files {
        println!("{}", file.display());
        tally += check(&std::fs::read(&file).unwrap());
    }
    println!("{tally:?}");
    // One process, one thread: sessions count their descriptors, so the other case is here as well.
    let mut rng = Rng::for_test("the_fuzz_corpus_of_sessions_passes");
    let mut tally = Tally::default();
    for _ in 0..1500 {
        let data: Vec<u8> = (0..300).map(|_| rng.next_u64().to_le_bytes()[0]).collect();
        tally += check(&data);
    }
    println!("{tally:?}");
    assert!(tally.sent > 15_000 && tally.answered > 3000);
    assert!(tally.refused * 2 < tally.answered, "most messages are accepted");
    assert!(tally.refused > 200 && tally.requests > 500);
}
