//! Processes that worlds are made in: whatever was killed in them goes with them.

use std::collections::{BTreeSet, VecDeque};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A number from the environment.
pub(crate) fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// Runs the test `name` for many seeds, `RINGWAY_SEEDS` of them or for `RINGWAY_SECONDS`; for `RINGWAY_SEED` alone if
/// that is set.
pub(crate) fn for_seeds(name: &str) {
    let only = from_env("RINGWAY_SEED");
    let seeds = only.map_or_else(|| from_env("RINGWAY_SEEDS").unwrap_or(500), |_| 1);
    let seconds = from_env("RINGWAY_SECONDS").unwrap_or(20);
    let first = only.unwrap_or_else(|| from_env("RINGWAY_FROM").unwrap_or(1));
    let done = in_processes(name, first..first + seeds, 10, Duration::from_secs(seconds));
    println!("seeds {first} to {}", first + done - 1);
}

/// Runs the test `name` in processes, each of which finds in the environment which of these numbers are its own
/// ([`seeds`]), `portion` of them. None is begun after so much time; how many were.
pub(crate) fn in_processes(
    name: &str,
    numbers: std::ops::Range<u64>,
    portion: u64,
    limit: Duration,
) -> u64 {
    let (begun, mut next, mut running) = (Instant::now(), numbers.start, VecDeque::new());
    loop {
        while running.len() < 2 && next < numbers.end && begun.elapsed() < limit {
            let count = portion.min(numbers.end - next);
            running.push_back(command(name, next, count).spawn().unwrap());
            next += count;
        }
        let Some(child) = running.pop_front() else { return next - numbers.start };
        let out = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{name}: {}\n{text}\n{said}", out.status);
    }
}

fn command(name: &str, first: u64, count: u64) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env("RINGWAY_FIRST", first.to_string())
        .env("RINGWAY_COUNT", count.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// What is done in a history: all of it, or what `RINGWAY_ACTS` has the numbers of.
#[derive(Debug, Default)]
pub(crate) struct Acts {
    only: Option<BTreeSet<u64>>,
    done: Mutex<BTreeSet<u64>>,
}

impl Acts {
    pub(crate) fn from_env() -> Arc<Self> {
        let only = std::env::var("RINGWAY_ACTS").ok();
        let numbers = |text: String| text.split(',').map(|act| act.parse().unwrap()).collect();
        Arc::new(Self { only: only.map(numbers), ..Self::default() })
    }

    /// Whether the act with this number is done.
    pub(crate) fn has(&self, act: u64) -> bool {
        let has = self.only.as_ref().is_none_or(|only| only.contains(&act));
        if has {
            self.done.lock().unwrap().insert(act);
        }
        has
    }

    /// Those that were done, as `RINGWAY_ACTS` has them.
    pub(crate) fn done(&self) -> String {
        let done = self.done.lock().unwrap();
        done.iter().map(u64::to_string).collect::<Vec<_>>().join(",")
    }
}

/// The fewest acts of a seed with which the test `name` still fails in the same way, as [`Acts::done`] has them: of what is
/// done, ever smaller parts are left out. `None` if it does not fail.
pub(crate) fn fewest_acts(name: &str, seed: u64) -> Option<String> {
    let fails = |acts: Option<&[String]>| {
        let mut child = command(name, seed, 1);
        if let Some(acts) = acts {
            child.env("RINGWAY_ACTS", acts.join(","));
        }
        let out = child.output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        let word =
            |name: &str| said.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
        // Numbers differ.
        let why = word("why ")?.split(|c: char| !c.is_alphabetic()).collect::<String>();
        Some((word("acts ")?.split(',').map(str::to_owned).collect::<Vec<_>>(), why))
    };
    let (mut acts, why) = fails(None)?;
    let mut part = acts.len().div_ceil(2);
    while part > 0 {
        let (before, mut from) = (acts.len(), 0);
        while from < acts.len() && acts.len() > 1 {
            let end = (from + part).min(acts.len());
            let rest = [&acts[..from], &acts[end..]].concat();
            match fails(Some(&rest)) {
                Some((done, same)) if !rest.is_empty() && same == why => acts = done,
                _ => from = end,
            }
        }
        if part == 1 && acts.len() == before {
            break;
        }
        part = (part / 2).max(1);
    }
    Some(acts.join(","))
}

/// The seeds of this process.
pub(crate) fn seeds() -> std::ops::Range<u64> {
    let first = from_env("RINGWAY_FIRST").unwrap_or(1);
    first..first + from_env("RINGWAY_COUNT").unwrap_or(1)
}

/// How to repeat what has failed.
pub(crate) fn repeat(test: &str, seed: u64) -> String {
    format!(
        "RINGWAY_SEED={seed} RUSTFLAGS=\"--cfg simulated\" CARGO_TARGET_DIR=target/simulated cargo test --locked -p \
         ringway-image --test simulated {test}"
    )
}

/// Numbers from a seed.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// True once in so many times.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}
