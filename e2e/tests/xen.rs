//! Stock Linux guests on a real Xen, on disks that `ringway serve --xen` serves.  See
//! `ringway_e2e::xen`.

use anyhow::Result;
use ringway_e2e::guest::skip_reason;
use ringway_e2e::xen::Machine;

/// Queues, ring pages, indirect requests and the ways to move data, in eight rounds; all verified in
/// the guest, with the kernel's own back-end as control.
#[test]
fn guest_verifies_every_kind_of_ring() -> Result<()> {
    if skip_reason().is_some() {
        return Ok(());
    }
    let Some(running) = Machine::new("rounds").boot()? else { return Ok(()) };
    let report = running.finish()?;
    report.expect_ok();
    // What the front-end says it was given.
    let spoken = report.info("r4.spoken");
    for word in ["persistent grants: enabled", "indirect descriptors: enabled"] {
        assert!(spoken.contains(word), "{spoken}");
    }
    assert!(report.info("r2.spoken").contains("persistent grants: disabled"));
    Ok(())
}

/// The back-end is killed three times and stopped once under a guest that verifies what it writes;
/// the disk grows, is trimmed, is read-only; the guest dies.
#[test]
fn guest_survives_its_back_ends() -> Result<()> {
    if skip_reason().is_some() {
        return Ok(());
    }
    let Some(running) = Machine::new("life").boot()? else { return Ok(()) };
    let report = running.finish()?;
    report.expect_ok();
    Ok(())
}
