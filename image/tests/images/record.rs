//! What files are asked to do, in order: the calls that change or sync them, taken in their way to the
//! host, of this process alone.
//!
//! The symbols below are those of the C library; the linker prefers ours. Each makes its system call,
//! and notes it if somebody records that file. One at a time, so that the order is the order.

use std::cell::Cell;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A call that has succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Write {
        at: u64,
        bytes: Vec<u8>,
    },
    /// Zeroes within the file.
    Punch {
        at: u64,
        len: u64,
    },
    /// So many bytes from now on.
    Size(u64),
    Sync,
    /// A note of the test.
    Note(u64),
}

/// Device and inode.
type Key = (u64, u64);

/// Files that are recorded together.
struct Recording {
    files: Vec<Key>,
    /// Each with the number of its file.
    events: Vec<(usize, Event)>,
}

static RECORDS: Mutex<Vec<Recording>> = Mutex::new(Vec::new());

fn records() -> MutexGuard<'static, Vec<Recording>> {
    RECORDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes to these files fail with EIO if a byte of theirs is this.
static FAULTS: Mutex<Vec<(Key, u8)>> = Mutex::new(Vec::new());

/// Writes that hold some byte fail until it is dropped.
pub(crate) struct Fault(Key);

impl Fault {
    pub(crate) fn of(file: &File, byte: u8) -> Self {
        FAULTS.lock().unwrap().push((key(file), byte));
        Self(key(file))
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        FAULTS.lock().unwrap_or_else(PoisonError::into_inner).retain(|fault| fault.0 != self.0);
    }
}

/// The next syncs of these files fail, once each, as the host tells what it has lost.
static SYNC_FAULTS: Mutex<Vec<(Key, i32)>> = Mutex::new(Vec::new());

pub(crate) fn fail_next_sync(file: &File) {
    fail_next_sync_with(file, libc::EIO);
}

pub(crate) fn fail_next_sync_with(file: &File, errno: i32) {
    SYNC_FAULTS.lock().unwrap().push((key(file), errno));
}

/// With what a sync is to fail, which the next one is not.
fn sync_fails(fd: i32) -> Option<i32> {
    let mut faults = SYNC_FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: stat is a plain C struct for which zeroes are valid, and ours.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    if faults.is_empty() || unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
        return None;
    }
    let its = faults.iter().position(|(key, _)| *key == (stat.st_dev, stat.st_ino));
    its.map(|at| faults.remove(at).1)
}

/// How calls fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failing {
    /// With this `errno`.
    With(i32),
    /// Half of a write is done, and the rest fails with `ENOSPC`. Other calls fail with it, and so does what lies
    /// within a sector of data, or of the header: it is written as a whole or not at all.
    Half,
}

/// How much of a write is done then.
fn half(at: i64, len: usize) -> usize {
    match len {
        _ if at < 512 => 0,
        0..64 => 0,
        64..512 => len / 16 * 8,
        _ => len / 1024 * 512,
    }
}

/// Files whose calls are counted, and of which some fail.
struct Plan {
    files: Vec<Key>,
    /// Reads are counted, too,
    reads: bool,
    /// and writes that are not the image's thread's.
    tools: bool,
    count: u64,
    /// The first call that fails, all behind it, too, if it is for ever, and how.
    fails: Option<(u64, bool, Failing)>,
    /// The next write is the rest of one of which half was done.
    is_half: bool,
}

static PLANS: Mutex<Vec<Plan>> = Mutex::new(Vec::new());

/// Counts what the image's thread asks of files, as the calls of [`BlockFile`] do, until it is dropped.
///
/// [`BlockFile`]: the file of an image, in `image/src/file.rs`.
pub(crate) struct Calls(Key);

impl Calls {
    pub(crate) fn of(files: &[&File], reads: bool) -> Self {
        let files: Vec<Key> = files.iter().map(|file| key(file)).collect();
        let first = files[0];
        let (tools, count, fails, is_half) = (false, 0, None, false);
        PLANS.lock().unwrap().push(Plan { files, reads, tools, count, fails, is_half });
        Self(first)
    }

