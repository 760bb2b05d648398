//! Histories: a guest with three queues, jobs beside it, and processes that end in every way.

use crate::model::{Model, SECTOR, sector};
use crate::process::{Rng, for_seeds, in_processes, repeat, seeds};
use crate::served::{Host, Queue};
use ringway_core::Op;
use ringway_core::host::{Faults, FileExt, Life, Losses, World, thread};
use ringway_core::sync_turn::SyncTurn;
use ringway_image::{Format, Image, Journal, Layer, NewImage, Use};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Values of what a disk is based on.
const BASE: u64 = 1 << 40;

/// What is found at the end of a life that nobody killed.
struct Ended {
    /// What its end said.
    outcome: io::Result<()>,
}

pub(crate) fn new_host(rng: &mut Rng) -> Host {
    let world = World::new(rng.next());
    let unit = [1, 512][usize::try_from(rng.below(2)).unwrap()];
    let cluster_bits = 9 + u32::try_from(rng.below(3)).unwrap();
    let sectors = usize::try_from(20 + rng.below(300)).unwrap();
    // What is longer than a clone is never seen.
    let below = usize::try_from(rng.below(sectors as u64 + 1)).unwrap();
    let is_based = rng.once_in(2);
    if is_based {
        let base = world.open("base", 1);
        let bytes: Vec<u8> = (0..below).flat_map(|at| sector(BASE + at as u64)).collect();
        base.write_all_at(&bytes, 0).unwrap();
        base.sync_data().unwrap();
    }
    let backing = is_based.then_some((Path::new("base"), Format::Raw));
    let top = world.open("top", 1);
    let new = NewImage { virtual_size: (sectors * SECTOR) as u64, cluster_bits, backing };
    new.write(&top).unwrap();
    top.sync_data().unwrap();
    let content = (0..sectors).map(|at| if is_based && at < below { BASE + at as u64 } else { 0 });
    let model = Arc::new(Mutex::new(Model::of(content)));
    let journal = (!rng.once_in(3)).then(|| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(Journal::BYTES).unwrap();
        Arc::new(file)
    });
    Host { world, unit, journal, model }
}

/// One queue asks this and that.
fn guest(mut queue: Queue, mut rng: Rng, requests: u64) {
    for _ in 0..requests {
        let all = queue.host.model(|model| model.sectors());
        let at = usize::try_from(rng.below(all as u64)).unwrap();
        let most = if rng.once_in(6) { 60 } else { 8 };
        let sectors = usize::try_from(1 + rng.below(most)).unwrap().min(all - at);
        // Errors are judged by what is there afterwards.
        let _ = match rng.below(16) {
            0..7 => queue.change(Op::Write, at, sectors),
            7..9 => queue.change(Op::Discard, at, sectors),
            9 => queue.change(Op::WriteZeroes, at, sectors),
            10..12 => queue.flush(),
            12 => {
                // The time for freed clusters to be given back.
                thread::park_timeout(std::time::Duration::from_millis(700));
                Ok(())
            }
            _ => queue.read(at, sectors),
        };
        queue.host.note_losses();
    }
}

/// What is done to an image while it is served.
fn job(host: &Host, image: &Image, rng: &mut Rng) {
    match rng.below(4) {
        0 => {
            let now = host.model(|model| model.sectors());
            let sectors = now + usize::try_from(rng.below(200)).unwrap();
            if sectors > now && image.grow((sectors * SECTOR) as u64).is_ok() {
                let now = host.now();
                host.model(|model| model.grow(sectors, now));
            }
        }
        1 => {
            let (mut at, size) = (0, image.size());
            while at < size {
                match image.pull(at, 1 + rng.below(20_000)) {
                    Ok(pulled) => at = pulled.next,
                    Err(_) => return,
                }
            }
            let _ = image.detach();
        }
        2 => {
            let _ = image.write_deferred();
        }
        _ => {}
    }
}

/// A process that serves the image, from its opening to its end.
fn life(host: &Host, mut rng: Rng) -> Ended {
    let opened = host.open();
    host.note_losses();
    let (image, mut lost) = match opened {
        Ok(opened) => opened,
        Err(error) => return Ended { outcome: Err(error) },
    };
    let mut image = Arc::new(image);
    for _ in 0..1 + rng.below(2) {
        let turn = Arc::new(SyncTurn::default());
        image.share_turn(Arc::clone(&turn));
        if let Err(error) = settle(host, &image, lost, &turn) {
            return Ended { outcome: Err(error) };
        }
        lost = false;
        let queues: Vec<_> = (0..3)
            .filter_map(|_| {
                let queue = Queue::new(host, &image, &turn).ok()?;
                let (rng, requests) = (Rng(rng.next()), 1 + rng.below(25));
                let named = thread::Builder::new().name("queue".into());
                Some(named.spawn(move || guest(queue, rng, requests)).unwrap())
            })
            .collect();
        job(host, &image, &mut rng);
        queues.into_iter().for_each(|queue| queue.join().unwrap());
        if !rng.once_in(3) {
            break;
        }
        // To another daemon, and back.
        let Ok(mut chain) = image.hand_over(host.unit) else { break };
        host.note_losses();
        let usage = Use { read_only: false, grows: true, barriers: true };
        let Ok(top) = Layer::taken_over(&chain[0], usage, host.unit) else { break };
        chain[0] = top;
        let bases = ringway_image::Bases::default();
        let Ok(next) = Image::open_beside(chain, usage, &bases, host.unit) else { break };
        image = Arc::new(next);
    }
    drop(image);
    host.note_losses();
    Ended { outcome: Ok(()) }
}

