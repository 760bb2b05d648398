//! A front-end's IOMMU, as the device sees it: translations that the front-end has told
//! (VHOST_USER_IOTLB_MSG), and those that it is asked for (VHOST_USER_BACKEND_IOTLB_MSG).
//!
//! What is here knows nothing of queues that run; `session/iommu.rs` does.

use super::message::{IOTLB_BYTES_PADDED, Message};
use super::ring_place::{AREAS, RingPlace};
use super::start::{StartError, UserAddresses};
use ringway_core::mem::{
    Access, GuestMap, HostRange, IOMMU_PAGE, Iotlb, MISSES_MAX, MappingError, Miss, Permission,
    Quota, Translation, page_size,
};
use ringway_ring::virtqueue::{Format, QUEUE_SIZE_MAX};
use std::collections::VecDeque;
use std::sync::Arc;

/// Translations kept for a connection: 1.3 MiB. One more, and all are forgotten, and asked for again
/// when they are needed.
pub(super) const TRANSLATIONS_MAX: usize = 32_768;

/// Questions that the front-end has not answered yet; others wait until it does.
pub(super) const ASKED_MAX: usize = 64;

/// Pieces that an area of a ring may lie in: pages of its largest, which are 16 bytes a descriptor, and one
/// more as it may begin in the middle of a page.
const AREA_PIECES_MAX: usize = 16 * QUEUE_SIZE_MAX as usize / 4096 + 1;

/// Questions of one queue that were not sent yet: what a request or a ring needs is asked for in steps.
const UNSENT_MAX: usize = MISSES_MAX;

/// Answers in a row that promise a translation that was not told. An invalidation may take away what was
/// told a moment ago, for all questions that are open; the next message about the IOMMU begins anew.
const FUTILE_MAX: usize = ASKED_MAX;

/// The same, for the header of a question.
pub(super) const QUESTION_BYTES: u32 = 32;

/// Types of `struct vhost_iotlb_msg`.
const MISS: u8 = 1;
const UPDATE: u8 = 2;
const INVALIDATE: u8 = 3;

/// Why a message about the IOMMU was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum IommuError {
    #[error("an IOTLB message, but ACCESS_PLATFORM was not negotiated")]
    NotNegotiated,
    #[error("an IOTLB message of type {0}: only updates (2) and invalidations (3) are understood")]
    Type(u8),
    #[error("an IOTLB update of {size} bytes at {iova:#x} with permission {permission}")]
    Range { iova: u64, size: u64, permission: u8 },
    #[error(
        "an IOTLB update maps {size} bytes at {iova:#x} to user address {user:#x}, which is not in \
         one region of the memory table"
    )]
    Outside { iova: u64, size: u64, user: u64 },
}

/// Why nothing more is asked on a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Nonsense {
    #[error("it answers what was not asked")]
    NotAsked,
    #[error("it answers {FUTILE_MAX} times in a row that a translation was told, and none was")]
    Futile,
}

/// What an IOTLB message says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum IotlbChange {
    /// This is so from now on.
    Update(Translation),
    /// Nothing is known of these I/O virtual addresses, first to last.
    Invalidate(u64, u64),
}

/// Reads an IOTLB message; memory is looked up in `map`.
pub(super) fn read(message: &Message, map: &GuestMap) -> Result<IotlbChange, IommuError> {
    let (iova, size, user) = (message.u64(0), message.u64(8), message.u64(16));
    let [permission, kind] = message.u16(24).to_ne_bytes();
    match kind {
        UPDATE => {
            let wrong = IommuError::Range { iova, size, permission };
            let last = size.checked_sub(1).and_then(|more| iova.checked_add(more));
            let (Some(last), Some(permission)) = (last, Permission::from_bits(permission)) else {
                return Err(wrong);
            };
            let outside = IommuError::Outside { iova, size, user };
            let host = map.user_to_host(user, size).ok_or(outside)?;
            Ok(IotlbChange::Update(Translation { first: iova, last, host, permission }))
        }
        // A size of 0 is 2^64, which does not fit; what ends beyond all addresses ends at the last.
        INVALIDATE => Ok(IotlbChange::Invalidate(iova, iova.saturating_add(size.wrapping_sub(1)))),
        other => Err(IommuError::Type(other)),
    }
}

