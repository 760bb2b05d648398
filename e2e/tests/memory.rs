//! `memory-max` at work: the process of a disk whose client has it fill more memory than its cgroup may hold
//! is killed alone. It all happens in a guest: its kernel has cgroups of version 2 with memory, which those of
//! machines that still use version 1 have not.

use anyhow::Result;
use ringway_e2e::guest::{Guest, ringway_program, server_is_control, skip_reason};
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

mod carry;

/// Two disks of one daemon, with processes of their own.
#[test]
fn e06_a_guest_beyond_memory_max_has_its_own_process_killed_alone() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server has no cgroups.
    }
    let dir = tempfile::tempdir()?;
    let mut drive = OsString::from("format=raw,if=none,id=program,readonly=on,file=");
    let unshare = carry::printed(Command::new("sh").args(["-c", "command -v unshare"]))?;
    let client = Path::new(env!("CARGO_BIN_EXE_fill-memory"));
    let programs = [&ringway_program()?, client, Path::new(unshare.trim())];
    drive.push(carry::archive(dir.path(), &programs)?);
    let guest = Guest::new("memory").vcpus(2).memory_mib(1024).limit(Duration::from_secs(300));
    let guest = guest.qemu_arg("-drive").qemu_arg(drive);
    let report =
        guest.qemu_arg("-device").qemu_arg("virtio-blk-pci,drive=program").boot()?.finish()?;
    report.expect_ok();
    let list: serde_json::Value = serde_json::from_str(report.info("list"))?;
    let restarts = |disk: usize| list["disks"][disk]["restarts"].as_u64();
    assert!(restarts(0) >= Some(1), "{list}");
    assert_eq!(restarts(1), Some(0), "{list}");
    assert!(report.info("log").contains("a.img"), "{}", report.tail());
    Ok(())
}
