//! Each call of a file fails once, or it and all behind it, or the process is killed in it, in each of the things that an
//! image's thread does.

use crate::history::{LOOSE, settle};
use crate::jobs::{self, Job};
use crate::model::{SECTOR, sector};
use crate::process::{Rng, in_processes, seeds};
use crate::served::{Host, Queue, Served};
use ringway_core::Op;
use ringway_core::host::{Faults, FileExt, Life, Losses, World};
use ringway_image::{Format, NewImage};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Of a disk with one L2 table for 64 sectors.
const SECTORS: usize = 200;

/// Of a disk with more clusters than the journal has entries.
const MANY: usize = 40 * SECTORS;

/// Sectors of one request.
const PART: usize = 500;

type Guest = fn(&Host, Served, Queue);

/// Who does something.
#[derive(Clone, Copy)]
enum Act {
    /// A guest, and jobs beside it.
    Serve(Guest),
    /// Somebody while nobody serves it.
    Tool(fn(&Host) -> io::Result<()>),
}

use Act::{Serve, Tool};

/// What is done, and what was done in the life before it.
const SCENARIOS: &[(&str, Guest, Act)] = &[
    // The first, of which C82 tells.
    (
        "a snapshot that was named",
        named_and_killed,
        Serve(|_, _, mut queue| {
            let _ = queue.change(Op::Write, 130, 3);
            let _ = queue.flush();
        }),
    ),
    ("nothing", written, Serve(|_, _, _| {})),
    ("replay", written_and_killed, Serve(|_, _, _| {})),
    ("first write", written, Serve(|_, _, mut queue| drop(queue.change(Op::Write, 130, 3)))),
    (
        "many",
        written,
        Serve(|_, _, mut queue| {
            (0..SECTORS / 20).for_each(|nth| drop(queue.change(Op::Write, nth * 20, 19)));
        }),
    ),
    ("discard", written, Serve(|_, _, mut queue| drop(queue.change(Op::Discard, 5, 40)))),
    ("zeroes", written, Serve(|_, _, mut queue| drop(queue.change(Op::WriteZeroes, 5, 40)))),
    (
        "flush",
        written,
        Serve(|_, _, mut queue| {
            let _ = queue.change(Op::Write, 100, 30);
            let _ = queue.flush();
            let _ = queue.change(Op::Write, 101, 3);
        }),
    ),
    (
        "freed and used again",
        written,
        Serve(|_, _, mut queue| {
            let _ = queue.change(Op::Discard, 0, 20);
            ringway_core::host::thread::sleep(Duration::from_millis(1500));
            let _ = queue.change(Op::Write, 120, 20);
            let _ = queue.flush();
        }),
    ),
    (
        "more counts than their table has room for",
        |host, served, queue| fill(host, &served, queue, 6),
        Serve(|_, _, mut queue| {
            (6..9).for_each(|nth| drop(queue.change(Op::Write, nth * PART, PART)));
            let _ = queue.flush();
        }),
    ),
    (
        "discards past the journal",
        |host, served, queue| fill(host, &served, queue, 9),
        Serve(|_, _, mut queue| {
            (0..9).for_each(|nth| drop(queue.change(Op::Discard, nth * PART, PART)));
            let _ = queue.flush();
        }),
    ),
    (
        "zeroes past the journal",
        |host, served, queue| fill(host, &served, queue, 9),
        Serve(|_, _, mut queue| drop(queue.change(Op::WriteZeroes, 0, 9 * PART))),
    ),
    (
        "grow",
        cut_short,
        Serve(|host, served, mut queue| {
            // It is said again.
            let grow = || jobs::grow_to(host, &served, MANY);
            if grow().or_else(|_| grow()).is_ok() {
                let _ = queue.change(Op::Write, 39 * SECTORS, 3);
            }
        }),
    ),
    (
        "grow and flatten",
        written,
        Serve(|host, mut served, queue| {
            let _ = jobs::grow_to(host, &served, MANY);
            let begun = jobs::flatten(host, &served, &mut Rng(1));
            job(host, &mut served, queue, begun);
        }),
    ),
    (
        "shrink",
        written,
        Serve(|host, served, queue| {
            drop(queue);
            let _ = jobs::shrink_to(host, served, SECTORS / 3);
        }),
    ),
    (
        "flatten",
        written,
        Serve(|host, mut served, queue| {
            let begun = jobs::flatten(host, &served, &mut Rng(1));
            job(host, &mut served, queue, begun);
        }),
    ),
    (
        "snapshot",
        written,
        Serve(|host, mut served, queue| {
            let begun = jobs::snapshot(host, &served, 1);
            job(host, &mut served, queue, begun);
        }),
    ),
    (
        "snapshot and merge",
        written,
        Serve(|host, mut served, queue| {
            let begun = jobs::snapshot(host, &served, 1);
            job(host, &mut served, queue, begun);
            let Ok(queue) = Queue::new(host, &served) else { return };
            let begun = jobs::merge(host, &served, &mut Rng(1));
            job(host, &mut served, queue, begun);
        }),
    ),
    (
        "merge once more",
        chained,
        Serve(|host, mut served, queue| {
            // It is said again.
            let merge =
                || jobs::merge(host, &served, &mut Rng(1)).inspect_err(|_| host.note_losses());
            let begun = merge().or_else(|_| merge());
            job(host, &mut served, queue, begun);
        }),
    ),
    ("repair", written_and_spoiled, Tool(jobs::repair)),
    (
        "hand over",
        written,
        Serve(|host, mut served, queue| {
            drop(queue);
            let _ = served.move_there_and_back(host);
        }),
    ),
];

