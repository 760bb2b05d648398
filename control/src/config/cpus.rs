//! Lists of CPUs: `0,2-3`, as taskset and the kernel write them.

use rustix::thread::{CpuSet, sched_getaffinity};
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// CPUs in the order they were named; at least one, none twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

impl CpuList {
    /// Their numbers.
    pub fn numbers(&self) -> &[usize] {
        &self.0
    }

    /// Begins with another one, so that processes which share the list do not all begin with the
    /// first.
    pub fn rotate(&mut self, by: usize) {
        let by = by % self.0.len().max(1);
        self.0.rotate_left(by);
    }

    /// The CPUs this process may use.
    pub fn allowed() -> Self {
        let set = sched_getaffinity(None).unwrap_or_default();
        Self((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
    }

    /// Checks that threads of this process can run on each of them.
    ///
    /// # Errors
    /// The message: which CPU cannot be used, why, and which can.
    pub fn check(&self) -> Result<(), String> {
        self.check_against(
            list_in("online").as_ref(),
            list_in("present").as_ref(),
            &Self::allowed(),
        )
    }

    fn check_against(
        &self,
        online: Option<&Self>,
        present: Option<&Self>,
        allowed: &Self,
    ) -> Result<(), String> {
        for cpu in &self.0 {
            let out_of = |list: Option<&Self>| list.is_some_and(|list| !list.0.contains(cpu));
            let why = if allowed.0.contains(cpu) {
                continue;
            } else if out_of(present) {
                "does not exist".to_owned()
            } else if out_of(online) {
                format!("is offline (1 in /sys/devices/system/cpu/cpu{cpu}/online wakes it)")
            } else {
                "is not allowed for this process (a cpuset, a container or taskset)".to_owned()
            };
            return Err(format!("CPU {cpu} {why}. CPUs that can be used: {allowed}"));
        }
        Ok(())
    }
}

/// A list the kernel keeps: `online`, `present`.
fn list_in(name: &str) -> Option<CpuList> {
    let text = std::fs::read_to_string(format!("/sys/devices/system/cpu/{name}")).ok()?;
    text.trim().parse().ok()
}

impl Serialize for CpuList {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad =
            |part: &str| format!("'{part}' is not a CPU: give numbers and ranges, such as 0,2-3");
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let part = part.trim();
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |word: &str| word.parse::<usize>().map_err(|_| bad(part));
            let (first, last) = (number(first)?, number(last)?);
            if last >= CpuSet::MAX_CPU {
                return Err(format!("there is no CPU {last}: they are below {}", CpuSet::MAX_CPU));
            }
            if first > last {
                return Err(format!("'{part}' ends before it begins: write {last}-{first}"));
            }
            for cpu in first..=last {
                if cpus.contains(&cpu) {
                    return Err(format!("CPU {cpu} is in the list twice"));
                }
                cpus.push(cpu);
            }
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuList {
    /// With ranges where numbers follow each other.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, run) in self.0.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if at == 0 { "" } else { "," };
            match run {
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [one] => write!(f, "{comma}{one}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for CpuList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> CpuList {
        text.parse().unwrap()
    }

    #[test]
    fn lists_are_read_and_written_like_the_kernels() {
        for (text, numbers, back) in [
            ("0", &[0][..], "0"),
            ("0,2-3", &[0, 2, 3], "0,2-3"),
            (" 5 , 1-2,3", &[5, 1, 2, 3], "5,1-3"),
            ("1023", &[1023], "1023"),
        ] {
            assert_eq!(list(text).numbers(), numbers, "{text}");
            assert_eq!(list(text).to_string(), back);
        }
        for (text, what) in [
            ("", "'' is not a CPU"),
            ("0,", "'' is not a CPU"),
            ("a", "'a' is not a CPU"),
            ("-1", "'-1' is not a CPU"),
            ("1-", "'1-' is not a CPU"),
            ("3-1", "write 1-3"),
            ("0-2,1", "CPU 1 is in the list twice"),
            ("1024", "no CPU 1024"),
            ("0-99999999999", "no CPU 99999999999"),
        ] {
            let error = text.parse::<CpuList>().unwrap_err();
            assert!(error.contains(what), "{text}: {error}");
        }
    }

    #[test]
    fn a_cpu_that_cannot_be_used_is_named_with_the_reason() {
        let (online, present, allowed) = (list("0-3"), list("0-4"), list("0-2"));
        let check =
            |text| list(text).check_against(Some(&online), Some(&present), &allowed).unwrap_err();
        assert_eq!(list("2,0").check_against(Some(&online), Some(&present), &allowed), Ok(()));
        assert!(check("0,9").starts_with("CPU 9 does not exist"));
        assert!(check("4").starts_with("CPU 4 is offline"));
        assert!(check("0-3").starts_with("CPU 3 is not allowed"));
        assert!(check("3").ends_with("can be used: 0-2"));
        assert!(CpuList::allowed().check().is_ok());
    }
}
