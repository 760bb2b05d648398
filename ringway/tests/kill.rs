//! The daemon is killed again and again under verified writes, and started again: the front-end
//! reconnects, and nothing is lost, done twice, or late. `xtask kill` runs the same in any number.

use crate::common::{Daemon, PATIENCE, folder};
use ringway_driver::{Device, Error, Options, SchedulerMode};
use ringway_testkit::Rng;
use ringway_testkit::kill::oracle::Wrong;
use ringway_testkit::kill::{self as campaign, End, Harm, Plan, Points};
use std::path::Path;
use std::time::Duration;

/// Deaths of the daemon in one test.
fn deaths() -> u64 {
    std::env::var("RINGWAY_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(60)
}

fn plan(packed: bool, engine: &str) -> Plan {
    Plan {
        ringway: env!("CARGO_BIN_EXE_ringway").into(),
        engine: engine.into(),
        cache: "writeback".into(),
        packed,
        path: SchedulerMode::Bio,
        kills: deaths(),
        end: End::Killed,
        points: if cfg!(any(feature = "kill-points", debug_assertions)) {
            Points::Half
        } else {
            Points::Never
        },
        depth: 32,
        seed: Rng::for_test("kill").next_u64() >> 16,
        dir: None,
        patience: PATIENCE,
        harm: None,
        faults: false,
        hold: false,
        limits: false,
        qcow2: false,
        qemu: false,
        progress: |_, _| {},
    }
}

fn survives(plan: &Plan) {
    println!("again: {plan}");
    let outcome = campaign::run(plan).unwrap();
    println!("{outcome:?}");
    assert!(outcome.findings.is_empty(), "{:#?}", outcome.findings);
    // With points, one more before there is a record, and two while queues are told to stop.
    let points = plan.points != Points::Never;
    assert_eq!(outcome.kills, plan.kills + if points { 3 } else { 0 });
    // Some hundred per kill; fewer where the guest gets little of a busy machine's CPUs.
    assert!(outcome.requests > plan.kills * 10 && outcome.overtaken > 0);
    assert_eq!(outcome.reattach.len(), outcome.kills - outcome.early);
    assert!(outcome.early < plan.kills);
    let at: u64 = outcome.at.values().sum();
    // Most of some thirty; fewer where a busy machine has daemons come to theirs too late.
    assert!(!points || at > plan.kills / 8, "{at} points are reached, {} missed", outcome.missed);
}

#[test]
fn c09_killed_under_writes_split() {
    survives(&plan(false, "threads"));
}

#[test]
fn c09_killed_under_writes_packed() {
    survives(&plan(true, "threads"));
}

#[test]
fn c09_killed_under_writes_auto_engine() {
    for packed in [false, true] {
        survives(&plan(packed, "auto"));
    }
}

#[test]
fn a_daemon_is_replaced_under_writes() {
    for packed in [false, true] {
        survives(&Plan {
            end: End::Terminated,
            points: Points::Never,
            kills: deaths() / 4 + 1,
            ..plan(packed, "threads")
        });
    }
}

/// An overlay whose tables change all the time: after each kill it is whole, to `qemu-img check`, too.
#[test]
fn c19_killed_daemons_leave_images_that_are_whole() {
    let qemu = std::process::Command::new("qemu-img").arg("--version").output().is_ok();
    for (packed, engine) in [(false, "auto"), (true, "threads")] {
        let kills = deaths() / 2 + 1;
        survives(&Plan { qcow2: true, qemu, kills, ..plan(packed, engine) });
    }
}

/// What is held in the front-end is not sent yet; what was merged is taken up again as it was sent.
#[test]
fn killed_while_the_front_end_merges() {
    for packed in [false, true] {
        survives(&Plan { path: SchedulerMode::Request, ..plan(packed, "threads") });
    }
}

/// What a predecessor left in flight is limited, too, and limits change all the time.
#[test]
fn c09_killed_while_requests_wait_for_limits() {
    // Whether requests have to wait in one campaign is up to its limits, and to chance.
    let (mut campaigns, mut throttled) = (0, 0);
    while campaigns < 2 || (throttled == 0 && campaigns < 10) {
        let packed = campaigns % 2 == 1;
        let plan = Plan { limits: true, kills: deaths() / 4 + 1, ..plan(packed, "threads") };
        println!("again: {plan}");
        let outcome = campaign::run(&plan).unwrap();
        println!("{outcome:?}");
        assert!(outcome.findings.is_empty(), "{:#?}", outcome.findings);
        throttled += outcome.throttled;
        campaigns += 1;
    }
    assert!(throttled > 0, "no request of {campaigns} campaigns has waited");
}

/// A campaign that could not fail would prove nothing.
#[test]
fn a_campaign_notices_mistakes() {
    let cases = [(Harm::Lost, Wrong::Lost), (Harm::Replayed, Wrong::Replayed)];
    for (harm, wrong) in [&cases[..], &[(Harm::Missing, Wrong::Missing)]].concat() {
        let patience = if harm == Harm::Missing { Duration::from_secs(3) } else { PATIENCE };
        // Harm is done to what is in flight at a kill, which may be nothing six times.
        let outcome = (0..10).find_map(|_| {
            let plan = Plan { kills: 6, harm: Some(harm), patience, ..plan(false, "threads") };
            let outcome = campaign::run(&plan).unwrap();
            println!("{plan}: {:?}", outcome.findings);
            (outcome.findings.count(wrong) > 0).then_some(outcome)
        });
        let outcome = outcome.unwrap_or_else(|| panic!("{harm:?} was not noticed"));
        std::fs::remove_dir_all(outcome.kept.unwrap()).unwrap();
    }
}

/// Kills among other faults: writes that fail with EIO and ENOSPC, syncs that fail, sizes that change,
/// a write cache that is switched, clients that disconnect, daemons that are told to end. Exactly the
/// requests fail that have to, a flush never succeeds after one has failed, and a guest without a write
/// cache is told of nothing that is not durable, whichever daemon it is told by.
///
/// One after the other: the mistake that is made on purpose is made to all regions of this process.
#[cfg(any(feature = "kill-points", debug_assertions))]
#[test]
fn c16_kills_together_with_other_faults() {
    let mut happened = [0; 5];
    for (packed, cache) in [(false, "writeback"), (true, "writeback"), (false, "none")] {
        let cache = if cache == "none" && !takes_direct() { continue } else { cache };
        let plan = Plan { faults: true, cache: cache.into(), ..plan(packed, "threads") };
        println!("again: {plan}");
        let outcome = campaign::run(&plan).unwrap();
        println!("{outcome:?}");
        assert!(outcome.findings.is_empty(), "{:#?}", outcome.findings);
        let campaign::Outcome {
            refused, durable_lives, flushes_failed, resizes, disconnects, ..
        } = outcome;
        let counts = [refused, durable_lives, flushes_failed, resizes, disconnects];
        happened.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    // One campaign may do without one of them by chance, all of them hardly do.
    assert!(
        happened.iter().all(|&count| count > 0),
        "refused, lives without a write cache, flushes failed, sizes, disconnects: {happened:?}"
    );
    for (harm, wrong) in [(Harm::Volatile, Wrong::Volatile), (Harm::Forgotten, Wrong::Forgotten)] {
        // The cache may be on, and no flush have failed, when the mistake is made.
        let outcome = (0..10).find_map(|_| {
            let plan = Plan { kills: 30, faults: true, harm: Some(harm), ..plan(false, "threads") };
            let outcome = campaign::run(&plan).unwrap();
            println!("{plan}: {:?}", outcome.findings);
            (outcome.findings.count(wrong) > 0).then_some(outcome)
        });
        let outcome = outcome.unwrap_or_else(|| panic!("{harm:?} was not noticed"));
        std::fs::remove_dir_all(outcome.kept.unwrap()).unwrap();
    }
}

/// Kills while requests are held for want of space, tried again and released: no request fails, none is
/// lost or done twice, and those that a daemon held its successor carries out.
#[cfg(any(feature = "kill-points", debug_assertions))]
#[test]
fn c18_kills_while_requests_are_held() {
    use ringway_core::kill_points::Point;
    let mut struck = std::collections::BTreeMap::new();
    let wanted = [Point::Holding, Point::Held, Point::Retrying, Point::Releasing];
    let ways = [(false, "threads"), (true, "threads"), (false, "auto")];
    // Which points are struck is up to chance: three campaigns, and more while one is missing.
    for (campaigns, (packed, engine)) in ways.into_iter().cycle().take(10).enumerate() {
        if campaigns >= ways.len() && wanted.iter().all(|point| struck.contains_key(point)) {
            break;
        }
        let plan = Plan { hold: true, points: Points::Always, ..plan(packed, engine) };
        println!("again: {plan}");
        let outcome = campaign::run(&plan).unwrap();
        println!("{outcome:?}");
        assert!(outcome.findings.is_empty(), "{:#?}", outcome.findings);
        assert_eq!((outcome.kills, outcome.refused), (plan.kills + 3, 0));
        outcome.at.iter().for_each(|(point, kills)| *struck.entry(*point).or_insert(0) += kills);
    }
    for point in wanted {
        assert!(struck.contains_key(&point), "{point:?}: {struck:?}");
    }
}

/// Whether the folder for temporary files takes O_DIRECT.
#[cfg(any(feature = "kill-points", debug_assertions))]
fn takes_direct() -> bool {
    use std::os::unix::fs::OpenOptionsExt;
    let dir = folder();
    let takes = std::fs::File::options()
        .write(true)
        .create(true)
        .custom_flags(libc::O_DIRECT)
        .open(dir.path().join("direct"))
        .is_ok();
    if !takes {
        ringway_testkit::skip(
            ringway_testkit::Need::Direct,
            "this folder takes no O_DIRECT: cache none is left out",
        );
    }
    takes
}

fn serve(dir: &Path, engine: &str) -> Daemon {
    let args = ["disk.img", "--socket", "s", "--queues", "2", "--cache", "writeback"];
    Daemon::serve(dir, &[&args[..], &["--engine", engine]].concat())
}

/// Nobody comes back: whoever waits is told, and nothing hangs.
#[test]
fn patience_ends_with_a_reason() {
    let dir = folder();
    let daemon = serve(dir.path(), "threads");
    let options = Options::new().reconnect(Duration::from_millis(300));
    let mut device = options.connect(dir.path().join("s")).unwrap();
    let mut queue = device.queue::<u8>().unwrap();
    daemon.kill();
    queue.read(0, device.pool().alloc(512).unwrap(), 7).unwrap();
    let error = queue.wait(Some(PATIENCE)).unwrap_err();
    assert!(matches!(&error, Error::GivenUp(why) if why.contains("ringway serve")), "{error}");
    assert!(!device.is_connected());
    assert_eq!(queue.abandon(), [7]);
}

/// Without the option a lost connection stays lost, with or without requests in flight.
#[test]
fn without_the_option_nothing_is_sent_twice() {
    let dir = folder();
    let daemon = serve(dir.path(), "threads");
    let mut device = Device::connect(dir.path().join("s")).unwrap();
    let mut queue = device.queue::<u8>().unwrap();
    daemon.kill();
    queue.read(0, device.pool().alloc(512).unwrap(), 7).unwrap();
    assert!(matches!(queue.wait(Some(PATIENCE)), Err(Error::NotConnected)));
    let _daemon = serve(dir.path(), "threads");
    assert!(device.stop().is_err());
    assert!(matches!(device.reconnect(), Err(Error::NotStopped)));
}