/// A job, and a write behind it.
fn job(host: &Host, served: &mut Served, queue: Queue, begun: io::Result<Job>) {
    drop(queue);
    host.note_losses();
    let _ = begun.and_then(|job| job.end(host, served));
    host.note_losses();
    if let Ok(mut queue) = Queue::new(host, served) {
        let _ = queue.change(Op::Write, 7, 3);
        let _ = queue.flush();
    }
}

fn host(unit: u32) -> Host {
    let world = World::new(7);
    let base = world.open("base", 1);
    let is_written = |at: usize| at < SECTORS / 2 || at > SECTORS - 20;
    let values = |at| if is_written(at) { (1 << 40) + at as u64 } else { 0 };
    let bytes: Vec<u8> = (0..SECTORS).flat_map(|at| sector(values(at))).collect();
    base.write_all_at(&bytes, 0).unwrap();
    base.sync_data().unwrap();
    let top = world.open("top", 1);
    let backing = Some((Path::new("base"), Format::Raw));
    let virtual_size = (SECTORS * SECTOR) as u64;
    NewImage { virtual_size, cluster_bits: 9, backing }.write(&top).unwrap();
    if unit > 1 {
        jobs::widen_counts(&top);
    }
    top.sync_data().unwrap();
    let journal = Some(jobs::new_journal());
    Host::new(world, unit, journal, (0..SECTORS).map(values), Arc::default())
}

/// A life in which something is done.
fn serve(host: &Host, act: Guest) -> io::Result<()> {
    let opened = host.open();
    host.note_losses();
    let (served, lost) = opened?;
    settle(host, &served, lost)?;
    let queue = Queue::new(host, &served)?;
    act(host, served, queue);
    host.note_losses();
    Ok(())
}

/// A life; how many calls of files it had.
fn live(host: &Host, faults: Faults, act: Act) -> Result<(io::Result<()>, u64), String> {
    let ended = host.live(faults, move |host| match act {
        Serve(act) => serve(host, act),
        Tool(act) => act(host),
    });
    let calls = host.world.counts().1;
    match ended {
        Life::Done(outcome) => Ok((outcome, calls)),
        Life::Killed => Ok((Ok(()), calls)),
        Life::Failed(why) => Err(why),
    }
}

fn written(_: &Host, _: Served, mut queue: Queue) {
    write(&mut queue);
}

fn write(queue: &mut Queue) {
    let _ = queue.change(Op::Write, 0, 30);
    let _ = queue.flush();
    for nth in 0..20 {
        let _ = queue.change(Op::Write, 40 + 3 * nth, 2);
    }
}