/// True if an IOTLB message takes memory away.
pub(super) fn is_invalidation(message: &Message) -> bool {
    message.u16(24).to_ne_bytes()[1] == INVALIDATE
}

/// The message that asks for a translation: `struct vhost_iotlb_msg`.
pub(super) fn question(miss: Miss) -> [u8; IOTLB_BYTES_PADDED] {
    let mut bytes = [0; IOTLB_BYTES_PADDED];
    bytes[..8].copy_from_slice(&miss.page.to_ne_bytes());
    bytes[24] = match miss.access {
        Access::Read => 1,
        Access::Write => 2,
    };
    bytes[25] = MISS;
    bytes
}

/// What the front-end has answered to all that a request waits for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answered {
    pub(super) learned: Vec<Translation>,
    /// Pages without one.
    pub(super) denied: Vec<Miss>,
}

/// What is known of a front-end's IOMMU.
#[derive(Debug)]
pub(super) struct Iommu {
    pub(super) table: Iotlb,
    /// Questions sent, in order, and for which queue; answers come in the same order. `None`: nobody
    /// needs it any more.
    asked: VecDeque<Option<(usize, Miss)>>,
    /// Questions of each queue that were not sent yet, at most [`UNSENT_MAX`]. A queue that stops, or
    /// whose ring moves, has none any more.
    unsent: Vec<VecDeque<Miss>>,
    /// The queue whose turn it is to ask.
    turn: usize,
    /// Answers in a row that promised what was not told.
    futile: usize,
    /// What the next request of each queue waits for. Bounded: a queue waits for one request.
    wanted: Vec<Vec<Miss>>,
    /// What it waits for no more: the front-end knows no translation.
    denied: Vec<Vec<Miss>>,
    /// A ring has no translation, and that was logged.
    pub(super) ring_fault_logged: bool,
    /// The beginning of an answer.
    pub(super) answer: Vec<u8>,
}

impl Iommu {
    pub(super) fn new(queues: usize) -> Self {
        Self {
            table: Iotlb::with_capacity(TRANSLATIONS_MAX),
            asked: VecDeque::with_capacity(ASKED_MAX),
            unsent: vec![VecDeque::new(); queues],
            turn: 0,
            futile: 0,
            wanted: vec![Vec::new(); queues],
            denied: vec![Vec::new(); queues],
            ring_fault_logged: false,
            answer: Vec::new(),
        }
    }

    /// True if `miss` is known by now.
    fn knows(&self, miss: &Miss) -> bool {
        self.table.find_for(miss.page, miss.access).is_some()
    }

    /// Queue `at` waits for this page.
    pub(super) fn want(&mut self, at: usize, miss: Miss) {
        let wanted = &mut self.wanted[at];
        if wanted.len() < MISSES_MAX && !wanted.contains(&miss) {
            wanted.push(miss);
        }
    }

    /// Queue `at` waits for nothing any more.
    pub(super) fn unwant(&mut self, at: usize) {
        self.wanted[at].clear();
        self.denied[at].clear();
        self.unsent[at].clear();
    }

    /// The front-end is to be asked for this page for queue `at`, unless it was.
    pub(super) fn ask(&mut self, at: usize, miss: Miss) {
        if self.unsent[at].contains(&miss) || self.has_asked(miss) || self.knows(&miss) {
            return;
        }
        if self.unsent[at].len() == UNSENT_MAX {
            // Of these some may have been told before anybody could ask.
            let mut unsent = std::mem::take(&mut self.unsent[at]);
            unsent.retain(|miss| !self.knows(miss));
            self.unsent[at] = unsent;
        }
        if self.unsent[at].len() < UNSENT_MAX {
            self.unsent[at].push_back(miss);
        }
    }

