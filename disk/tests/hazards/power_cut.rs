//! Power cuts, simulated: what was acknowledged is there, and nothing else was touched. More seeds:
//! `cargo run --release -p xtask -- power-cut --seeds 100000`.

use ringway_testkit::Rng;
use ringway_testkit::power_cut::{Campaign, Counts, Lie};

/// Seeds of a run of this test.
const SEEDS: u64 = 4000;
/// Seeds within which every lie must have been noticed.
const SEEDS_PER_LIE: u64 = 4000;

#[test]
fn c07_power_cuts_lose_nothing_acknowledged() {
    let first = Rng::for_test("c07_power_cuts_lose_nothing_acknowledged").next_u64() >> 16;
    println!("seeds {first} and the {SEEDS} after it");
    let mut campaign = Campaign::new(None);
    let mut counters = Counts::default();
    for seed in first..first + SEEDS {
        counters += campaign.run(seed).unwrap_or_else(|failure| panic!("{failure}"));
    }
    println!("{counters:?}");
    assert!(counters.cuts >= SEEDS && counters.cuts_in_flight * 4 > SEEDS);
    for (what, count) in [
        ("flushes", counters.flushes),
        ("durable writes", counters.durable),
        ("bounced requests", counters.bounced),
        ("faults", counters.continued),
        ("errors", counters.failed),
    ] {
        assert!(count > SEEDS / 2, "only {count} {what}");
    }
    assert!(counters.merged > SEEDS / 4, "only {} merged requests", counters.merged);
    assert!(
        counters.both_ways > SEEDS / 200,
        "paths were tried in {} lives only",
        counters.both_ways
    );
}

/// The same campaign with one mistake, in the disk or above it: the oracle notices each.
#[test]
fn every_lie_about_durability_is_noticed() {
    let first = Rng::for_test("every_lie_about_durability_is_noticed").next_u64() >> 16;
    for lie in Lie::ALL {
        let mut campaign = Campaign::new(Some(lie));
        let noticed = (first..first + SEEDS_PER_LIE).find_map(|seed| campaign.run(seed).err());
        let Some(failure) = noticed else {
            panic!("{lie:?} goes unnoticed in the seeds from {first} on");
        };
        let seeds = failure.seed - first + 1;
        let wrong = &failure.wrong.0;
        println!("{lie:?}: {seeds} seeds, {}", wrong.lines().next().unwrap_or(""));
        let by_the_oracle = wrong.contains(" holds ") || wrong.contains("one had failed");
        assert!(by_the_oracle, "{lie:?} is noticed for another reason: {wrong}");
    }
}
