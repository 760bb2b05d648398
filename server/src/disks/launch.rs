//! A disk begins to be served.

use super::{Disks, Ready};
use crate::accept::Acceptor;
use crate::endpoint::Endpoint;
use crate::served::{Exported, Served, Server, lock};
use crate::session_threads::SessionThreads;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::sync_channel;

impl Disks {
    /// Serves a disk: on threads that all have, if its transport can.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(crate) fn launch(&self, ready: Ready) -> anyhow::Result<()> {
        let Ready { served, endpoint } = ready;
        if let Exported::VhostUser(export) = &served.export {
            let (disk, export) = (Arc::clone(&served), Arc::clone(export));
            let (outcome, ended) = sync_channel(1);
            *lock(&served.server) = Some(Server::Task(ended));
            let acceptor = Acceptor::new((disk, export), endpoint, Arc::clone(&self.bell), outcome);
            self.attend(acceptor)?;
        } else {
            self.launch_thread(served, endpoint)?;
        }
        self.bell.changed();
        Ok(())
    }

    /// The session threads, which are started for the first, have one more disk.
    fn attend(&self, acceptor: Acceptor) -> std::io::Result<()> {
        let mut threads = lock(&self.session_threads);
        let threads = match &mut *threads {
            Some(threads) => threads,
            none => none.insert(SessionThreads::start()?),
        };
        threads.add(Box::new(acceptor));
        Ok(())
    }

    fn launch_thread(&self, served: Arc<Served>, endpoint: Endpoint) -> anyhow::Result<()> {
        let (disk, bell) = (Arc::clone(&served), Arc::clone(&self.bell));
        let xen = self.xen.as_ref().and_then(|plan| crate::xen::session(plan, &self.host));
        let name = format!("disk-{}", served.id);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            // A panic ends this disk as an error does: it is heard of, and the daemon ends in order.
            let ended = catch_unwind(AssertUnwindSafe(|| disk.serve(&endpoint, xen)));
            // Its socket file goes before anybody hears that it has ended.
            drop(endpoint);
            disk.ended.store(true, SeqCst);
            drop(disk);
            bell.ended(ended.is_err());
            ended.unwrap_or_else(|panic| resume_unwind(panic))
        })?;
        *lock(&served.server) = Some(Server::Thread(thread));
        Ok(())
    }
}
