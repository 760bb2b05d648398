//! An export that is in use: its owner's side.

use crate::allocation::{Allocation, AllocationError};
use crate::connect::Connected;
use crate::first_flush::flush;
use crate::handshake::Negotiated;
use crate::ledger::Counts;
use crate::shared::{OnOutage, Shared, Wish};
use crate::supervisor::{Connect, Supervisor, Timeouts};
use ringway_aio::Handle;
use ringway_nbd_words::offers;
use rustix::net::{Shutdown, shutdown};
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// An export in use. Dropping it ends its connections.
#[derive(Debug)]
pub struct Remote {
    shared: Arc<Shared>,
    /// Why there is no connection at first, if its server is away.
    away: OnceLock<String>,
    wishes: Mutex<Option<Receiver<Wish>>>,
    supervisor: Mutex<Option<JoinHandle<()>>>,
}

impl Remote {
    /// An export with the sockets of `connected`, which must not block. The log calls it `name`.
    #[must_use]
    pub fn new(name: &str, connected: &Connected) -> Self {
        let (wish, wishes) = channel();
        let shared = Shared::new(name, connected, wish);
        let away = connected.away.clone().map_or_else(OnceLock::new, OnceLock::from);
        let wishes = Mutex::new(Some(wishes));
        Self { shared, away, wishes, supervisor: Mutex::default() }
    }

    /// What engines know it by.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Arc::<Shared>::clone(&self.shared)
    }

    /// What was agreed upon.
    #[must_use]
    pub fn negotiated(&self) -> Negotiated {
        self.shared.negotiated
    }

    /// How many connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.lanes.len()
    }

    /// The connections, as long as no engine has any of them.
    #[must_use]
    pub fn unused(&self) -> Option<Connected> {
        let mut sockets = self.shared.lanes.iter().map(|lane| lane.unused());
        let (socket, others) = (sockets.next()??, sockets.collect::<Option<_>>()?);
        let (negotiated, export) = (self.shared.negotiated, self.shared.export.clone());
        Some(Connected { socket, others, negotiated, export, away: self.away.get().cloned() })
    }

    /// Why there was no connection at first, if the server was away.
    #[must_use]
    pub fn was_away(&self) -> Option<&str> {
        self.away.get().map(String::as_str)
    }

    /// Why there is no connection, if its server is away now.
    #[must_use]
    pub fn outage(&self) -> Option<String> {
        self.shared.outage()
    }

    /// Has `call` be called when its server has gone and when it is back, by the thread that connects. It must not
    /// block. The first one is kept.
    pub fn on_outage(&self, call: Box<dyn Fn() + Send + Sync>) {
        let _ = self.shared.on_outage.set(OnOutage(call));
    }

    /// True if it was away, and no connection that has come since was used.
    #[must_use]
    pub fn never_came(&self) -> bool {
        self.away.get().is_some() && !self.shared.came.load(SeqCst)
    }

    /// So many engines share the connections, at most as many as there are: each gets its part. One,
    /// unless this is said before the first of them comes.
    pub fn share_among(&self, engines: usize) {
        self.shared.engines.store(engines.clamp(1, self.connections()), SeqCst);
    }

    /// Asks where the export has data, over its first connection, before an engine uses that. `None` if
    /// the server does not tell. After an error the connection is of no use.
    ///
    /// # Errors
    /// [`AllocationError`].
    pub fn allocation(&self) -> Result<Option<Allocation>, AllocationError> {
        let negotiated = &self.shared.negotiated;
        let first = self.shared.lanes.first().and_then(|lane| lane.unused());
        match first.filter(|_| negotiated.block_status.is_some()) {
            Some(socket) => Allocation::ask(&socket, negotiated).map(Some),
            None => Ok(None),
        }
    }

    /// From now on what is answered and not flushed is counted in a page that outlives this process. Before an
    /// engine uses the export.
    ///
    /// `lost` is called if writes that an earlier process had answered may be lost; what it keeps of that has to
    /// be kept when it returns.
    pub fn keep_counts(&self, counts: Counts, lost: impl FnOnce()) {
        self.shared.ledger.keep(counts, lost);
    }

    /// Asks for a flush over its first connection, before an engine uses that, and waits for its end: what an
    /// earlier process had answered is durable then. False if the server fails it.
    ///
    /// # Errors
    /// What the host says, also of a server that does not answer within `limit`: the connection is of no use then.
    pub fn flush_first(&self, limit: Duration) -> io::Result<bool> {
        let first = self.shared.lanes.first().and_then(|lane| lane.unused());
        first.map_or(Ok(true), |socket| flush(&socket, &self.shared.negotiated, limit))
    }

    /// Takes its server for one that is away: its connections end, and requests wait for others. Before an engine uses
    /// it, and before [`Remote::supervise`].
    pub fn take_for_away(&self, why: String) {
        let unused = self.shared.lanes.iter().filter_map(|lane| lane.unused());
        // One that has ended by itself is what is wanted.
        unused.for_each(|socket| {
            let _ = shutdown(&*socket, Shutdown::Both);
        });
        self.shared.set_outage(Some(&why));
        let _ = self.away.set(why);
    }

    /// True if what was answered is not flushed, and a flush can change that: there is a server, and nothing is
    /// lost yet.
    #[must_use]
    pub fn wants_flush(&self) -> bool {
        let shared = &self.shared;
        let offered = shared.negotiated.offers(offers::SEND_FLUSH);
        let owed = shared.ledger.is_owed() && !shared.ledger.is_lost();
        offered && owed && shared.outage().is_none()
    }

    /// Starts the thread that has lost connections come back, by `connect`. Requests wait meanwhile, or
    /// fail after a while if `timeouts` has it so, until there are connections again. Without this
    /// thread a lost connection stays lost, and its requests wait for ever.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub fn supervise(&self, connect: Box<Connect>, timeouts: Timeouts) -> io::Result<()> {
        let mut wishes = self.wishes.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(wishes) = wishes.take() else { return Ok(()) };
        let shared = Arc::downgrade(&self.shared);
        let supervisor = Supervisor { shared, connect, timeouts };
        let thread = std::thread::Builder::new().name("nbd".into());
        let thread = thread.spawn(move || supervisor.run(&wishes))?;
        // An engine that has it by now finds out by itself.
        if let Some(why) = self.away.get() {
            if let Some(old) = self.shared.lanes.first().and_then(|lane| lane.retreat()) {
                let (why, absent) = (why.clone(), true);
                self.shared.ask(Wish { lane: 0, why, old, lost: false, absent });
            }
        }
        *self.supervisor.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    /// Gives the export up: nothing more is sent, and what is not answered fails (`ENOTCONN`). What the server has
    /// been sent it may still do.
    pub fn end(&self) {
        self.shared.ended.store(true, SeqCst);
        self.shared.lanes.iter().for_each(|lane| lane.ring());
    }

    /// Waits until the server has closed the connections of an export that was given up with requests in flight,
    /// for `patience` at most: by then it has taken all that it was sent.
    pub fn await_end(&self, patience: Duration) {
        let begun = Instant::now();
        let supervisor = self.supervisor.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(supervisor) = &*supervisor else { return };
        while !supervisor.is_finished() && begun.elapsed() < patience {
            // Nobody unparks this thread.
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.end();
    }
}
