//! A cgroup for each process of a disk, where this daemon may make some (cgroups of version 2,
//! delegated: systemd's `Delegate=`, <https://systemd.io/CGROUP_DELEGATION>).
//!
//! ```text
//! ringway@vm1.service      delegated
//!   daemon                 the daemon, its helper, its spawner: processes are in leaves only
//!   disk-1, disk-2, …      a disk's process and its helper, with memory.max if it was given
//! ```

use anyhow::{Context, bail};
use rustix::fs::getxattr;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// The cgroup of the daemon itself.
const LEAF: &str = "daemon";

/// Where cgroups are made.
#[derive(Debug)]
pub(super) struct Cgroups {
    base: PathBuf,
    /// Why memory cannot be limited there.
    no_memory: Option<String>,
}

/// That of one disk, made; removed when its processes have ended.
#[derive(Debug)]
pub(super) struct Cgroup(PathBuf);

impl Cgroups {
    /// Moves this process into a leaf, if it may. There must be no child yet.
    ///
    /// # Errors
    /// Why there can be no cgroups.
    pub(super) fn prepare() -> anyhow::Result<Self> {
        let read = |file: &str| std::fs::read_to_string(file).with_context(|| file.to_owned());
        let (mine, mounts) = (read("/proc/self/cgroup")?, read("/proc/self/mountinfo")?);
        let own = own_cgroup(&mine, &mounts).context("it sees no cgroups of version 2")?;
        let is_leaf = own.file_name().is_some_and(|name| name == LEAF);
        let base = match own.parent() {
            _ if is_delegated(&own) => own.clone(),
            // systemd's `DelegateSubgroup=`, or a daemon before.
            Some(parent) if is_leaf && is_delegated(parent) => parent.into(),
            _ => bail!("{} is not delegated to it", own.display()),
        };
        if base == own {
            let leaf = make(&base.join(LEAF))?;
            write(&leaf.join("cgroup.procs"), "0")?;
        }
        let no_memory = give_memory(&base).err().map(|error| format!("{error:#}"));
        Ok(Self { base, no_memory })
    }

    /// The cgroup of a disk's processes, with at most so many bytes of memory.
    pub(super) fn make(&self, number: u64, memory_max: Option<u64>) -> anyhow::Result<Cgroup> {
        let cgroup = Cgroup(make(&self.base.join(format!("disk-{number}")))?);
        match (&self.no_memory, memory_max) {
            (Some(why), Some(_)) => bail!("no memory-max is possible: {why}"),
            (Some(_), None) => {}
            (None, max) => {
                let max = max.map_or_else(|| "max".to_owned(), |bytes| bytes.to_string());
                write(&cgroup.0.join("memory.max"), &max)?;
            }
        }
        Ok(cgroup)
    }
}

impl Cgroup {
    /// What a process writes `0` to, to be in it.
    pub(super) fn door(&self) -> anyhow::Result<OwnedFd> {
        let path = self.0.join("cgroup.procs");
        let file = File::options().write(true).open(&path);
        Ok(file.with_context(|| path.display().to_string())?.into())
    }

    /// Removes it, if nobody is in it. Whether it is gone.
    pub(super) fn remove(&self) -> bool {
        std::fs::remove_dir(&self.0).is_ok() || !self.0.exists()
    }
}

fn make(path: &Path) -> anyhow::Result<PathBuf> {
    match std::fs::create_dir(path) {
        // Of a daemon that was killed.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(path.into()),
        done => done.map(|()| path.into()).with_context(|| path.display().to_string()),
    }
}

fn write(path: &Path, what: &str) -> anyhow::Result<()> {
    // No file of a cgroup is made.
    let file = File::options().write(true).open(path);
    file.and_then(|mut file| io::Write::write_all(&mut file, what.as_bytes()))
        .with_context(|| path.display().to_string())
}

/// Has the cgroups within `base` count and limit memory.
fn give_memory(base: &Path) -> anyhow::Result<()> {
    let controllers = std::fs::read_to_string(base.join("cgroup.controllers"))?;
    if !controllers.split_whitespace().any(|name| name == "memory") {
        bail!(
            "{} has no memory controller (systemd: Delegate=memory; the cgroups of this host may be of \
             version 1)",
            base.display()
        );
    }
    write(&base.join("cgroup.subtree_control"), "+memory")
}

/// systemd marks what it has delegated; what is the root of a namespace is its container's own.
fn is_delegated(cgroup: &Path) -> bool {
    let marked = ["user.delegate", "trusted.delegate"].iter().any(|name| {
        let mut value = [0; 1];
        // One that is longer, and another word, is an error.
        getxattr(cgroup, *name, &mut value) == Ok(1) && value == *b"1"
    });
    // The root of all of them has no type.
    marked || (is_mount(cgroup) && cgroup.join("cgroup.type").exists())
}

/// Whether it is where cgroups begin for this process.
fn is_mount(cgroup: &Path) -> bool {
    !cgroup.parent().is_some_and(|parent| parent.join("cgroup.procs").exists())
}

/// Where the cgroup of a process is, by its `cgroup` and `mountinfo` (cgroups(7), proc(5)).
fn own_cgroup(mine: &str, mounts: &str) -> Option<PathBuf> {
    let path = Path::new(mine.lines().find_map(|line| line.strip_prefix("0::"))?);
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut fields = left.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        let is_ours = right.starts_with("cgroup2 ");
        // Above the root of a namespace: `/../a`.
        let within = path.strip_prefix(root).ok().filter(|_| is_ours)?;
        (!within.starts_with("..")).then(|| Path::new(point).join(within))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
        22 1 254:0 / / rw - ext4 /dev/vda rw\n\
        30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn its_own_cgroup_is_where_it_is_mounted() {
        let unit = "0::/system.slice/ringway@vm1.service\n";
        let found = own_cgroup(unit, MOUNTS).unwrap();
        assert_eq!(found, Path::new("/sys/fs/cgroup/system.slice/ringway@vm1.service"));
        assert_eq!(own_cgroup("0::/", MOUNTS).unwrap(), Path::new("/sys/fs/cgroup/"));
        // Beside those of version 1, and of a container that sees the root's own mount.
        let mixed = "4:memory:/a\n0::/kube/pod\n";
        let mounts = "9 1 0:26 /kube /sys/fs/cgroup/unified ro - cgroup2 none rw\n";
        let found = own_cgroup(mixed, mounts).unwrap();
        assert_eq!(found, Path::new("/sys/fs/cgroup/unified/pod"));
        for (mine, mounts) in [
            ("4:memory:/a\n", MOUNTS),
            (unit, "22 1 254:0 / / rw - ext4 /dev/vda rw\n"),
            ("0::/../b\n", MOUNTS),
            ("0::/other\n", mounts),
            ("", ""),
        ] {
            assert_eq!(own_cgroup(mine, mounts), None, "{mine} {mounts}");
        }
    }

    #[test]
    fn what_nobody_has_delegated_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("cgroup.procs"), "").unwrap();
        let inner = folder.path().join("a");
        std::fs::create_dir(&inner).unwrap();
        std::fs::write(inner.join("cgroup.type"), "domain\n").unwrap();
        assert!(!is_delegated(&inner) && !is_delegated(folder.path()));
    }
}
