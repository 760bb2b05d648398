//! Each call of a file fails once, or it and all behind it, or the process is killed in it, in each of the things that an
//! image's thread does.

use crate::history::settle;
use crate::model::{Model, SECTOR, sector};
use crate::process::{in_processes, seeds};
use crate::served::{Host, Queue};
use ringway_core::Op;
use ringway_core::host::{Faults, FileExt, Life, World};
use ringway_core::sync_turn::SyncTurn;
use ringway_image::{Format, Image, Journal, NewImage};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Of a disk with one L2 table for 64 sectors.
const SECTORS: usize = 200;

type Act = fn(&Host, &Arc<Image>, &mut Queue);

/// What is done, and whether the life before it was killed.
const SCENARIOS: &[(&str, bool, Act)] = &[
    ("nothing", false, |_, _, _| {}),
    ("replay", true, |_, _, _| {}),
    ("first write", false, |_, _, queue| drop(queue.change(Op::Write, 130, 3))),
    ("many", false, |_, _, queue| {
        (0..SECTORS / 20).for_each(|nth| drop(queue.change(Op::Write, nth * 20, 19)));
    }),
    ("discard", false, |_, _, queue| drop(queue.change(Op::Discard, 5, 40))),
    ("zeroes", false, |_, _, queue| drop(queue.change(Op::WriteZeroes, 5, 40))),
    ("flush", false, |_, _, queue| {
        let _ = queue.change(Op::Write, 100, 30);
        let _ = queue.flush();
        let _ = queue.change(Op::Write, 101, 3);
    }),
    ("freed and used again", false, |_, _, queue| {
        let _ = queue.change(Op::Discard, 0, 20);
        ringway_core::host::thread::sleep(Duration::from_millis(1500));
        let _ = queue.change(Op::Write, 120, 20);
        let _ = queue.flush();
    }),
    ("grow", false, |host, image, queue| {
        if image.grow((40 * SECTORS * SECTOR) as u64).is_ok() {
            let now = host.now();
            host.model(|model| model.grow(40 * SECTORS, now));
            let _ = queue.change(Op::Write, 39 * SECTORS, 3);
        }
    }),
    ("flatten", false, |_, image, queue| {
        let mut at = 0;
        while at < image.size() {
            match image.pull(at, 9000) {
                Ok(pulled) => at = pulled.next,
                Err(_) => return,
            }
        }
        let _ = image.detach();
        let _ = queue.change(Op::Write, 7, 3);
    }),
    ("hand over", false, |host, image, _| drop(image.hand_over(host.unit))),
];

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
    Host { world, unit, journal: Some(Arc::new(file)), model }
}

/// A life in which something is done.
fn serve(host: &Host, act: Act) -> io::Result<()> {
    let opened = host.open();
    host.note_losses();
    let (image, lost) = opened?;
    let (image, turn) = (Arc::new(image), Arc::new(SyncTurn::default()));
    image.share_turn(Arc::clone(&turn));
    settle(host, &image, lost, &turn)?;
    let mut queue = Queue::new(host, &image, &turn)?;
    act(host, &image, &mut queue);
    drop((queue, image));
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

fn written(_: &Host, _: &Arc<Image>, queue: &mut Queue) {
    let _ = queue.change(Op::Write, 0, 30);
    let _ = queue.flush();
    for nth in 0..20 {
        let _ = queue.change(Op::Write, 40 + 3 * nth, 2);
    }
}

/// Some of it is in the journal alone then.
fn written_and_killed(host: &Host, image: &Arc<Image>, queue: &mut Queue) {
    written(host, image, queue);
    assert!(image.has_deferred());
    host.world.kill_here();
}

/// What was there before, then the act with these faults, then whoever comes next; how many calls the act had.
fn one(unit: u32, is_killed: bool, act: Act, faults: Faults) -> Result<u64, String> {
    let host = host(unit);
    let before: Act = if is_killed { written_and_killed } else { written };
    let (_, _) = live(&host, Faults::default(), before)?;
    let (_, calls) = live(&host, faults, act)?;
    host.check()?;
    for _ in 0..2 {
        let (outcome, _) = live(&host, Faults::default(), |_, _, queue| {
            let _ = queue.change(Op::Write, 3, 150);
        })?;
        outcome.map_err(|error| format!("it cannot be opened: {error}"))?;
    }
    // What was taken ahead, where nobody knew what the file said.
    let leaks = host.check()?;
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
        let (name, is_killed, act) = SCENARIOS[usize::try_from(number).unwrap()];
        for unit in [1, 512] {
            let fail = |why: String, what: &str| -> u64 {
                panic!("{name}, in units of {unit}, {what}: {why}")
            };
            let calls = one(unit, is_killed, act, Faults::default())
                .unwrap_or_else(|why| fail(why, "no fault"));
            let with = |nth, what: &str| match what {
                "killed" => Faults { kill_in: Some(nth), ..Faults::default() },
                "once" => Faults { nth: Some((nth, false)), errno: libc::EIO, ..Faults::default() },
                "for ever" => {
                    Faults { nth: Some((nth, true)), errno: libc::EIO, ..Faults::default() }
                }
                _ => Faults { nth: Some((nth, true)), errno: libc::ENOSPC, ..Faults::default() },
            };
            for what in ["killed", "once", "for ever", "full"] {
                for nth in (1..=calls).step_by(step(calls)) {
                    let outcome = one(unit, is_killed, act, with(nth, what));
                    outcome.unwrap_or_else(|why| fail(why, &format!("call {nth} {what}")));
                }
            }
            println!("{name}, in units of {unit}: {calls} calls");
        }
    }
}

#[test]
fn c92_each_call_of_each_act_may_fail() {
    let count = SCENARIOS.len() as u64;
    in_processes("nth_call::the_process", 0..count, 1, Duration::from_secs(600));
}
