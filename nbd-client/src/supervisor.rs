//! How lost connections come back.
//!
//! ```text
//! engines (workers)                         supervisor (a thread)
//!   connection lost  ── Wish ──────────▶      has the others of the export given up, too
//!   the others       ◀── Mail::Retreat ──
//!                    ── Wish ──────────▶      waits until the server has let go of all of them
//!                                             connects, as often as there were connections, again and again
//!   reap             ◀── Mail::Connected ──   new sockets
//!                    ◀── Mail::GaveUp ─────   it takes too long: what is not sent fails until they come
//! ```
//!
//! No connection is used before all of them are there, and none that was made before one was lost is used
//! beside one that was made after it. So an answer is always of the server that all connections reach, and
//! no flush reaches a server that has not seen what an older one had answered, unless that is known by then
//! (`ledger.rs`; `ledger/model.rs` is a search for orders of events in which it is not).

use crate::connect::{Connected, wait_until_closed};
use crate::handshake::printable;
use crate::shared::{Lane, Mail, Shared, Wish};
use ringway_nbd_words::offers;
use std::error::Error;
use std::fs::File;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The shortest and longest time between two attempts to connect.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// A connection that has lived for so long without a question has not been ended for what was asked.
const RESTS: Duration = Duration::from_secs(10);

/// What guests use of an export, if it offers that when they begin.
const USED: u16 =
    offers::SEND_FLUSH | offers::SEND_FUA | offers::SEND_TRIM | offers::SEND_WRITE_ZEROES;

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// How long requests wait for a lost connection before they fail; `None` is for ever.
    pub give_up: Option<Duration>,
    /// How long a server may say nothing at all while requests wait for it, before its connection is
    /// given up. It may be twice as long until that is noticed.
    pub silence: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { give_up: None, silence: Duration::from_secs(60) }
    }
}

/// How connections are made anew, as many as there were.
pub type Connect = dyn Fn() -> Result<Connected, Box<dyn Error + Send + Sync>> + Send + Sync;

/// Looks after the connections of an export.
pub(crate) struct Supervisor {
    pub(crate) shared: Weak<Shared>,
    pub(crate) connect: Box<Connect>,
    pub(crate) timeouts: Timeouts,
}

