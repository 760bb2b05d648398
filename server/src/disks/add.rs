//! Disks that come while the daemon runs: all of several, or none.

use super::super::departure::Departure;
use super::super::host::{NewImage, OpenDisk};
use super::super::isolate::{Isolated, Starting};
use super::super::served::lock;
use super::means::is_isolated;
use super::{AnyDisk, Disks, Ready};
use crate::sandbox::Guests;
use anyhow::bail;
use ringway_control::config::{DiskSpec, Place};
use ringway_control::protocol::Happened;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// A disk that is opened and listens, and is not served yet: what was made for it goes again unless it is.
pub(crate) enum Addition {
    /// By this process; with its image, if that was made.
    Here(Ready, Option<NewImage>),
    /// By one of its own.
    Apart(Arc<Isolated>),
}

impl Disks {
    /// Opens one more disk and serves it.
    ///
    /// # Errors
    /// One message; nothing was created or changed then.
    pub(crate) fn add(&self, spec: DiskSpec) -> anyhow::Result<AnyDisk> {
        let mut disks = self.serve_all(vec![self.open_to_add(spec)?])?;
        Ok(disks.remove(0))
    }

    /// Opens a disk that is to be added.
    ///
    /// # Errors
    /// One message; nothing was created or changed then.
    pub(crate) fn open_to_add(&self, spec: DiskSpec) -> anyhow::Result<Addition> {
        self.host.look_at(&spec)?;
        self.check_apart(&spec)?;
        if is_isolated(&spec, &self.options)? {
            let (spawner, id) = (self.spawner()?, self.next_id.fetch_add(1, SeqCst));
            let turn = usize::try_from(id).unwrap_or_default();
            let starting = Starting::new(spawner, spec, &self.options, self.log, turn)?;
            // With --lock-wait this takes its time; the daemon can stop meanwhile.
            let disk = starting.wait(id, |path| self.host.locate(path), spawner)?;
            return Ok(Addition::Apart(Arc::new(disk)));
        }
        if (self.guests == Guests::Nbd) != matches!(spec.place, Place::Nbd(_)) {
            bail!("a daemon serves NBD clients (--nbd) or virtual machines (--socket), not both");
        }
        if self.xen.is_some() != matches!(spec.place, Place::Xen(_)) {
            bail!(
                "this daemon serves what the toolstack of Xen attaches (--xen), and nothing else"
            );
        }
        // With --lock-wait this takes its time; the daemon can stop meanwhile.
        let OpenDisk { disk, new, clone } = self.host.open(&spec)?;
        let open = lock(&self.open);
        if !*open {
            bail!("the daemon is stopping");
        }
        // Another one may have come meanwhile.
        self.check_apart(&spec)?;
        let (queues, before) = (self.queues_now(disk.engine()), self.count_workers());
        self.provide(disk.engine(), queues + usize::from(spec.queues))?;
        self.warn_of_crowd(before);
        let id = self.next_id.fetch_add(1, SeqCst);
        let ready = self.prepare(Arc::new(disk), spec, (id, clone))?;
        Ok(Addition::Here(ready, new))
    }

    /// Serves disks that were opened.
    ///
    /// # Errors
    /// One message; none of them is served then, and what was made for them is gone, except for the image of
    /// one with a process of its own that was serving already.
    pub(crate) fn serve_all(&self, additions: Vec<Addition>) -> anyhow::Result<Vec<AnyDisk>> {
        let open = lock(&self.open);
        if !*open {
            self.abandon(additions);
            bail!("the daemon is stopping");
        }
        let (mut served, mut new_images) = (Vec::new(), Vec::new());
        // A process keeps its image as soon as it serves: those come last.
        let (here, apart): (Vec<_>, Vec<_>) =
            additions.into_iter().partition(|addition| matches!(addition, Addition::Here(..)));
        let mut additions = here.into_iter().chain(apart);
        while let Some(addition) = additions.next() {
            match self.serve(addition) {
                Ok((disk, new)) => {
                    served.push(disk);
                    new_images.extend(new);
                }
                Err(error) => {
                    drop(open);
                    self.abandon(additions.collect());
                    // Best effort: nobody has had the time to use them.
                    served.into_iter().for_each(|disk| drop(self.take(disk, false)));
                    return Err(error);
                }
            }
        }
        new_images.into_iter().for_each(NewImage::keep);
        for disk in &served {
            let (id, image) = (disk.id(), disk.image());
            tracing::info!(disk = image, id, "disk added");
            self.events.tell(Some((id, &image)), Happened::Added);
        }
        Ok(served)
    }

    fn serve(&self, addition: Addition) -> anyhow::Result<(AnyDisk, Option<NewImage>)> {
        match addition {
            Addition::Here(ready, new) => {
                let served = Arc::clone(&ready.served);
                self.launch(ready).inspect_err(|_| self.forget(&served))?;
                Ok((AnyDisk::Here(served), new))
            }
            Addition::Apart(disk) => {
                let spawner = self.spawner()?;
                // Another one may have come meanwhile.
                let apart = self.check_claim_apart(&disk.claim(&self.host));
                let launched = apart.and_then(|()| disk.launch(spawner, &self.bell, &self.events));
                launched.inspect_err(|_| disk.abandon(spawner))?;
                lock(&self.isolated).push(Arc::clone(&disk));
                Ok((AnyDisk::Apart(disk), None))
            }
        }
    }

    /// Has disks not be served that were opened, and takes away what was made for them.
    pub(crate) fn abandon(&self, additions: Vec<Addition>) {
        for addition in additions {
            match addition {
                Addition::Here(ready, new) => {
                    self.forget(&ready.served);
                    drop((ready, new));
                }
                Addition::Apart(disk) => {
                    self.spawner.iter().for_each(|spawner| disk.abandon(spawner));
                }
            }
        }
    }

    /// Serves a disk no more. An ephemeral clone is deleted if the disk is `removed` for good.
    ///
    /// # Errors
    /// As [`Disks::remove`].
    pub(crate) fn take(&self, disk: AnyDisk, removed: bool) -> anyhow::Result<Departure> {
        match disk {
            AnyDisk::Here(served) => self.take_here(served, removed),
            AnyDisk::Apart(disk) => self.take_isolated(&disk, removed),
        }
    }
}
