//! One world: its storage, its threads, its clock, its seed.

use super::inode::{Inode, Losses};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Nobody's number.
const NONE: usize = usize::MAX;

/// What nobody wakes.
pub(super) const SLEEPS: usize = usize::MAX;

/// What a world may do beside what it is asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// The call of a file with this number fails, the first being 1, and all behind it if it is for ever.
    pub nth: Option<(u64, bool)>,
    /// With this `errno`. `ENOSPC` comes to calls alone that need room.
    pub errno: i32,
    /// The process is killed in the middle of the call of a file with this number.
    pub kill_in: Option<u64>,
    /// The process is killed at the event with this number.
    pub kill_at: Option<u64>,
    /// So many calls of a thousand fail with any error that they may have.
    pub per_mille: u64,
    /// So many syncs of a thousand fail, and lose what is not written back.
    pub syncs_per_mille: u64,
    /// From the first of these calls of files to the last there is no room: those that may need some fail.
    pub full: Option<(u64, u64)>,
    /// So many calls of a thousand take up to three seconds.
    pub slow_per_mille: u64,
    /// So many calls of a thousand are interrupted, or do less than they are asked for.
    pub short_per_mille: u64,
    /// At so many events of a thousand the host drops some of what it has in its memory and could not write.
    pub evicts_per_mille: u64,
}

/// How a life of a process ended.
#[derive(Debug)]
pub enum Life<R> {
    /// What it was for came to this.
    Done(R),
    /// It was killed.
    Killed,
    /// A thread has panicked, or all of them wait for each other.
    Failed(String),
}

#[derive(Debug, PartialEq, Eq)]
enum End {
    Done,
    Killed,
    Failed(String),
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Runs,
    /// Until somebody wakes those that wait for this, or the clock is there.
    Waits {
        on: usize,
        until: Option<u64>,
    },
    Over,
}

#[derive(Debug)]
struct Actor {
    name: String,
    state: State,
    baton: Arc<Condvar>,
    /// A wait ended because the clock was there.
    timed_out: bool,
    /// It was unparked.
    token: bool,
}

#[derive(Debug)]
pub(super) struct Inner {
    rng: u64,
    clock: u64,
    events: u64,
    pub(super) calls: u64,
    pub(super) faults: Faults,
    /// Syncs that have failed on purpose.
    pub(super) failed_syncs: u64,
    pub(super) failed_calls: u64,
    /// Which calls of this life were syncs.
    pub(super) syncs: Vec<u64>,
    /// Of 256 events so many let another thread run.
    restless: u64,
    actors: Vec<Actor>,
    current: usize,
    end: Option<End>,
    trace: u64,
    tells: bool,
    pub(super) boot: u64,
    pub(super) files: Vec<Inode>,
    pub(super) names: BTreeMap<String, usize>,
    bells: Vec<bool>,
}

/// A simulated host. Each of its lives is a process on it; its storage outlives them.
#[derive(Debug)]
pub struct World {
    inner: Mutex<Inner>,
    over: Condvar,
}

thread_local! {
    static HERE: RefCell<Option<(Arc<World>, usize)>> = const { RefCell::new(None) };
}

/// The world and the number of the thread that asks, if it is one of a world.
pub(super) fn here() -> Option<(Arc<World>, usize)> {
    HERE.with(|here| here.borrow().clone())
}

impl Inner {
    pub(super) fn random(&mut self) -> u64 {
        // splitmix64.
        self.rng = self.rng.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.rng;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.random() % end.max(1)
    }

