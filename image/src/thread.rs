//! The image's thread: all that is more than a look-up.
//!
//! It takes what all queues ask in batches: reads and plans one part after the other, has what is planned be
//! written, several clusters at a time (`writer/crew.rs`), commits the tables once for all of them, and answers.

use crate::ahead::{Aside, Fetcher, Ranges};
use crate::aligned::Aligned;
use crate::ask::{Answer, Ask, Room};
use crate::client::{Message, Reply, ServerEnd};
use crate::failure::Failure;
use crate::layer::{Layer, LayerFormat, Open};
use crate::layout::{Shape, corrupt};
use crate::map::Map;
use crate::table::{Place, Table};
use crate::writer::Writer;
use ringway_core::host::sync::mpsc::TryRecvError;
use ringway_core::host::sync::{Mutex, MutexGuard};
use ringway_core::host::{Instant, thread};
use ringway_core::{ByteRange, Op};
use std::fmt;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// The most questions of a batch.
const BATCH: usize = 64;

/// The most clusters that a batch erases, of all questions together: what is planned of them lies in memory, and others
/// wait meanwhile. Whoever asked is told how far it got, and asks again.
const ERASED: u64 = 8192;

/// The most bytes that a batch writes as zeroes, of all questions together, where clusters cannot be made to read as
/// such.
const ZEROED: u64 = 16 << 20;

/// How long freed clusters wait at most for others to go with.
const TIMEOUT: Duration = Duration::from_millis(500);

/// So many of them do not wait.
const FREED: usize = 1024;

/// When it is tried again to give back those that could not be.
const RETRY: Duration = Duration::from_secs(2);

/// What somebody else wants done where the tables are, between two batches.
pub(crate) struct Task(pub(crate) Box<dyn FnOnce(&mut Work) + Send>);

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Order")
    }
}

/// Queues that have come.
#[derive(Debug, Default)]
struct Arrivals {
    queues: Vec<ServerEnd>,
    /// Nobody is there to serve them.
    is_over: bool,
}

/// What others leave for the thread.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    arrivals: Mutex<Arrivals>,
    pub(crate) ends: AtomicBool,
    /// One at a time: whoever gives it waits.
    pub(crate) task: Mutex<Option<Task>>,
    pub(crate) failure: Arc<Failure>,
}

impl Mailbox {
    fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A queue has come. If the thread has ended it learns that at once.
    pub(crate) fn admit(&self, queue: ServerEnd) {
        let mut arrivals = self.arrivals();
        if !arrivals.is_over {
            arrivals.queues.push(queue);
        }
    }
}

/// Dropped when the thread ends, in whatever way.
struct Ending<'a> {
    mailbox: &'a Mailbox,
    table: Arc<Table>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            // It may have changed a table and not said so. Whoever looks asks, and learns that nobody answers.
            self.table.forget(0, self.table.clusters());
        }
        let queues = {
            let mut arrivals = self.mailbox.arrivals();
            arrivals.is_over = true;
            std::mem::take(&mut arrivals.queues)
        };
        drop(queues);
    }
}

/// What the thread works on.
#[derive(Debug)]
pub(crate) struct Work {
    map: Map,
    writer: Option<Writer>,
    queues: Vec<ServerEnd>,
    /// Questions of this batch: whose, and what.
    batch: Vec<(usize, Ask)>,
    /// Freed clusters for which queues have been asked to let what is in flight end.
    fenced: Vec<u64>,
    /// Somebody who does not ask here still reads by the former tables: nothing they name is given back.
    keeps_freed: bool,
    /// Some could not be given back: not before then it is tried again.
    retry_at: Option<Instant>,
    buffer: Aligned,
    /// If there is something on no file of this host.
    fetcher: Option<Fetcher>,
}

impl Work {
    pub(crate) fn new(map: Map, writer: Option<Writer>) -> Self {
        let (queues, batch) = (Vec::new(), Vec::with_capacity(BATCH));
        let (fenced, buffer) = (Vec::new(), Aligned::default());
        let fetcher = map.layers.ahead.as_ref().map(|(_, ahead)| Fetcher::new(Arc::clone(ahead)));
        let (keeps_freed, retry_at) = (false, None);
        Self { map, writer, queues, batch, fenced, keeps_freed, retry_at, buffer, fetcher }
    }