    /// Counts writes of tools, too, which are those of a queue as well.
    pub(crate) fn of_tools(&self) {
        self.with(|plan| plan.tools = true);
    }

    fn with<T>(&self, act: impl FnOnce(&mut Plan) -> T) -> T {
        let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
        act(plans.iter_mut().find(|plan| plan.files[0] == self.0).unwrap())
    }

    /// The `nth` call from now on fails, and all that follow if it is for ever. The first is number 1.
    pub(crate) fn fail(&self, nth: u64, for_ever: bool, how: Failing) {
        self.with(|plan| {
            (plan.count, plan.is_half) = (0, false);
            plan.fails = Some((nth, for_ever, how));
        });
    }

    /// None fails any more. How many there were since some were to fail, or it began.
    pub(crate) fn mend(&self) -> u64 {
        self.with(|plan| {
            (plan.fails, plan.is_half) = (None, false);
            std::mem::take(&mut plan.count)
        })
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
        plans.retain(|plan| plan.files[0] != self.0);
    }
}

/// What a call is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Read,
    /// So much of it can be done.
    Write(usize),
    /// Of a queue, or a tool.
    Apart,
    Other,
}

/// What is to become of a call, if it is not simply to be made: an `errno`, or half of it.
fn verdict(fd: i32, call: Call) -> Option<Failing> {
    let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: stat is a plain C struct for which zeroes are valid, and ours.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    if plans.is_empty() || unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
        return None;
    }
    let key = (stat.st_dev, stat.st_ino);
    let plan = plans.iter_mut().find(|plan| plan.files.contains(&key))?;
    if (call == Call::Read && !plan.reads) || (call == Call::Apart && !plan.tools) {
        return None;
    }
    if matches!(call, Call::Write(_)) && std::mem::take(&mut plan.is_half) {
        return Some(Failing::With(libc::ENOSPC));
    }
    plan.count += 1;
    let (nth, for_ever, how) = plan.fails?;
    let fails = plan.count == nth || (for_ever && plan.count > nth);
    match how {
        _ if !fails => None,
        Failing::Half if matches!(call, Call::Write(1..)) => {
            plan.is_half = true;
            Some(how)
        }
        Failing::Half => Some(Failing::With(libc::ENOSPC)),
        how => Some(how),
    }
}

/// Has a call fail, if it is to; `None`: it is to be made.
fn failed(fd: i32, call: Call) -> Option<i32> {
    match verdict(fd, call)? {
        Failing::Half => None,
        Failing::With(errno) => {
            // SAFETY: this thread's own.
            unsafe { *libc::__errno_location() = errno };
            Some(-1)
        }
    }
}

/// Where files have no room, in bytes: writes of the image's thread that begin there fail with `ENOSPC`.
static FULL: Mutex<Vec<(Key, Range<u64>)>> = Mutex::new(Vec::new());

/// A part of a file for which there is no room, until it is dropped.
pub(crate) struct NoRoom(Key);

impl NoRoom {
    pub(crate) fn of(file: &File, range: Range<u64>) -> Self {
        FULL.lock().unwrap().push((key(file), range));
        Self(key(file))
    }
}

impl Drop for NoRoom {
    fn drop(&mut self) {
        FULL.lock().unwrap_or_else(PoisonError::into_inner).retain(|full| full.0 != self.0);
    }
}

/// True if there is no room at a place of a file.
fn is_full(fd: i32, at: i64) -> bool {
    let full = FULL.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: stat is a plain C struct for which zeroes are valid, and ours.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    if full.is_empty() || unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
        return false;
    }
    let key = (stat.st_dev, stat.st_ino);
    full.iter().any(|full| full.0 == key && full.1.contains(&(at as u64)))
}

