//! What is needed of a base that is in no file of this host is fetched before the image's thread comes to it: its server
//! may be far, or away, and others ask that thread for what it has here.
//!
//! ```text
//! take_batch ── reads the base? ──▶ set aside ─▶ the thread `image-base` fetches ─▶ the next batch, which finds it here
//!      └──────────── no ──────────▶ this batch
//! ```

use crate::ask::Ask;
use crate::read_at::ReadElsewhere;
use ringway_core::host::Bell;
use ringway_core::host::sync::mpsc::{self, RecvTimeoutError};
use ringway_core::host::sync::{Condvar, Mutex, MutexGuard};
use ringway_core::host::thread::{Builder, Thread};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Bytes of the base, and where they begin there.
type Part = (u64, Vec<u8>);

/// A base, and what was fetched of it. Nothing else is read of it here: that is an error, `EAGAIN`.
#[derive(Debug)]
pub(crate) struct Ahead {
    base: Arc<dyn ReadElsewhere>,
    /// By the numbers of those for whom it was fetched.
    fetched: Mutex<Vec<(u64, Part)>>,
}

/// Ranges of a base: where they begin, and bytes.
pub(crate) type Ranges = Vec<(u64, usize)>;

/// The number of what a job has fetched, of which an image has one at a time.
pub(crate) const FOR_A_JOB: u64 = u64::MAX;

/// The same of who makes the disk larger, which may be meanwhile.
pub(crate) const FOR_GROWTH: u64 = FOR_A_JOB - 1;

/// How often a job that waits is asked whether it goes on.
const GOES_ON: Duration = Duration::from_millis(100);

impl Ahead {
    pub(crate) fn new(base: Arc<dyn ReadElsewhere>) -> Self {
        Self { base, fetched: Mutex::default() }
    }

    fn fetched(&self) -> MutexGuard<'_, Vec<(u64, Part)>> {
        self.fetched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches ranges for `number`, and waits until they are here.
    ///
    /// # Errors
    /// What whoever has them says; none of them is kept then.
    fn fetch(&self, number: u64, ranges: &Ranges) -> io::Result<()> {
        self.keep(number, self.read(ranges)?);
        Ok(())
    }

    /// As [`Ahead::fetch`], but waits as long as it `goes_on`.
    ///
    /// # Errors
    /// As [`Ahead::fetch`]; `Interrupted` if it does not go on.
    pub(crate) fn fetch_while(
        self: &Arc<Self>,
        number: u64,
        goes_on: &dyn Fn() -> bool,
        ranges: Ranges,
    ) -> io::Result<()> {
        if ranges.is_empty() {
            return Ok(());
        }
        let (says, hears) = mpsc::sync_channel(1);
        let ahead = Arc::clone(self);
        // Nobody waits for it any more if its server does not answer.
        let read = move || drop(says.send(ahead.read(&ranges)));
        Builder::new().name("image-base".into()).spawn(read)?;
        loop {
            match hears.recv_timeout(GOES_ON) {
                Ok(parts) => {
                    self.keep(number, parts?);
                    return Ok(());
                }
                Err(RecvTimeoutError::Timeout) if goes_on() => {}
                Err(RecvTimeoutError::Timeout) => return Err(io::ErrorKind::Interrupted.into()),
                Err(gone) => return Err(io::Error::other(gone)),
            }
        }
    }

    fn keep(&self, number: u64, parts: Vec<Part>) {
        self.fetched().extend(parts.into_iter().map(|part| (number, part)));
    }

    fn read(&self, ranges: &Ranges) -> io::Result<Vec<Part>> {
        let unit = u64::from(self.base.unit().max(1));
        let mut parts = Vec::new();
        for &(at, len) in ranges {
            let (begin, end) = (at / unit * unit, (at + len as u64).next_multiple_of(unit));
            let mut bytes = vec![0; usize::try_from(end - begin).map_err(io::Error::other)?];
            let mut done = 0;
            while done < bytes.len() {
                match self.base.read_at(&mut bytes[done..], begin + done as u64)? {
                    0 => break,
                    got => done += got,
                }
            }
            bytes.truncate(done);
            parts.push((begin, bytes));
        }
        Ok(parts)
    }

    /// What was fetched for these is not needed any more.
    pub(crate) fn forget(&self, numbers: &[u64]) {
        self.fetched().retain(|(number, _)| !numbers.contains(number));
    }
}

impl ReadElsewhere for Ahead {
    fn unit(&self) -> u32 {
        self.base.unit()
    }

