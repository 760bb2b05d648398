//! Guests, queues and a disk whose power fails, without threads: a seed is a history.

use super::config::{Config, Counts, DEPTH, DISK, ROOM};
use super::life::Life;
use super::oracle::Wrong;
use super::{Faults, Lie};
use crate::{Rng, pattern};
use ringway_core::mem::Mapping;
use ringway_disk::{Alignment, CacheMode, SchedulerMode};
use std::fmt;

/// The most queues of a disk.
const QUEUES_MAX: usize = 4;

/// A seed after which something is on the disk that must not be.
#[derive(Debug)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// What it stands for.
    pub config: Config,
    /// What is wrong.
    pub wrong: Wrong,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, config, wrong } = self;
        write!(
            f,
            "seed {seed}: {wrong}\n{config:?}\nagain: cargo run --release -p xtask -- power-cut \
             --seed {seed}"
        )
    }
}

/// Runs seeds. The memory of its guests is taken once.
#[derive(Debug)]
pub struct Campaign {
    lie: Option<Lie>,
    memory: Mapping,
}

impl Campaign {
    /// A campaign in which everybody is honest, or one lies.
    ///
    /// # Panics
    /// If there is no memory.
    #[must_use]
    pub fn new(lie: Option<Lie>) -> Self {
        let bytes = QUEUES_MAX * usize::from(DEPTH) * ROOM;
        Self { lie, memory: Mapping::anonymous(bytes).expect("memory") }
    }

    /// What `seed` stands for.
    #[must_use]
    pub fn config(&self, seed: u64) -> Config {
        let rng = &mut Rng::new(seed);
        let alignment = |memory, offset| Alignment { memory, offset };
        let (cache, alignment) = match rng.below(8) {
            0 | 1 => (CacheMode::None, alignment(512, 512)),
            2..5 => (CacheMode::None, alignment(512, 4096)),
            5 => (CacheMode::Writethrough, Alignment::ANY),
            6 => (CacheMode::Writeback, Alignment::ANY),
            _ if rng.below(4) == 0 => (CacheMode::Unsafe, Alignment::ANY),
            _ => (CacheMode::None, alignment(4, 4096)),
        };
        let faulty = rng.below(3) == 0;
        let mut rate = |most: u64| match faulty {
            true => u16::try_from(rng.below(most)).expect("of a thousand"),
            false => 0,
        };
        let (short, again, error, sync_error) = (rate(100), rate(100), rate(30), rate(60));
        // Trials take time, and requests.
        let path = rng.pick(&[SchedulerMode::Bio, SchedulerMode::Request, SchedulerMode::Auto]);
        let tries = path == SchedulerMode::Auto && rng.below(3) == 0;
        let step_ns = if tries { 8_000_000 } else { rng.pick(&[1, 100_000, 10_000_000]) };
        Config {
            cache,
            alignment,
            block_device: cache == CacheMode::None && rng.below(2) == 0,
            blocks: 1 + rng.below(10),
            queues: 1 + usize::try_from(rng.below(QUEUES_MAX as u64)).expect("few"),
            requests: if tries { 200 + rng.below(400) } else { 4 + rng.below(60) },
            whole_blocks: rng.pick(&[0, 0, 300, 1000]),
            toggles: rng.below(3) == 0,
            path,
            step_ns,
            lives: 1 + u32::from(rng.below(3) == 0),
            faults: Faults { short, again, error, sync_error, no_erase: rng.below(4) == 0 },
        }
    }

    /// One seed, from a new disk to its last power cut.
    ///
    /// # Errors
    /// What must not be.
    pub fn run(&mut self, seed: u64) -> Result<Counts, Box<Failure>> {
        let config = self.config(seed);
        // The choices of the guests are not those that made the configuration.
        let mut rng = Rng::new(!seed);
        let mut counters = Counts::default();
        let mut image = vec![0; usize::try_from(config.blocks * 4096).expect("a small disk")];
        pattern::fill(&mut image, DISK, 0, 0);
        for life in 0..config.lives {
            let mut scene = Life::new(self.lie, &self.memory, config, &image, rng.next_u64());
            scene.sequence = u64::from(life) << 32;
            let cut = scene.live(&mut rng, &mut counters);
            image = cut.map_err(|wrong| Box::new(Failure { seed, config, wrong }))?;
        }
        Ok(counters)
    }
}