/// Whoever opens it reads all of it first.
pub(crate) fn settle(
    host: &Host,
    image: &Arc<Image>,
    lost: bool,
    turn: &Arc<SyncTurn>,
) -> io::Result<()> {
    let (size, sectors) = (image.size() as usize, host.model(|model| model.sectors()));
    if size > sectors * SECTOR {
        // A disk may have grown though whoever asked was not told.
        let now = host.now();
        host.model(|model| model.grow(size / SECTOR, now));
    }
    let mut queue = Queue::new(host, image, turn)?;
    let mut found = Vec::new();
    while found.len() < size {
        let len = (size - found.len()).min(64 << 10);
        found.extend(queue.read_bytes(found.len(), len)?);
    }
    host.note_losses();
    let now = host.now();
    host.model(|model| model.settle(&found, lost, now)).unwrap_or_else(|why| panic!("{why}"));
    Ok(())
}

fn faults(rng: &mut Rng) -> Faults {
    let mut faults = Faults { short_per_mille: rng.below(20), ..Faults::default() };
    match rng.below(6) {
        0 => faults.per_mille = 1 + rng.below(30),
        1 => faults.syncs_per_mille = 20 + rng.below(200),
        2 => (faults.per_mille, faults.syncs_per_mille) = (rng.below(10), rng.below(50)),
        _ => {}
    }
    if rng.once_in(2) {
        faults.kill_at = Some(1 + rng.below(5000));
    } else if rng.once_in(3) {
        faults.kill_in = Some(1 + rng.below(600));
    }
    faults
}

/// A disk, and all that happens to it; a number for that.
fn history(seed: u64) -> Result<u64, String> {
    let mut rng = Rng(seed);
    let host = new_host(&mut rng);
    for nth in 0..=1 + rng.below(6) {
        let is_last = nth > 4;
        let faults = if is_last { Faults::default() } else { faults(&mut rng) };
        let (at, of_life) = (host.clone(), Rng(rng.next()));
        let ended = host.world.live(faults, move || life(&at, of_life));
        let (_, _, failed_syncs, failed_calls) = host.world.counts();
        let now = host.now();
        host.model(|model| model.is_killed(now));
        match ended {
            Life::Failed(why) => return Err(format!("life {nth}: {why}")),
            Life::Killed => {}
            Life::Done(Ended { outcome: Err(error) }) if failed_calls == 0 => {
                return Err(format!("life {nth}: {error}, and no call has failed"));
            }
            // Whether it has settled is not known otherwise.
            Life::Done(_) => {}
        }
        if failed_syncs > 0 {
            host.model(|model| model.lossy = true);
        }
        if rng.once_in(3) {
            host.model(|model| model.cut = true);
            let losses = [Losses::All, Losses::Some, Losses::Some, Losses::None];
            host.world.cut_power(losses[usize::try_from(rng.below(4)).unwrap()]);
        }
        let leaks = host.check().map_err(|why| format!("after life {nth}: {why}"))?;
        if leaks > 3 * 1024 {
            return Err(format!("after life {nth}: {leaks} leaks"));
        }
    }
    Ok(host.world.trace())
}

#[test]
#[ignore = "the process that worlds are made in; the tests below start it"]
fn the_process() {
    for seed in seeds() {
        match history(seed) {
            Ok(trace) => println!("seed {seed}: {trace:x}"),
            Err(why) => panic!("seed {seed}: {why}\n  {}", repeat("c90_", seed)),
        }
    }
}

/// What cannot be repeated cannot be mended.
#[test]
#[ignore = "a process of its own; the test below starts it"]
fn the_process_of_twins() {
    for seed in seeds() {
        let (one, other) = (history(seed).unwrap(), history(seed).unwrap());
        assert_eq!(one, other, "seed {seed}");
    }
}

#[test]
fn c91_a_seed_has_one_history() {
    let limit = std::time::Duration::from_secs(20);
    in_processes("history::the_process_of_twins", 1..31, 10, limit);
}

#[test]
fn c90_whatever_fails_an_image_keeps_what_was_answered() {
    for_seeds("history::the_process");
}