/// Files of which a part is written by the image's thread only later, and whether such a write waits.
static HOLDS: Mutex<Vec<(Key, Range<u64>, bool)>> = Mutex::new(Vec::new());
/// The part of a file that no write is of: its reads wait.
const READS: Range<u64> = u64::MAX..u64::MAX;
static HOLD_CHANGED: Condvar = Condvar::new();

/// The next write of the image's thread to a file, or to a part of it, waits until it is dropped.
pub(crate) struct Hold(Key, Range<u64>);

impl Hold {
    pub(crate) fn of(file: &File) -> Self {
        Self::within(file, 0..u64::MAX)
    }

    /// Of writes that begin there.
    pub(crate) fn within(file: &File, range: Range<u64>) -> Self {
        HOLDS.lock().unwrap().push((key(file), range.clone(), false));
        Self(key(file), range)
    }

    /// Of all reads instead.
    pub(crate) fn of_reads(file: &File) -> Self {
        Self::within(file, READS)
    }

    /// Returns once a write waits.
    pub(crate) fn reached(&self) {
        let mut holds = HOLDS.lock().unwrap();
        while !holds.contains(&(self.0, self.1.clone(), true)) {
            let waited = HOLD_CHANGED.wait_timeout(holds, Duration::from_secs(60)).unwrap();
            assert!(!waited.1.timed_out(), "nothing is written");
            holds = waited.0;
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut holds = HOLDS.lock().unwrap_or_else(PoisonError::into_inner);
        holds.retain(|hold| hold.0 != self.0 || hold.1 != self.1);
        drop(holds);
        HOLD_CHANGED.notify_all();
    }
}

/// Waits as long as writes to that place of a file are held, or without one its reads.
fn wait_if_held(fd: i32, at: Option<u64>) {
    let mut holds = HOLDS.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: stat is a plain C struct for which zeroes are valid, and ours.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    if holds.is_empty() || unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
        return;
    }
    let key = (stat.st_dev, stat.st_ino);
    let holds_it = |range: &Range<u64>| at.map_or(*range == READS, |at| range.contains(&at));
    while let Some(hold) = holds.iter_mut().find(|hold| hold.0 == key && holds_it(&hold.1)) {
        hold.2 = true;
        HOLD_CHANGED.notify_all();
        holds = HOLD_CHANGED.wait(holds).unwrap_or_else(PoisonError::into_inner);
    }
}

/// True if a write of such bytes is to fail.
fn fails(fd: i32, bytes: impl FnOnce() -> Vec<u8>) -> bool {
    let faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: stat is a plain C struct for which zeroes are valid, and ours.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    if faults.is_empty() || unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
        return false;
    }
    let mut its = faults.iter().filter(|fault| fault.0 == (stat.st_dev, stat.st_ino));
    its.next().is_some_and(|(_, byte)| bytes().contains(byte))
}

/// Records files until it is dropped; the first one is one that nobody else records.
pub(crate) struct Record(Key);

fn key(file: &File) -> Key {
    let meta = file.metadata().unwrap();
    (meta.dev(), meta.ino())
}

impl Record {
    pub(crate) fn of(file: &File) -> Self {
        let key = key(file);
        records().push(Recording { files: vec![key], events: Vec::new() });
        Self(key)
    }

    /// Records one more, in one order with the others.
    pub(crate) fn add(&self, file: &File) {
        self.with(|recording| recording.files.push(key(file)));
    }

    fn with<T>(&self, act: impl FnOnce(&mut Recording) -> T) -> T {
        let mut all = records();
        act(all.iter_mut().find(|recording| recording.files[0] == self.0).unwrap())
    }

    /// Notes something between the calls.
    pub(crate) fn note(&self, number: u64) {
        self.with(|recording| recording.events.push((0, Event::Note(number))));
    }

    /// What happened so far, with the number of the file that it happened to.
    pub(crate) fn take_all(&self) -> Vec<(usize, Event)> {
        self.with(|recording| std::mem::take(&mut recording.events))
    }

