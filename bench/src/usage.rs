//! What the kernel counts of a process: CPU time, context switches, writes.

use anyhow::{Context, Result};
use std::fs;

/// Counters of a process, all of its threads together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// CPU time in nanoseconds.
    pub cpu_ns: u64,
    /// Context switches, wanted or not.
    pub switches: u64,
    /// write(2) and its relatives, those to eventfds included.
    pub writes: u64,
}

impl Usage {
    /// CPU time of this process so far, threads that have ended included, in nanoseconds.
    pub fn of_this_process() -> u64 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel fills the structure in; this clock exists everywhere.
        unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
        time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
    }

    /// Of the process `pid`.
    pub fn of(pid: u32) -> Result<Self> {
        Self::of_threads(pid, |_| true)
    }

    /// Of those threads of `pid` whose names are `wanted`; `writes` is the whole process's.
    pub fn of_threads(pid: u32, wanted: impl Fn(&str) -> bool) -> Result<Self> {
        let mut usage = Self::default();
        let tasks = fs::read_dir(format!("/proc/{pid}/task"))
            .with_context(|| format!("the server, process {pid}, has ended"))?;
        for task in tasks {
            let task = task?.path();
            // A thread may end while this looks.
            let Ok(name) = fs::read_to_string(task.join("comm")) else { continue };
            if !wanted(name.trim()) {
                continue;
            }
            if let Ok(text) = fs::read_to_string(task.join("schedstat")) {
                usage.cpu_ns += number(text.split(' ').next());
            }
            if let Ok(text) = fs::read_to_string(task.join("status")) {
                let switches = text.lines().filter(|line| line.contains("ctxt_switches"));
                usage.switches += switches.map(|line| number(line.split('\t').nth(1))).sum::<u64>();
            }
        }
        if let Ok(text) = fs::read_to_string(format!("/proc/{pid}/io")) {
            let line = text.lines().find_map(|line| line.strip_prefix("syscw: "));
            usage.writes = number(line);
        }
        Ok(usage)
    }

    /// What was counted since `before`.
    pub const fn since(&self, before: &Self) -> Self {
        Self {
            cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns),
            switches: self.switches.saturating_sub(before.switches),
            writes: self.writes.saturating_sub(before.writes),
        }
    }
}

fn number(text: Option<&str>) -> u64 {
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// The machine, in the words of the kernel: CPU model, cores, kernel.
pub fn machine() -> (String, usize, String) {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let of = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_once(": ")).map(|(_, value)| value.to_owned())
    };
    let cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    let mut model = of("model name").unwrap_or_else(|| "unknown CPU".into());
    if let (Some(family), Some(number)) = (of("cpu family"), of("model\t")) {
        model = format!("{model} (family {family}, model {number})");
    }
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    (model, cores, kernel.trim().to_owned())
}
