//! Each call of a file fails once, or it and all behind it, or the process is killed in it, in each of the things that an
//! image's thread does.

use crate::history::settle;
use crate::jobs::{self, Job};
use crate::model::{Model, SECTOR, sector};
use crate::process::{Rng, in_processes, seeds};
use crate::served::{Host, Queue, Served};
use ringway_core::Op;
use ringway_core::host::{Faults, FileExt, Life, Losses, World};
use ringway_image::{Format, Journal, NewImage};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Of a disk with one L2 table for 64 sectors.
const SECTORS: usize = 200;

type Act = fn(&Host, Served, Queue);

/// What is done, and what was done in the life before it.
const SCENARIOS: &[(&str, Act, Act)] = &[
    // The first, of which C82 tells.
    ("a snapshot that was named", named_and_killed, |_, _, mut queue| {
        let _ = queue.change(Op::Write, 130, 3);
        let _ = queue.flush();
    }),
    ("nothing", written, |_, _, _| {}),
    ("replay", written_and_killed, |_, _, _| {}),
    ("first write", written, |_, _, mut queue| drop(queue.change(Op::Write, 130, 3))),
    ("many", written, |_, _, mut queue| {
        (0..SECTORS / 20).for_each(|nth| drop(queue.change(Op::Write, nth * 20, 19)));
    }),
    ("discard", written, |_, _, mut queue| drop(queue.change(Op::Discard, 5, 40))),
    ("zeroes", written, |_, _, mut queue| drop(queue.change(Op::WriteZeroes, 5, 40))),
    ("flush", written, |_, _, mut queue| {
        let _ = queue.change(Op::Write, 100, 30);
        let _ = queue.flush();
        let _ = queue.change(Op::Write, 101, 3);
    }),
    ("freed and used again", written, |_, _, mut queue| {
        let _ = queue.change(Op::Discard, 0, 20);
        ringway_core::host::thread::sleep(Duration::from_millis(1500));
        let _ = queue.change(Op::Write, 120, 20);
        let _ = queue.flush();
    }),
    ("grow", written, |host, served, mut queue| {
        if jobs::grow_to(host, &served, 40 * SECTORS).is_ok() {
            let _ = queue.change(Op::Write, 39 * SECTORS, 3);
        }
    }),
    ("grow and flatten", written, |host, mut served, queue| {
        let _ = jobs::grow_to(host, &served, 40 * SECTORS);
        let begun = jobs::flatten(host, &served, &mut Rng(1));
        job(host, &mut served, queue, begun);
    }),
    ("shrink", written, |host, served, queue| {
        drop(queue);
        let _ = jobs::shrink_to(host, served, SECTORS / 3);
    }),
    ("flatten", written, |host, mut served, queue| {
        let begun = jobs::flatten(host, &served, &mut Rng(1));
        job(host, &mut served, queue, begun);
    }),
    ("snapshot", written, |host, mut served, queue| {
        let begun = jobs::snapshot(host, &served, 1);
        job(host, &mut served, queue, begun);
    }),
    ("snapshot and merge", written, |host, mut served, queue| {
        let begun = jobs::snapshot(host, &served, 1);
        job(host, &mut served, queue, begun);
        let Ok(queue) = Queue::new(host, &served) else { return };
        let begun = jobs::merge(host, &served, &mut Rng(1));
        job(host, &mut served, queue, begun);
    }),
    ("hand over", written, |host, mut served, queue| {
        drop(queue);
        let _ = served.move_there_and_back(host);
    }),
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
    let values = |at| if at < SECTORS / 2 { (1 << 40) + at as u64 } else { 0 };
    base.write_all_at(&(0..SECTORS).flat_map(|at| sector(values(at))).collect::<Vec<_>>(), 0)
        .unwrap();
    base.sync_data().unwrap();
    let top = world.open("top", 1);
    let backing = Some((Path::new("base"), Format::Raw));
    let virtual_size = (SECTORS * SECTOR) as u64;
    NewImage { virtual_size, cluster_bits: 9, backing }.write(&top).unwrap();
    top.sync_data().unwrap();
    let model = Arc::new(Mutex::new(Model::of((0..SECTORS).map(values))));
    let file = tempfile::tempfile().unwrap();
    file.set_len(Journal::BYTES).unwrap();
    let (acts, forgets) = (Arc::default(), Arc::default());
    Host { world, unit, journal: Some(Arc::new(file)), model, acts, forgets }
}

