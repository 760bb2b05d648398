//! `ringway serve --xen`: the disks that the toolstack attaches to guests of this host.
//!
//! One thread watches the folder in xenstore under which the toolstack puts them. Each disk has a
//! thread and a connection of its own, so that no guest can keep the others waiting.

use super::disks::Disks;
use super::host::Host;
use super::survive::survive;
use anyhow::{Context, anyhow, bail};
use ringway_control::config::{Attached, DiskArgs, Place, XenData, XenDevice, XenPlan};
use ringway_export::Export;
use ringway_export::Limit;
use ringway_terminal::reasons::in_full;
pub(crate) use ringway_xen_blkback::{
    Access, Address, Here, Named, Queue, RecordName, SessionOptions, session_ioctls, worker_ioctls,
};
use ringway_xen_blkback::{Ended, Movement, Session, Tx, Xenstore};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a disk may be refused before that is told: a disk that was just detached still has its
/// image for a moment.
const PATIENCE: Duration = Duration::from_secs(3);

/// How often to try again meanwhile, and whether the store is back.
const AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

const NOT_AT_ALL: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

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
fn device(at: Address) -> XenDevice {
    let Address { back, front, domid, devid, params, read_only } = at;
    XenDevice { back, front, domid, devid, params, read_only }
}

/// As a session finds it.
pub(super) fn address(device: XenDevice) -> Address {
    let XenDevice { back, front, domid, devid, params, read_only } = device;
    Address { back, front, domid, devid, params, read_only }
}

