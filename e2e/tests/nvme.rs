//! `--engine nvme` on a namespace of QEMU's emulated NVMe, in a guest: a real kernel carries the commands, and
//! what they did is in the namespace's file afterwards.

use anyhow::{Context, Result};
use ringway_e2e::guest::{Guest, ringway_program, server_is_control, skip_reason};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

mod carry;

const MIB: u64 = 1 << 20;

/// True if all bytes of a part are `byte`.
fn holds(file: &File, offset: u64, len: u64, byte: u8) -> Result<bool> {
    let mut bytes = vec![0; usize::try_from(len)?];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes.iter().all(|&found| found == byte))
}

#[test]
fn b30_a_namespace_is_served_past_the_block_layer_and_is_nobody_elses_meanwhile() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server has no such engine.
    }
    let dir = tempfile::tempdir_in("/dev/shm")?;
    let path = dir.path().join("namespace");
    let namespace = File::options().read(true).write(true).create_new(true).open(&path)?;
    namespace.set_len(64 * MIB)?;
    let programs = [&ringway_program()?, Path::new(env!("CARGO_BIN_EXE_survive-kills"))];
    let mut drive = OsString::from("format=raw,if=none,id=program,readonly=on,file=");
    drive.push(carry::archive(dir.path(), &programs)?);
    let mut file = OsString::from("driver=file,node-name=file,discard=unmap,filename=");
    file.push(&path);
    // One sector cannot be written.
    let medium = "driver=blkdebug,node-name=medium,image=file,discard=unmap,inject-error.0.event=none,\
                  inject-error.0.iotype=write,inject-error.0.errno=5,inject-error.0.sector=120832";
    let guest = Guest::new("nvme").vcpus(2).memory_mib(1024).limit(Duration::from_secs(600));
    let guest = guest.qemu_arg("-drive").qemu_arg(drive);
    let guest = guest.qemu_arg("-device").qemu_arg("virtio-blk-pci,drive=program");
    let guest = guest.qemu_arg("-blockdev").qemu_arg(file).qemu_arg("-blockdev").qemu_arg(medium);
    let report = guest.qemu_arg("-device").qemu_arg("nvme,drive=medium,serial=ringway").boot()?;
    report.finish()?.expect_ok();

    // Each request of the guest is where it belongs, and what was discarded is gone.
    assert!(holds(&namespace, 20479 << 10, 513 << 10, 0x11)?);
    assert!(holds(&namespace, 60 * MIB, 64 << 10, 0x33)?);
    assert!(holds(&namespace, 61 * MIB, 64 << 10, 0x44)?, "written by a tool");
    assert!(holds(&namespace, 62 * MIB, 64 << 10, 0x55)?, "of a disk that was added");
    let allocated = namespace.metadata().context("it is there")?.blocks() * 512;
    assert!(allocated < 64 * MIB, "{allocated}");
    Ok(())
}
