//! Taking and giving up the lock of an image, as `lock_state.rs` decides.

use super::lock_owner::{Names, TIMEOUT};
use super::lock_state::{Before, LockState};
use super::{Export, lock};
use crate::limit::Pass;
use crate::queue::QueueLifecycle;
use ringway_core::kill_point;
use ringway_disk::{Disk, LockError};
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// Waiting goes on quietly for that long: a source that is about to give the lock up takes less.
const QUIET: Duration = Duration::from_millis(500);

/// How often to tell of a guest that waits.
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// How long to wait before asking for the lock again: a part of what was waited for, within bounds.
/// The guest stands still meanwhile.
const ASK_AGAIN: (u32, Duration, Duration) =
    (16, Duration::from_micros(250), Duration::from_millis(100));

/// A guest that waits for the lock.
#[derive(Debug)]
pub struct LockWait {
    begun: Instant,
    tell_at: Duration,
    logged: bool,
}

impl LockWait {
    /// It begins now.
    fn new() -> Self {
        Self { begun: Instant::now(), tell_at: QUIET, logged: false }
    }

    /// When to ask again.
    #[must_use]
    pub fn pause(&self) -> Duration {
        let (part, least, most) = ASK_AGAIN;
        (self.begun.elapsed() / part).clamp(least, most)
    }
}

impl<Q: QueueLifecycle> Export<Q> {
    /// With somebody to ask about paths, and with another time after which a guest that waits for the
    /// lock is reported as an error.
    #[must_use]
    pub fn with_names(mut self, names: Option<Arc<dyn Names>>, timeout: Option<Duration>) -> Self {
        self.image_lock.names = names;
        self.image_lock.timeout = timeout.unwrap_or(TIMEOUT);
        self
    }

