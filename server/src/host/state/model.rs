//! Every order in which two daemons of an image, their helpers, a guest and an operator can take their steps: a
//! search through all states (hazards C39, C40). The rules are those of [ADR 0066].
//!
//! What is simulated: the image, as a count of the acknowledged writes that its tables lead to, and the mark in its
//! header; state files, with their journal, pause and failure, and the names by which folders have them; the lock,
//! which a helper has as well. Page caches and power cuts are left out.
//!
//! [ADR 0066]: ../../../../docs/adr/0066-what-outlives-a-process.md

use std::collections::{HashMap, VecDeque};

/// How far the search goes.
const WRITES_MAX: u8 = 3;
const KILLS_MAX: u8 = 3;
const MOVES_MAX: u8 = 3;
const FILES: usize = 4;
/// The file of a mark whose file is gone.
const GONE: usize = FILES;

/// Rules that are broken on purpose: the search has to find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// A helper takes an error on its line for the death of its daemon.
    ErrorIsDeath,
    /// A destination takes the state up when it starts, without the lock.
    TakesUpWithoutLock,
    /// The lock is given up before the state is left.
    UnlocksFirst,
    /// A guest may leave while what it was answered waits in the journal.
    JournalStaysBehind,
    /// A helper does not hold the lock of a dead daemon.
    LockDiesWithDaemon,
    /// A helper takes away the state of a daemon that holds no lock any more.
    HelperTakesAway,
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    /// Both daemons have one folder.
    shared: bool,
    besides: Besides,
    mistake: Mistake,
}

/// What else than writes, migrations, kills and restarts happens, once: with both at a time there are too many worlds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Besides {
    /// A sync fails.
    Failure,
    /// The disk is paused.
    Pause,
}

