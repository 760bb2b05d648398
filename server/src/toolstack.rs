//! The disks that the toolstack of a Xen host attaches to its guests.
//!
//! One thread watches the folder in xenstore under which the toolstack puts them. Each disk is opened on a
//! thread of its own, and has one and a connection while it is served, so that none keeps the others waiting.

use super::disks::Disks;
use super::survive::survive;
use super::xen::{AGAIN, device};
use anyhow::{Context, anyhow, bail};
use ringway_control::config::{Attached, DiskArgs, Place, XenPlan};
use ringway_export::WarningLimit;
use ringway_terminal::reasons::in_full;
use ringway_xen_blkback::{Access, Address, StoreError, Tx, Xenstore};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a disk may be refused before that is logged: a disk that was just detached still has its
/// image for a moment.
const TIMEOUT: Duration = Duration::from_secs(3);

/// How often a disk is tried again after that, if its guest has it already.
const LATER: Duration = Duration::from_secs(1);

/// How often a disk is tried until it is logged.
const MOMENT: Duration = Duration::from_millis(100);

const NOT_AT_ALL: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The thread that hears the toolstack. Dropping it ends it.
pub(super) struct Toolstack {
    /// Keeps other daemons from the same disks, as long as this process lives.
    _claim: Option<File>,
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
    logged: bool,
    /// When to try again; `None` once the toolstack was told that it is over.
    again: Option<Instant>,
}

/// What the thread knows.
struct Watch {
    disks: Arc<Disks>,
    plan: Arc<XenPlan>,
    access: Arc<dyn Access>,
    store: Xenstore,
    refused: HashMap<String, Refused>,
    /// Disks that are being opened.
    opening: HashSet<String>,
    /// What came of it.
    opened: Receiver<Opened>,
    tell: Sender<Opened>,
    /// Rings when there is something in `opened`.
    bell: Arc<OwnedFd>,
    failures: WarningLimit,
}

/// A disk by its folder in the store, and why it is not served.
type Opened = (String, anyhow::Result<()>);

impl Toolstack {
    /// Listens to the store from now on; `claim` is what [`super::xen::claim`] has returned.
    ///
    /// # Errors
    /// That there is none.
    pub(super) fn listen(
        disks: &Arc<Disks>,
        plan: &Arc<XenPlan>,
        claim: Option<File>,
    ) -> anyhow::Result<Self> {
        let access = disks.host.xen().ok_or_else(|| anyhow!("--xen: it was not prepared for"))?;
        let store = Xenstore::open(&*access).map_err(|error| anyhow!("--xen: {error}"))?;
        let (disks, plan) = (Arc::clone(disks), Arc::clone(plan));
        let (tell, opened) = channel();
        let mut watch = Watch {
            disks,
            plan,
            access,
            store,
            refused: HashMap::new(),
            opening: HashSet::new(),
            opened,
            tell,
            bell: Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            failures: WarningLimit::warnings(None, "a xenstore that fails"),
        };
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
        Ok(Self { _claim: claim, end, thread: Some(thread) })
    }
}

impl Watch {
    fn begin(&mut self) -> anyhow::Result<()> {
        Ok(self.store.watch(&self.plan.folder(), "disks")?)
    }

    fn run(&mut self, stop: &OwnedFd) {
        loop {
            let looked = self.scan_disks();
            if let Err(error) = &looked {
                if let Some(pass) = self.failures.pass() {
                    let (suppressed, why) = (pass.suppressed, in_full(error));
                    tracing::warn!(suppressed, "xenstore: {why}; trying again");
                }
            }
            // Events that came between answers are in no socket any more.
            let timeout = if looked.is_ok() && self.store.has_events() {
                Some(NOT_AT_ALL)
            } else if looked.is_err() {
                Some(AGAIN)
            } else {
                self.until_again()
            };
            let mut fds = vec![stop.as_fd(), self.bell.as_fd()];
            // A store that is lost would be readable for ever.
            fds.extend(looked.is_ok().then(|| self.store.fd()));
            let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
            // Interrupted is as good as woken.
            let _ = poll(&mut polled, timeout.as_ref());
            if !polled[0].revents().is_empty() {
                return;
            }
            drop(polled);
            // It only says that there is something to look at.
            let _ = rustix::io::read(&*self.bell, &mut [0; 8]);
            if looked.is_err() {
                if let Ok(store) = Xenstore::open(&*self.access) {
                    self.store = store;
                    let _ = self.begin();
                }
            }
        }
    }

    /// How long until a disk is to be tried again.
    fn until_again(&self) -> Option<Timespec> {
        let waiting = self.refused.iter().filter(|(back, _)| !self.opening.contains(*back));
        let next = waiting.filter_map(|(_, refused)| refused.again).min()?;
        let left = next.saturating_duration_since(Instant::now());
        // Rounded up: too early is once more for nothing.
        Timespec::try_from(left + Duration::from_millis(1)).ok()
    }

