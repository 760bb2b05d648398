//! What a guest may find after a power cut, from nothing but its own requests and their answers.
//!
//! A write *supersedes* another one to the same sector if it was issued after the other one had been
//! answered. Found may be whatever was issued, unless something supersedes it that had to be
//! durable: a write whose answer promised that, or that was answered before a successful flush was
//! issued.

use super::SECTOR;
use crate::pattern;
use std::fmt;

/// What a request puts into a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// What the disk held at the beginning.
    Initial,
    /// [`pattern::fill`] with this sequence number.
    Write(u64),
    /// Zeroes.
    Zeroes,
    /// Discarded: it may hold anything.
    Anything,
}

/// A time that has not come.
const NEVER: u64 = u64::MAX;

/// One request's effect on one sector.
#[derive(Clone, Copy, Debug)]
struct Change {
    content: Content,
    issued: u64,
    /// When its answer came.
    ended: u64,
    /// It succeeded.
    done: bool,
    /// Its answer promised that it is durable.
    durable: bool,
}

/// What is wrong, for people.
#[derive(Debug, PartialEq, Eq)]
pub struct Wrong(pub String);

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A request under way, as the oracle knows it.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    first: u64,
    sectors: u64,
    issued: u64,
}

/// Remembers requests and judges what is found.
#[derive(Debug)]
pub struct Oracle {
    disk: u64,
    initial: Vec<u8>,
    sectors: Vec<Vec<Change>>,
    clock: u64,
    /// When the latest of the successful flushes was issued.
    flushed: u64,
    /// When the answer came that a flush had failed.
    flush_failed: u64,
}

impl Oracle {
    /// For disk number `disk` (see [`pattern`]) that holds `initial`.
    #[must_use]
    pub fn new(disk: u64, initial: Vec<u8>) -> Self {
        let first =
            Change { content: Content::Initial, issued: 0, ended: 0, done: true, durable: true };
        Self {
            disk,
            sectors: initial.chunks(SECTOR).map(|_| vec![first]).collect(),
            initial,
            clock: 0,
            flushed: 0,
            flush_failed: NEVER,
        }
    }

    fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// A request that changes sectors is about to be issued.
    pub fn change(&mut self, first: u64, sectors: u64, content: Content) -> Ticket {
        let issued = self.now();
        for sector in &mut self.sectors[range(first, sectors)] {
            sector.push(Change { content, issued, ended: NEVER, done: false, durable: false });
        }
        Ticket { first, sectors, issued }
    }

    /// It was answered; `durable` if the answer promises as much.
    pub fn changed(&mut self, ticket: Ticket, done: bool, durable: bool) {
        let ended = self.now();
        for sector in &mut self.sectors[range(ticket.first, ticket.sectors)] {
            for change in sector.iter_mut().filter(|change| change.issued == ticket.issued) {
                (change.ended, change.done, change.durable) = (ended, done, durable);
            }
        }
    }

    /// A flush or a read is about to be issued.
    pub fn ask(&mut self, first: u64, sectors: u64) -> Ticket {
        Ticket { first, sectors, issued: self.now() }
    }

    /// A flush was answered; what it says counts for what had been answered before it was issued.
    ///
    /// # Errors
    /// If it succeeded after an earlier one had failed.
    pub fn flushed(&mut self, ticket: Ticket, done: bool) -> Result<(), Wrong> {
        let now = self.now();
        if !done {
            self.flush_failed = self.flush_failed.min(now);
            return Ok(());
        }
        if ticket.issued > self.flush_failed {
            return Err(Wrong(format!(
                "the flush issued at {} succeeds, though one had failed at {}",
                ticket.issued, self.flush_failed
            )));
        }
        self.flushed = self.flushed.max(ticket.issued);
        Ok(())
    }

    /// A read has brought `bytes`.
    ///
    /// # Errors
    /// If a sector cannot hold that.
    pub fn read(&mut self, ticket: Ticket, bytes: &[u8]) -> Result<(), Wrong> {
        self.now();
        for (sector, bytes) in (ticket.first..).zip(bytes.chunks(SECTOR)) {
            let changes = &self.sectors[range(sector, 1)][0];
            let bar = newest(changes, |change| change.done && change.ended < ticket.issued);
            self.judge(sector, bytes, bar)
                .map_err(|wrong| Wrong(format!("a read issued at {}: {wrong}", ticket.issued)))?;
        }
        Ok(())
    }

    /// The power was cut, and the disk holds `image`.
    ///
    /// # Errors
    /// If a sector cannot hold that.
    pub fn found(&self, image: &[u8]) -> Result<(), Wrong> {
        assert_eq!(image.len(), self.initial.len());
        for (sector, bytes) in (0..).zip(image.chunks(SECTOR)) {
            let changes = &self.sectors[range(sector, 1)][0];
            let bar = newest(changes, |change| {
                change.done && (change.durable || change.ended < self.flushed)
            });
            self.judge(sector, bytes, bar).map_err(|wrong| {
                let flushed = self.flushed;
                Wrong(format!("after the cut, the last flush issued at {flushed}: {wrong}"))
            })?;
        }
        Ok(())
    }