/// What is kept of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct File {
    /// An image has its mark; entries lead to so many writes.
    journal: Option<u8>,
    paused: bool,
    failed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Daemon {
    alive: bool,
    locked: bool,
    /// Its queues run.
    runs: bool,
    /// The state file that it has mapped.
    file: Option<usize>,
    /// It has begun to use the journal.
    marked: bool,
    /// The acknowledged writes that it finds.
    sees: u8,
    paused: bool,
    failed: bool,
    /// Written memory is logged.
    logs: bool,
    /// Its guest has left; the image is about to be given up.
    releasing: bool,
    /// The state that it leaves once it has given up the lock: a mistake.
    leaves_late: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Helper {
    alive: bool,
    /// It has the daemon's open file, and so its lock.
    holds: bool,
    file: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct World {
    daemons: [Daemon; 2],
    helpers: [Helper; 2],
    files: [Option<File>; FILES],
    /// The file that each folder has under the image's name; only the first counts where there is one folder.
    named: [Option<usize>; 2],
    /// Which journal the header names, and what the tables lead to.
    mark: Option<usize>,
    tables: u8,
    acknowledged: u8,
    /// Where the guest is, and whether it runs.
    guest: usize,
    guest_runs: bool,
    /// It has left with all that it had written, and has not written since.
    left: bool,
    /// A pause was answered and not taken back.
    paused: bool,
    /// The host has told this daemon of a lost write, and nobody has noted it.
    untold: Option<usize>,
    /// A sync has failed: to be known by all who serve it from then on, unless nobody could note it.
    lost: bool,
    kills: u8,
    moves: u8,
    /// What happens besides has happened.
    once: bool,
}

impl World {
    fn start() -> Self {
        let mut world = Self {
            daemons: Default::default(),
            helpers: Default::default(),
            files: [None; FILES],
            named: [None; 2],
            mark: None,
            tables: 0,
            acknowledged: 0,
            guest: 0,
            guest_runs: true,
            left: false,
            paused: false,
            untold: None,
            lost: false,
            kills: 0,
            moves: 0,
            once: false,
        };
        world.helpers[0].alive = true;
        world.daemons[0].alive = true;
        world
    }

    fn folder(side: usize, setting: Setting) -> usize {
        if setting.shared { 0 } else { side }
    }

    fn is_free(&self) -> bool {
        let locked = self.daemons.iter().any(|daemon| daemon.alive && daemon.locked);
        !locked && !self.helpers.iter().any(|helper| helper.alive && helper.holds)
    }

    fn file(&mut self, at: usize) -> &mut File {
        self.files[at].get_or_insert_default()
    }

    /// Files that nobody can find or has any more are gone; the others are numbered in one order, and the guest's
    /// side is the first, so that worlds that differ in that alone are one.
    fn sweep(&mut self, setting: Setting) {
        if self.guest == 1 {
            // It does not matter which of them is called which.
            self.guest = 0;
            self.daemons.swap(0, 1);
            self.helpers.swap(0, 1);
            self.untold = self.untold.map(|side| 1 - side);
            if !setting.shared {
                self.named.swap(0, 1);
            }
        }
        let mut order: Vec<usize> = Vec::new();
        let daemons = self.daemons.iter().flat_map(|daemon| [daemon.file, daemon.leaves_late]);
        let helpers = self.helpers.iter().map(|helper| helper.file);
        for at in self.named.into_iter().chain(daemons).chain(helpers).flatten() {
            if !order.contains(&at) {
                order.push(at);
            }
        }
        let new = |at: usize| order.iter().position(|before| *before == at);
        let mut files = [None; FILES];
        for (new, before) in order.iter().enumerate() {
            files[new] = self.files[*before];
        }
        self.files = files;
        self.mark = self.mark.map(|at| new(at).unwrap_or(GONE));
        let renumber = |at: &mut Option<usize>| *at = at.and_then(new);
        self.named.iter_mut().for_each(renumber);
        for (daemon, helper) in self.daemons.iter_mut().zip(&mut self.helpers) {
            renumber(&mut daemon.file);
            renumber(&mut daemon.leaves_late);
            renumber(&mut helper.file);
        }
    }

    fn take_up(&mut self, side: usize, setting: Setting) {
        let folder = Self::folder(side, setting);
        let at = self.named[folder].unwrap_or_else(|| {
            let free = self.files.iter().position(Option::is_none);
            free.expect("there are as many as processes can have")
        });
        self.named[folder] = Some(at);
        let file = *self.file(at);
        self.daemons[side].file = Some(at);
        self.helpers[side].file = Some(at).filter(|_| self.helpers[side].alive);
        self.daemons[side].paused |= file.paused;
        self.daemons[side].failed |= file.failed;
    }

    /// Takes the lock, the state, the entries; false if somebody has it.
    fn take_over(&mut self, side: usize, setting: Setting) -> bool {
        if !self.is_free() {
            return false;
        }
        self.daemons[side].locked = true;
        self.helpers[side].holds =
            self.helpers[side].alive && setting.mistake != Mistake::LockDiesWithDaemon;
        if self.daemons[side].file.is_none() {
            self.take_up(side, setting);
        }
        let (mark, at) = (self.mark.take(), self.daemons[side].file);
        let entries = at.and_then(|at| self.files[at]).and_then(|file| file.journal);
        match entries {
            Some(entries) if mark == at => self.tables = entries,
            None if mark.is_none() => {}
            // The journal of the mark is not here, or the image is not that of the journal.
            _ => {
                self.daemons[side].failed = true;
                at.into_iter().for_each(|at| self.file(at).failed = true);
            }
        }
        self.daemons[side].file.into_iter().for_each(|at| self.file(at).journal = None);
        self.daemons[side].marked = false;
        self.daemons[side].sees = self.tables;
        true
    }

    /// All that was answered is in the tables, and nothing says of a journal.
    fn leave_journal(&mut self, side: usize) {
        self.tables = self.daemons[side].sees;
        if std::mem::take(&mut self.daemons[side].marked) {
            self.mark = None;
            self.daemons[side].file.into_iter().for_each(|at| self.file(at).journal = None);
        }
    }

    fn unlink_if_empty(&mut self, at: usize, folder: usize) {
        if self.files[at].unwrap_or_default() == File::default() {
            self.named[folder] = None;
        }
    }

    /// Leaves the image in order.
    fn leave(&mut self, side: usize, setting: Setting) {
        let at = self.daemons[side].file.take();
        self.helpers[side].file = None;
        self.helpers[side].holds = false;
        if setting.mistake == Mistake::UnlocksFirst {
            self.daemons[side].leaves_late = at;
        } else {
            at.into_iter().for_each(|at| self.unlink_if_empty(at, Self::folder(side, setting)));
        }
        self.daemons[side] = Daemon {
            alive: true,
            leaves_late: self.daemons[side].leaves_late,
            ..Daemon::default()
        };
    }

    /// What is wrong with it.
    fn judge(&self, setting: Setting) -> Result<(), String> {
        let locked = |daemon: &&Daemon| daemon.alive && daemon.locked;
        if self.daemons.iter().filter(locked).count() > 1 {
            return Err("two have the lock".into());
        }
        for (side, daemon) in self.daemons.iter().enumerate().filter(|(_, d)| locked(d)) {
            let misses = daemon.sees < self.acknowledged;
            // That a sync has failed is in the folder, and with it why one is missing.
            if misses && !daemon.failed && (setting.shared || !self.lost) {
                return Err(format!("side {side} misses an acknowledged write, and nobody knows"));
            }
            if (misses || daemon.failed) && setting.shared && !self.lost {
                return Err(format!("side {side} takes for lost what nobody has lost"));
            }
            if self.left && (misses || daemon.failed) && !self.lost {
                return Err(format!("side {side} misses what the guest had when it left"));
            }
            if self.paused && setting.shared && !daemon.paused {
                return Err(format!("side {side} has forgotten a pause"));
            }
            let knows = daemon.failed || self.untold.is_some();
            if self.lost && setting.shared && !knows {
                return Err(format!("side {side} does not know that a flush has failed"));
            }
        }
        Ok(())
    }
}

type Step = fn(&mut World, usize, Setting) -> bool;

const STEPS: [(&str, Step); 19] = [
    ("start", |world, side, setting| {
        if world.daemons[side].alive || world.helpers[side].alive || !world.is_free() {
            return false;
        }
        (world.daemons[side].alive, world.helpers[side].alive) = (true, true);
        world.take_over(side, setting)
    }),
    ("start of an incoming", |world, side, setting| {
        if world.daemons[side].alive || world.helpers[side].alive {
            return false;
        }
        (world.daemons[side].alive, world.helpers[side].alive) = (true, true);
        if setting.mistake == Mistake::TakesUpWithoutLock {
            world.take_up(side, setting);
        }
        true
    }),
    ("queue starts", |world, side, setting| {
        let daemon = world.daemons[side];
        let ready = daemon.alive && !daemon.runs && !daemon.releasing && !daemon.paused;
        if !ready || world.guest != side || !world.guest_runs {
            return false;
        }
        if !daemon.locked && !world.take_over(side, setting) {
            return false;
        }
        world.daemons[side].runs = !world.daemons[side].paused;
        true
    }),
    ("write", |world, side, setting| {
        let daemon = world.daemons[side];
        if !daemon.runs || world.acknowledged == WRITES_MAX {
            return false;
        }
        world.acknowledged += 1;
        // Whoever misses one has been told so: it is not to be found missing again.
        world.daemons[side].sees = world.acknowledged;
        world.left = false;
        let defers = !daemon.logs || setting.mistake == Mistake::JournalStaysBehind;
        match daemon.file.filter(|_| defers) {
            Some(at) => {
                if !daemon.marked {
                    (world.mark, world.daemons[side].marked) = (Some(at), true);
                }
                world.file(at).journal = Some(world.acknowledged);
            }
            None => world.tables = world.acknowledged,
        }
        true
    }),
    ("a sync fails", |world, side, setting| {
        let fails = setting.besides == Besides::Failure && world.daemons[side].runs;
        let fails = fails && !world.once;
        if fails {
            world.once = true;
            (world.untold, world.lost) = (Some(side), true);
        }
        fails
    }),
    ("it is noted", |world, side, _| {
        if world.untold != Some(side) || !world.daemons[side].alive {
            return false;
        }
        world.untold = None;
        world.daemons[side].failed = true;
        world.daemons[side].file.into_iter().for_each(|at| world.file(at).failed = true);
        true
    }),
    ("pause", |world, side, setting| {
        let daemon = world.daemons[side];
        if !daemon.runs || world.once || setting.besides != Besides::Pause {
            return false;
        }
        world.once = true;
        (world.daemons[side].paused, world.daemons[side].runs) = (true, false);
        world.leave_journal(side);
        daemon.file.into_iter().for_each(|at| world.file(at).paused = true);
        world.paused = daemon.file.is_some();
        true
    }),
    ("resume", |world, side, _| {
        let daemon = world.daemons[side];
        let resumes = daemon.alive && daemon.locked && daemon.paused;
        if resumes {
            (world.daemons[side].paused, world.paused) = (false, false);
            daemon.file.into_iter().for_each(|at| world.file(at).paused = false);
        }
        resumes
    }),
    ("guest may leave", |world, side, setting| {
        let daemon = world.daemons[side];
        let begins = daemon.runs && !daemon.logs && world.moves < MOVES_MAX;
        if begins {
            world.daemons[side].logs = true;
            if setting.mistake != Mistake::JournalStaysBehind {
                world.leave_journal(side);
            }
        }
        begins
    }),
    ("guest leaves", |world, side, _| {
        let daemon = &mut world.daemons[side];
        let leaves = daemon.runs && daemon.logs;
        if leaves {
            world.moves += 1;
            (daemon.runs, daemon.releasing) = (false, true);
            (world.guest_runs, world.left) = (false, !daemon.failed);
        }
        leaves
    }),
    ("image is given up", |world, side, setting| {
        let daemon = world.daemons[side];
        if !daemon.alive || !daemon.releasing {
            return false;
        }
        world.daemons[side].releasing = false;
        if !daemon.failed && world.untold != Some(side) {
            world.leave_journal(side);
            world.leave(side, setting);
        }
        true
    }),
    ("state is left late", |world, side, setting| {
        let Some(at) = world.daemons[side].leaves_late.take() else { return false };
        world.unlink_if_empty(at, World::folder(side, setting));
        true
    }),
    ("guest goes on at the other side of", |world, side, _| {
        let goes = world.guest == side && !world.guest_runs;
        if goes {
            (world.guest, world.guest_runs) = (1 - side, true);
        }
        goes
    }),
    ("migration is cancelled", |world, side, _| {
        let goes = world.guest == side && !world.guest_runs;
        if goes {
            world.guest_runs = true;
            (world.daemons[side].logs, world.daemons[side].releasing) = (false, false);
        }
        goes
    }),
    ("stop", |world, side, setting| {
        let daemon = world.daemons[side];
        if !daemon.alive || world.untold == Some(side) {
            return false;
        }
        if daemon.locked {
            world.leave_journal(side);
        }
        if daemon.locked || daemon.file.is_some() {
            world.leave(side, setting);
        }
        let leaves_late = world.daemons[side].leaves_late;
        world.daemons[side] = Daemon { leaves_late, ..Daemon::default() };
        world.helpers[side] = Helper::default();
        true
    }),
    ("kill of the daemon", |world, side, _| {
        if !world.daemons[side].alive || world.kills == KILLS_MAX {
            return false;
        }
        world.kills += 1;
        world.daemons[side] = Daemon::default();
        if world.helpers[side].file.is_none() {
            // It has nothing to look after.
            world.helpers[side] = Helper::default();
        }
        if !world.helpers[side].alive && world.untold == Some(side) {
            // Nobody could note it: see the price of ADR 0016.
            (world.untold, world.lost) = (None, false);
        }
        true
    }),
    ("kill of the helper", |world, side, _| {
        if !world.helpers[side].alive || world.kills == KILLS_MAX {
            return false;
        }
        world.kills += 1;
        world.helpers[side] = Helper::default();
        if !world.daemons[side].alive && world.untold == Some(side) {
            (world.untold, world.lost) = (None, false);
        }
        true
    }),
    ("helper finds its daemon dead", |world, side, setting| {
        if world.daemons[side].alive || !world.helpers[side].alive {
            return false;
        }
        world.end_of_helper(side, setting, true);
        true
    }),
    ("error on the line of the helper", |world, side, setting| {
        let errs = setting.mistake == Mistake::ErrorIsDeath
            && world.daemons[side].alive
            && world.helpers[side].alive;
        if errs {
            world.end_of_helper(side, setting, false);
        }
        errs
    }),
];

impl World {
    /// It takes its daemon for dead, which that is, or not.
    fn end_of_helper(&mut self, side: usize, setting: Setting, dead: bool) {
        let helper = std::mem::take(&mut self.helpers[side]);
        let Some(at) = helper.file else { return };
        if dead && self.untold == Some(side) {
            self.untold = None;
            self.file(at).failed = true;
            self.file(at).journal = None;
        }
        if !dead {
            // What helpers did before: entries went into the image, and their file away.
            if self.mark == Some(at) {
                self.tables = self.files[at].and_then(|file| file.journal).unwrap_or(self.tables);
                self.mark = None;
            }
            self.file(at).journal = None;
        }
        if !dead || setting.mistake == Mistake::HelperTakesAway {
            self.named[Self::folder(side, setting)] = None;
        }
    }
}

/// All states; or the way to the first that is wrong.
fn search(setting: Setting) -> Result<usize, String> {
    let mut start = World::start();
    assert!(start.take_over(0, setting));
    let mut came_from: HashMap<World, Option<(World, String)>> = HashMap::from([(start, None)]);
    let mut queue = VecDeque::from([start]);
    while let Some(world) = queue.pop_front() {
        if let Err(wrong) = world.judge(setting) {
            let (mut trace, mut at) = (vec![wrong], world);
            while let Some(Some((before, what))) = came_from.get(&at) {
                trace.push(what.clone());
                at = *before;
            }
            trace.reverse();
            return Err(trace.join(", "));
        }
        for side in 0..2 {
            for (what, step) in STEPS {
                let mut next = world;
                if !step(&mut next, side, setting) {
                    continue;
                }
                next.sweep(setting);
                came_from.entry(next).or_insert_with(|| {
                    queue.push_back(next);
                    Some((world, format!("{what} {side}")))
                });
            }
        }
    }
    Ok(came_from.len())
}

#[test]
fn c40_no_order_of_steps_loses_what_outlives_a_process() {
    for besides in [Besides::Failure, Besides::Pause] {
        for shared in [true, false] {
            let setting = Setting { shared, besides, mistake: Mistake::None };
            let states = search(setting).unwrap_or_else(|trace| panic!("{setting:?}: {trace}"));
            println!("{besides:?}, one folder: {shared}, {states} states");
            assert!(states > 10_000, "the search saw {states} states");
        }
    }
}

#[test]
fn c40_each_mistake_is_found() {
    use {Besides as B, Mistake as M};
    for (shared, besides, mistake) in [
        (true, B::Pause, M::ErrorIsDeath),
        (true, B::Failure, M::TakesUpWithoutLock),
        (true, B::Pause, M::TakesUpWithoutLock),
        (true, B::Pause, M::UnlocksFirst),
        (false, B::Pause, M::JournalStaysBehind),
        (true, B::Failure, M::LockDiesWithDaemon),
        (true, B::Pause, M::HelperTakesAway),
    ] {
        let setting = Setting { shared, besides, mistake };
        let trace = search(setting).expect_err(&format!("{mistake:?}"));
        println!("{mistake:?}: {trace}");
    }
}