    /// Looks at all there is, and serves what is new.
    fn scan_disks(&mut self) -> anyhow::Result<()> {
        self.store.events()?;
        while let Ok((back, opened)) = self.opened.try_recv() {
            self.opening.remove(&back);
            match opened {
                Ok(()) => drop(self.refused.remove(&back)),
                Err(error) => self.refuse(&back, &error),
            }
        }
        let folder = self.plan.folder();
        let mut there = Vec::new();
        for domain in self.store.list(Tx::NONE, &folder)? {
            for device in self.store.list(Tx::NONE, &format!("{folder}/{domain}"))? {
                there.push(format!("{folder}/{domain}/{device}"));
            }
        }
        self.refused.retain(|back, _| there.contains(back));
        for back in there {
            let now = Instant::now();
            let is_early = |refused: &Refused| refused.again.is_none_or(|again| now < again);
            if self.opening.contains(&back)
                || self.refused.get(&back).is_some_and(is_early)
                || self.disks.list().iter().any(|served| served.device.as_deref() == Some(&back))
            {
                continue;
            }
            let Some(at) = Address::read(&mut self.store, &back)? else { continue };
            if let Err(error) = self.open(at) {
                self.refuse(&back, &error);
            }
        }
        Ok(())
    }

    /// Begins to open a disk, which may wait for the image's lock or for a file system.
    fn open(&mut self, at: Address) -> anyhow::Result<()> {
        let guest = match self.plan.disks.is_empty() {
            true => None,
            false => self.store.read(Tx::NONE, &format!("/local/domain/{}/name", at.domid))?,
        };
        let (disks, plan) = (Arc::clone(&self.disks), Arc::clone(&self.plan));
        let (tell, bell, back) = (self.tell.clone(), Arc::clone(&self.bell), at.back.clone());
        let name = back.clone();
        std::thread::Builder::new().name("xen-open".into()).spawn(move || {
            let guest = guest.unwrap_or_default();
            let opened =
                survive("the thread that opens a disk", || serve(&disks, &plan, at, &guest));
            // Nobody waits for it if the daemon is stopping.
            let _ = tell.send((name, opened.unwrap_or_else(|| Err(anyhow!("it panicked")))));
            // It can only be full of rings that were not read, which is as good.
            let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
        })?;
        self.opening.insert(back);
        Ok(())
    }

    /// Tells the log and the toolstack, unless it may still work. Only a disk that nobody has offered yet is
    /// ended: a guest that has one may be served by somebody else, or wait for a successor whose volume is
    /// not there yet, and would lose it for good.
    fn refuse(&mut self, back: &str, error: &anyhow::Error) {
        let now = Instant::now();
        let refused = self.refused.entry(back.to_owned());
        let refused = refused.or_insert(Refused { since: now, logged: false, again: Some(now) });
        if now - refused.since < TIMEOUT {
            refused.again = Some(now + MOMENT);
            return;
        }
        refused.again = Some(now + LATER);
        let is_first = !std::mem::replace(&mut refused.logged, true);
        let words = in_full(error);
        match end_if_new(&mut self.store, back, &format!("22 {words}")) {
            Ok(true) => {
                refused.again = None;
                tracing::error!("{back} is not served: {words}");
            }
            Ok(false) if is_first => {
                tracing::error!(
                    "{back} is not served: {words}. Its guest has it already: trying again"
                );
            }
            Ok(false) => {}
            Err(error) if is_first => {
                tracing::error!(
                    "{back} is not served: {words}. The toolstack is not told: {error}"
                );
            }
            Err(_) => {}
        }
    }
}

/// Opens a disk of a guest of this name, and serves it from then on.
fn serve(disks: &Disks, plan: &XenPlan, at: Address, guest: &str) -> anyhow::Result<()> {
    let image = PathBuf::from(image_of(&at.params)?);
    if !image.is_absolute() {
        bail!("'{}' is no absolute path", image.display());
    }
    let (mut disk, origin) = words(disks, plan, (guest, at.devid), &image);
    disk.read_only |= at.read_only;
    let back = at.back.clone();
    let served = disk
        .into_spec(&image, Place::Xen(device(at)))
        .map_err(anyhow::Error::msg)
        .and_then(|spec| disks.add(spec));
    match &origin {
        Some(origin) => drop(served.context(origin.clone())?),
        None => drop(served?),
    }
    if let Some(from) = origin {
        tracing::info!("{back}: its options are those of {from}");
    }
    Ok(())
}

/// The options of a disk, and where they were said.
fn words(
    disks: &Disks,
    plan: &XenPlan,
    (guest, device): (&str, u32),
    image: &Path,
) -> (DiskArgs, Option<String>) {
    if plan.disks.is_empty() {
        return (plan.disk.clone(), None);
    }
    // Whatever it is called: a link to a volume, another node of a device.
    let here = disks.host.locate(image);
    let is_image = |path: &Path| path == image || disks.host.locate(path).is_same(&here);
    let (disk, origin) = plan.words(Attached { guest, device }, is_image);
    (disk, origin.map(str::to_owned))
}

/// Writes why a disk is not served to where the toolstack looks, and what ends its waiting; false, and nothing
/// is written, if anybody has offered it.
fn end_if_new(store: &mut Xenstore, back: &str, reason: &str) -> Result<bool, StoreError> {
    let key = format!("{back}/state");
    store.transaction(|store, tx| {
        // XenbusStateUnknown and XenbusStateInitialising. Without one it was removed meanwhile.
        let state = store.read(tx, &key)?;
        if !matches!(state.as_deref().map(str::trim), Some("0" | "1")) {
            return Ok(false);
        }
        store.write(tx, &format!("error/{back}/error"), reason)?;
        store.write(tx, &key, "6")?;
        Ok(true)
    })
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