    fn has_asked(&self, miss: Miss) -> bool {
        self.asked.iter().flatten().any(|&(_, asked)| asked == miss)
    }

    /// The next question to send, unless too many wait for an answer. Queues take turns.
    pub(super) fn next_question(&mut self) -> Option<Miss> {
        if self.asked.len() >= ASKED_MAX {
            return None;
        }
        let queues = self.unsent.len();
        for at in (0..queues).map(|step| (self.turn + step) % queues) {
            while let Some(&miss) = self.unsent[at].front() {
                // Another queue may have asked the same meanwhile.
                if !self.has_asked(miss) && !self.knows(&miss) {
                    self.turn = at;
                    return Some(miss);
                }
                self.unsent[at].pop_front();
            }
        }
        None
    }

    /// The question was sent.
    pub(super) fn was_sent(&mut self) {
        if let Some(miss) = self.unsent[self.turn].pop_front() {
            self.asked.push_back(Some((self.turn, miss)));
        }
        self.turn = (self.turn + 1) % self.unsent.len();
    }

    /// Nothing is known and nobody waits. Answers that are on their way belong to what was asked
    /// before: the same pages may be elsewhere by now.
    pub(super) fn restart(&mut self) {
        self.table.clear();
        self.unsent.iter_mut().for_each(VecDeque::clear);
        self.futile = 0;
        self.asked.iter_mut().for_each(|miss| *miss = None);
        self.wanted.iter_mut().chain(&mut self.denied).for_each(Vec::clear);
        self.ring_fault_logged = false;
    }

    /// Questions go to another channel from now on; what the old one owes will not come.
    pub(super) fn renew_channel(&mut self) {
        self.answer.clear();
        let again: Vec<(usize, Miss)> = self.asked.drain(..).flatten().collect();
        again.into_iter().for_each(|(at, miss)| self.ask(at, miss));
        self.futile = 0;
    }

    /// The front-end has answered the oldest question: the page that it knows no translation of. An
    /// answer without a translation that comes after an invalidation is asked for once more.
    pub(super) fn was_answered(&mut self, found: bool) -> Result<Option<Miss>, Nonsense> {
        let answered = self.asked.pop_front().ok_or(Nonsense::NotAsked)?;
        let Some((_, miss)) = answered.filter(|(_, miss)| !self.knows(miss)) else {
            return Ok(None);
        };
        if !found {
            return Ok(Some(miss));
        }
        if self.futile == FUTILE_MAX {
            return Err(Nonsense::Futile);
        }
        self.futile += 1;
        if let Some(&at) = self.who_wants(miss).first() {
            self.ask(at, miss);
        }
        Ok(None)
    }

    /// The front-end has told something about the IOMMU.
    pub(super) fn translation_came(&mut self) {
        self.futile = 0;
    }

    /// Questions that wait for an answer or to be sent.
    pub(super) fn is_asking(&self) -> bool {
        !self.asked.is_empty() || self.unsent.iter().any(|unsent| !unsent.is_empty())
    }

    /// Queues whose next request waits for this page.
    pub(super) fn who_wants(&self, miss: Miss) -> Vec<usize> {
        (0..self.wanted.len()).filter(|&at| self.wanted[at].contains(&miss)).collect()
    }

    /// The front-end knows no translation of this page. What else a request waits for is waited for all the
    /// same: the place of its status may be there, and its failure is to be told.
    pub(super) fn deny(&mut self, miss: Miss) {
        for (wanted, denied) in self.wanted.iter_mut().zip(&mut self.denied) {
            let before = wanted.len();
            wanted.retain(|one| *one != miss);
            denied.extend(std::iter::repeat_n(miss, before - wanted.len()));
        }
    }

    /// Nobody can be asked: there is no translation of what is not known.
    pub(super) fn deny_all(&mut self) {
        self.unsent.iter_mut().for_each(VecDeque::clear);
        let table = &self.table;
        for (wanted, denied) in self.wanted.iter_mut().zip(&mut self.denied) {
            wanted.retain(|miss| {
                let is_known = table.find_for(miss.page, miss.access).is_some();
                if !is_known {
                    denied.push(*miss);
                }
                is_known
            });
        }
    }

