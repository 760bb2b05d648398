//! A real libvirt: guests start from served disks, attached by exactly the XML that `serve` prints, under
//! SeaBIOS and under OVMF; the daemon is killed, a disk grows, a second one comes and goes.
//! `libvirt/inside.sh` does it.

use anyhow::{Context, Result, ensure};
use ringway_e2e::guest::{guest_files, ringway_program, skip_reason, target_dir, turn};
use ringway_testkit::{Need, skip};
use std::path::Path;
use std::process::{Command, Stdio};

/// Programs it calls, and the Debian packages that bring them.
const PROGRAMS: [(&str, &str); 7] = [
    ("libvirtd", "libvirt-daemon"),
    ("virsh", "libvirt-clients"),
    ("mkfs.vfat", "dosfstools"),
    ("mcopy", "mtools"),
    ("syslinux", "syslinux"),
    ("unshare", "util-linux"),
    ("qemu-system-x86_64", "qemu-system-x86"),
];

fn lacking() -> Option<(Need, String)> {
    // SAFETY: it only tells.
    if unsafe { libc::geteuid() } != 0 {
        return Some((Need::Root, "libvirtd gets folders of its own by mounts".into()));
    }
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let is_there = |name: &str| path.split(':').any(|dir| Path::new(dir).join(name).is_file());
    let missing = PROGRAMS.iter().find(|(name, _)| !is_there(name));
    if let Some((name, package)) = missing {
        return Some((Need::Libvirt, format!("there is no {name}: package {package}")));
    }
    // The driver is a package of its own.
    let driver = "/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so";
    let missing = !Path::new(driver).is_file();
    missing.then(|| (Need::Libvirt, "no driver: package libvirt-daemon-driver-qemu".into()))
}

#[test]
fn guests_of_libvirt_start_from_disks_and_survive_the_daemon() -> Result<()> {
    if skip_reason().is_some() {
        return Ok(());
    }
    if let Some((need, why)) = lacking() {
        skip(need, why);
        return Ok(());
    }
    let files = guest_files()?;
    // One guest already fills a small machine.
    let _turn = turn()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("libvirt/run.sh");
    let output = Command::new(&script)
        .arg(ringway_program()?)
        .args([&files.kernel, &files.initrd])
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {}", script.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && text.trim_end().ends_with("passed"),
        "{}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    println!("{text}");
    if text.contains("left out") {
        skip(Need::Libvirt, "no guest of OVMF: package ovmf");
    }
    Ok(())
}

/// As above, with Debian 13's libvirt and QEMU, which `tools/suites.sh` unpacks beside.
#[test]
fn guests_of_a_newer_libvirt_start_from_disks_and_survive_the_daemon() -> Result<()> {
    if skip_reason().is_some() {
        return Ok(());
    }
    // SAFETY: it only tells.
    if unsafe { libc::geteuid() } != 0 {
        skip(
            Need::Root,
            "Debian 13 is unpacked with its owners, and libvirtd gets folders of its own",
        );
        return Ok(());
    }
    let _turn = turn()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/suites.sh");
    let target = target_dir();
    let target = target.parent().context("a target folder")?;
    let mut command = Command::new(&script);
    command.arg("libvirt").env("CARGO_TARGET_DIR", target).env("RINGWAY", ringway_program()?);
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("start {}", script.display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if !said.contains("pass") && !said.contains("FAIL") {
        skip(
            Need::Libvirt,
            format_args!("{}", errors.trim_end().lines().last().unwrap_or_default()),
        );
        return Ok(());
    }
    ensure!(output.status.success(), "{said}\n{errors}");
    Ok(())
}