    fn read_at(&self, memory: &mut [u8], at: u64) -> io::Result<usize> {
        let fetched = self.fetched();
        let found = fetched.iter().find_map(|(_, (begin, bytes))| {
            let from = usize::try_from(at.checked_sub(*begin)?).ok()?;
            bytes.get(from..).filter(|bytes| !bytes.is_empty())
        });
        if let Some(bytes) = found {
            let len = bytes.len().min(memory.len());
            memory[..len].copy_from_slice(&bytes[..len]);
            return Ok(len);
        }
        // Nobody who asks the image's thread waits for a server that another one needs.
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }
}

/// A question that waits for what it needs of the base.
#[derive(Debug)]
pub(crate) struct Aside {
    /// Whose it is, and whom to wake.
    pub(crate) bell: Arc<Bell>,
    thread: Thread,
    pub(crate) ask: Ask,
    pub(crate) number: u64,
    ranges: Ranges,
    /// What became of it.
    pub(crate) result: io::Result<()>,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Aside>,
    done: Vec<Aside>,
    runs: bool,
    ends: bool,
}

#[derive(Debug)]
struct Shared {
    ahead: Arc<Ahead>,
    state: Mutex<State>,
    more: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        while !state.ends {
            let Some(mut aside) = state.waiting.pop_front() else {
                state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            aside.result = self.ahead.fetch(aside.number, &aside.ranges);
            let thread = aside.thread.clone();
            state = self.lock();
            state.done.push(aside);
            thread.unpark();
        }
    }
}

/// Fetches for an image's thread. Dropping it does not wait: a server may never answer.
#[derive(Debug)]
pub(crate) struct Fetcher {
    shared: Arc<Shared>,
    next: u64,
    /// For whom the present batch has something.
    pub(crate) used: Vec<u64>,
}

impl Fetcher {
    pub(crate) fn new(ahead: Arc<Ahead>) -> Self {
        let (state, more) = (Mutex::default(), Condvar::new());
        Self { shared: Arc::new(Shared { ahead, state, more }), next: 0, used: Vec::new() }
    }

    /// Has the ranges be fetched that a question needs. It comes back if there is no thread to be had: then it fails, and
    /// is asked again.
    pub(crate) fn set_aside(
        &mut self,
        (bell, thread): (&Arc<Bell>, &Thread),
        ask: Ask,
        ranges: Ranges,
    ) -> Result<(), Ask> {
        let mut state = self.shared.lock();
        if !state.runs {
            let shared = Arc::clone(&self.shared);
            let named = Builder::new().name("image-base".into());
            if named.spawn(move || shared.run()).is_err() {
                return Err(ask);
            }
            state.runs = true;
        }
        let (bell, thread, number) = (Arc::clone(bell), thread.clone(), self.next);
        self.next += 1;
        state.waiting.push_back(Aside { bell, thread, ask, number, ranges, result: Ok(()) });
        self.shared.more.notify_one();
        Ok(())
    }

    /// Questions whose ranges are here, or cannot be had.
    pub(crate) fn take(&self) -> Vec<Aside> {
        std::mem::take(&mut self.shared.lock().done)
    }