    /// True while the image is locked for this export.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        let held =
            matches!(*lock(&self.image_lock.state), LockState::Held | LockState::Releasing { .. });
        held && !self.disk.has_forgotten_image()
    }

    /// Ends what concerns its image, which is served no more: has all that is known of it be in its file, and
    /// lets others have it at once, unless something is in flight. Nothing is kept of its guest if that ends, too
    /// ([`Disk::ends`]). Waits for what changes it. `before_it_goes` is called while it is locked, unless it was somebody
    /// else's, or about to be, because its guest has left; if that says false, it is not over, and the lock goes when all
    /// who have the image open have closed it.
    pub fn end_image(&self, guest_ends: bool, before_it_goes: &mut dyn FnMut() -> bool) {
        let _alone = lock(&self.changing);
        // Whoever gives it up for a guest that has left does so after this, and finds that it was done.
        let state = *lock(&self.image_lock.state);
        if !self.is_clear() {
            if state == LockState::Held {
                before_it_goes();
            }
            return;
        }
        let mut ended = match state {
            LockState::Releasing { .. } => self.disk.sync(),
            LockState::Held | LockState::Free => Ok(()),
        };
        if state != LockState::Free {
            ended = ended.and_then(|()| self.disk.forget_image());
        }
        // Not before, which may find out that a flush has failed.
        self.disk.ends(guest_ends);
        let is_over = state != LockState::Held || before_it_goes();
        match ended {
            Ok(()) => {
                self.disk.leave_state();
                if is_over {
                    self.disk.unlock();
                }
            }
            // Its lock goes when it is closed.
            Err(error) => {
                warn!(disk = self.disk.name(), "its image cannot be left in order: {error}")
            }
        }
    }

    /// This process is about to end in order: what is known of its image is in its file after this, and what outlives
    /// the process is left, both while the lock is ours. Whoever serves it next may be waiting for that, which goes
    /// with the process. Waits for what changes the image or gives it up. What is in flight still is as in a process
    /// that is killed.
    ///
    /// # Errors
    /// What the host says: what its guest was answered is not in its file.
    pub fn leave_image(&self) -> io::Result<()> {
        let _alone = lock(&self.changing);
        let ours = *lock(&self.image_lock.state) != LockState::Free;
        if !ours || !self.is_clear() {
            return Ok(());
        }
        if self.disk.leave_image().is_ok() {
            // Nothing writes its tables any more, so that its lock may go before this process does.
            let _ = self.disk.forget_image();
            self.disk.leave_state();
            return Ok(());
        }
        // Perhaps only clusters could not be given back.
        self.disk.leave_journal()
    }

    /// As [`Export::leave_image`], and others may have the image at once; nothing of it is waited for. False, and nothing
    /// is done, while something of it is in flight, somebody changes it or gives it up, or its tables were not left.
    #[must_use]
    pub fn let_go(&self) -> bool {
        let Ok(_alone) = self.changing.try_lock() else { return false };
        let ours = *lock(&self.image_lock.state) != LockState::Free;
        if !ours || !self.is_clear() || self.disk.image().is_some() {
            return false;
        }
        self.disk.leave_state();
        self.disk.unlock();
        true
    }

    /// A queue is ready to run: true if it may. If not, whoever asks does so again after
    /// [`LockWait::pause`].
    pub fn may_run(&self, wait: &mut Option<LockWait>) -> bool {
        let before = lock(&self.image_lock.state).ready();
        let outcome = match before {
            Before::Run if !self.disk.has_forgotten_image() => Ok(()),
            Before::Wait => Err(None),
            Before::Run | Before::Lock => self.make_ours(),
        };
        match outcome {
            Ok(()) if self.holds() => {
                // It was paused where it was served before.
                *wait = None;
                false
            }
            Ok(()) => {
                let waited = wait.take().filter(|wait| wait.logged);
                if let Some(wait) = waited {
                    if let Some(pass) = self.limits.locked.pass() {
                        let (disk, seconds) =
                            (self.disk.name(), wait.begun.elapsed().as_secs_f32());
                        info!(
                            disk,
                            seconds,
                            suppressed = pass.suppressed,
                            "the image's lock is ours: its guest goes on"
                        );
                    }
                }
                true
            }
            Err(why) => {
                self.tell_of_wait(wait.get_or_insert_with(LockWait::new), why.as_deref());
                false
            }
        }
    }

    /// Takes the lock, or only reads the tables again, if those were given up and the lock was not. Its storage may take
    /// its time: who asks how the disk is does not wait for that, and who leaves it does. An error without words is that
    /// somebody changes it, or gives it up.
    #[cold]
    fn make_ours(&self) -> Result<(), Option<String>> {
        let Ok(_alone) = self.change() else { return Err(None) };
        let before = lock(&self.image_lock.state).ready();
        match before {
            Before::Run => self.map_again()?,
            Before::Lock => self.take_lock()?,
            Before::Wait => return Err(None),
        }
        lock(&self.image_lock.state).locked();
        Ok(())
    }

    /// Takes the lock, and looks at what may have changed while others had it.
    fn take_lock(&self) -> Result<(), String> {
        self.disk.lock().map_err(|error| match error {
            LockError::Host(error) => format!("it cannot be locked: {error}"),
            LockError::Locked | LockError::Marked(_) => String::new(),
        })?;
        self.check_again().inspect_err(|_| {
            self.disk.leave_state();
            self.disk.unlock();
        })
    }

    fn check_again(&self) -> Result<(), String> {
        // The lock of a file that nobody finds under its name keeps nobody away.
        if self.image_lock.names.as_ref().is_some_and(|names| !names.leads_to(&self.disk)) {
            return Err("another file has its name by now: start this daemon anew".into());
        }
        self.keep_state()?;
        self.disk.forget_cached();
        self.map_again()?;
        let bytes = self.disk.next_size(None).map_err(|error| format!("its size: {error}"))?;
        self.note_size(bytes);
        Ok(())
    }

    /// What outlives this process is ours with the lock; that it was paused by whoever had it before, for one.
    fn keep_state(&self) -> Result<(), String> {
        let Some(names) = &self.image_lock.names else { return Ok(()) };
        names.keep_state(&self.disk)?;
        if self.disk.was_paused() {
            self.paused.store(true, SeqCst);
            self.rests.store(true, SeqCst);
            let disk = self.disk.name();
            warn!(disk, "paused, as it was when it was served before: ringway ctl resume");
        }
        Ok(())
    }

    /// Reads the tables of an image that is not raw, if they are not known.
    fn map_again(&self) -> Result<(), String> {
        if self.disk.has_forgotten_image() {
            let bytes = self.disk.map_image_again().map_err(|error| error.to_string())?;
            self.note_size(bytes);
        }
        Ok(())
    }

    fn note_size(&self, bytes: u64) {
        let before = self.disk.capacity();
        if bytes != before {
            warn!(
                disk = self.disk.name(),
                "it has {bytes} bytes by now, not {before}: the guest is told"
            );
            self.disk.set_capacity(bytes);
            self.resizes.fetch_add(1, SeqCst);
        }
    }

    /// Says that a guest waits, after a moment, after its timeout and once a minute. Without a reason
    /// the export's own release is not over yet; an empty one is that somebody else has the lock.
    fn tell_of_wait(&self, wait: &mut LockWait, why: Option<&str>) {
        let waited = wait.begun.elapsed();
        if waited < wait.tell_at {
            return;
        }
        wait.logged = true;
        let timeout = self.image_lock.timeout;
        wait.tell_at = if waited < timeout { timeout } else { waited + TELL_AGAIN };
        let why = match why {
            None => "what was written is still being made durable".into(),
            Some("") => match &self.image_lock.names {
                Some(names) => format!("it is in use by {}", names.holder(&self.disk)),
                None => "somebody else has it".into(),
            },
            Some(why) => why.to_owned(),
        };
        let Some(pass) = self.limits.locked.pass() else { return };
        let (disk, seconds, suppressed) = (self.disk.name(), waited.as_secs(), pass.suppressed);
        if waited < timeout {
            warn!(disk, suppressed, "the guest's requests wait for the image's lock: {why}");
        } else {
            error!(
                disk,
                suppressed,
                "the guest's requests have waited for the image's lock for {seconds} s: {why}. They \
                 are carried out as soon as it is free"
            );
        }
    }

    /// No queue runs any more, and none is ready to. With `leaving` the guest is about to go on
    /// elsewhere: the lock is given up once what was written is durable.
    pub fn rings_stopped(&self, leaving: bool) {
        // Requests of an earlier connection may be in flight still.
        let leaving = leaving && self.disk.can_be_handed_over() && self.is_clear();
        if leaving {
            // Before anybody is told that it has left: we may be killed after that, and whoever goes on has another
            // state folder. There is nothing to do unless what was answered had to wait when the guest began to
            // leave. If it fails, so does what follows, which says so and keeps the lock.
            let _ = self.disk.leave_journal();
        }
        if !lock(&self.image_lock.state).stopped(leaving) {
            return;
        }
        let pass = self.limits.locked.pass();
        let (disk, state) = (Arc::clone(&self.disk), Arc::clone(&self.image_lock.state));
        let changing = Arc::clone(&self.changing);
        let release = move || release(&disk, &state, &changing, pass);
        // It can take its time, and the front-end waits for an answer.
        let thread = std::thread::Builder::new().name("release".into()).spawn(release.clone());
        if thread.is_err() {
            release();
        }
    }
}