    pub(super) fn note(&mut self, what: std::fmt::Arguments<'_>) {
        let line = format!("{} {} {what}", self.events, self.current);
        for byte in line.bytes() {
            self.trace = (self.trace ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
        if self.tells {
            let name = self.actors.get(self.current).map_or("", |actor| &actor.name);
            eprintln!("{line} ({name})");
        }
    }

    /// Memory is wanted for something else, now and then.
    fn evict_some(&mut self) {
        let per_mille = self.faults.evicts_per_mille;
        if per_mille == 0 || !self.files.iter().any(Inode::has_lost) {
            return;
        }
        if self.below(1000) < per_mille {
            let mut files = std::mem::take(&mut self.files);
            files.iter_mut().for_each(|file| file.evict_some(&mut || self.below(2) == 0));
            self.files = files;
        }
    }

    /// Who is next.
    fn choose(&mut self) -> Option<usize> {
        loop {
            let now = self.clock;
            for actor in &mut self.actors {
                if matches!(actor.state, State::Waits { until: Some(until), .. } if until <= now) {
                    (actor.state, actor.timed_out) = (State::Runs, true);
                }
            }
            let runs = |actor: &&Actor| actor.state == State::Runs;
            let count = self.actors.iter().filter(runs).count() as u64;
            if count > 0 {
                let nth = usize::try_from(self.below(count)).unwrap_or(0);
                let mut able =
                    self.actors.iter().enumerate().filter(|(_, actor)| actor.state == State::Runs);
                return able.nth(nth).map(|(at, _)| at);
            }
            let next = self.actors.iter().filter_map(|actor| match actor.state {
                State::Waits { until, .. } => until,
                _ => None,
            });
            self.clock = next.min()?;
        }
    }
}

impl World {
    /// A host without files.
    #[must_use]
    pub fn new(seed: u64) -> Arc<Self> {
        let mut inner = Inner {
            rng: seed,
            clock: 1,
            events: 0,
            calls: 0,
            faults: Faults::default(),
            failed_syncs: 0,
            failed_calls: 0,
            syncs: Vec::new(),
            restless: 0,
            actors: Vec::new(),
            current: NONE,
            end: None,
            trace: 0xcbf2_9ce4_8422_2325,
            tells: std::env::var_os("RINGWAY_TRACE").is_some(),
            boot: 0,
            files: Vec::new(),
            names: BTreeMap::new(),
            bells: Vec::new(),
        };
        inner.boot = inner.random() | 1;
        inner.restless = [8, 64, 200][usize::try_from(inner.below(3)).unwrap_or(0)];
        Arc::new(Self { inner: Mutex::new(inner), over: Condvar::new() })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process is begun that does this, and waited for. It may be killed, and calls fail, as `faults` says.
    ///
    /// # Panics
    /// If the host starts no thread.
    pub fn live<R: Send + 'static>(
        self: &Arc<Self>,
        faults: Faults,
        body: impl FnOnce() -> R + Send + 'static,
    ) -> Life<R> {
        {
            let mut inner = self.lock();
            // Threads of a life that is over stay where they are: nobody hands them the baton again.
            inner.actors.clear();
            (inner.end, inner.current, inner.faults) = (None, NONE, faults);
            (inner.events, inner.calls) = (0, 0);
            (inner.failed_calls, inner.failed_syncs) = (0, 0);
            inner.syncs.clear();
        }
        let answer = Arc::new(Mutex::new(None));
        let told = Arc::clone(&answer);
        let body = move || {
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(body());
        };
        let main = self.spawn("main".into(), body);
        let mut inner = self.lock();
        inner.current = main;
        inner.actors[main].baton.notify_one();
        while inner.end.is_none() {
            inner = self.over.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner.current = NONE;
        inner.faults = Faults::default();
        match inner.end.take() {
            Some(End::Killed) => Life::Killed,
            Some(End::Failed(why)) => Life::Failed(why),
            _ => match answer.lock().unwrap_or_else(PoisonError::into_inner).take() {
                Some(answer) => Life::Done(answer),
                None => Life::Failed("it ended without an answer".into()),
            },
        }
    }

    /// Adds a thread that waits for its turn; its number.
    pub(super) fn spawn(
        self: &Arc<Self>,
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> usize {
        let mut inner = self.lock();
        let me = inner.actors.len();
        let (baton, state) = (Arc::new(Condvar::new()), State::Runs);
        let mine = Arc::clone(&baton);
        inner.actors.push(Actor { name, state, baton, timed_out: false, token: false });
        drop(inner);
        let world = Arc::clone(self);
        let run = move || {
            HERE.with(|here| *here.borrow_mut() = Some((Arc::clone(&world), me)));
            // Its life may be over by now.
            drop(world.wait_for(world.lock(), me, &mine));
            let panicked = catch_unwind(AssertUnwindSafe(body)).err();
            world.finish(me, panicked.as_deref());
        };
        std::thread::Builder::new().stack_size(1 << 20).spawn(run).expect("the host has threads");
        me
    }

    fn wait_for_baton<'a>(
        &'a self,
        inner: MutexGuard<'a, Inner>,
        me: usize,
    ) -> MutexGuard<'a, Inner> {
        let baton = Arc::clone(&inner.actors[me].baton);
        self.wait_for(inner, me, &baton)
    }

    fn wait_for<'a>(
        &'a self,
        mut inner: MutexGuard<'a, Inner>,
        me: usize,
        baton: &Arc<Condvar>,
    ) -> MutexGuard<'a, Inner> {
        // What is over hands it to nobody, and a later life has other batons.
        while inner.current != me || inner.end.is_some() || !is_of(&inner, me, baton) {
            inner = baton.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner
    }

    fn finish(&self, me: usize, panicked: Option<&(dyn std::any::Any + Send)>) {
        let mut inner = self.lock();
        inner.actors[me].state = State::Over;
        if let Some(panicked) = panicked {
            let text = panicked.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panicked.downcast_ref::<&str>().map(|text| (*text).into()));
            let text = text.unwrap_or_else(|| "a panic".into());
            let why = format!("thread {:?}: {text}", inner.actors[me].name);
            return self.end(&mut inner, End::Failed(why));
        }
        wake(&mut inner, thread_key(me), false);
        if me == 0 {
            return self.end(&mut inner, End::Done);
        }
        self.hand_on(&mut inner);
    }

