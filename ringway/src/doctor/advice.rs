//! What stands in the way, and what to do about it.

use super::image::{Choice, Image};
use super::memory::{Memory, OWN_BYTES};
use super::report::{Report, Warning};
use ringway_control::size::Size;
use std::collections::BTreeMap;

/// A guest smaller than this is rare; its memory should fit the limit.
const GUEST_BYTES: u64 = 1 << 30;

/// Memory of guests that is worth a word; records of what is in flight are smaller.
const GUESTS_MIN: u64 = 1 << 20;

/// Requests that each worker of linux-aio takes from the host's pool: `DEPTH` and one poll.
const AIO_REQUESTS: u64 = 2049;

/// All warnings that the facts give reason for.
pub(crate) fn draw(report: &Report) -> Vec<Warning> {
    let mut list = Vec::new();
    let mut warn = |about, what: String, to_do: &str| {
        list.push(Warning { about, what, to_do: to_do.into() });
    };
    about_host(report, &mut warn);
    report.memory.iter().for_each(|memory| about_memory(memory, &mut warn));
    about_shared_limits(&report.memory, &mut warn);
    if let Some(image) = &report.image {
        if let Some(choice) = &image.choice {
            about_choice(report, image, choice, &mut warn);
        }
        about_image(image, &mut warn);
    }
    list
}

