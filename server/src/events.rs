//! What happens, reported to whoever reads `ctl events`.
//!
//! Reported by sessions, by whoever carries out commands and by threads that write the log; never by
//! workers. Nobody waits for a reader: each has room for some events, and what finds none is counted
//! and reported when there is room again.

use super::bell::event;
use super::served::lock;
use ringway_control::protocol::{Event, Happened, VERSION};
use ringway_export::Notice;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

/// Readers at a time.
const READERS_MAX: usize = 8;
/// Events that a reader may be behind.
const ROOM: usize = 1024;

/// All that is reported.
#[derive(Default)]
pub(crate) struct Events {
    shared: Mutex<Shared>,
    lost: AtomicU64,
}

#[derive(Default)]
struct Shared {
    /// The number of the last one.
    number: u64,
    readers: Vec<Arc<Mailbox>>,
}

/// What a reader has not read yet.
struct Mailbox {
    bell: OwnedFd,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    events: VecDeque<Event>,
    lost: u64,
}

/// One reader; dropping it ends that.
pub(crate) struct Reader<'a> {
    events: &'a Events,
    mailbox: Arc<Mailbox>,
}

impl Events {
    /// Tells something about a disk, by its number and image, or about the daemon.
    pub(crate) fn tell(&self, disk: Option<(u64, &str)>, happened: Happened) {
        let mut shared = lock(&self.shared);
        shared.number += 1;
        let event = Event {
            version: VERSION,
            number: shared.number,
            time_us: now_us(),
            id: disk.map(|(id, _)| id),
            image: disk.map(|(_, image)| image.to_owned()),
            happened,
        };
        for reader in &shared.readers {
            if !reader.put(&event) {
                self.lost.fetch_add(1, Relaxed);
            }
        }
    }

    /// Tells what a session has noticed.
    pub(crate) fn notice(&self, disk: (u64, &str), notice: Notice) {
        let happened = match notice {
            Notice::Connected => Happened::Connected,
            Notice::Disconnected { why } => Happened::Disconnected { why },
            Notice::Broken { queue, why } => Happened::Broken { queue, why },
            Notice::Recovered { queue, requests } => Happened::Recovered { queue, requests },
        };
        self.tell(Some(disk), happened);
    }

    /// Reads from now on; `None` if there are too many readers.
    ///
    /// # Errors
    /// What the host says to an eventfd.
    pub(crate) fn read(&self) -> io::Result<Option<Reader<'_>>> {
        let mailbox = Arc::new(Mailbox { bell: event()?, waiting: Mutex::default() });
        let readers = &mut lock(&self.shared).readers;
        if readers.len() >= READERS_MAX {
            return Ok(None);
        }
        readers.push(Arc::clone(&mailbox));
        Ok(Some(Reader { events: self, mailbox }))
    }

    /// How many events readers have lost, all together.
    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

impl Mailbox {
    /// False if there is no room.
    fn put(&self, event: &Event) -> bool {
        let mut waiting = lock(&self.waiting);
        let fits = waiting.events.len() < ROOM;
        if fits {
            waiting.events.push_back(event.clone());
        } else {
            waiting.lost += 1;
        }
        drop(waiting);
        // A full counter rings too.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        fits
    }
}

impl Reader<'_> {
    /// Readable when there is something to take.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.mailbox.bell.as_fd()
    }

    /// All there is, in its order; after it, how many found no room.
    pub(crate) fn take(&self) -> Vec<Event> {
        let mut counter = [0; 8];
        // Empty already is as good as emptied.
        let _ = rustix::io::read(&self.mailbox.bell, &mut counter);
        let Waiting { events, lost } = std::mem::take(&mut *lock(&self.mailbox.waiting));
        let number = events.back().map_or(0, |event| event.number) + lost;
        let gap = Event {
            version: VERSION,
            number,
            time_us: now_us(),
            id: None,
            image: None,
            happened: Happened::Lost { events: lost },
        };
        events.into_iter().chain((lost > 0).then_some(gap)).collect()
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        let readers = &mut lock(&self.events.shared).readers;
        readers.retain(|other| !Arc::ptr_eq(other, &self.mailbox));
    }
}

fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_stalls_loses_events_and_is_told_how_many() {
        let events = Events::default();
        events.tell(None, Happened::WorkerFailed);
        let (slow, quick) = (events.read().unwrap().unwrap(), events.read().unwrap().unwrap());
        let mut got = 0;
        for _ in 0..ROOM + 3 {
            events.notice((7, "a.img"), Notice::Connected);
            got += quick.take().len();
        }
        assert_eq!((got, events.lost()), (ROOM + 3, 3));
        let received = slow.take();
        assert_eq!(received.len(), ROOM + 1);
        assert_eq!(
            (received[0].number, received[0].id, received[0].image.as_deref()),
            (2, Some(7), Some("a.img"))
        );
        let last = received.last().unwrap();
        assert_eq!((last.number, &last.happened), (ROOM as u64 + 4, &Happened::Lost { events: 3 }));
        events.tell(None, Happened::WorkerFailed);
        let [next] = &slow.take()[..] else { panic!("one") };
        assert_eq!(next.number, ROOM as u64 + 5);
        drop(slow);
        let more: Vec<_> = (1..READERS_MAX).map(|_| events.read().unwrap().unwrap()).collect();
        assert!(events.read().unwrap().is_none());
        drop(more);
        assert!(events.read().unwrap().is_some());
    }
}
