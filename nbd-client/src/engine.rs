//! The engine: files are connections of exports.
//!
//! ```text
//! queue ─► sending ─ submit: one call ─► the server ─ reap ─► done
//!             ▲                              │
//!             └── connection lost: again ────┘
//! ```

use crate::connection::{Connection, SEGMENTS_MAX};
use crate::loss::Loss;
use crate::operations::Operations;
use crate::shared::Shared;
use crate::table::Table;
use ringway_aio::bells::Bells;
use ringway_aio::{BellId, Counters, Done, Engine, FileId, Full, Handle, Io, Limits, Reaped};
use ringway_nbd_words::PAYLOAD_MAX;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

/// Bells from here on are those of connections.
const CONNECTIONS: BellId = 0xffff_0000;

/// Asks NBD servers.
///
/// Its files are [`Remote`](crate::Remote)s, by their handles, and what is asked of one is asked of the export.
/// When a connection is lost, what was not answered waits for the next one.
///
/// # Invariants
/// 1. `in_flight` counts operations from `queue` to `reap` and is at most `limits.depth`; each is in
///    `ready` or has a place in `operations`.
#[derive(Debug)]
pub struct Nbd {
    limits: Limits,
    bells: Bells,
    rung: Vec<BellId>,
    connections: Vec<Option<Connection>>,
    operations: Operations,
    ready: Vec<Done>,
    in_flight: u32,
    counters: Counters,
}

impl Nbd {
    /// An engine for `depth` operations at a time.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub fn new(depth: u32) -> io::Result<Self> {
        let mut limits = Limits::new("nbd", depth);
        limits.max_segments = SEGMENTS_MAX;
        limits.max_bytes = PAYLOAD_MAX;
        Ok(Self {
            limits,
            bells: Bells::new()?,
            rung: Vec::with_capacity(64),
            connections: Vec::new(),
            operations: Operations::new(depth),
            ready: Vec::with_capacity(depth as usize),
            in_flight: 0,
            counters: Counters::default(),
        })
    }

    /// Does something with a connection; if it is lost by that, it is told.
    #[inline]
    fn with(
        &mut self,
        at: usize,
        act: impl FnOnce(&mut Connection, &mut Table<'_>) -> Result<(), Loss>,
    ) {
        let Some(Some(connection)) = self.connections.get_mut(at) else { return };
        let mut table = Table {
            operations: &mut self.operations,
            ready: &mut self.ready,
            syscalls: &mut self.counters.syscalls,
        };
        if let Err(loss) = act(connection, &mut table) {
            if let Some(fd) = connection.fd() {
                self.bells.unwatch(fd);
            }
            connection.lose(&mut table, &loss);
        }
    }

    /// Sends, and has the engine ring when there is room again, where there is none.
    #[inline]
    fn send(&mut self, at: usize) {
        let was_full = self.connections[at].as_ref().is_some_and(|connection| connection.full);
        self.with(at, Connection::send);
        let Some(connection) = &self.connections[at] else { return };
        if connection.full != was_full {
            self.watch_room(at);
        }
    }

    #[cold]
    fn watch_room(&mut self, at: usize) {
        let Some(connection) = &self.connections[at] else { return };
        let Some(fd) = connection.fd() else { return };
        let (full, bell) = (connection.full, bell(at));
        if let Err(error) = self.bells.watch_room(bell, fd, full) {
            self.with(at, |_, _| Err(Loss::Host(error)));
        }
    }

    /// What has rung: bells of others go to `out`.
    #[inline]
    fn hear(&mut self, out: &mut Vec<BellId>) {
        self.bells.take(&mut self.rung);
        for at in 0..self.rung.len() {
            let rung = self.rung[at];
            match rung.checked_sub(CONNECTIONS) {
                None => out.push(rung),
                Some(at) => {
                    let at = at as usize;
                    if let Some(Some(connection)) = self.connections.get_mut(at) {
                        if connection.fd().is_some() {
                            connection.unread = true;
                            connection.closed |= self.bells.closed().contains(&rung);
                            if std::mem::take(&mut connection.full) {
                                self.watch_room(at);
                            }
                        }
                    }
                }
            }
        }
        self.rung.clear();
    }

    /// A connection has mail of its supervisor, or its owner has gone.
    #[cold]
    fn hear_supervisor(&mut self, at: usize) {
        let Some(Some(connection)) = self.connections.get_mut(at) else { return };
        if connection.shared.ended.load(SeqCst) {
            if connection.users > 0 {
                return self.with(at, Connection::end);
            }
            if let Some(fd) = connection.fd() {
                self.bells.unwatch(fd);
            }
            self.connections[at] = None;
            return;
        }
        let before = connection.fd();
        self.with(at, Connection::hear_supervisor);
        let after = self.connections[at].as_ref().and_then(Connection::fd);
        if let Some(fd) = after.filter(|_| before.is_none()) {
            if let Err(error) = self.bells.watch(bell(at), fd) {
                self.with(at, |_, _| Err(Loss::Host(error)));
            }
        }
    }

    /// The connection of an export that fewest use, of those that are here, and how many do.
    fn to_be_shared(&self, shared: &Arc<Shared>) -> Option<(usize, u32)> {
        let here = |(at, known): (usize, &Option<Connection>)| {
            let known = known.as_ref().filter(|known| Arc::ptr_eq(&known.shared, shared))?;
            Some((at, known.users))
        };
        self.connections.iter().enumerate().filter_map(here).min_by_key(|(_, users)| *users)
    }

    /// Takes another connection of an export, of which this engine has one already if one is `known`.
    /// `None` if all that it may have are here.
    fn take(&self, shared: &Arc<Shared>, known: Option<(usize, u32)>) -> io::Result<Option<usize>> {
        let known = known.and_then(|(at, _)| self.connections[at].as_ref());
        let Some(known) = known else {
            let taken = || io::Error::other("other workers have the connections to the NBD server");
            let seat = shared.seat().ok_or_else(taken)?;
            return shared.take(seat).map(Some).ok_or_else(taken);
        };
        Ok(shared.take(shared.seat_of(known.index)))
    }

    /// True if something can be done without waiting.
    fn has_work(&self) -> bool {
        let can = |connection: &Connection| {
            connection.unread || connection.can_send() || connection.lane.arrived.load(Relaxed)
        };
        !self.ready.is_empty() || self.connections.iter().flatten().any(can)
    }
}