fn about_host(report: &Report, warn: &mut impl FnMut(&'static str, String, &str)) {
    let host = &report.host;
    if host.cpus == 1 {
        warn(
            "cpus",
            "one CPU: workers and guests take turns on it".into(),
            "give this host or container a second CPU; never use --poll always with one",
        );
    }
    if let Some(why) = &report.io_uring.error {
        warn("io_uring", why.clone(), "allow io_uring; until then another engine is taken");
    } else if let Some(limit) =
        host.memlock_bytes.filter(|&limit| limit < GUEST_BYTES && !host.memlock_exempt)
    {
        warn(
            "memlock",
            format!("{} is too small to pin guest memory for io_uring", Size(limit)),
            "`ulimit -l unlimited`, or LimitMEMLOCK=infinity in the unit; without it all works, \
             a little slower",
        );
    }
}

fn about_memory(memory: &Memory, warn: &mut impl FnMut(&'static str, String, &str)) {
    let Some(limit) = memory.limit_bytes else { return };
    let place = memory.cgroup.as_ref().map(|cgroup| format!(" ({})", cgroup.display()));
    let place = place.unwrap_or_default();
    let what = match (memory.process, memory.guests_bytes) {
        (Some(process), Some(guests)) if guests.saturating_add(OWN_BYTES) > limit => format!(
            "process {process} may use {}{place}, and its guests have {} that its reads may fill: \
             the kernel ends it when they do",
            Size(limit),
            Size(guests)
        ),
        (Some(_), Some(_)) => return,
        (process, _) => format!(
            "{} may use {}{place}. A guest's memory counts for a daemon that reads into it before \
             the guest has touched it, so the limit must have room for all guests' memory",
            process.map_or("what runs here".into(), |process| format!("process {process}")),
            Size(limit)
        ),
    };
    warn(
        "memory",
        what,
        "raise the limit, have guests' memory allocated by the VM (QEMU: prealloc=on, or huge \
         pages), or give disks processes of their own (isolate); see docs/sandbox.md",
    );
}

/// Processes of one cgroup have one limit: what fits for each may not fit for all.
fn about_shared_limits(list: &[Memory], warn: &mut impl FnMut(&'static str, String, &str)) {
    let mut groups = BTreeMap::<_, Vec<(u32, u64)>>::new();
    for memory in list {
        if let (Some(cgroup), Some(limit)) = (&memory.cgroup, memory.limit_bytes) {
            if let (Some(process), Some(guests)) = (memory.process, memory.guests_bytes) {
                if guests >= GUESTS_MIN {
                    groups.entry((cgroup, limit)).or_default().push((process, guests));
                }
            }
        }
    }
    for ((cgroup, limit), processes) in groups {
        let guests = processes.iter().fold(0u64, |sum, (_, guests)| sum.saturating_add(*guests));
        if processes.len() < 2 || guests.saturating_add(OWN_BYTES) <= limit {
            continue;
        }
        let numbers: Vec<_> = processes.iter().map(|(process, _)| process.to_string()).collect();
        warn(
            "memory",
            format!(
                "processes {} share {} ({}), and their guests have {} that reads may fill: one guest \
                 can use up what all of them have, and the kernel then ends any of them",
                numbers.join(", "),
                Size(limit),
                cgroup.display(),
                Size(guests)
            ),
            "isolate keeps faults apart, not limits: raise the limit, have guests' memory allocated \
             by the VM, or give each process a cgroup of its own; see docs/sandbox.md",
        );
    }
}

fn about_choice(
    report: &Report,
    image: &Image,
    choice: &Choice,
    warn: &mut impl FnMut(&'static str, String, &str),
) {
    let needed = AIO_REQUESTS * u64::from(choice.workers);
    if let Some(aio) = report.host.aio_requests {
        if choice.engine == "linux-aio" && aio.max.saturating_sub(aio.used) < needed {
            warn(
                "linux-aio",
                format!("{} of {} AIO requests are taken, {needed} are needed", aio.used, aio.max),
                "raise sysctl fs.aio-max-nr, or use --engine threads",
            );
        }
    }
    let Some(direct) = &image.o_direct else { return };
    let offset = direct.offset_alignment.unwrap_or(0);
    if !direct.works {
        warn(
            "O_DIRECT",
            "the file system has none for this image: what a guest caches is cached by this host \
             as well"
                .into(),
            "keep the image on ext4, xfs or a block device",
        );
    } else if choice.cache != "none" {
        warn(
            "O_DIRECT",
            format!(
                "the size is not a multiple of {offset}, which O_DIRECT needs: the page cache is \
                 used instead"
            ),
            &format!("stop its users, then `truncate -s %{offset} {}`", image.name),
        );
    } else if image.logical_block.is_some_and(|block| block < offset) {
        warn(
            "block size",
            format!("O_DIRECT needs multiples of {offset} bytes; smaller writes read first"),
            &format!("--block-size {offset}, if the guest's partitions allow it"),
        );
    } else if image.bytes.is_some_and(|bytes| bytes % 4096 != 0) {
        warn(
            "size",
            "not a multiple of 4096: --block-size 4096 and disks of such blocks are out of reach"
                .into(),
            &format!("stop its users, then `truncate -s %4096 {}`", image.name),
        );
    }
}

fn about_image(image: &Image, warn: &mut impl FnMut(&'static str, String, &str)) {
    if image.locked_otherwise {
        warn(
            "in use",
            "another program has locked parts of it; QEMU does so with a disk it has open".into(),
            "make sure that nobody else writes it",
        );
    }
    let Some(file_system) = &image.file_system else { return };
    let missing = image.bytes.zip(image.allocated_bytes).map(|(b, a)| b.saturating_sub(a));
    if let Some(missing) = missing.filter(|&missing| missing > file_system.free_bytes) {
        warn(
            "space",
            format!(
                "it can still grow by {}, but its file system has {} left; guests then see write \
                 errors",
                Size(missing),
                Size(file_system.free_bytes)
            ),
            "make room, or move the image",
        );
    }
    match file_system.name.as_str() {
        "tmpfs" => warn(
            "file system",
            "tmpfs keeps the image in memory: it is gone after a restart of the host".into(),
            "good for tests only",
        ),
        "overlay" => warn(
            "file system",
            "overlay copies the whole image with its first write".into(),
            "keep images on a volume, not in a container's own layer",
        ),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn process(process: u32, cgroup: &str, limit: Option<u64>, guests: u64) -> Memory {
        let guests_bytes = Some(guests);
        let cgroup = limit.map(|_| cgroup.into());
        Memory { process: Some(process), limit_bytes: limit, cgroup, guests_bytes }
    }

    fn said(list: &[Memory]) -> Vec<String> {
        let mut said = Vec::new();
        about_shared_limits(list, &mut |_, what, _| said.push(what));
        said
    }

    #[test]
    fn a_limit_that_processes_share_must_have_room_for_all_their_guests() {
        let (unit, limit) = ("/sys/fs/cgroup/disks.service", Some(3 * GIB));
        let daemon = process(1, unit, limit, 4096);
        let (a, b) = (process(7, unit, limit, 2 * GIB), process(8, unit, limit, 2 * GIB));
        // Each alone would fit.
        let said_of_two = said(&[daemon, a, b]);
        assert_eq!(said_of_two.len(), 1, "{said_of_two:?}");
        for word in ["processes 7, 8 share 3 GiB", unit, "guests have 4 GiB"] {
            assert!(said_of_two[0].contains(word), "{word}: {said_of_two:?}");
        }
        let apart = [process(7, unit, limit, 2 * GIB), process(8, "/else", limit, 2 * GIB)];
        let roomy = [process(7, unit, Some(5 * GIB), GIB), process(8, unit, Some(5 * GIB), GIB)];
        let free = [process(7, unit, None, 9 * GIB), process(8, unit, None, 9 * GIB)];
        let alone = [process(7, unit, limit, 9 * GIB), process(8, unit, limit, 4096)];
        for list in [&apart, &roomy, &free, &alone] {
            assert_eq!(said(list), [""; 0], "{list:?}");
        }
    }
}