    /// Whether clusters that are freed are kept from now on: they leak if that is never taken back.
    pub(crate) fn keep_freed(&mut self, keep: bool) {
        self.keeps_freed = keep;
    }

    /// Works until it is told to end.
    pub(crate) fn run(mut self, mailbox: &Mailbox) {
        let _ending = Ending { mailbox, table: Arc::clone(&self.map.table) };
        let mut has_waited = false;
        loop {
            self.queues.append(&mut mailbox.arrivals().queues);
            let task = mailbox.task.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(Task(carry_out)) = task {
                carry_out(&mut self);
            }
            self.take_batch();
            if !self.batch.is_empty() {
                self.carry_out(mailbox);
                self.tend_freed(mailbox, false);
                self.note(mailbox);
                has_waited = false;
                continue;
            }
            // Whoever ends it waits for this thread, so that nothing is asked any more.
            if mailbox.ends.load(SeqCst) {
                break;
            }
            self.tend_freed(mailbox, has_waited);
            self.note(mailbox);
            has_waited = self.rest();
        }
        let outcome = self.give_back();
        if let (Err(error), true) = (&outcome, Writer::has_deferred(&mut self.map)) {
            tracing::error!(
                "entries of its tables could not be written, and are in the state folder alone: serve it again with \
                 that (--state-dir) when that is mended: {error}"
            );
        } else if let Err(error) = outcome {
            tracing::warn!("clusters that are not used could not be given back: {error}");
        }
    }