impl Supervisor {
    /// Until the export is needed no more.
    pub(crate) fn run(&self, wishes: &Receiver<Wish>) {
        let (mut seen, mut outage) = (None, None);
        loop {
            match wishes.recv_timeout(self.timeouts.silence) {
                Ok(wish) => {
                    if self.bring_back(wish, wishes, &mut outage).is_none() {
                        return;
                    }
                    seen = None;
                }
                Err(RecvTimeoutError::Timeout) => {
                    let Some(shared) = self.shared.upgrade() else { return };
                    self.end_silent(&shared, &mut seen);
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Ends connections with requests that wait if nothing has come on any since the last look: a server
    /// that answers others may be long about one, but not within its reply.
    fn end_silent(&self, shared: &Shared, seen: &mut Option<Vec<u64>>) {
        let now: Vec<_> = shared.lanes.iter().map(|lane| lane.progress.load(Relaxed)).collect();
        let before = seen.replace(now.clone());
        let waiting = |lane: &&Arc<Lane>| lane.waits.load(Relaxed);
        if !shared.lanes.iter().any(|lane| waiting(&lane)) {
            *seen = None;
        } else if let Some(before) = before {
            let silent = before == now;
            let lanes = shared.lanes.iter().zip(before.iter().zip(&now));
            let stuck = lanes.filter(|(lane, (before, now))| {
                waiting(lane) && (silent || (before == now && lane.amid.load(Relaxed)))
            });
            let ended = stuck.filter(|(lane, _)| lane.end()).count();
            if ended > 0 {
                tracing::warn!(
                    disk = shared.name,
                    "the NBD server has said nothing for {} s while requests wait for \
                     it: the connection is given up",
                    self.timeouts.silence.as_secs()
                );
            }
        }
    }

    /// Connects until it works. `None` once nobody needs it any more.
    ///
    /// A server that takes connections and ends them without an answer is away: that is one outage with the one
    /// before, unless nothing waited for the connection, which was there for a while: that time is no outage.
    fn bring_back(
        &self,
        wish: Wish,
        wishes: &Receiver<Wish>,
        last: &mut Option<Outage>,
    ) -> Option<()> {
        let shared = self.shared.upgrade()?;
        shared.set_outage(Some(&wish.why));
        let answered = |lane: &Arc<Lane>| lane.answered.swap(false, Relaxed);
        // All of them are asked.
        let answers = shared.lanes.iter().filter(|lane| answered(lane)).count();
        let asked = shared.lanes.iter().any(|lane| lane.asked_at_once.load(Relaxed));
        let is_one =
            |last: &&mut Outage| answers == 0 && (asked || last.connected.elapsed() < RESTS);
        let (outage, goes_on) = match last.as_mut().filter(is_one) {
            Some(_) => (last.as_mut()?, true),
            None => (last.insert(Outage::begin(self.timeouts.give_up)), false),
        };
        if wish.absent {
            outage.reason.clone_from(&wish.why);
        } else if !shared.ended.load(SeqCst) {
            outage.tell(&shared.name, &wish.why, goes_on);
            tell_if_lost(&shared.name, &wish);
        }
        let lanes: Vec<_> = shared.lanes.iter().map(Arc::clone).collect();
        let name = shared.name.clone();
        let old = self.gather(shared, wish, wishes, outage)?;
        wait_until_closed(&old);
        drop(old);
        // Answers that were still on their way count for what was.
        lanes.iter().for_each(|lane| lane.answered.store(false, Relaxed));
        if goes_on {
            outage.fail_if_over(&name, &lanes);
            outage.rest();
        }
        loop {
            if self.shared.upgrade()?.ended.load(SeqCst) {
                return None;
            }
            let tried = (self.connect)();
            let shared = self.shared.upgrade()?;
            if shared.ended.load(SeqCst) {
                return None;
            }
            let error = match tried.and_then(|new| check(&shared, &new).map(|()| new)) {
                Ok(new) => {
                    let lanes = shared.lanes.iter().zip(new.sockets());
                    lanes.for_each(|(lane, new)| lane.connect(new));
                    shared.came.store(true, SeqCst);
                    shared.set_outage(None);
                    outage.tell_end(&shared.name);
                    return Some(());
                }
                Err(error) => error,
            };
            let why = error.to_string();
            shared.set_outage(Some(&why));
            outage.tell_reason(&shared.name, &why);
            outage.fail_if_over(&shared.name, &shared.lanes);
            drop(shared);
            outage.rest();
        }
    }

    /// Has all connections be given up that were made together with the one that is lost, and waits for
    /// their sockets: for answers to what was sent on them, but not to a server that is silent. `None` once
    /// nobody needs new ones.
    fn gather(
        &self,
        shared: Arc<Shared>,
        first: Wish,
        wishes: &Receiver<Wish>,
        outage: &mut Outage,
    ) -> Option<Vec<Arc<File>>> {
        let lanes: Vec<_> = shared.lanes.iter().map(Arc::clone).collect();
        let mut old: Vec<Option<Arc<File>>> = vec![None; lanes.len()];
        for (at, lane) in lanes.iter().enumerate() {
            old[at] = if at == first.lane { Some(Arc::clone(&first.old)) } else { lane.retreat() };
        }
        let name = shared.name.clone();
        // The last one that has it is an engine, or its owner: without them no wish comes.
        drop(shared);
        // For all of them together: else a guest would wait once more for each.
        let mut end = Instant::now() + self.timeouts.silence;
        while old.iter().any(Option::is_none) {
            let next = outage.over().filter(|_| !outage.failing).map_or(end, |over| over.min(end));
            match wishes.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(wish) => {
                    tell_if_lost(&name, &wish);
                    old[wish.lane] = Some(wish.old);
                }
                Err(RecvTimeoutError::Timeout) => {
                    outage.fail_if_over(&name, &lanes);
                    if Instant::now() >= end {
                        let left = lanes.iter().zip(&old).filter(|(_, old)| old.is_none());
                        self.end_busy(&name, left.map(|(lane, _)| lane));
                        end = Instant::now() + self.timeouts.silence;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        Some(old.into_iter().flatten().collect())
    }

    /// Ends connections whose requests are not answered in time after another one was lost.
    fn end_busy<'a>(&self, name: &str, lanes: impl Iterator<Item = &'a Arc<Lane>>) {
        let ended = lanes.filter(|lane| lane.end()).count();
        tracing::warn!(
            disk = name,
            "the NBD server has not answered all that was sent on {ended} other connections within {} s: \
             they are given up, too",
            self.timeouts.silence.as_secs()
        );
    }
}

/// A time without an answer: it ends with the first one that comes by a new connection.
struct Outage {
    begun: Instant,
    /// How long it may be before requests fail; `None` if they never do.
    most: Option<Duration>,
    /// That requests fail is told.
    failing: bool,
    /// How long to wait before the next attempt.
    pause: Duration,
    /// Why there was no connection, when that was told last.
    reason: String,
    /// How often a connection has come, and gone without an answer.
    flaps: u32,
    /// When the last one came.
    connected: Instant,
}

impl Outage {
    fn begin(most: Option<Duration>) -> Self {
        let (begun, pause) = (Instant::now(), PAUSE.0);
        let (reason, connected) = (String::new(), begun);
        Self { begun, most, failing: false, pause, reason, flaps: 0, connected }
    }

    fn tell(&mut self, name: &str, why: &str, goes_on: bool) {
        self.flaps += u32::from(goes_on);
        match self.flaps {
            0 => tracing::warn!(
                disk = name,
                "the connection to the NBD server is lost: {why}. Requests wait for a new one"
            ),
            1 => tracing::warn!(
                disk = name,
                "the NBD server has taken a connection and ended it without an answer ({why}). It is tried on, \
                 more and more seldom, and that is not told again until it has answered"
            ),
            _ => tracing::debug!(disk = name, "the connection is lost again: {why}"),
        }
    }

    fn tell_reason(&mut self, name: &str, reason: &str) {
        // A server that is there again may have another reason than one that was not.
        if self.reason != reason {
            tracing::warn!(disk = name, "not connected yet: {reason}");
            reason.clone_into(&mut self.reason);
        }
    }

    /// There is a connection.
    fn tell_end(&mut self, name: &str) {
        self.connected = Instant::now();
        let seconds = self.begun.elapsed().as_secs_f32();
        match self.flaps {
            // Whoever reads it can rely on it.
            0 => tracing::info!(
                disk = name,
                "connected to the NBD server again after {seconds:.1} s"
            ),
            _ => tracing::debug!(disk = name, "connected to the NBD server once more"),
        }
    }

    /// Waits until the next attempt is due.
    fn rest(&mut self) {
        // Nobody unparks this thread.
        std::thread::park_timeout(self.pause);
        self.pause = (self.pause * 2).min(PAUSE.1);
    }

    /// When requests fail.
    fn over(&self) -> Option<Instant> {
        self.most.map(|most| self.begun + most)
    }

    /// Has requests fail if it is too long.
    fn fail_if_over(&mut self, name: &str, lanes: &[Arc<Lane>]) {
        if self.over().is_none_or(|over| Instant::now() < over) {
            return;
        }
        // Also if it was told: what has come since may have been sent to a server that ends it all.
        if !std::mem::replace(&mut self.failing, true) {
            tracing::error!(
                disk = name,
                "no answer of the NBD server for {} s (reconnect-timeout): requests fail until there is one",
                self.begun.elapsed().as_secs()
            );
        }
        lanes.iter().for_each(|lane| lane.deliver(Mail::GaveUp));
    }
}

fn tell_if_lost(name: &str, wish: &Wish) {
    if wish.lost {
        tracing::error!(
            disk = name,
            "writes that the NBD server had answered, and that were not flushed yet, may be lost \
             with it: flushes fail from now on. --cache writethrough leaves nothing to be lost"
        );
    }
}

/// Whether it is the same export as before, as far as its guest can tell, with as many connections. What was used
/// of the server has to be there; it may offer more by now.
fn check(shared: &Shared, new: &Connected) -> Result<(), Box<dyn Error + Send + Sync>> {
    let lanes = shared.lanes.len();
    let (was, is) = (shared.negotiated, new.negotiated);
    if was.bytes != is.bytes {
        let (was, is) = (was.bytes, is.bytes);
        return Err(format!(
            "the export has another size than before ({was} bytes, now {is}): serve the disk anew"
        )
        .into());
    }
    let several = if lanes > 1 { offers::CAN_MULTI_CONN } else { 0 };
    let used = was.flags & (USED | several);
    // A disk that is not written loses nothing by it.
    let closed = is.flags & !was.flags & offers::READ_ONLY;
    // What is written without FUA stays in a cache that did not exist, and that nobody has emptied.
    let writes_through = was.offers(offers::SEND_FLUSH) || was.offers(offers::SEND_FUA);
    let cached = !writes_through && is.offers(offers::SEND_FLUSH);
    if cached {
        return Err("the server has a cache now, which it did not have when the disk was opened: its flushes would be \
             answered without being asked for. Serve the disk anew"
            .into());
    }
    let takes = is.min_block <= was.min_block && is.max_block >= was.max_block;
    if is.flags & used != used || closed != 0 || !takes || was.structured != is.structured {
        return Err(format!(
            "the export lacks what is used of it (it had flags {:#x}, blocks of {} to {} bytes, structured replies: \
             {}; now {:#x}, {} to {}, {}): serve the disk anew",
            was.flags,
            was.min_block,
            was.max_block,
            was.structured,
            is.flags,
            is.min_block,
            is.max_block,
            is.structured
        )
        .into());
    }
    // It may have been asked for what it gives to who names nothing.
    if let Some(was) = &shared.export {
        if new.export.as_ref() != Some(was) {
            let is =
                new.export.as_ref().map(|is| format!("gives the export '{}' now", printable(is)));
            return Err(format!(
            "the server {}, and this disk is its export '{}': have it give that again, or serve the disk anew with \
             the name of the export that is meant",
            is.as_deref().unwrap_or("does not say any more which export it gives"),
            printable(was)
        )
        .into());
        }
    }
    let count = new.sockets().count();
    if count < lanes {
        return Err(format!(
            "the server takes {count} connections, and the disk had {lanes}: have it take as many again, \
             or serve the disk anew"
        )
        .into());
    }
    Ok(())
}
