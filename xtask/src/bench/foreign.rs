//! What others have of the cores that are measured on: other processes, and the host below.

use crate::bench::lab::Lab;
use anyhow::{Context, Result};
use ringway_bench::usage::Usage;
use std::time::Instant;

/// Ticks of /proc/stat in a second: what the kernel tells user space, whatever its own are.
const TICKS_PER_SECOND: f64 = 100.0;

/// Looks at both ends of a measurement.
pub(crate) struct Watch {
    cores: Vec<usize>,
    begun: Instant,
    /// Seconds that these cores were busy or taken away, and seconds of CPU time of our own.
    before: (f64, f64),
}

impl Watch {
    /// From now on, on the cores of server and client.
    pub(crate) fn begin(lab: &Lab) -> Result<Self> {
        let mut cores = [&lab.common.server_cpus[..], &lab.common.client_cpus].concat();
        cores.sort_unstable();
        cores.dedup();
        let before = cpu_seconds(&cores)?;
        Ok(Self { cores, begun: Instant::now(), before })
    }

    /// Until now: of these cores' time, in percent. Servers must have ended, so that their time counts as
    /// ours.
    #[allow(clippy::cast_precision_loss)]
    pub(crate) fn foreign_percent(&self) -> Result<f64> {
        let (busy, own) = cpu_seconds(&self.cores)?;
        let all = self.begun.elapsed().as_secs_f64() * self.cores.len() as f64;
        let foreign = (busy - self.before.0) - (own - self.before.1);
        Ok((100.0 * foreign / all).max(0.0))
    }
}

fn cpu_seconds(cores: &[usize]) -> Result<(f64, f64)> {
    let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    Ok((taken(&stat, cores), own()))
}

/// Seconds of user, nice, system and steal of these cores. Interrupts are left out: those of the disk
/// belong to what is measured, and are nobody's.
fn taken(stat: &str, cores: &[usize]) -> f64 {
    let of_core = |line: &str| {
        let (name, rest) = line.split_once(' ')?;
        let core: usize = name.strip_prefix("cpu")?.parse().ok()?;
        if !cores.contains(&core) {
            return None;
        }
        let ticks: Vec<f64> =
            rest.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        Some([0, 1, 2, 7].iter().filter_map(|&at| ticks.get(at)).sum::<f64>())
    };
    stat.lines().filter_map(of_core).sum::<f64>() / TICKS_PER_SECOND
}

/// Seconds of CPU time of this process, and of its children that have ended.
#[allow(clippy::cast_precision_loss)]
fn own() -> f64 {
    let children = children_seconds().unwrap_or(0.0);
    Usage::of_this_process() as f64 / 1e9 + children
}

/// Fields 16 and 17 of proc(5)'s stat: user and system time of children that were waited for.
fn children_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name may hold anything; it ends with the last bracket.
    let rest = stat.rsplit_once(')')?.1;
    let words: Vec<&str> = rest.split_whitespace().collect();
    let ticks = |at: usize| words.get(at).and_then(|word| word.parse::<f64>().ok());
    Some((ticks(13)? + ticks(14)?) / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_cores_in_use_count_and_idle_time_does_not() {
        let stat = "cpu  9 9 9 9 9 9 9 9 0 0\n\
                    cpu0 100 10 50 999 999 7 7 40 0 0\n\
                    cpu1 1 0 0 999 0 0 0 0 0 0\n\
                    cpu10 5000 0 0 0 0 0 0 0 0 0\nintr 5\n";
        assert!((taken(stat, &[0]) - 2.0).abs() < 1e-9);
        assert!((taken(stat, &[0, 1]) - 2.01).abs() < 1e-9);
        assert!(taken(stat, &[7]).abs() < 1e-9);
    }

    #[test]
    fn what_a_child_has_used_is_ours() {
        let before = children_seconds().unwrap();
        let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        assert!(std::process::Command::new("sh").args(["-c", script]).status().unwrap().success());
        assert!(children_seconds().unwrap() > before);
    }
}
