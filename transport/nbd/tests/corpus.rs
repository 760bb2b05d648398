//! Whole conversations from arbitrary bytes: those that the fuzzer found worth keeping, and seeded
//! changes of conversations that make sense.

use ringway_testkit::Rng;
use ringway_testkit::nbd::{CaseCounters, EXTENDED, SIMPLE, STRUCTURED, check, command, request};
use std::path::Path;

/// Requests of every kind, with their data.
fn conversation(rng: &mut Rng) -> Vec<u8> {
    let first = rng.pick(&[1, 3, 5]);
    let mode = [SIMPLE, SIMPLE, STRUCTURED, STRUCTURED, EXTENDED, EXTENDED][usize::from(first)];
    let mut said = vec![first];
    for cookie in 0..rng.below(12) {
        let kind = rng.pick(&[0, 0, 1, 1, 3, 4, 5, 6, 7]);
        let len = 512 * rng.below(9);
        let fua = if kind == command::WRITE { rng.pick(&[0, 1]) } else { 0 };
        let paid = if mode == EXTENDED && kind == command::WRITE { 32 } else { 0 };
        said.extend(request(mode, kind, fua | paid, cookie, (512 * rng.below(2060), len)));
        if kind == command::WRITE {
            said.extend(std::iter::repeat_n(0x11, usize::try_from(len).unwrap()));
        }
    }
    said
}

fn changed(mut said: Vec<u8>, rng: &mut Rng) -> Vec<u8> {
    for _ in 0..rng.below(4) {
        let at = usize::try_from(rng.below(said.len() as u64)).unwrap();
        match rng.below(4) {
            0 => said[at] = rng.next_u64().to_le_bytes()[0],
            1 => said[at] ^= 1 << rng.below(8),
            2 => drop(said.drain(at..(at + 5).min(said.len()))),
            _ => said.truncate(at.max(1)),
        }
        if said.is_empty() {
            said.push(1);
        }
    }
    said
}

#[test]
fn d11_changed_conversations_end_and_leave_nothing_behind() {
    let mut rng = Rng::for_test("d11_changed_conversations_end_and_leave_nothing_behind");
    let mut counters = CaseCounters::default();
    for _ in 0..1500 {
        let said = conversation(&mut rng);
        counters += check(&changed(said, &mut rng));
    }
    println!("{counters:?}");
    assert!(counters.options > 1500 && counters.done > 3000 && counters.refused > 300);
}

#[test]
fn the_fuzz_corpus_of_nbd_passes() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/nbd");
    let mut files: Vec<_> = std::fs::read_dir(&dir)
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() >= 20, "the corpus has only {} files", files.len());
    let mut counters = CaseCounters::default();
    for file in files {
        println!("{}", file.display());
        counters += check(&std::fs::read(&file).unwrap());
    }
    println!("{counters:?}");
    assert!(counters.options > 0 && counters.done > 0 && counters.refused > 0);
}