impl Engine for Nbd {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn attach(&mut self, _: &Arc<File>) -> io::Result<FileId> {
        Err(no_export())
    }

    fn attach_handle(&mut self, _: &Arc<File>, handle: &Handle) -> io::Result<FileId> {
        let shared: Arc<Shared> = Arc::clone(handle).downcast().map_err(|_| no_export())?;
        let at = match self.to_be_shared(&shared) {
            Some((at, 0)) => at,
            known => match self.take(&shared, known)? {
                Some(index) => {
                    shared.lanes[index].listen(self.bells.waker());
                    let free = self.connections.iter().position(Option::is_none);
                    let at = free.unwrap_or(self.connections.len());
                    self.connections.resize_with(self.connections.len().max(at + 1), || None);
                    let depth = self.limits.depth;
                    self.connections[at] = Some(Connection::new(shared, index, number(at), depth));
                    at
                }
                None => known.map_or(0, |(at, _)| at),
            },
        };
        if let Some(connection) = &mut self.connections[at] {
            connection.users += 1;
        }
        // Also that its owner has gone before, so that what is asked of it fails.
        self.hear_supervisor(at);
        Ok(FileId(number(at)))
    }

    fn detach(&mut self, file: FileId) {
        let at = file.0 as usize;
        // The connection stays for the guest's next queue, until its disk has gone.
        if let Some(Some(connection)) = self.connections.get_mut(at) {
            connection.users -= 1;
            self.hear_supervisor(at);
        }
    }

    fn watch(&mut self, bell: BellId, fd: RawFd) -> io::Result<()> {
        debug_assert!(bell < CONNECTIONS);
        self.bells.watch(bell, fd)
    }

    fn unwatch(&mut self, _bell: BellId, fd: RawFd) {
        self.bells.unwatch(fd);
    }

    #[inline]
    unsafe fn queue(&mut self, io: &Io<'_>) -> Result<(), Full> {
        if self.in_flight == self.limits.depth {
            return Err(Full);
        }
        // SAFETY: passed on to the caller, who keeps to our limits: no registered buffers.
        let slot = unsafe { self.operations.begin(io) }.ok_or(Full)?;
        self.in_flight += 1;
        self.counters.queued += 1;
        self.with(io.file.0 as usize, |connection, table| {
            connection.queue(table, slot);
            Ok(())
        });
        Ok(())
    }

    #[inline]
    fn submit(&mut self) -> io::Result<()> {
        for at in 0..self.connections.len() {
            if self.connections[at].as_ref().is_some_and(Connection::can_send) {
                self.send(at);
            }
        }
        Ok(())
    }

    #[inline]
    fn reap(&mut self, out: &mut Reaped) -> usize {
        if self.bells.any() {
            self.hear(&mut out.rung);
        }
        for at in 0..self.connections.len() {
            let Some(connection) = &self.connections[at] else { continue };
            if connection.lane.arrived.load(Relaxed) {
                self.hear_supervisor(at);
            }
            if self.connections[at].as_ref().is_some_and(Connection::listens) {
                self.with(at, Connection::receive);
            }
            // What goes on with another request, and what a new connection gets.
            if self.connections[at].as_ref().is_some_and(Connection::can_send) {
                self.send(at);
            }
        }
        let found = self.ready.len();
        out.done.append(&mut self.ready);
        // At most `depth` are in flight (invariant 1).
        #[allow(clippy::cast_possible_truncation)]
        let fewer = found as u32;
        self.in_flight -= fewer;
        found
    }

    fn poll_doorbells(&mut self) -> io::Result<()> {
        self.bells.poll(&mut self.counters)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.has_work() {
            return Ok(());
        }
        self.bells.wait(timeout, &mut self.counters)
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

#[cold]
fn no_export() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is no NBD connection")
}

fn bell(at: usize) -> BellId {
    CONNECTIONS + number(at)
}

/// There are fewer disks than descriptors.
fn number(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(0)
}
