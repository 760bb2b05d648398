//! Stock Linux guests on a real Xen, on disks that `ringway serve --xen` serves.  See
//! `ringway_e2e::xen`.

use anyhow::Result;
use ringway_e2e::guest::skip_reason;
use ringway_e2e::xen::Machine;
use std::time::Duration;

/// Every number of queues with every length of ring, direct and indirect requests and every way to
/// move data: 72 rounds, verified in the guest; the kernel's own back-end as control.
#[test]
fn guest_verifies_every_kind_of_ring() -> Result<()> {
    if skip_reason().is_some() {
        return Ok(());
    }
    let Some(running) = Machine::new("rounds").limit(Duration::from_secs(900)).boot()? else {
        return Ok(());
    };
    let report = running.finish()?;
    report.expect_ok();
    for queues in [1, 2, 4] {
        for order in [0, 1, 2, 4] {
            for requests in ["direct", "indirect"] {
                for data in ["copy", "map", "persistent"] {
                    let round = format!("queues_{queues}_order_{order}_{requests}_{data}");
                    let judged = report.checks.iter().filter(|check| check.name == round).count();
                    assert_eq!(judged, 1, "{round}; {}", report.tail());
                }
            }
        }
    }
    // Flushes and discards arrived as such; of the last round of each disk.
    let stats = report.infos_with("stats.");
    assert_eq!(stats.len(), 9);
    for (disk, counts) in stats {
        let count = |key: &str| -> u64 {
            let (_, rest) = counts.split_once(&format!("\"{key}\":")).unwrap_or_default();
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
            digits.parse().unwrap_or(0)
        };
        assert!(count("flushes") > 0 && count("erases") > 0, "{disk}: {counts}");
        assert_eq!(count("errors"), 0, "{disk}: {counts}");
    }
    Ok(())
}

/// The back-end is killed six times and stopped once under a guest that verifies what it writes, and
/// three times or more once it offers no persistent grants; what was in flight at each kill is counted,
/// and at some of them it was something. The disk grows, with its daemon and without one, and is paused when its
/// daemon is killed (C15); it is trimmed, is read-only; the guest dies.
#[test]
fn guest_survives_its_back_ends() -> Result<()> {
    if skip_reason().is_some() {
        return Ok(());
    }
    let Some(running) = Machine::new("life").boot()? else { return Ok(()) };
    let report = running.finish()?;
    report.expect_ok();
    let counts: Vec<u32> = report
        .infos
        .iter()
        .filter(|(key, _)| key.contains("in_flight_at_kill_"))
        .map(|(_, count)| count.parse())
        .collect::<std::result::Result<_, _>>()?;
    println!("requests in flight at each kill: {counts:?}");
    assert!(counts.len() >= 9 && counts.iter().any(|&count| count > 0), "{counts:?}");
    Ok(())
}