    fn end(&self, inner: &mut Inner, end: End) {
        inner.note(format_args!("end {end:?}"));
        inner.end = Some(end);
        inner.current = NONE;
        self.over.notify_all();
    }

    /// Hands the baton to whoever is next.
    fn hand_on(&self, inner: &mut Inner) {
        match inner.choose() {
            Some(next) => {
                inner.current = next;
                inner.actors[next].baton.notify_one();
            }
            None => {
                let waits = inner.actors.iter().filter(|actor| actor.state != State::Over);
                let names: Vec<_> = waits.map(|actor| actor.name.as_str()).collect();
                let why = format!("all threads wait: {names:?}");
                self.end(inner, End::Failed(why));
            }
        }
    }

    /// Something happens: another thread may run before it, or the process be killed.
    pub(super) fn event(&self, me: usize, what: std::fmt::Arguments<'_>) {
        let mut inner = self.lock();
        inner.events += 1;
        inner.clock += 500 + inner.random() % 1000;
        inner.note(what);
        inner.evict_some();
        if inner.faults.kill_at == Some(inner.events) {
            self.kill(inner, me);
            return;
        }
        if inner.below(256) < inner.restless {
            self.hand_on(&mut inner);
            if inner.current != me {
                drop(self.wait_for_baton(inner, me));
            }
        }
    }

    /// The process is over, as by SIGKILL. Does not come back.
    pub(super) fn kill(&self, mut inner: MutexGuard<'_, Inner>, me: usize) {
        self.end(&mut inner, End::Killed);
        drop(self.wait_for_baton(inner, me));
    }

    /// Waits until somebody wakes those that wait for this; false if the clock was there before.
    pub(super) fn wait(&self, me: usize, on: usize, after: Option<u64>) -> bool {
        let mut inner = self.lock();
        let until = after.map(|after| inner.clock.saturating_add(after));
        inner.actors[me].timed_out = false;
        inner.actors[me].state = State::Waits { on, until };
        self.hand_on(&mut inner);
        let inner = self.wait_for_baton(inner, me);
        !inner.actors[me].timed_out
    }

    /// The call of a file takes its time, now and then.
    pub(super) fn stall(&self, me: usize) {
        let mut inner = self.lock();
        let is_slow = inner.faults.slow_per_mille > 0;
        if is_slow && inner.below(1000) < inner.faults.slow_per_mille {
            let nanos = inner.below(3_000_000_000);
            drop(inner);
            self.wait(me, SLEEPS, Some(nanos));
        }
    }

    /// Wakes who waits for this: all, or one of them.
    pub(super) fn wake(&self, on: usize, one: bool) {
        wake(&mut self.lock(), on, one);
    }

    pub(super) fn now(&self) -> u64 {
        self.lock().clock
    }

    /// Has a thread go on that is parked, or the next time that it parks.
    pub(super) fn unpark(&self, thread: usize) {
        let mut inner = self.lock();
        if let Some(actor) = inner.actors.get_mut(thread) {
            actor.token = true;
        }
        wake(&mut inner, park_key(thread), false);
    }

    pub(super) fn park(&self, me: usize, after: Option<u64>) {
        if !std::mem::take(&mut self.lock().actors[me].token) {
            self.wait(me, park_key(me), after);
            self.lock().actors[me].token = false;
        }
    }

