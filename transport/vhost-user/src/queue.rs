//! A virtqueue of a vhost-user guest, as a worker sees it (hot). How it begins and ends:
//! `queue/lifecycle.rs`; what guests behind an IOMMU or under migration need: `queue/slow_path.rs`.

mod lifecycle;
mod slow_path;

use super::dirty_log::QueueLog;
use super::inflight::QueueInflight;
use super::ring_place::RingPlace;
use ringway_core::mem::{Miss, Translator};
use ringway_core::{Request, Status, kill_point};
use ringway_export::{AnswerDue, Armed, Broken, PeerEventfd, Pop, RequestQueue, SessionInbox};
use ringway_ring::virtio_blk::{self, StatusByte};
use ringway_ring::virtqueue::{self, Device, Head};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The right to answer one virtio-blk request.
#[derive(Debug)]
pub struct Token {
    head: Head,
    status_at: StatusByte,
    due: AnswerDue,
}

impl Token {
    #[inline]
    fn new(head: Head, status_at: StatusByte) -> Self {
        Self { head, status_at, due: AnswerDue::default() }
    }
}

/// A virtqueue of either format, the guest memory it lies in, and its eventfds.
///
/// # Invariants
/// 1. `memory` keeps the map alive in which all resolved segments lie, `memory` and `place` what the ring
///    lies in, and `inflight` the mapping of the ring's record.
#[derive(Debug)]
pub struct Queue {
    ring: Device,
    memory: Translator,
    place: Arc<RingPlace>,
    inflight: Option<QueueInflight>,
    kick: OwnedFd,
    call: Option<Arc<PeerEventfd>>,
    calls: u64,
    /// Descriptors of the last chain.
    effort: u32,
    /// What the device writes is marked here while a guest is migrated.
    log: Option<Arc<QueueLog>>,
    /// Requests that were taken and stay unanswered in the record.
    left: usize,
    /// Its record may stay behind when its guest goes elsewhere: all that was taken is answered.
    answers_all: bool,
    /// Its front-end has gone, and its memory may be somebody else's by now: nothing is written there.
    mute: bool,
    /// The next request needs translations that were asked for: it stays in the ring until they come.
    stalled: bool,
    /// What a queue behind an IOMMU has beside.
    iommu: Option<Box<BehindIommu>>,
}

#[derive(Debug)]
struct BehindIommu {
    /// Where to ask for translations, and as which queue.
    inbox: Arc<SessionInbox>,
    at: usize,
    /// Pages that the next request must not have: the front-end knows no translation.
    faults: Vec<Miss>,
}

impl Queue {
    pub(super) fn call(&mut self) -> io::Result<()> {
        let Some(call) = &self.call else { return Ok(()) };
        self.calls += 1;
        let rung = call.signal();
        kill_point!(Called);
        if rung.is_err() {
            // Whatever the peer has done to it, this one is done with. If it blocked, so are all others.
            self.call = None;
        }
        rung
    }
}

impl RequestQueue for Queue {
    type Token = Token;

    #[inline]
    fn pop(&mut self, request: &mut Request) -> Result<Pop<Token>, Broken> {
        if self.stalled {
            return Ok(Pop::Empty);
        }
        let Some((head, chain)) = self.ring.pop(&mut self.memory).map_err(Broken::rule)? else {
            return Ok(Pop::Empty);
        };
        let (status_at, status) = match chain {
            Ok(chain) => {
                // A chain has less than 2^17 descriptors.
                #[allow(clippy::cast_possible_truncation)]
                let walked = chain.walked() as u32;
                self.effort = walked;
                let decoded = virtio_blk::decode(chain, &mut self.memory, request);
                match decoded.verdict {
                    Ok(()) => {
                        return Ok(Pop::Request(Token::new(head, decoded.status_at)));
                    }
                    Err(status) => {
                        Self::note_misses(chain, &mut self.memory);
                        (decoded.status_at, status)
                    }
                }
            }
            // No place for a status is known: the chain goes back with nothing written.
            Err(_) => {
                self.effort = u32::try_from(self.ring.walked()).unwrap_or(u32::MAX);
                (StatusByte::NOWHERE, Status::IoError)
            }
        };
        Ok(match self.stalls_over(head) {
            Ok(()) => Pop::Empty,
            Err(head) => Pop::Refused(Token::new(head, status_at), status),
        })
    }

    #[inline]
    fn effort(&self) -> u32 {
        self.effort
    }

    #[inline]
    fn complete(&mut self, token: Token, status: Status, written: u32) {
        let Token { head, status_at, due } = token;
        due.settle();
        if self.mute {
            return;
        }
        // SAFETY: the byte was resolved in the map that `memory` keeps alive (Queue invariant 1).
        let status_bytes = unsafe { status_at.write(status) };
        if let Some(log) = &self.log {
            log.answered(&status_at);
        }
        self.ring.push(head, written + status_bytes);
    }

    #[inline]
    fn publish(&mut self) -> io::Result<()> {
        if self.mute {
            return Ok(());
        }
        let wants_call = match &self.log {
            None => self.ring.publish(),
            Some(log) => Self::publish_logged(&mut self.ring, log),
        };
        if wants_call { self.call() } else { Ok(()) }
    }

    #[inline]
    fn has_work(&self) -> bool {
        self.ring.has_work() && !self.stalled
    }

    fn arm(&mut self) -> Result<Armed, Broken> {
        if self.mute {
            return Ok(Armed::Quiet);
        }
        let armed = self.ring.arm();
        self.log_wish();
        // Translations come with a command, which wakes the worker.
        match armed.map_err(Broken::rule)? {
            virtqueue::Armed::WorkArrived if !self.stalled => Ok(Armed::WorkArrived),
            _ => Ok(Armed::Quiet),
        }
    }

    fn disarm(&mut self) {
        if !self.mute {
            self.ring.disarm();
            self.log_wish();
        }
    }
}

#[cfg(test)]
mod tests;