/// Some of it is in the journal alone then.
fn written_and_killed(host: &Host, served: Served, mut queue: Queue) {
    write(&mut queue);
    let _ = queue.change(Op::Discard, 4, 20);
    assert!(served.image.has_deferred());
    host.world.kill_here();
}

/// QEMU has written it since, with lazy counts, and was killed.
fn written_and_spoiled(host: &Host, served: Served, queue: Queue) {
    written(host, served, queue);
    jobs::spoil_counts(host, &mut Rng(1));
}

/// What is behind the end of the disk is never seen, though its base has something there.
fn cut_short(host: &Host, served: Served, mut queue: Queue) {
    write(&mut queue);
    drop(queue);
    jobs::shrink_to(host, served, SECTORS - 50).unwrap();
}

/// So many parts of a large disk are written.
fn fill(host: &Host, served: &Served, mut queue: Queue, parts: usize) {
    jobs::grow_to(host, served, MANY).unwrap();
    (0..parts).for_each(|nth| queue.change(Op::Write, nth * PART, PART).unwrap());
    queue.flush().unwrap();
}

/// A new image has the name of what is served, which goes on being written.
fn named_and_killed(host: &Host, served: Served, mut queue: Queue) {
    write(&mut queue);
    assert!(jobs::snapshot(host, &served, 1).is_ok_and(|job| matches!(job, Job::Snapshot(..))));
    write(&mut queue);
    host.world.kill_here();
}

/// Two images lie below the one that is served, and what was written is in all three.
fn chained(host: &Host, mut served: Served, mut queue: Queue) {
    write(&mut queue);
    for nth in 1..3 {
        let begun = jobs::snapshot(host, &served, nth);
        job(host, &mut served, queue, begun);
        queue = Queue::new(host, &served).unwrap();
        let _ = queue.change(Op::Write, 60 * usize::try_from(nth).unwrap(), 50);
        let _ = queue.flush();
    }
}

/// What becomes of the storage behind the act.
#[derive(Clone, Copy)]
enum Then {
    Nothing,
    /// What could not be written is not in memory any more.
    Evicted,
    /// The same, but a tool has made its counts right before.
    Repaired,
    Cut(Losses),
}

/// What a life had.
struct Calls {
    /// Its calls of files.
    all: u64,
    /// Those that were syncs.
    syncs: Vec<u64>,
}

/// The act with these faults, and whoever comes next.
fn one(start: &Host, act: Act, faults: Faults, then: Then) -> Result<Calls, String> {
    let host = start.twin();
    let (_, all) = live(&host, faults, act)?;
    let calls = Calls { all, syncs: host.world.syncs() };
    match then {
        Then::Nothing => {}
        Then::Evicted => host.world.evict(),
        Then::Repaired if jobs::is_whole(&host) => {
            live(&host, Faults::default(), Tool(jobs::repair))?.0.map_err(|why| why.to_string())?;
            host.world.evict();
        }
        Then::Repaired => {}
        Then::Cut(losses) => {
            host.model(|model| model.cut = true);
            host.world.cut_power(losses);
        }
    }
    if jobs::is_closed(&host) {
        let (leaks, _) = host.check()?;
        // What one call leaves that fails is given back with the image.
        let once = faults.nth.filter(|(nth, ever)| !ever && !calls.syncs.contains(nth));
        if leaks > 0 && once.is_some_and(|(nth, _)| host.was_open(nth)) {
            return Err(format!("{leaks} leaks, and one call has failed"));
        }
    }
    for _ in 0..2 {
        let next: Guest = |_, _, mut queue| {
            let sectors = queue.host.model(|model| model.sectors());
            let _ = queue.change(Op::Write, 3, sectors.min(153) - 3);
            let _ = queue.flush();
        };
        let (outcome, _) = live(&host, Faults::default(), Serve(next))?;
        outcome.map_err(|error| format!("it cannot be opened: {error}"))?;
        host.world.evict();
    }
    // What was taken ahead, where nobody knew what the file said.
    let (leaks, _) = host.check()?;
    let most = LOOSE.max(host.model(|model| model.sectors()) as u64);
    if leaks > most { Err(format!("{leaks} leaks")) } else { Ok(calls) }
}