    pub(super) fn is_over(&self, thread: usize) -> bool {
        self.lock().actors.get(thread).is_none_or(|actor| actor.state == State::Over)
    }

    pub(super) fn new_bell(&self) -> usize {
        let mut inner = self.lock();
        inner.bells.push(false);
        inner.bells.len() - 1
    }

    pub(super) fn bell<T>(&self, bell: usize, act: impl FnOnce(&mut bool) -> T) -> T {
        act(&mut self.lock().bells[bell])
    }

    /// Power is cut: what was not synced is lost as far as this says, and the host comes up again.
    pub fn cut_power(&self, losses: Losses) {
        let mut inner = self.lock();
        inner.boot = inner.random() | 1;
        let mut files = std::mem::take(&mut inner.files);
        files.iter_mut().for_each(|file| file.cut_power(losses, &mut |end| inner.below(end)));
        inner.files = files;
    }

    /// The host needs its memory: of what it could not write only that is left which storage has.
    pub fn evict(&self) {
        self.lock().files.iter_mut().for_each(Inode::evict);
    }

    /// Another one with the same storage, on which nobody has done anything yet.
    #[must_use]
    pub fn twin(&self) -> Arc<Self> {
        let (twin, inner) = (Self::new(0), self.lock());
        let mut its = twin.lock();
        (its.rng, its.clock, its.restless, its.boot) =
            (inner.rng, inner.clock, inner.restless, inner.boot);
        (its.files, its.names) = (inner.files.clone(), inner.names.clone());
        drop(its);
        twin
    }

    /// A file gets another name beside the one that it has, durably. Whatever had that name has it no more.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn link(&self, name: &str, other: &str) {
        if let Some((world, me)) = here() {
            world.event(me, format_args!("link {name} {other}"));
        }
        let mut inner = self.lock();
        let inode = inner.names[name];
        inner.names.insert(other.into(), inode);
    }

    /// A file is known by another name, durably. Whatever had that name has it no more.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn rename(&self, name: &str, other: &str) {
        if let Some((world, me)) = here() {
            world.event(me, format_args!("rename {name} {other}"));
        }
        let mut inner = self.lock();
        let inode = inner.names.remove(name).expect("there is such a file");
        inner.names.insert(other.into(), inode);
    }

    /// How many events and calls of files there were in this life, and how many of these have failed on purpose:
    /// syncs, and all.
    #[must_use]
    pub fn counts(&self) -> (u64, u64, u64, u64) {
        let inner = self.lock();
        (inner.events, inner.calls, inner.failed_syncs, inner.failed_calls)
    }

    /// Which of the calls of files in this life were syncs, the first call being 1.
    #[must_use]
    pub fn syncs(&self) -> Vec<u64> {
        self.lock().syncs.clone()
    }

    /// The process of the calling thread is killed. Does not come back.
    ///
    /// # Panics
    /// If it is no thread of a world.
    pub fn kill_here(&self) {
        let (_, me) = here().expect("a thread of a world");
        self.kill(self.lock(), me);
    }

    /// Something of the test is part of what happens.
    pub fn tell(&self, what: std::fmt::Arguments<'_>) {
        self.lock().note(what);
    }

    /// A number for all that has happened.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.lock().trace
    }

    /// The time of this world, for whoever judges what happens in it.
    #[must_use]
    pub fn event_count(&self) -> u64 {
        self.lock().clock
    }
}

/// What a thread waits for that is parked, and who waits for its end: no address is so small.
fn park_key(thread: usize) -> usize {
    2 * thread
}

pub(super) fn thread_key(thread: usize) -> usize {
    2 * thread + 1
}

/// Whether this is the baton of a thread of the life that is led now.
fn is_of(inner: &Inner, me: usize, baton: &Arc<Condvar>) -> bool {
    inner.actors.get(me).is_some_and(|actor| Arc::ptr_eq(&actor.baton, baton))
}

fn wake(inner: &mut Inner, on: usize, one: bool) {
    let waits = |actor: &Actor| matches!(actor.state, State::Waits { on: what, .. } if what == on);
    let mut which: Vec<usize> =
        (0..inner.actors.len()).filter(|at| waits(&inner.actors[*at])).collect();
    if one && which.len() > 1 {
        let nth = usize::try_from(inner.below(which.len() as u64)).unwrap_or(0);
        which = vec![which[nth]];
    }
    for at in which {
        inner.actors[at].state = State::Runs;
    }
}