    /// Gives back all clusters that are not used; only those that never were if the others are kept.
    /// Nothing may be in flight.
    pub(crate) fn give_back(&mut self) -> io::Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        if self.keeps_freed {
            return writer.give_back_reserve(&mut self.map);
        }
        writer.freed.append(&mut self.fenced);
        writer.close(&mut self.map)
    }

    /// Has all of it be in the file, durably, and changes nothing from then on. Nothing may be in flight.
    pub(crate) fn hand_over(&mut self) -> io::Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        if writer.is_broken() {
            // Of its mark at least.
            let _ = writer.leave_journal(&mut self.map);
            return Err(corrupt());
        }
        writer.freed.append(&mut self.fenced);
        writer.close(&mut self.map)?;
        writer.settle(&mut self.map)?;
        self.writer = None;
        Ok(())
    }

    /// Has all entries be in the file, and its header say that there is no journal.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn leave_journal(&mut self) -> io::Result<()> {
        self.writer.as_mut().map_or(Ok(()), |writer| writer.leave_journal(&mut self.map))
    }

    /// As [`Writer::set_defers`].
    pub(crate) fn set_defers(&mut self, defers: bool) -> io::Result<()> {
        self.writer.as_mut().map_or(Ok(()), |writer| writer.set_defers(&mut self.map, defers))
    }

    /// The tables, for whoever changes them: all that is known of them is in the file.
    pub(crate) fn writer(&mut self) -> io::Result<(&mut Writer, &mut Map)> {
        self.write_deferred()?;
        let writer = self.writer.as_mut();
        let writer = writer.ok_or_else(|| {
            let text = "nothing is written to it any more: it is read-only, or its guest has left";
            io::Error::new(io::ErrorKind::ReadOnlyFilesystem, text)
        })?;
        Ok((writer, &mut self.map))
    }

    /// What the header of the top says by now.
    pub(crate) fn shape(&mut self) -> Shape {
        let mut shape = self.map.layers.top().shape;
        if let Some(writer) = &self.writer {
            writer.place_table(&mut shape);
        }
        shape
    }

    /// The top as the first file of a base, and as a layer of that: nothing is written to it any more. No file is looked
    /// at.
    ///
    /// # Errors
    /// That not all is in the file that is known of it, or that nobody knows what is.
    pub(crate) fn top_beneath(&mut self, mut layer: Layer) -> io::Result<(Open, Layer)> {
        let is_broken = self.writer.as_ref().is_some_and(Writer::is_broken);
        if is_broken || Writer::has_deferred(&mut self.map) || self.map.layers.has_data_file() {
            return Err(corrupt());
        }
        layer.file_bytes = self.map.layers.top_end();
        let (now, top) = (self.shape(), self.map.layers.top_beneath());
        if let LayerFormat::Qcow2 { shape, .. } = &mut layer.format {
            *shape = now;
        }
        Ok((top, layer))
    }

    /// Has all entries be in the file, though not durably.
    ///
    /// # Errors
    /// What the host says; the others stay in the journal then.
    pub(crate) fn write_deferred(&mut self) -> io::Result<()> {
        self.writer.as_mut().map_or(Ok(()), |writer| writer.write_deferred(&mut self.map))
    }

    /// Says what others have to know, before they are answered.
    pub(crate) fn note(&mut self, mailbox: &Mailbox) {
        if let Some(writer) = self.writer.as_ref().filter(|writer| writer.has_lost()) {
            mailbox.failure.failed.store(true, SeqCst);
            // What they lead to may be lost, and what the image held before is not.
            writer.end_journal();
        }
    }

    /// Sleeps until something is asked; true if nothing was for so long that freed clusters may go
    /// by themselves.
    fn rest(&self) -> bool {
        let none = |writer: &Writer| self.keeps_freed || writer.freed.is_empty();
        if self.writer.as_ref().is_none_or(none) {
            thread::park();
            return false;
        }
        let (begun, timeout) = (Instant::now(), self.retry_at.map_or(TIMEOUT, |_| RETRY));
        thread::park_timeout(timeout);
        begun.elapsed() >= timeout
    }

    /// Takes what queues ask, each in its turn.
    fn take_batch(&mut self) {
        self.batch.clear();
        self.take_fetched();
        let mut at = 0;
        while at < self.queues.len() {
            let share = BATCH / self.queues.len().max(1) + 1;
            let mut gone = false;
            for _ in 0..share {
                match self.queues[at].messages.try_recv() {
                    Ok(Message::Ask(ask)) => {
                        let now = self.set_aside(at, ask);
                        self.batch.extend(now.map(|ask| (at, ask)));
                    }
                    Ok(Message::Fenced) => self.queues[at].fencing = false,
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        gone = true;
                        break;
                    }
                }
            }
            // Its questions are answered: its client has waited for that.
            if gone && !self.batch.iter().any(|(queue, _)| *queue >= at) {
                self.queues.remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Questions whose parts of the base are here; those that cannot be had are answered.
    fn take_fetched(&mut self) {
        let Some(fetcher) = &mut self.fetcher else { return };
        for Aside { bell, ask, number, result, .. } in fetcher.take() {
            let whose = |queue: &ServerEnd| Arc::ptr_eq(&queue.bell, &bell);
            // Its client waits for the answer, and is here until then.
            let Some(at) = self.queues.iter().position(whose) else { continue };
            match result {
                Ok(()) => {
                    fetcher.used.push(number);
                    self.batch.push((at, ask));
                }
                Err(error) => {
                    let result = -i64::from(error.raw_os_error().unwrap_or(libc::EIO));
                    self.queues[at].say(Reply::Answer(Answer { tag: ask.tag, result }));
                    self.queues[at].ring();
                }
            }
        }
    }

    /// Has the parts of the base be fetched that a question needs, which is set aside until then; or gives it back.
    fn set_aside(&mut self, queue: usize, ask: Ask) -> Option<Ask> {
        if self.fetcher.is_none() {
            return Some(ask);
        }
        let (range, mut ranges) = (ask.range, Ranges::new());
        match ask.op {
            Op::Read if !ask.memory.is_null() => {
                let size = self.map.cluster();
                self.map.load(range.offset() / size);
                let len = self.to_be_read(&ask);
                ranges = self.map.layers.needs_ahead(range.offset(), len);
            }
            Op::Write | Op::WriteZeroes => ranges = self.map.needs_to_write(range),
            _ => {}
        }
        let fetcher = self.fetcher.as_mut().filter(|_| !ranges.is_empty());
        let Some(fetcher) = fetcher else { return Some(ask) };
        let ServerEnd { bell, thread, .. } = &self.queues[queue];
        fetcher.set_aside((bell, thread), ask, ranges).err()
    }

    fn carry_out(&mut self, mailbox: &Mailbox) {
        let batch = std::mem::take(&mut self.batch);
        let erases = batch.iter().filter(|(_, ask)| erases(ask)).count() as u64;
        let asks = batch.iter().enumerate();
        let mut results: Vec<io::Result<u64>> =
            asks.map(|(index, (_, ask))| self.carry_out_one(index, ask, erases)).collect();
        if let Some(writer) = &mut self.writer {
            for (index, error) in writer.finish_writes(&mut self.map) {
                results[index] = Err(io::Error::from_raw_os_error(error));
            }
            if let Err(error) = writer.commit_batch(&mut self.map) {
                fail(&batch, &mut results, Op::changes_disk, &error);
            }
            let is_flush = |op: Op| op == Op::Flush;
            if batch.iter().any(|(_, ask)| is_flush(ask.op)) {
                if let Err(error) = writer.write_deferred(&mut self.map) {
                    fail(&batch, &mut results, is_flush, &error);
                }
            }
            // Before anybody is answered.
            self.note(mailbox);
        }
        for ((queue, ask), result) in batch.iter().zip(results) {
            let result = match result {
                Ok(done) => done as i64,
                Err(error) => -i64::from(error.raw_os_error().unwrap_or(libc::EIO)),
            };
            self.queues[*queue].say(Reply::Answer(Answer { tag: ask.tag, result }));
        }
        self.queues.iter_mut().for_each(ServerEnd::ring);
        self.fetcher.iter_mut().for_each(Fetcher::forget);
        self.batch = batch;
        self.batch.clear();
    }

    /// True if zeroes are written like other data.
    fn writes_zeroes(&mut self, ask: &Ask) -> bool {
        ask.op == Op::WriteZeroes && (ask.room != Room::Freed || !self.map.zeroes_clusters())
    }

    /// Where the portion ends with which an erasure begins that is one of `erases` of a batch.
    fn end_of_portion(&mut self, ask: &Ask, erases: u64) -> u64 {
        let (range, size) = (ask.range, self.map.cluster());
        let is_written = self.writes_zeroes(ask);
        let most = portion(erases, is_written.then_some(size));
        (range.offset() / size + most).saturating_mul(size).min(range.end())
    }

    /// Carries out a question, or a portion of one of `erases` that erase: how many bytes of it.
    fn carry_out_one(&mut self, index: usize, ask: &Ask, erases: u64) -> io::Result<u64> {
        if ask.op == Op::Flush {
            return Ok(0);
        }
        let cluster = ask.range.offset() / self.map.cluster();
        let (end_of_portion, is_written) =
            (self.end_of_portion(ask, erases), self.writes_zeroes(ask));
        self.map.load(cluster);
        if ask.op == Op::Read {
            return if ask.memory.is_null() { Ok(0) } else { self.read(ask) };
        }
        let Some(writer) = &mut self.writer else {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        };
        let (range, size) = (ask.range, self.map.cluster());
        if ask.op == Op::Write {
            return writer.write(&mut self.map, (index, ask), 0, range.len());
        }
        let range =
            ByteRange::new(range.offset(), end_of_portion - range.offset()).unwrap_or(range);
        let whole = self.map.whole_clusters(range);
        let (first, end) = (whole.start * size, (whole.end * size).min(range.end()));
        if is_written || ask.op == Op::WriteZeroes && whole.is_empty() {
            return writer.write(&mut self.map, (index, ask), 0, range.len());
        }
        if ask.op == Op::WriteZeroes && first > range.offset() {
            writer.write(&mut self.map, (index, ask), 0, first - range.offset())?;
        }
        writer.zero(&mut self.map, whole)?;
        if ask.op == Op::WriteZeroes && end < range.end() {
            writer.write(&mut self.map, (index, ask), end - range.offset(), range.end() - end)?;
        }
        Ok(range.len())
    }

    /// How much of a part that is read is to be read here: what is not simply in a file, or not into this memory.
    fn to_be_read(&self, ask: &Ask) -> u64 {
        match self.map.table.place(ask.range, false) {
            Place::Ask { len } => len,
            Place::Direct { len, .. } if !ask.fits(self.map.layers.unit) => len,
            _ => 0,
        }
    }

    fn read(&mut self, ask: &Ask) -> io::Result<u64> {
        let len = self.to_be_read(ask);
        let size = self.map.cluster();
        let mut done = 0;
        while done < len {
            let at = ask.range.offset() + done;
            let part = (size - at % size).min(len - done);
            let room = usize::try_from(part).map_err(io::Error::other)?;
            let bytes = self.buffer.room(room, self.map.layers.unit);
            match self.map.layers.read(at, bytes) {
                // More is to be read here than when it was fetched. It is asked for again.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && done > 0 => break,
                read => read?,
            }
            ask.scatter(done, bytes);
            done += part;
        }
        Ok(done)
    }

    /// Gives freed clusters back, once what was in flight when they were freed is over.
    fn tend_freed(&mut self, mailbox: &Mailbox, idle: bool) {
        let Some(writer) = self.writer.as_mut().filter(|_| !self.keeps_freed) else { return };
        if self.queues.iter().any(|queue| queue.fencing) {
            // Also if nothing waits for it any more: what comes back would be taken for the next one.
            return;
        }
        if !self.fenced.is_empty() {
            let freed = std::mem::take(&mut self.fenced);
            self.retry_at = match writer.release(&mut self.map, freed) {
                Ok(()) => None,
                Err(error) => {
                    if self.retry_at.is_none() {
                        tracing::warn!(
                            "clusters that are not used could not be given back: {error}. It is tried again"
                        );
                    }
                    Some(Instant::now() + RETRY)
                }
            };
        }
        let is_due = self.retry_at.is_none_or(|at| at <= Instant::now());
        if is_due && (writer.freed.len() >= FREED || (idle && !writer.freed.is_empty())) {
            self.fenced = std::mem::take(&mut writer.freed);
            // Also those who came during the batch, and looked before it was over.
            self.queues.append(&mut mailbox.arrivals().queues);
            for queue in &mut self.queues {
                queue.fencing = true;
                queue.say(Reply::Fence);
                queue.ring();
            }
        }
    }
}

/// True if a question takes clusters away, which may be many.
fn erases(ask: &Ask) -> bool {
    matches!(ask.op, Op::Discard | Op::WriteZeroes)
}

/// The most clusters that each of `erases` questions of a batch erases, of so many bytes each if zeroes are written
/// there.
fn portion(erases: u64, written: Option<u64>) -> u64 {
    let most = written.map_or(ERASED, |size| ERASED.min(ZEROED / size));
    (most / erases.max(1)).max(1)
}

/// Those of a batch failed whose operation is one of these.
fn fail(
    batch: &[(usize, Ask)],
    results: &mut [io::Result<u64>],
    which: impl Fn(Op) -> bool,
    error: &io::Error,
) {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    for ((_, ask), result) in batch.iter().zip(results) {
        // Where the map needs no change a write has not failed.
        if which(ask.op) && (ask.op == Op::Flush || !matches!(result, Ok(0))) {
            *result = Err(io::Error::from_raw_os_error(errno));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d21_the_questions_of_a_batch_have_one_portion_together() {
        for (erases, bits) in (1..=64).flat_map(|erases| (9..=21).map(move |bits| (erases, bits))) {
            let size = 1 << bits;
            let (erased, written) = (portion(erases, None), portion(erases, Some(size)));
            assert!((1..=ERASED / erases).contains(&erased), "{erases} of {size}");
            let most = (ZEROED / size).min(ERASED).max(erases);
            assert!(written > 0 && erases * written <= most, "{erases} of {size}: {written}");
        }
        assert_eq!((portion(0, None), portion(1, Some(1 << 16))), (ERASED, 256));
    }
}
