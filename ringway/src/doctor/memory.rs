//! How much memory processes may use (cgroups, version 1 and 2), and what guests can make them use.
//!
//! A page of a guest's memory counts for whoever touches it first. A daemon that reads into pages
//! which its guest has never touched pays for them.

use crate::ctl::ask;
use anyhow::Context;
use ringway_control::protocol::List;
use serde::Serialize;
use serde_json::Map;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a daemon may take to tell what it is.
const TIMEOUT: Duration = Duration::from_secs(5);

/// More than any host has is what version 1 calls no limit.
const NO_LIMIT: u64 = 1 << 60;

/// What a daemon needs for itself and one disk, roughly.
pub(super) const OWN_BYTES: u64 = 64 << 20;

/// What one process may use.
#[derive(Debug, Serialize)]
pub(crate) struct Memory {
    /// The daemon's, or that of one of its disks; `None` is this very program.
    pub(crate) process: Option<u32>,
    /// The limit that is reached first, in bytes; `None` is no limit.
    pub(crate) limit_bytes: Option<u64>,
    /// The cgroup that has it.
    pub(crate) cgroup: Option<PathBuf>,
    /// Memory of guests that the process has mapped, in bytes; `None` if that cannot be told.
    pub(crate) guests_bytes: Option<u64>,
}

/// Looks at a running daemon and the processes of its disks, or else at this process.
///
/// # Errors
/// That there is no such daemon.
pub(crate) fn inspect(control: Option<&Path>) -> anyhow::Result<Vec<Memory>> {
    let Some(control) = control else { return Ok(vec![of(None)]) };
    let answer = ask(control, "list", Map::new(), TIMEOUT)?;
    let answer = answer.map_err(|problem| anyhow::anyhow!("{}", problem.message))?;
    let list: List = serde_json::from_value(answer).context("the daemon is not understood")?;
    let disks = list.disks.iter().filter_map(|disk| disk.process);
    Ok(std::iter::once(list.daemon.pid).chain(disks).map(|process| of(Some(process))).collect())
}

fn of(process: Option<u32>) -> Memory {
    let folder = process.map_or("/proc/self".into(), |pid| format!("/proc/{pid}"));
    let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).ok();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let (limit_bytes, cgroup) = read("cgroup")
        .and_then(|groups| lowest(&groups, &mounts))
        .map_or((None, None), |(limit, cgroup)| (Some(limit), Some(cgroup)));
    // Of another process, and only with root's rights.
    let guests_bytes = process.and_then(|_| read("maps")).map(|maps| shared(&maps));
    Memory { process, limit_bytes, cgroup, guests_bytes }
}

/// The lowest limit from a process's cgroup up to the root, and where it is.
fn lowest(groups: &str, mounts: &str) -> Option<(u64, PathBuf)> {
    let mut limits = Vec::new();
    for line in groups.lines() {
        // `4:memory:/a/b`, and of version 2 `0::/a/b` (cgroups(7)).
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let file = match controllers {
            "" => "memory.max",
            list if list.split(',').any(|one| one == "memory") => "memory.limit_in_bytes",
            _ => continue,
        };
        let Some((root, mount)) = mount_of(mounts, controllers.is_empty()) else { continue };
        // In a container the mount may begin somewhere below.
        let below = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(path));
        let below = below.strip_prefix("/").unwrap_or(below);
        for group in mount.join(below).ancestors() {
            let word = std::fs::read_to_string(group.join(file)).unwrap_or_default();
            // `max` is no number.
            let limit = word.trim().parse::<u64>().ok().filter(|&limit| limit < NO_LIMIT);
            limits.extend(limit.map(|limit| (limit, group.to_path_buf())));
            if group == mount {
                break;
            }
        }
    }
    limits.into_iter().min()
}

/// Where the hierarchy with the memory controller begins, and where it is mounted (proc(5)).
fn mount_of(mounts: &str, unified: bool) -> Option<(PathBuf, PathBuf)> {
    mounts.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (name, options) = (kind.next()?, kind.nth(1).unwrap_or_default());
        let is_it = match unified {
            true => name == "cgroup2",
            false => name == "cgroup" && options.split(',').any(|option| option == "memory"),
        };
        let mut place = place.split(' ').skip(3);
        is_it.then_some((place.next()?.into(), place.next()?.into()))
    })
}

/// Bytes of files that are mapped to be written and shared: guests' memory, and records of what is in
/// flight, which are small.
fn shared(maps: &str) -> u64 {
    let bytes = |line: &str| {
        // `7f00-7f10 rw-s 00000000 00:01 1234   /memfd:guest (deleted)`
        let mut words = line.split_whitespace();
        let (first, last) = words.next()?.split_once('-')?;
        let (is_shared, file) = (words.next()? == "rw-s", words.nth(3)?);
        let size = u64::from_str_radix(last, 16).ok()?;
        let size = size.checked_sub(u64::from_str_radix(first, 16).ok()?)?;
        (is_shared && file.starts_with('/')).then_some(size)
    };
    maps.lines().filter_map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_on_the_way_up_counts() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        std::fs::create_dir_all(at("two/vms.slice/disks.service")).unwrap();
        std::fs::create_dir_all(at("one/a/b")).unwrap();
        let mounts = format!(
            "31 23 0:28 / {0} rw - tmpfs tmpfs rw\n35 31 0:32 / {0}/cpu rw - cgroup cgroup rw,cpu\n\
             36 31 0:33 /box {0}/one rw shared:3 - cgroup cgroup rw,memory\n\
             41 31 0:38 / {0}/two rw - cgroup2 cgroup2 rw\n",
            dir.path().display()
        );
        let groups = "5:cpu:/a\n4:memory:/box/a/b\n0::/vms.slice/disks.service\n";
        assert_eq!(lowest(groups, &mounts), None, "no file says anything");
        let set = |path: &str, word: &str| std::fs::write(at(path), word).unwrap();
        set("two/vms.slice/disks.service/memory.max", "max\n");
        set("one/a/b/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(lowest(groups, &mounts), None);
        set("two/vms.slice/memory.max", "1073741824\n");
        assert_eq!(lowest(groups, &mounts), Some((1 << 30, at("two/vms.slice"))));
        set("one/a/memory.limit_in_bytes", "67108864\n");
        assert_eq!(lowest(groups, &mounts), Some((64 << 20, at("one/a"))));
        set("two/vms.slice/disks.service/memory.max", "0\n");
        assert_eq!(lowest(groups, &mounts), Some((0, at("two/vms.slice/disks.service"))));
        assert_eq!(lowest("nonsense\n0::\n", &mounts), None);
        assert_eq!(lowest(groups, "nonsense\n"), None);
    }

    #[test]
    fn guests_memory_is_what_is_shared_and_written() {
        let maps = "00400000-00500000 r-xp 00000000 fe:00 12  /usr/bin/ringway\n\
                    7f0000000000-7f0010000000 rw-s 00000000 00:01 1034  /memfd:guest (deleted)\n\
                    7f1000000000-7f1000001000 rw-s 00000000 00:0e 13  anon_inode:[io_uring]\n\
                    7f2000000000-7f2000100000 rw-p 00000000 00:00 0 \n\
                    7f3000000000-7f3000200000 rw-s 00000000 00:31 7  /dev/shm/vm2\n\
                    nonsense\n";
        assert_eq!(shared(maps), (256 << 20) + (2 << 20));
    }
}
