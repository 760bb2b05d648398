//! A closed loop with a disk on paper: so many bytes per second by each policy.

use super::*;

const MS: u64 = 1_000_000;

/// A load as queues would see it.
#[derive(Clone, Copy)]
struct Load {
    /// Requests of 4 KiB per second, by bio and by request.
    bio: u64,
    request: u64,
    /// In a hundred: neighbours among the requests.
    adjacent: u64,
    depth: u64,
}

const STREAM_ON_HDD: Load = Load { bio: 14_000, request: 43_000, adjacent: 98, depth: 32 };
const RANDOM_ON_HDD: Load = Load { bio: 300, request: 290, adjacent: 0, depth: 32 };
const STREAM_ON_SSD: Load = Load { bio: 800_000, request: 400_000, adjacent: 98, depth: 128 };
const STREAM_ON_NULL: Load = Load { bio: 9_000_000, request: 6_000_000, adjacent: 98, depth: 32 };

struct World {
    auto: Auto,
    now: u64,
    rest: f64,
    noise: u64,
    /// Time spent on each policy.
    spent: [u64; 2],
}

impl World {
    fn new() -> Self {
        Self { auto: Auto::new(0), now: 0, rest: 0.0, noise: 1, spent: [0; 2] }
    }

    /// `load` for `ns`, with up to `noise` in a hundred more or less.
    fn run(&mut self, load: Load, ns: u64, noise: u64) {
        let end = self.now + ns;
        while self.now < end {
            let step = 5 * MS;
            self.now += step;
            let policy = self.auto.policy();
            self.spent[policy as usize] += step;
            self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let swing = (self.noise >> 33) % (2 * noise + 1) + 100 - noise;
            let speed = if policy == Policy::Bio { load.bio } else { load.request };
            let done = (speed * swing) as f64 / 100.0 * step as f64 / 1e9 + self.rest;
            self.rest = done.fract();
            // Far below 2^52.
            #[allow(clippy::cast_possible_truncation)]
            let requests = done as u64;
            let mut seen = Seen { requests, bytes: requests * 4096, ..Seen::default() };
            if policy == Policy::Bio {
                seen.sampled = requests.min(16);
                seen.adjacent = seen.sampled * load.adjacent / 100;
                seen.in_flight = seen.sampled * load.depth;
                seen.timed = seen.sampled;
                seen.latency = seen.timed * load.depth * SECOND / speed;
            } else {
                (seen.plugged, seen.merged) = (requests, requests * load.adjacent / 100);
            }
            self.auto.observe(self.now, &seen);
        }
    }
}

#[cfg_attr(miri, ignore = "hours of a disk's life")]
#[test]
fn takes_up_what_carries_more_within_two_seconds() {
    let mut world = World::new();
    world.run(STREAM_ON_HDD, 2 * SECOND, 1);
    assert_eq!(world.auto.chosen(), Policy::Request);
    world.run(RANDOM_ON_HDD, 2 * SECOND, 1);
    assert_eq!(world.auto.chosen(), Policy::Bio, "nothing merges");
    // However long the calm was.
    world.run(RANDOM_ON_HDD, 300 * SECOND, 1);
    world.run(STREAM_ON_HDD, 2 * SECOND, 1);
    assert_eq!(world.auto.policy(), Policy::Request);
    assert_eq!(world.auto.switches(), 3);
}

#[cfg_attr(miri, ignore = "hours of a disk's life")]
#[test]
fn stays_with_bio_where_merging_does_not_win_and_spends_next_to_nothing_on_trials() {
    for (load, share) in
        [(STREAM_ON_SSD, 200), (STREAM_ON_NULL, u64::MAX), (RANDOM_ON_HDD, u64::MAX)]
    {
        let mut world = World::new();
        world.run(load, 600 * SECOND, 5);
        assert_eq!((world.auto.chosen(), world.auto.switches()), (Policy::Bio, 0));
        let on_trial = world.spent[Policy::Request as usize];
        assert!(on_trial <= world.now / share, "{on_trial} ns of {}", world.now);
    }
}

#[cfg_attr(miri, ignore = "hours of a disk's life")]
#[test]
fn two_paths_that_are_as_good_do_not_alternate() {
    for noise in [0, 2, 5, 10, 20] {
        let same = Load { bio: 20_000, request: 20_000, adjacent: 60, depth: 16 };
        let mut world = World::new();
        world.run(same, 600 * SECOND, noise);
        assert!(world.auto.switches() <= 4, "{} switches, noise {noise}", world.auto.switches());
    }
}

#[cfg_attr(miri, ignore = "hours of a disk's life")]
#[test]
fn a_load_that_alternates_does_not_make_the_choice_alternate() {
    for period in [50, 100, 200, 400, 700, 1000, 1500, 3000] {
        let mut world = World::new();
        while world.now < 600 * SECOND {
            world.run(STREAM_ON_HDD, period * MS, 5);
            world.run(RANDOM_ON_HDD, period * MS, 5);
        }
        let per_minute = world.auto.switches() / 10;
        assert!(per_minute <= 12, "{per_minute} switches a minute at {period} ms");
    }
}

#[cfg_attr(miri, ignore = "hours of a disk's life")]
#[test]
fn loses_request_again_when_bio_has_become_better() {
    let mut world = World::new();
    world.run(STREAM_ON_HDD, 10 * SECOND, 1);
    assert_eq!(world.auto.chosen(), Policy::Request);
    // The same stream, but the disk below was replaced by a fast one.
    world.run(STREAM_ON_SSD, 70 * SECOND, 1);
    assert_eq!(world.auto.chosen(), Policy::Bio);
}

#[cfg_attr(miri, ignore = "hours of a disk's life")]
#[test]
fn a_trial_without_load_ends_and_costs_nothing() {
    let mut world = World::new();
    world.run(STREAM_ON_HDD, 100 * MS, 0);
    assert!(matches!(world.auto.state, State::Trial { .. }));
    world.run(Load { bio: 1, request: 1, adjacent: 0, depth: 1 }, 3 * SECOND, 0);
    assert_eq!((world.auto.policy(), world.auto.switches()), (Policy::Bio, 0));
}