    /// What is known of the pages that queue `at` waits for.
    pub(super) fn known_of(&self, at: usize) -> Vec<Translation> {
        let mut known: Vec<Translation> = Vec::new();
        for miss in &self.wanted[at] {
            match self.table.find_for(miss.page, miss.access) {
                Some(range) if !known.contains(range) => known.push(*range),
                _ => {}
            }
        }
        known
    }

    /// Queues that have an answer to all they wait for.
    pub(super) fn satisfied(&mut self) -> Vec<(usize, Answered)> {
        let mut found = Vec::new();
        for at in 0..self.wanted.len() {
            let wanted = &self.wanted[at];
            let waits = !wanted.is_empty() || !self.denied[at].is_empty();
            if !waits || !wanted.iter().all(|miss| self.knows(miss)) {
                continue;
            }
            let learned = self.known_of(at);
            self.wanted[at].clear();
            found.push((at, Answered { learned, denied: std::mem::take(&mut self.denied[at]) }));
        }
        found
    }

    /// Where `first..=last` is as far as it was known; it is not from now on. Pages in it that a
    /// request waits for, and that were told while others were still missing, are asked for again:
    /// guests invalidate more than they unmap.
    pub(super) fn forget(&mut self, first: u64, last: u64) -> Vec<HostRange> {
        let hosts = self.table.hosts(first, last);
        self.table.remove(first, last);
        let lost = |miss: &Miss| miss.page <= last && miss.page + (IOMMU_PAGE - 1) >= first;
        for at in 0..self.wanted.len() {
            let lost: Vec<Miss> =
                self.wanted[at].iter().filter(|&miss| lost(miss)).copied().collect();
            lost.into_iter().for_each(|miss| self.ask(at, miss));
        }
        hosts
    }

    /// Where the ring of queue `queue` at these I/O virtual addresses is in `map`: `None` until all of it is
    /// known, which is asked for.
    pub(super) fn ring_place(
        &mut self,
        queue: usize,
        at: UserAddresses,
        format: Format,
        map: &GuestMap,
        quota: &Arc<Quota>,
    ) -> Result<Option<RingPlace>, StartError> {
        let mut is_known = true;
        let mut pieces = [const { Vec::new() }; 3];
        for ((pieces, name), (iova, len, access)) in
            pieces.iter_mut().zip(AREAS).zip(ring_parts(at, format))
        {
            let found = self.table.pieces(iova, len, access, AREA_PIECES_MAX);
            is_known &= found.missed.is_empty();
            found.missed.into_iter().for_each(|miss| self.ask(queue, miss));
            let known: u64 = found.known.iter().map(|&(_, bytes)| bytes).sum();
            if found.known.len() == AREA_PIECES_MAX && known < len {
                let page = page_size();
                return Err(StartError::Scattered(name, MappingError::NotPages { page }));
            }
            *pieces = found.known;
        }
        is_known.then(|| RingPlace::of_pieces(&pieces, map, quota)).transpose()
    }
}

/// The areas of a ring: first I/O virtual address, bytes, and what the device does there.
fn ring_parts(at: UserAddresses, format: Format) -> [(u64, u64, Access); 3] {
    let (desc, driver, device) = format.area_bytes();
    // The descriptors of a packed ring are also where answers go.
    let descs = if format.packed { Access::Write } else { Access::Read };
    [
        (at.desc, desc as u64, descs),
        (at.avail, driver as u64, Access::Read),
        (at.used, device as u64, Access::Write),
    ]
}

/// True if some byte of a ring is in `first..=last`.
pub(super) fn ring_overlaps(at: UserAddresses, format: Format, first: u64, last: u64) -> bool {
    ring_parts(at, format)
        .into_iter()
        .any(|(iova, len, _)| iova <= last && iova.saturating_add(len - 1) >= first)
}

const _: () = assert!(QUESTION_BYTES as usize == IOTLB_BYTES_PADDED);

#[cfg(test)]
mod tests;
