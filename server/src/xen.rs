//! `ringway serve --xen`: what is prepared for guests of a Xen host, and how one disk of theirs is served.

use super::host::Host;
use anyhow::{Context, bail};
use ringway_control::config::{XenData, XenDevice, XenPlan};
use ringway_export::Export;
pub(crate) use ringway_xen_blkback::{
    Access, Address, Here, Named, Queue, RecordName, SessionOptions, session_ioctls, worker_ioctls,
};
use ringway_xen_blkback::{Ended, Movement, Session, XENSTORES, Xenstore};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often to try again meanwhile, and whether the store is back.
pub(super) const AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// What the sessions of this plan have in common.
pub(super) fn session(plan: &XenPlan, host: &Host) -> Option<SessionOptions> {
    let movement = match plan.args.xen_data {
        XenData::Auto => Movement::Auto,
        XenData::Copy => Movement::Copy,
        XenData::Map => Movement::Map,
        XenData::Persistent => Movement::Persistent,
    };
    Some(SessionOptions { movement, access: host.xen()? })
}

/// As a plan describes it.
pub(super) fn device(at: Address) -> XenDevice {
    let Address { back, front, domid, devid, params, read_only } = at;
    XenDevice { back, front, domid, devid, params, read_only }
}

/// Makes the folder of records, for this user alone, and opens it. Before there is a sandbox.
///
/// # Errors
/// That somebody else could write to it.
pub(super) fn prepare(plan: &XenPlan) -> anyhow::Result<Here> {
    let dir = &plan.args.xen_records;
    let cannot = || format!("--xen-records {}", dir.display());
    // Others may search the folders around it, where sockets may be.
    if let Some(around) = dir.parent() {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(around);
        made.with_context(cannot)?;
    }
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.with_context(cannot)?;
    let folder = File::open(dir).with_context(cannot)?;
    let meta = folder.metadata().with_context(cannot)?;
    if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
        bail!("{}: others can write to it. Give a folder of this user alone", cannot());
    }
    Ok(Here::new(plan.args.xen_store.clone(), folder.into()))
}

/// How long another daemon may take to end: what it had in flight when it was killed keeps its files open.
const ENDING: Duration = Duration::from_secs(10);

/// Claims the disks of a store for this process, until what is returned is closed: two daemons would offer
/// and end the same disks. `None` if there is no store to be seen, or no place to claim it.
///
/// # Errors
/// That another daemon has them.
pub(super) fn claim(plan: &XenPlan) -> anyhow::Result<Option<File>> {
    let asked = plan.args.xen_store.as_deref();
    let usual = asked.is_none().then_some(XENSTORES.map(Path::new)).into_iter().flatten();
    let Some(store) = asked.into_iter().chain(usual).find_map(|place| place.canonicalize().ok())
    else {
        return Ok(None);
    };
    // Beside the store, whatever it is called.
    let mut name = store.clone().into_os_string();
    name.push(format!(".{}.ringway", plan.args.xen_name));
    let name = PathBuf::from(name);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match openat(CWD, &name, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => File::from(file),
        Err(error) => {
            let place = name.display();
            tracing::warn!(
                "that another daemon serves the same disks is not seen: {place}: {error}"
            );
            return Ok(None);
        }
    };
    let begun = Instant::now();
    while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if error != Errno::WOULDBLOCK {
            return Err(error).with_context(|| format!("--xen: cannot lock {}", name.display()));
        }
        if begun.elapsed() > ENDING {
            bail!(
                "--xen: another daemon serves the disks of {} in backend/{}: a disk has one back-end. Stop \
                 it first, or give another --xen-name",
                store.display(),
                plan.args.xen_name
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(Some(file))
}

/// Serves one disk until it is removed.
///
/// # Errors
/// That a worker failed, or the disk's session.
pub(super) fn serve(
    export: &Export<Queue>,
    at: &Address,
    options: SessionOptions,
    stop: BorrowedFd<'_>,
) -> std::io::Result<()> {
    let mut logged = false;
    let session = loop {
        let store = Xenstore::open(&*options.access).map_err(std::io::Error::other);
        let begun =
            store.and_then(|store| Session::new(export, options.clone(), store, at.clone(), stop));
        match begun {
            Ok(session) => break session,
            // A store that is away, or no descriptor left: other disks are well.
            Err(error) if !std::mem::replace(&mut logged, true) => {
                tracing::warn!(disk = export.disk().name(), "{error}; trying again");
            }
            Err(_) => {}
        }
        let mut polled = [PollFd::new(&stop, PollFlags::IN)];
        if poll(&mut polled, Some(&AGAIN)).is_ok_and(|rung| rung > 0) {
            return Ok(());
        }
    };
    match session.run() {
        Ended::Removed | Ended::ByOrder => Ok(()),
        Ended::Failed => {
            Err(std::io::Error::other("a worker or its session failed; the log says why"))
        }
    }
}

/// What to write to attach a disk.
pub(super) fn attach_line(image: &Path) -> String {
    format!(
        "format=raw,vdev=xvda,access=rw,backendtype=tap,script=block-ringway,target={}",
        image.display()
    )
}
