//! `memory-max` at work: the process of a disk whose client has it fill more memory than its cgroup may hold
//! is killed alone. It all happens in a guest: its kernel has cgroups of version 2 with memory, which those of
//! machines that still use version 1 have not.

use anyhow::{Context, Result, ensure};
use ringway_e2e::guest::{Guest, ringway_program, server_is_control, skip_reason};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Runs a command that must succeed: what it printed.
fn printed(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}, {error}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Copies a program to `root/bin`, and the libraries it needs to where it looks for them.
fn carry(program: &Path, root: &Path) -> Result<()> {
    let name = program.file_name().context("a program has a name")?;
    std::fs::create_dir_all(root.join("bin"))?;
    std::fs::copy(program, root.join("bin").join(name))?;
    let libraries = printed(Command::new("ldd").arg(program))?;
    for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        let to = root.join(library.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().context("a library is in a folder")?)?;
        std::fs::copy(library, to).with_context(|| library.to_owned())?;
    }
    Ok(())
}

/// `ringway`, a client of it and what enters a namespace, as an archive for `chroot`.
fn archive(dir: &Path) -> Result<PathBuf> {
    let (root, archive) = (dir.join("root"), dir.join("root.tar"));
    carry(&ringway_program()?, &root)?;
    carry(Path::new(env!("CARGO_BIN_EXE_fill-memory")), &root)?;
    let unshare = printed(Command::new("sh").args(["-c", "command -v unshare"]))?;
    carry(Path::new(unshare.trim()), &root)?;
    printed(Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&archive).arg("."))?;
    Ok(archive)
}

/// Two disks of one daemon, with processes of their own.
#[test]
fn e06_a_guest_beyond_memory_max_has_its_own_process_killed_alone() -> Result<()> {
    if skip_reason().is_some() || server_is_control() {
        return Ok(()); // QEMU's own server has no cgroups.
    }
    let dir = tempfile::tempdir()?;
    let mut drive = OsString::from("format=raw,if=none,id=program,readonly=on,file=");
    drive.push(archive(dir.path())?);
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
