//! What the host did while something was measured: who else had its CPUs, and where devices interrupted.

use crate::usage::machine;
use serde::Serialize;
use std::fmt::Write as _;
use std::fs;
use std::time::Instant;

/// Ticks of /proc/stat in a second: what the kernel tells user space, whatever its own are.
const TICKS_PER_SECOND: f64 = 100.0;

/// Interrupts a second below which a device is not worth naming, and the most that are named.
const NAMED_FROM: f64 = 500.0;
const NAMED_MAX: usize = 3;

/// The host's counters at some moment.
#[derive(Clone, Debug)]
pub struct HostLook {
    at: Instant,
    stat: String,
    interrupts: String,
}

/// What came of it between two looks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Host {
    /// CPU time that the host below took away, in percent of all CPUs.
    pub stolen_percent: f64,
    /// CPU time of others in user and system mode, in percent of all CPUs, kernel threads included; `None`
    /// if it is not known whose some of it was.
    pub others_percent: Option<f64>,
    /// Devices that interrupted most often.
    pub interrupts: Vec<Interrupts>,
}

/// Interrupts of one vector of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Interrupts {
    /// The kernel's name: `virtio1-req.0`, `nvme0q2`.
    pub name: String,
    /// The CPU that had most of them.
    pub cpu: usize,
    /// How many there were, on all CPUs.
    pub count: u64,
}

impl HostLook {
    /// What cannot be read is left out of what comes of it.
    #[must_use]
    pub fn now() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self { at: Instant::now(), stat: read("/proc/stat"), interrupts: read("/proc/interrupts") }
    }

    /// Until now. `ours` is CPU time, in nanoseconds, of what is measured, if all of it is known.
    #[must_use]
    pub fn since(&self, ours: Option<u64>) -> Host {
        let now = Self::now();
        between(self, &now, now.at.duration_since(self.at).as_secs_f64(), ours)
    }
}

fn between(before: &HostLook, after: &HostLook, seconds: f64, ours: Option<u64>) -> Host {
    let cpus = after.stat.lines().filter(|line| is_cpu(line)).count().max(1) as f64;
    let percent = |cpu_seconds: f64| (100.0 * cpu_seconds / (seconds * cpus)).max(0.0);
    let passed = |columns: &[usize]| ticks(&after.stat, columns) - ticks(&before.stat, columns);
    let busy = passed(&[0, 1, 2]) / TICKS_PER_SECOND;
    let stolen = passed(&[7]) / TICKS_PER_SECOND;
    let rows = interrupts(&before.interrupts);
    let mut most: Vec<Interrupts> = Vec::new();
    for (name, counts) in interrupts(&after.interrupts) {
        let earlier = rows.iter().find(|(known, _)| *known == name).map(|(_, counts)| counts);
        let more = |cpu: usize| {
            let earlier = earlier.and_then(|counts| counts.get(cpu)).copied().unwrap_or(0);
            counts[cpu].saturating_sub(earlier)
        };
        let count: u64 = (0..counts.len()).map(more).sum();
        let Some(cpu) = (0..counts.len()).max_by_key(|&cpu| more(cpu)) else { continue };
        if count as f64 >= NAMED_FROM * seconds {
            most.push(Interrupts { name: name.to_owned(), cpu, count });
        }
    }
    most.sort_by_key(|one| std::cmp::Reverse(one.count));
    most.truncate(NAMED_MAX);
    Host {
        stolen_percent: percent(stolen),
        others_percent: ours.map(|ns| percent(busy - ns as f64 / 1e9)),
        interrupts: most,
    }
}