    /// What happened so far to one file.
    pub(crate) fn take(&self) -> Vec<Event> {
        self.take_all().into_iter().map(|(_, event)| event).collect()
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        records().retain(|recording| recording.files[0] != self.0);
    }
}

/// Makes a call, and notes what it did if it succeeded and the file is recorded.
fn noted(fd: i32, call: impl FnOnce() -> i64, event: impl FnOnce(u64) -> Event) -> i64 {
    let mut all = records();
    if all.is_empty() {
        drop(all);
        return call();
    }
    // SAFETY: stat is a plain C struct for which zeroes are valid, and ours.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let known = unsafe { libc::fstat(fd, &raw mut stat) } == 0;
    let result = call();
    if known {
        if let Ok(done) = u64::try_from(result) {
            if let Some((recording, nth)) = all.iter_mut().find_map(|recording| {
                let its = |key: &Key| *key == (stat.st_dev, stat.st_ino);
                let nth = recording.files.iter().position(its)?;
                Some((recording, nth))
            }) {
                recording.events.push((nth, event(done)));
            }
        }
    }
    result
}

/// The bytes of a vector that were written.
///
/// # Safety
/// As of pwritev2(2).
unsafe fn written(iov: *const libc::iovec, count: i32, done: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for nth in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: passed on to the caller.
        let part = unsafe { &*iov.add(nth) };
        // SAFETY: as above.
        let part = unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) };
        bytes.extend_from_slice(part);
    }
    bytes.truncate(usize::try_from(done).unwrap_or(0));
    bytes
}

/// # Safety
/// As of preadv2(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn preadv2(
    fd: i32,
    iov: *const libc::iovec,
    count: i32,
    at: i64,
    flags: i32,
) -> isize {
    wait_if_held(fd, None);
    if let Some(failed) = failed(fd, Call::Read) {
        return failed as isize;
    }
    // SAFETY: passed on to the caller. The offset has two words, the second of them its high half.
    (unsafe { libc::syscall(libc::SYS_preadv2, fd, iov, count, at, 0, flags) }) as isize
}

/// # Safety
/// As of pwritev2(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn pwritev2(
    fd: i32,
    iov: *const libc::iovec,
    count: i32,
    at: i64,
    flags: i32,
) -> isize {
    // SAFETY: the caller's, as the kernel reads them.
    if fails(fd, || unsafe { written(iov, count, u64::MAX) }) {
        // SAFETY: this thread's own.
        unsafe { *libc::__errno_location() = libc::EIO };
        return -1;
    }
    wait_if_held(fd, Some(at as u64));
    if is_full(fd, at) {
        // SAFETY: this thread's own.
        unsafe { *libc::__errno_location() = libc::ENOSPC };
        return -1;
    }
    let mut begun;
    let (mut iov, mut count) = (iov, count);
    // SAFETY: the caller's, as the kernel reads it.
    let some = half(at, unsafe { (*iov).iov_len });
    match verdict(fd, Call::Write(some)) {
        None => {}
        Some(Failing::With(errno)) => {
            // SAFETY: this thread's own.
            unsafe { *libc::__errno_location() = errno };
            return -1;
        }
        Some(Failing::Half) => {
            // SAFETY: the caller's, as the kernel reads it.
            begun = unsafe { *iov };
            begun.iov_len = some;
            (iov, count) = (&raw const begun, 1);
        }
    }
    // SAFETY: passed on to the caller. The offset has two words, the second of them its high half.
    let call = || unsafe { libc::syscall(libc::SYS_pwritev2, fd, iov, count, at, 0, flags) };
    // SAFETY: the kernel has read as much.
    let event = |done| unsafe { Event::Write { at: at as u64, bytes: written(iov, count, done) } };
    noted(fd, call, event) as isize
}