    /// The batch is over.
    pub(crate) fn forget(&mut self) {
        if !self.used.is_empty() {
            self.shared.ahead.forget(&self.used);
            self.used.clear();
        }
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.shared.lock().ends = true;
        self.shared.more.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ask::Room;
    use crate::{
        Answer, Format, Header, Image, ImageClient, Layer, LayerFormat, NewImage, Place, Shape, Use,
    };
    use ringway_core::mem::{Segment, Segments};
    use ringway_core::{ByteRange, Op};
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::time::Instant;

    const CLUSTER: u64 = 64 << 10;
    const CLUSTERS: u64 = 32;
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A server that does not answer until it is told to.
    #[derive(Debug)]
    struct Server {
        answers: Mutex<Option<io::Result<()>>>,
        told: Condvar,
        asked: AtomicUsize,
    }

    fn byte(at: u64) -> u8 {
        u8::try_from(at / 512 % 251).unwrap()
    }

    impl ReadElsewhere for Server {
        fn unit(&self) -> u32 {
            512
        }

        fn read_at(&self, memory: &mut [u8], at: u64) -> io::Result<usize> {
            self.asked.fetch_add(1, SeqCst);
            let mut answers = self.answers.lock().unwrap();
            while answers.is_none() {
                answers = self.told.wait(answers).unwrap();
            }
            if answers.as_ref().is_some_and(Result::is_err) {
                return Err(io::Error::from_raw_os_error(libc::ENOTCONN));
            }
            for (byte, at) in memory.iter_mut().zip(at..) {
                *byte = self::byte(at);
            }
            Ok(memory.len())
        }
    }

    fn server() -> Arc<Server> {
        let (answers, told, asked) = (Mutex::new(None), Condvar::new(), AtomicUsize::new(0));
        Arc::new(Server { answers, told, asked })
    }

    impl Server {
        fn answer(&self, answers: io::Result<()>) {
            *self.answers.lock().unwrap() = Some(answers);
            self.told.notify_all();
        }
    }

    fn clone_of(server: &Arc<Server>) -> Image {
        clone_with(server, CLUSTERS * CLUSTER, CLUSTERS * CLUSTER)
    }

    /// An image of `virtual_size` bytes on an export of `base_bytes`.
    fn clone_with(server: &Arc<Server>, virtual_size: u64, base_bytes: u64) -> Image {
        let file = tempfile::tempfile().unwrap();
        let backing = Some((Path::new("nbd://h/x"), Format::Raw));
        let new = NewImage { virtual_size, cluster_bits: 16, backing };
        new.write(&file).unwrap();
        let file_bytes = file.metadata().unwrap().len();
        let header = Header::read(&file, file_bytes).unwrap().unwrap();
        let format = LayerFormat::Qcow2 { shape: Shape::from(&header), data: None };
        let top = Layer { file: Arc::new(file), file_bytes, format, name: "top".into() };
        let base = Layer {
            file: Arc::new(tempfile::tempfile().unwrap()),
            file_bytes: base_bytes,
            format: LayerFormat::Elsewhere(Some(Arc::clone(server) as Arc<dyn ReadElsewhere>)),
            name: "nbd://h/x".into(),
        };
        let usage = Use { read_only: false, grows: true, barriers: true };
        Image::open(vec![top, base], usage).unwrap()
    }

    fn ask(client: &mut ImageClient, op: Op, at: u64, memory: &Segments) {
        let range = ByteRange::new(at, memory.bytes()).unwrap();
        // SAFETY: whoever calls this keeps list and memory until the answer.
        unsafe { client.ask(Ask { tag: 0, op, range, memory, skip: 0, room: Room::Freed }) }
            .unwrap();
    }

    fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < PATIENCE, "{what}");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn answer(client: &mut ImageClient) -> i64 {
        let mut result = None;
        until("no answer", || {
            result = client.take().expect("its thread lives").map(|Answer { result, .. }| result);
            result.is_some()
        });
        result.unwrap()
    }

    fn list(memory: &mut [u8]) -> Segments {
        let mut list = Segments::with_capacity(1);
        assert!(list.push(Segment { base: memory.as_mut_ptr(), len: memory.len() }));
        list
    }

    #[test]
    fn f53_a_job_that_is_told_to_stop_waits_no_longer() {
        let server = server();
        let image = clone_of(&server);
        let goes_on = || server.asked.load(SeqCst) == 0;
        let stopped = image.pull_while(&goes_on, 0, 8 * CLUSTER).unwrap_err();
        assert_eq!(stopped.kind(), io::ErrorKind::Interrupted);
        server.answer(Ok(()));
        assert_eq!(image.pull(0, 8 * CLUSTER).unwrap().next, 8 * CLUSTER);
    }

    /// Neither the end of the disk nor that of its base is that of a cluster.
    #[test]
    fn f62_nobody_waits_for_a_server_but_who_makes_the_disk_larger() {
        let old = CLUSTERS * CLUSTER + 512;
        for (succeeds, size) in [(true, old + 2 * CLUSTER), (true, old + 1024), (false, 2 * old)] {
            let server = server();
            let image = clone_with(&server, old, old + 1024);
            let mut client = image.client(8).unwrap();
            let mut whole = vec![0xbb; 64 << 10];
            let whole = list(&mut whole);
            std::thread::scope(|scope| {
                let grows = scope.spawn(|| image.grow(size));
                until("it is asked", || server.asked.load(SeqCst) > 0);
                for cluster in 20..30 {
                    ask(&mut client, Op::Write, cluster * CLUSTER, &whole);
                    assert_eq!(answer(&mut client), 64 << 10);
                }
                assert!(!grows.is_finished());
                let error = io::Error::from_raw_os_error(libc::ENOTCONN);
                server.answer(if succeeds { Ok(()) } else { Err(error) });
                let grown = grows.join().unwrap();
                let failure = grown.err().and_then(|error| error.raw_os_error());
                assert_eq!(failure, (!succeeds).then_some(libc::ENOTCONN));
            });
            assert_eq!(image.size(), if succeeds { size } else { old });
            if !succeeds {
                continue;
            }
            // Whoever reads is told where it is.
            let mut part = vec![0; 512];
            let part = list(&mut part);
            ask(&mut client, Op::Read, CLUSTERS * CLUSTER, &part);
            assert_eq!(answer(&mut client), 0);
            let range = ByteRange::new(CLUSTERS * CLUSTER, CLUSTER.min(size - CLUSTERS * CLUSTER));
            let range = range.unwrap();
            let Place::Direct { file: 0, offset, len } = image.place(range, false) else {
                panic!("the last cluster is the image's own");
            };
            assert_eq!(len, range.len());
            let mut found = vec![0; usize::try_from(len).unwrap()];
            image.files()[0].read_exact_at(&mut found, offset).unwrap();
            for (found, at) in found.iter().zip(range.offset()..) {
                assert_eq!(*found, if at < old { byte(at) } else { 0 }, "{at}");
            }
        }
    }