fn start(unit: u32, before: Guest) -> Host {
    let start = host(unit);
    live(&start, Faults::default(), Serve(before)).unwrap().0.unwrap();
    start
}

fn once(nth: u64) -> Faults {
    Faults { nth: Some((nth, false)), errno: libc::EIO, ..Faults::default() }
}

/// With `RINGWAY_NTH_CALL=all` every call fails; without it some are left out where there are many, but each sync fails
/// once, and is killed once.
fn which(calls: &Calls, what: &str) -> BTreeSet<u64> {
    let is_all = std::env::var("RINGWAY_NTH_CALL").is_ok_and(|which| which == "all");
    let parts = if calls.all < 1000 { 24 } else { 4 };
    let step = if is_all { 1 } else { usize::try_from(calls.all / parts).unwrap() + 1 };
    let syncs = calls.syncs.iter().filter(|_| what.starts_with("once") || what == "killed");
    (1..=calls.all).step_by(step).chain(syncs.copied()).collect()
}

#[test]
#[ignore = "the process that worlds are made in; the test below starts it"]
fn the_process() {
    for number in seeds() {
        let (name, before, act) = SCENARIOS[usize::try_from(number).unwrap()];
        for unit in [1, 512] {
            let fail = |why: String, what: &str| -> Calls {
                panic!("{name}, in units of {unit}, {what}: {why}")
            };
            let start = start(unit, before);
            let calls = one(&start, act, Faults::default(), Then::Cut(Losses::All))
                .unwrap_or_else(|why| fail(why, "no fault"));
            let with = |nth, what: &str| match what {
                "killed" | "power" => Faults { kill_in: Some(nth), ..Faults::default() },
                "once" | "once, forgotten" => once(nth),
                "for ever" => {
                    Faults { nth: Some((nth, true)), errno: libc::EIO, ..Faults::default() }
                }
                _ => Faults { nth: Some((nth, true)), errno: libc::ENOSPC, ..Faults::default() },
            };
            for what in ["killed", "power", "once", "once, forgotten", "for ever", "full"] {
                for nth in which(&calls, what) {
                    let then = match what {
                        "power" if nth % 2 == 0 => Then::Cut(Losses::All),
                        "power" => Then::Cut(Losses::Some),
                        // What else fails is in memory as it was.
                        "once, forgotten" if !calls.syncs.contains(&nth) => continue,
                        "once, forgotten" => Then::Evicted,
                        "for ever" if nth % 2 == 0 => Then::Evicted,
                        _ => Then::Nothing,
                    };
                    let outcome = one(&start, act, with(nth, what), then);
                    outcome.unwrap_or_else(|why| fail(why, &format!("call {nth} {what}")));
                }
            }
            println!("{name}, in units of {unit}: {} calls", calls.all);
        }
    }
}

#[test]
fn c82_what_was_answered_while_a_snapshot_got_its_name_is_flushed_by_whoever_comes_next() {
    in_processes("nth_call::the_process", 0..1, 1, Duration::from_secs(600));
}

#[test]
fn c92_each_call_of_each_act_may_fail() {
    let count = SCENARIOS.len() as u64;
    in_processes("nth_call::the_process", 1..count, 1, Duration::from_secs(600));
}

#[test]
#[ignore = "the process that worlds are made in; the test below starts it"]
fn the_process_of_repairs() {
    for number in seeds() {
        let (name, before, act) = SCENARIOS[usize::try_from(number).unwrap()];
        for unit in [1, 512] {
            let start = start(unit, before);
            let calls = one(&start, act, Faults::default(), Then::Repaired).unwrap();
            for nth in calls.syncs {
                one(&start, act, once(nth), Then::Repaired).unwrap_or_else(|why| {
                    panic!(
                        "{name}, in units of {unit}, sync {nth} fails, and it is repaired: {why}"
                    )
                });
            }
        }
    }
}

#[test]
fn c123_counts_are_made_right_by_what_storage_has() {
    let count = SCENARIOS.len() as u64;
    in_processes("nth_call::the_process_of_repairs", 1..count, 1, Duration::from_secs(600));
}