fn is_cpu(line: &str) -> bool {
    line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// The sum of these columns of the line of all CPUs.
fn ticks(stat: &str, columns: &[usize]) -> f64 {
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
    let ticks: Vec<f64> = all.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    columns.iter().filter_map(|&at| ticks.get(at)).sum()
}

/// Names and counts of each CPU, of devices: their lines begin with a number.
fn interrupts(text: &str) -> Vec<(&str, Vec<u64>)> {
    let cpus = text.lines().next().unwrap_or_default().split_whitespace().count();
    text.lines().filter_map(|line| device(line, cpus)).collect()
}

fn device(line: &str, cpus: usize) -> Option<(&str, Vec<u64>)> {
    let (number, rest) = line.trim_start().split_once(':')?;
    number.parse::<u32>().ok()?;
    let words = rest.split_whitespace();
    Some((words.clone().last()?, words.take(cpus).map_while(|word| word.parse().ok()).collect()))
}

impl Host {
    /// CPU time that was not to be had, in percent of all CPUs, as far as it is known.
    pub(crate) fn disturbance(&self) -> f64 {
        self.stolen_percent + self.others_percent.unwrap_or(0.0)
    }

    /// One line: the machine, and what else went on.
    #[must_use]
    pub fn words(&self) -> String {
        let (cpu, cpus, kernel) = machine();
        let mut text = format!("host: {cpu}, {cpus} CPUs, Linux {kernel}");
        let _ = write!(text, "; stolen from it {:.1} %", self.stolen_percent);
        if let Some(others) = self.others_percent {
            let _ = write!(text, ", used by others {others:.1} %");
        }
        let names: Vec<_> =
            self.interrupts.iter().map(|one| format!("{} on CPU {}", one.name, one.cpu)).collect();
        if !names.is_empty() {
            let _ = write!(text, "; interrupts: {}", names.join(", "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(stat: &str, interrupts: &str) -> HostLook {
        HostLook { at: Instant::now(), stat: stat.into(), interrupts: interrupts.into() }
    }

    #[test]
    fn others_the_host_below_and_interrupts_are_told() {
        let before = look(
            "cpu  100 10 50 1000 0 0 0 5 0 0\ncpu0 50 5 25 500\ncpu1 50 5 25 500\nintr 5\n",
            "           CPU0       CPU1\n 36:  10  1000  PCI-MSIX-0000:00:02.0   1-edge   virtio1-req.0\n\
             NMI:   0   0   Non-maskable interrupts\n",
        );
        let after = look(
            "cpu  250 10 100 1300 0 0 0 25 0 0\ncpu0 50 5 25 500\ncpu1 50 5 25 500\nintr 5\n",
            "           CPU0       CPU1\n 36:  20  5000  PCI-MSIX-0000:00:02.0   1-edge   virtio1-req.0\n \
             40: 3000 0 PCI-MSIX 0-edge nvme0q1\n 41: 100 0 IO-APIC timer\nNMI:   9000   0   Non-maskable \
             interrupts\n",
        );
        // Two seconds of two CPUs: 2 s of work, of which 1.5 are ours, and 0.2 s stolen.
        let host = between(&before, &after, 2.0, Some(1_500_000_000));
        assert!((host.others_percent.unwrap() - 12.5).abs() < 1e-9, "{host:?}");
        assert!((host.stolen_percent - 5.0).abs() < 1e-9, "{host:?}");
        let named = |name: &str, cpu, count| Interrupts { name: name.into(), cpu, count };
        assert_eq!(host.interrupts, [named("virtio1-req.0", 1, 4010), named("nvme0q1", 0, 3000)]);
        let words = host.words();
        let expected = "stolen from it 5.0 %, used by others 12.5 %; interrupts: virtio1-req.0 on CPU 1, \
                        nvme0q1 on CPU 0";
        assert!(words.ends_with(expected), "{words}");
        assert_eq!(between(&before, &after, 2.0, None).others_percent, None);
    }

    #[test]
    fn a_host_that_tells_nothing_is_no_error() {
        let host = between(&look("", ""), &look("", ""), 1.0, Some(5));
        assert_eq!((host.stolen_percent, host.others_percent), (0.0, Some(0.0)));
        assert_eq!(host.interrupts, []);
    }
}