    /// A guest writes one of the clusters that were fetched to be copied.
    #[test]
    fn f63_a_job_copies_no_more_than_was_fetched() {
        let server = server();
        let image = clone_of(&server);
        let mut client = image.client(8).unwrap();
        let mut whole = vec![0xbb; 64 << 10];
        let whole = list(&mut whole);
        let pulled = std::thread::scope(|scope| {
            let pulls = scope.spawn(|| image.pull(0, 4 * CLUSTER));
            until("it is asked", || server.asked.load(SeqCst) > 0);
            ask(&mut client, Op::Write, CLUSTER, &whole);
            assert_eq!(answer(&mut client), 64 << 10);
            server.answer(Ok(()));
            pulls.join().unwrap().unwrap()
        });
        assert_eq!(server.asked.load(SeqCst), 4);
        assert_eq!((pulled.next, pulled.copied), (4 * CLUSTER, 3 * CLUSTER));
        // It goes on from there.
        assert_eq!(image.pull(pulled.next, u64::MAX >> 1).unwrap().next, CLUSTERS * CLUSTER);
    }

    #[test]
    fn f49_nobody_waits_for_a_server_but_who_needs_it() {
        for succeeds in [true, false] {
            let server = server();
            let image = clone_of(&server);
            let (mut one, mut other) = (image.client(8).unwrap(), image.client(8).unwrap());
            let (mut part, mut whole) = (vec![0xaa; 512], vec![0xbb; 64 << 10]);
            let (part, whole) = (list(&mut part), list(&mut whole));
            // Who reads is told where it is, and asks the server by itself.
            ask(&mut one, Op::Read, 12 * CLUSTER, &part);
            assert_eq!(answer(&mut one), 0);
            let range = ByteRange::new(12 * CLUSTER, 512).unwrap();
            let expected = Place::Direct { file: 1, offset: 12 * CLUSTER, len: 512 };
            assert_eq!(image.place(range, false), expected);
            assert_eq!(server.asked.load(SeqCst), 0);
            std::thread::scope(|scope| {
                let pulls = scope.spawn(|| image.pull(0, 8 * CLUSTER));
                ask(&mut one, Op::Write, 8 * CLUSTER + 512, &part);
                until("it is asked", || server.asked.load(SeqCst) >= 2);
                for cluster in 20..30 {
                    ask(&mut other, Op::Write, cluster * CLUSTER, &whole);
                    assert_eq!(answer(&mut other), 64 << 10);
                }
                assert!(one.take().unwrap().is_none() && !pulls.is_finished());
                let error = || io::Error::from_raw_os_error(libc::ENOTCONN);
                server.answer(if succeeds { Ok(()) } else { Err(error()) });
                let pulled = pulls.join().unwrap();
                if !succeeds {
                    assert_eq!(answer(&mut one), -i64::from(libc::ENOTCONN));
                    assert_eq!(pulled.unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
                    return;
                }
                assert_eq!(answer(&mut one), 512);
                assert_eq!(pulled.unwrap().next, 8 * CLUSTER);
            });
            if !succeeds {
                continue;
            }
            // All of it was fetched ahead.
            let file: &File = &image.files()[0];
            for cluster in 0..=8 {
                let range = ByteRange::new(cluster * CLUSTER, CLUSTER).unwrap();
                let Place::Direct { file: 0, offset, len: CLUSTER } = image.place(range, false)
                else {
                    panic!("{cluster}");
                };
                let mut found = vec![0; 64 << 10];
                file.read_exact_at(&mut found, offset).unwrap();
                for (found, at) in found.iter().zip(range.offset()..) {
                    let written = (8 * CLUSTER + 512..8 * CLUSTER + 1024).contains(&at);
                    assert_eq!(*found, if written { 0xaa } else { byte(at) }, "{at}");
                }
            }
        }
    }
}