/// Makes the folder of records, for this user alone, and opens it. Before there is a sandbox.
///
/// # Errors
/// That somebody else could write to it.
pub(super) fn prepare(plan: &XenPlan) -> anyhow::Result<Here> {
    let dir = &plan.args.xen_records;
    let cannot = || format!("--xen-records {}", dir.display());
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.with_context(cannot)?;
    let folder = File::open(dir).with_context(cannot)?;
    let meta = folder.metadata().with_context(cannot)?;
    if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o022 != 0 {
        bail!("{}: others can write to it. Give a folder of this user alone", cannot());
    }
    Ok(Here::new(plan.args.xen_store.clone(), folder.into()))
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
    let mut told = false;
    let session = loop {
        let store = Xenstore::open(&*options.access).map_err(std::io::Error::other);
        let begun =
            store.and_then(|store| Session::new(export, options.clone(), store, at.clone(), stop));
        match begun {
            Ok(session) => break session,
            // A store that is away, or no descriptor left: other disks are well.
            Err(error) if !std::mem::replace(&mut told, true) => {
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

/// The thread that hears the toolstack. Dropping it ends it.
pub(super) struct Toolstack {
    end: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Toolstack {
    fn drop(&mut self) {
        // One write can not fill the counter.
        let _ = rustix::io::write(&*self.end, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A disk that is not served.
struct Refused {
    since: Instant,
    told: bool,
}

/// What the thread knows.
struct Watch {
    disks: Arc<Disks>,
    plan: Arc<XenPlan>,
    access: Arc<dyn Access>,
    store: Xenstore,
    refused: HashMap<String, Refused>,
    told: Limit,
}

impl Toolstack {
    /// Listens to the store from now on.
    ///
    /// # Errors
    /// That there is none.
    pub(super) fn listen(disks: &Arc<Disks>, plan: &Arc<XenPlan>) -> anyhow::Result<Self> {
        let access = disks.host.xen().ok_or_else(|| anyhow!("--xen: it was not prepared for"))?;
        let store = Xenstore::open(&*access).map_err(|error| anyhow!("--xen: {error}"))?;
        let (disks, plan) = (Arc::clone(disks), Arc::clone(plan));
        let (refused, told) = (HashMap::new(), Limit::warnings(None, "a xenstore that fails"));
        let mut watch = Watch { disks, plan, access, store, refused, told };
        watch.begin().map_err(|error| anyhow!("--xen: {error}"))?;
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stop = Arc::clone(&end);
        let thread = std::thread::Builder::new().name("xen".into());
        let thread = thread.spawn(move || {
            while survive("the thread that hears the toolstack", || watch.run(&stop)).is_none() {
                // Not too fast, if it panics over all it hears.
                let mut polled = [PollFd::new(&*stop, PollFlags::IN)];
                let _ = poll(&mut polled, Some(&AGAIN));
                // What the store said before may be lost: it says all of it anew.
                let _ = watch.begin();
            }
        })?;
        Ok(Self { end, thread: Some(thread) })
    }
}

impl Watch {
    fn begin(&mut self) -> anyhow::Result<()> {
        Ok(self.store.watch(&self.plan.folder(), "disks")?)
    }

    fn run(&mut self, stop: &OwnedFd) {
        loop {
            let looked = self.look();
            if let Err(error) = &looked
                && let Some(pass) = self.told.pass()
            {
                let (suppressed, why) = (pass.suppressed, in_full(error));
                tracing::warn!(suppressed, "xenstore: {why}; trying again");
            }
            // Events that came between answers are in no socket any more.
            let patience = if looked.is_ok() && self.store.has_events() {
                Some(&NOT_AT_ALL)
            } else {
                (looked.is_err() || self.tries_again()).then_some(&AGAIN)
            };
            let store = self.store.fd();
            // A store that is lost would be readable for ever.
            let fds = if looked.is_ok() { vec![stop.as_fd(), store] } else { vec![stop.as_fd()] };
            let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            // Interrupted is as good as woken.
            let _ = poll(&mut polled, patience);
            if !polled[0].revents().is_empty() {
                return;
            }
            drop(polled);
            if looked.is_err()
                && let Ok(store) = Xenstore::open(&*self.access)
            {
                self.store = store;
                let _ = self.begin();
            }
        }
    }

    fn tries_again(&self) -> bool {
        self.refused.values().any(|refused| !refused.told)
    }

    /// Looks at all there is, and serves what is new.
    fn look(&mut self) -> anyhow::Result<()> {
        self.store.events()?;
        let folder = self.plan.folder();
        let mut there = Vec::new();
        for domain in self.store.list(Tx::NONE, &folder)? {
            for device in self.store.list(Tx::NONE, &format!("{folder}/{domain}"))? {
                there.push(format!("{folder}/{domain}/{device}"));
            }
        }
        self.refused.retain(|back, _| there.contains(back));
        for back in there {
            if self.refused.get(&back).is_some_and(|refused| refused.told)
                || self.disks.list().iter().any(|served| served.device.as_deref() == Some(&back))
            {
                continue;
            }
            let Some(at) = Address::read(&mut self.store, &back)? else { continue };
            match self.serve(at) {
                Ok(()) => drop(self.refused.remove(&back)),
                Err(error) => self.refuse(&back, &error),
            }
        }
        Ok(())
    }

    fn serve(&mut self, at: Address) -> anyhow::Result<()> {
        let image = PathBuf::from(image_of(&at.params)?);
        if !image.is_absolute() {
            bail!("'{}' is no absolute path", image.display());
        }
        let (mut disk, origin) = self.words(&at, &image)?;
        disk.read_only |= at.read_only;
        let (back, from) = (at.back.clone(), origin.clone());
        let served = disk
            .into_spec(&image, Place::Xen(device(at)))
            .map_err(anyhow::Error::msg)
            .and_then(|spec| self.disks.add(spec));
        match origin {
            Some(origin) => served.context(origin)?,
            None => served?,
        };
        if let Some(from) = from {
            tracing::info!("{back}: its options are those of {from}");
        }
        Ok(())
    }

    /// The options of a disk, and where they were said.
    fn words(&mut self, at: &Address, image: &Path) -> anyhow::Result<(DiskArgs, Option<String>)> {
        if self.plan.disks.is_empty() {
            return Ok((self.plan.disk.clone(), None));
        }
        let name = self.store.read(Tx::NONE, &format!("/local/domain/{}/name", at.domid))?;
        let attached = Attached { guest: &name.unwrap_or_default(), device: at.devid };
        // Whatever it is called: a link to a volume, another node of a device.
        let here = self.disks.host.locate(image);
        let is_image = |path: &Path| path == image || self.disks.host.locate(path).is_same(&here);
        let (disk, origin) = self.plan.words(attached, is_image);
        Ok((disk, origin.map(str::to_owned)))
    }

    /// Tells the log and the toolstack, unless it may still work.
    fn refuse(&mut self, back: &str, error: &anyhow::Error) {
        let now = Instant::now();
        let refused = self.refused.entry(back.to_owned());
        let refused = refused.or_insert(Refused { since: now, told: false });
        if now - refused.since < PATIENCE {
            return;
        }
        refused.told = true;
        let words = in_full(error);
        tracing::error!("{back} is not served: {words}");
        // Where the toolstack looks, and what ends its waiting; best effort.
        let told = format!("22 {words}");
        let _ = self.store.write(Tx::NONE, &format!("error/{back}/error"), &told);
        let _ = self.store.write(Tx::NONE, &format!("{back}/state"), "6");
    }
}

/// The image behind the key `params`: a path, perhaps behind its format.
fn image_of(params: &str) -> anyhow::Result<&str> {
    let Some((format, path)) = params.split_once(':').filter(|(word, _)| !word.contains('/'))
    else {
        return Ok(params);
    };
    match format {
        "raw" | "aio" | "phy" | "file" => Ok(path),
        _ => bail!("format '{format}': only raw images are served"),
    }
}

/// What to write to attach a disk.
pub(super) fn attach_line(image: &Path) -> String {
    format!(
        "format=raw,vdev=xvda,access=rw,backendtype=tap,script=block-ringway,target={}",
        image.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_is_a_path_and_raw() {
        for (params, image) in
            [("/a/b.img", "/a/b.img"), ("raw:/x", "/x"), ("aio:/x:y", "/x:y"), ("/x:y", "/x:y")]
        {
            assert_eq!(image_of(params).unwrap(), image);
        }
        for params in ["qcow2:/x", "vhd:/x"] {
            assert!(image_of(params).unwrap_err().to_string().contains("only raw"), "{params}");
        }
    }
}