/// A life in which something is done.
fn serve(host: &Host, act: Act) -> io::Result<()> {
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
    let at = host.clone();
    let ended = host.world.live(faults, move || serve(&at, act));
    let now = host.now();
    host.model(|model| model.is_killed(now));
    host.note_losses();
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

/// A new image has the name of what is served, which goes on being written.
fn named_and_killed(host: &Host, served: Served, mut queue: Queue) {
    write(&mut queue);
    assert!(jobs::snapshot(host, &served, 1).is_ok_and(|job| matches!(job, Job::Snapshot(..))));
    write(&mut queue);
    host.world.kill_here();
}

/// What was there before, then the act with these faults, then whoever comes next; how many calls the act had.
fn one(
    unit: u32,
    before: Act,
    act: Act,
    faults: Faults,
    cuts: Option<Losses>,
) -> Result<u64, String> {
    let host = host(unit);
    let (_, _) = live(&host, Faults::default(), before)?;
    let (_, calls) = live(&host, faults, act)?;
    if let Some(cuts) = cuts {
        host.model(|model| model.cut = true);
        host.world.cut_power(cuts);
    }
    host.check()?;
    for _ in 0..2 {
        let (outcome, _) = live(&host, Faults::default(), |_, _, mut queue| {
            let sectors = queue.host.model(|model| model.sectors());
            let _ = queue.change(Op::Write, 3, sectors.min(153) - 3);
        })?;
        outcome.map_err(|error| format!("it cannot be opened: {error}"))?;
    }
    // What was taken ahead, where nobody knew what the file said.
    let (leaks, _) = host.check()?;
    if leaks > 1024 { Err(format!("{leaks} leaks")) } else { Ok(calls) }
}

/// With `RINGWAY_NTH_CALL=all` every call fails; without it some are left out where there are many.
fn step(calls: u64) -> usize {
    let is_all = std::env::var("RINGWAY_NTH_CALL").is_ok_and(|which| which == "all");
    if is_all { 1 } else { usize::try_from(calls / 24).unwrap() + 1 }
}

#[test]
#[ignore = "the process that worlds are made in; the test below starts it"]
fn the_process() {
    for number in seeds() {
        let (name, before, act) = SCENARIOS[usize::try_from(number).unwrap()];
        for unit in [1, 512] {
            let fail = |why: String, what: &str| -> u64 {
                panic!("{name}, in units of {unit}, {what}: {why}")
            };
            let calls = one(unit, before, act, Faults::default(), Some(Losses::All))
                .unwrap_or_else(|why| fail(why, "no fault"));
            let with = |nth, what: &str| match what {
                "killed" | "power" => Faults { kill_in: Some(nth), ..Faults::default() },
                "once" => Faults { nth: Some((nth, false)), errno: libc::EIO, ..Faults::default() },
                "for ever" => {
                    Faults { nth: Some((nth, true)), errno: libc::EIO, ..Faults::default() }
                }
                _ => Faults { nth: Some((nth, true)), errno: libc::ENOSPC, ..Faults::default() },
            };
            for what in ["killed", "power", "once", "for ever", "full"] {
                for nth in (1..=calls).step_by(step(calls)) {
                    let losses = if nth % 2 == 0 { Losses::All } else { Losses::Some };
                    let cuts = (what == "power").then_some(losses);
                    let outcome = one(unit, before, act, with(nth, what), cuts);
                    outcome.unwrap_or_else(|why| fail(why, &format!("call {nth} {what}")));
                }
            }
            println!("{name}, in units of {unit}: {calls} calls");
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