/// Makes durable what was written, then gives the lock up.
fn release(disk: &Disk, state: &Mutex<LockState>, changing: &Mutex<()>, pass: Option<Pass>) {
    let name = disk.name();
    kill_point!(LeftUnsynced);
    let synced = disk.sync();
    // A change of the size, or of the files, that is under way ends first.
    let _alone = lock(changing);
    // Its tables are in memory, and somebody else is about to change them.
    let synced = synced.and_then(|()| disk.forget_image());
    if let Err(error) = &synced {
        if let Some(pass) = pass {
            error!(
                disk = name,
                suppressed = pass.suppressed,
                "the guest has left, but what it wrote cannot be made durable: {error}. The image stays \
                 locked, so that nobody goes on without it; end this daemon to let others have it as it is"
            );
        }
    }
    let gives_up = lock(state).gives_up(synced.is_ok());
    if gives_up {
        // Who looks after that may wait for its storage.
        disk.leave_state();
        disk.unlock();
    }
    lock(state).released(gives_up);
    if gives_up {
        if let Some(pass) = pass {
            let (disk, suppressed) = (name, pass.suppressed);
            info!(disk, suppressed, "the guest has left during a migration: its image is unlocked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::command_channel;
    use crate::export::ExportOptions;
    use crate::memory::SharedMemory;
    use crate::queue::{Armed, Broken, Pop, RequestQueue};
    use ringway_core::{Request, Status};
    use ringway_disk::{Base, OpenOptions, Qcow2, STATE_FILE_BYTES, Source, lock_image, open};
    use std::fs::File;
    use std::io;
    use std::os::fd::RawFd;
    use std::path::PathBuf;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    /// Queues of which there are none.
    enum Never {}

    impl RequestQueue for Never {
        type Token = ();

        fn pop(&mut self, _: &mut Request) -> Result<Pop<()>, Broken> {
            match *self {}
        }

        fn has_work(&self) -> bool {
            match *self {}
        }

        fn effort(&self) -> u32 {
            match *self {}
        }

        fn complete(&mut self, (): (), _: Status, _: u32) {
            match *self {}
        }

        fn publish(&mut self) -> io::Result<()> {
            match *self {}
        }

        fn arm(&mut self) -> Result<Armed, Broken> {
            match *self {}
        }

        fn disarm(&mut self) {
            match *self {}
        }
    }

    impl QueueLifecycle for Never {
        fn doorbell(&self) -> RawFd {
            match *self {}
        }

        fn depth(&self) -> u16 {
            match *self {}
        }

        fn shared_memory(&self) -> Option<&dyn SharedMemory<()>> {
            match *self {}
        }
    }

    /// Leaving what is kept of a disk takes its time, as a helper has to be asked.
    struct Slow {
        image: PathBuf,
        begun: SyncSender<()>,
        was_free: Arc<AtomicBool>,
    }

    impl Drop for Slow {
        fn drop(&mut self) {
            self.begun.send(()).unwrap();
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(300) {
                let other = File::options().read(true).write(true).open(&self.image).unwrap();
                if lock_image(&other, false).is_ok() {
                    self.was_free.store(true, SeqCst);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Storage that answers once the other end is dropped.
    struct Hung(SyncSender<()>, Mutex<Receiver<()>>);

    impl Hung {
        fn new() -> (Self, Receiver<()>, SyncSender<()>) {
            let ((begun, has_begun), (goes_on, hangs)) = (sync_channel(1), sync_channel(0));
            (Self(begun, Mutex::new(hangs)), has_begun, goes_on)
        }

        fn hang(&self) {
            self.0.send(()).unwrap();
            let _ = lock(&self.1).recv();
        }
    }

    impl Names for Hung {
        fn leads_to(&self, _: &Disk) -> bool {
            self.hang();
            true
        }

        fn holder(&self, _: &Disk) -> String {
            String::new()
        }

        fn keep_state(&self, _: &Disk) -> Result<(), String> {
            Ok(())
        }
    }

    /// What is kept of a disk there.
    struct HungKeeper(Hung);

    impl Drop for HungKeeper {
        fn drop(&mut self) {
            self.0.hang();
        }
    }

    /// The storage of a disk hangs when its guest comes, and when it leaves: who asks how it is does not wait for that.
    #[test]
    fn e70_a_guest_that_waits_for_hung_storage_keeps_nobody_else_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        File::create_new(&image).unwrap().set_len(1 << 20).unwrap();
        let state = tempfile::tempfile().unwrap();
        state.set_len(STATE_FILE_BYTES).unwrap();
        let mut options = OpenOptions::new(Source::Path(image));
        (options.raw, options.incoming) = (true, true);
        let disk = Arc::new(open(&options).unwrap());
        let (names, looks, goes_on) = Hung::new();
        let (handle, _inbox) = command_channel::<Never>().unwrap();
        let shape = ExportOptions { queues: 1, queue_size: 64 };
        let export = Export::new(Arc::clone(&disk), shape, vec![handle], 0);
        let export = Arc::new(export.with_names(Some(Arc::new(names)), None));
        let is_locked = || {
            let (export, (say, said)) = (Arc::clone(&export), sync_channel(1));
            std::thread::spawn(move || say.send(export.is_locked()));
            said.recv_timeout(Duration::from_secs(30)).expect("it waits for storage")
        };
        let its = Arc::clone(&export);
        let comes = std::thread::spawn(move || its.may_run(&mut None));
        looks.recv().unwrap();
        assert!(!is_locked());
        assert!(!export.let_go(), "it is about to be ours");
        drop(goes_on);
        assert!(comes.join().unwrap() && is_locked());

        let (keeper, leaves, goes_on) = Hung::new();
        disk.keep_state(&state, Arc::new(HungKeeper(keeper))).unwrap();
        export.rings_stopped(true);
        leaves.recv().unwrap();
        assert!(is_locked(), "it is given up after that");
        assert!(!export.may_run(&mut None));
        drop(goes_on);
        let begun = Instant::now();
        while is_locked() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it is locked for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A daemon ends that another disk keeps from ending: what was left of this one is for others, though its tables
    /// were in memory.
    #[test]
    fn e71_an_image_with_tables_that_was_left_is_let_go() {
        let folder = tempfile::tempdir().unwrap();
        let (base, image) = (folder.path().join("base.raw"), folder.path().join("image"));
        File::create_new(&base).unwrap().set_len(1 << 20).unwrap();
        let mut options = OpenOptions::new(Source::Path(image.clone()));
        let base = Base { path: base, format: None, export: None };
        options.qcow2 = Some(Qcow2 { base: Some(base), ..Qcow2::default() });
        let mut disk = open(&options).unwrap();
        disk.map_image().unwrap();
        let (handle, _inbox) = command_channel::<Never>().unwrap();
        let shape = ExportOptions { queues: 1, queue_size: 64 };
        let export = Export::new(Arc::new(disk), shape, vec![handle], 0);
        let other =
            || lock_image(&File::options().read(true).write(true).open(&image).unwrap(), false);
        assert!(!export.let_go(), "its tables may be written");
        assert!(other().is_err());
        export.leave_image().unwrap();
        assert!(other().is_err(), "this process still has it");
        assert!(export.let_go());
        assert!(other().is_ok());
    }

    /// An end in order while the guest leaves: whoever comes first leaves what is kept of the disk, and nobody gives
    /// the lock up before that is done.
    #[test]
    fn c63_the_lock_stays_until_what_outlives_the_process_was_left() {
        for stops_first in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let image = folder.path().join("image");
            File::create_new(&image).unwrap().set_len(1 << 20).unwrap();
            let state = tempfile::tempfile().unwrap();
            state.set_len(STATE_FILE_BYTES).unwrap();
            let mut options = OpenOptions::new(Source::Path(image.clone()));
            options.raw = true;
            let disk = Arc::new(open(&options).unwrap());
            let ((begun, has_begun), was_free) = (sync_channel(1), Arc::default());
            let slow = Slow { image: image.clone(), begun, was_free: Arc::clone(&was_free) };
            disk.keep_state(&state, Arc::new(slow)).unwrap();
            let (handle, _inbox) = command_channel::<Never>().unwrap();
            let shape = ExportOptions { queues: 1, queue_size: 64 };
            let export = Export::new(disk, shape, vec![handle], 0);
            std::thread::scope(|scope| {
                if stops_first {
                    scope.spawn(|| export.leave_image().unwrap());
                    has_begun.recv().unwrap();
                    export.rings_stopped(true);
                    assert!(!export.let_go(), "somebody leaves it");
                } else {
                    export.rings_stopped(true);
                    has_begun.recv().unwrap();
                    assert!(!export.let_go(), "somebody gives it up");
                    export.leave_image().unwrap();
                }
            });
            assert!(!was_free.load(SeqCst), "stops first: {stops_first}");
            // The guest has left: in the end others have it.
            let other = File::options().read(true).write(true).open(&image).unwrap();
            let begun = Instant::now();
            while lock_image(&other, false).is_err() {
                assert!(begun.elapsed() < Duration::from_secs(60), "it is locked for ever");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