/// # Safety
/// As of pwrite(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn pwrite64(fd: i32, from: *const libc::c_void, len: usize, at: i64) -> isize {
    if let Some(failed) = failed(fd, Call::Apart) {
        return failed as isize;
    }
    // SAFETY: passed on to the caller.
    let call = || unsafe { libc::syscall(libc::SYS_pwrite64, fd, from, len, at) };
    let iov = libc::iovec { iov_base: from.cast_mut(), iov_len: len };
    // SAFETY: the kernel has read as much.
    let event =
        |done| unsafe { Event::Write { at: at as u64, bytes: written(&raw const iov, 1, done) } };
    noted(fd, call, event) as isize
}

/// # Safety
/// None.
#[unsafe(no_mangle)]
unsafe extern "C" fn fallocate(fd: i32, mode: i32, at: i64, len: i64) -> i32 {
    if let Some(failed) = failed(fd, Call::Other) {
        return failed;
    }
    // SAFETY: no memory is involved.
    let call = || unsafe { libc::syscall(libc::SYS_fallocate, fd, mode, at, len) };
    let event = |_| Event::Punch { at: at as u64, len: len as u64 };
    noted(fd, call, event) as i32
}

/// # Safety
/// None.
#[unsafe(no_mangle)]
unsafe extern "C" fn ftruncate64(fd: i32, len: i64) -> i32 {
    if let Some(failed) = failed(fd, Call::Other) {
        return failed;
    }
    // SAFETY: no memory is involved.
    let call = || unsafe { libc::syscall(libc::SYS_ftruncate, fd, len) };
    noted(fd, call, |_| Event::Size(len as u64)) as i32
}

thread_local! {
    /// The host has no thread for the next one that this thread starts.
    pub(crate) static NO_THREAD: Cell<bool> = const { Cell::new(false) };
}

type Start = extern "C" fn(*mut libc::c_void) -> *mut libc::c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Start,
    *mut libc::c_void,
) -> i32;

/// # Safety
/// As that of the C library.
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    with: *mut libc::c_void,
) -> i32 {
    if NO_THREAD.replace(false) {
        return libc::EAGAIN;
    }
    // SAFETY: the name ends with a zero.
    let create = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) };
    // SAFETY: the C library's own, which there is, as it has started this thread.
    let create: Create = unsafe { std::mem::transmute(create) };
    // SAFETY: passed on to the caller.
    unsafe { create(thread, attributes, start, with) }
}

/// # Safety
/// None.
#[unsafe(no_mangle)]
unsafe extern "C" fn fdatasync(fd: i32) -> i32 {
    if let Some(errno) = sync_fails(fd) {
        // SAFETY: this thread's own.
        unsafe { *libc::__errno_location() = errno };
        return -1;
    }
    if let Some(failed) = failed(fd, Call::Other) {
        return failed;
    }
    // The simulated disk forgets what it likes, whatever the host's has kept: no real sync is needed.
    // SAFETY: no memory is involved.
    let call = || unsafe { libc::syscall(libc::SYS_fcntl, fd, libc::F_GETFD) };
    noted(fd, || call().min(0), |_| Event::Sync) as i32
}

/// The record is complete: what the image's code calls arrives here.
#[test]
fn all_calls_that_change_a_file_are_noted() {
    use std::os::unix::fs::FileExt;
    let file = tempfile::tempfile().unwrap();
    let record = Record::of(&file);
    file.set_len(100).unwrap();
    file.write_all_at(b"one", 7).unwrap();
    let iov = libc::iovec { iov_base: b"two".as_ptr().cast_mut().cast(), iov_len: 3 };
    // SAFETY: the vector names three bytes, which the kernel only reads.
    assert_eq!(unsafe { libc::pwritev2(file.as_raw_fd(), &raw const iov, 1, 20, 0) }, 3);
    file.sync_data().unwrap();
    record.note(5);
    let write = |at, bytes: &[u8]| Event::Write { at, bytes: bytes.to_vec() };
    let events =
        [Event::Size(100), write(7, b"one"), write(20, b"two"), Event::Sync, Event::Note(5)];
    assert_eq!(record.take(), events);
    // And is not interested in others.
    tempfile::tempfile().unwrap().set_len(5).unwrap();
    assert_eq!(record.take(), []);
}