    /// `bytes` are of a change that was not over before `bar`.
    fn judge(&self, sector: u64, bytes: &[u8], bar: u64) -> Result<(), Wrong> {
        let changes = &self.sectors[range(sector, 1)][0];
        let fits = |change: &Change| change.ended >= bar && self.is(change.content, sector, bytes);
        if changes.iter().rev().any(fits) {
            return Ok(());
        }
        let old = changes.iter().rev().find(|change| self.is(change.content, sector, bytes));
        let what = match old {
            Some(change) => format!("{:?}, issued at {}", change.content, change.issued),
            None => self.strange(bytes),
        };
        let history: Vec<String> = changes.iter().map(Change::tell).collect();
        Err(Wrong(format!(
            "sector {sector} holds {what}; it must hold something that was not over at {bar}. Its \
             changes:\n  {}",
            history.join("\n  ")
        )))
    }

    fn is(&self, content: Content, sector: u64, bytes: &[u8]) -> bool {
        match content {
            Content::Initial => bytes == &self.initial[range(sector * 512, 512)],
            Content::Write(sequence) => {
                pattern::first_difference(bytes, self.disk, sector, sequence).is_none()
            }
            Content::Zeroes => bytes.iter().all(|&byte| byte == 0),
            Content::Anything => true,
        }
    }

    /// Whose content this is, if it is not of this sector.
    fn strange(&self, bytes: &[u8]) -> String {
        for (other, changes) in (0..).zip(&self.sectors) {
            let write = changes.iter().find(|change| {
                matches!(change.content, Content::Write(_)) && self.is(change.content, other, bytes)
            });
            if let Some(change) = write {
                return format!("{:?} of sector {other}", change.content);
            }
        }
        format!("what nobody wrote there ({:02x?}…)", &bytes[..8])
    }
}

impl Change {
    fn tell(&self) -> String {
        let Self { content, issued, ended, done, durable } = *self;
        let end = match (ended, done, durable) {
            (NEVER, ..) => "not answered".to_owned(),
            (_, false, _) => format!("failed at {ended}"),
            (_, true, false) => format!("done at {ended}"),
            (_, true, true) => format!("done and durable at {ended}"),
        };
        format!("{content:?}, issued at {issued}, {end}")
    }
}

/// When the newest of the changes that count was issued.
fn newest(changes: &[Change], counts: impl Fn(&Change) -> bool) -> u64 {
    changes.iter().filter(|change| counts(change)).map(|change| change.issued).max().unwrap_or(0)
}

fn range(first: u64, count: u64) -> std::ops::Range<usize> {
    let at = |n: u64| usize::try_from(n).expect("a small disk");
    at(first)..at(first + count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sector(sequence: u64) -> Vec<u8> {
        let mut bytes = vec![0; SECTOR];
        pattern::fill(&mut bytes, 7, 0, sequence);
        bytes
    }

    #[test]
    fn only_a_flush_issued_after_the_answer_counts() {
        let mut oracle = Oracle::new(7, vec![0; SECTOR]);
        let write = oracle.change(0, 1, Content::Write(1));
        let early = oracle.ask(0, 0);
        oracle.changed(write, true, false);
        oracle.flushed(early, true).unwrap();
        oracle.found(&vec![0; SECTOR]).unwrap();
        oracle.found(&sector(1)).unwrap();
        let late = oracle.ask(0, 0);
        oracle.flushed(late, true).unwrap();
        oracle.found(&sector(1)).unwrap();
        oracle.found(&vec![0; SECTOR]).unwrap_err();
        oracle.found(&sector(2)).unwrap_err();
    }

    #[test]
    fn what_was_under_way_together_may_win_either_way() {
        let mut oracle = Oracle::new(7, vec![0; SECTOR]);
        let first = oracle.change(0, 1, Content::Write(1));
        let second = oracle.change(0, 1, Content::Write(2));
        oracle.changed(second, true, true);
        oracle.changed(first, true, false);
        oracle.found(&sector(1)).unwrap();
        oracle.found(&sector(2)).unwrap();
        oracle.found(&vec![0; SECTOR]).unwrap_err();
        let third = oracle.change(0, 1, Content::Zeroes);
        oracle.found(&vec![0; SECTOR]).unwrap();
        oracle.changed(third, true, true);
        oracle.found(&sector(1)).unwrap_err();
        oracle.found(&vec![0; SECTOR]).unwrap();
    }

    #[test]
    fn a_failed_change_promises_nothing_and_does_not_come_back_later() {
        let mut oracle = Oracle::new(7, vec![0; SECTOR]);
        let failed = oracle.change(0, 1, Content::Write(1));
        oracle.changed(failed, false, true);
        oracle.found(&vec![0; SECTOR]).unwrap();
        oracle.found(&sector(1)).unwrap();
        let write = oracle.change(0, 1, Content::Write(2));
        oracle.changed(write, true, true);
        oracle.found(&sector(1)).unwrap_err();
    }

    #[test]
    fn reads_see_what_was_answered() {
        let mut oracle = Oracle::new(7, vec![0; SECTOR]);
        let write = oracle.change(0, 1, Content::Write(1));
        let early = oracle.ask(0, 1);
        oracle.changed(write, true, false);
        let late = oracle.ask(0, 1);
        oracle.read(early, &vec![0; SECTOR]).unwrap();
        oracle.read(late, &sector(1)).unwrap();
        oracle.read(late, &vec![0; SECTOR]).unwrap_err();
    }

    #[test]
    fn after_a_failed_flush_none_may_succeed() {
        let mut oracle = Oracle::new(7, vec![0; SECTOR]);
        let (first, second) = (oracle.ask(0, 0), oracle.ask(0, 0));
        oracle.flushed(first, false).unwrap();
        oracle.flushed(second, true).unwrap();
        let third = oracle.ask(0, 0);
        oracle.flushed(third, true).unwrap_err();
    }
}
