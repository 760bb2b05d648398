//! What guests are started from, and where that is.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow, ensure};
use ringway_testkit::{Lack, Need};

/// What a guest is started from.
#[derive(Debug)]
pub struct GuestFiles {
    /// Linux.
    pub kernel: PathBuf,
    /// Its first file system, with the scenarios.
    pub initrd: PathBuf,
}

/// Runs `guest/build.sh` once per test program; with a warm cache it takes no time.
pub fn guest_files() -> Result<&'static GuestFiles> {
    static FILES: OnceLock<Result<GuestFiles, String>> = OnceLock::new();
    let found = FILES.get_or_init(|| build_guest().map_err(|error| format!("{error:#}")));
    found.as_ref().map_err(|error| anyhow!("{error}"))
}

fn build_guest() -> Result<GuestFiles> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/build.sh");
    let out = target_dir().join("guest");
    let output = Command::new(&script)
        .arg(&out)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {}", script.display()))?;
    ensure!(
        output.status.success(),
        "the guest could not be built:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(GuestFiles { kernel: out.join("vmlinuz"), initrd: out.join("initrd.cpio") })
}

/// A QEMU of Debian 13.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewerQemu {
    /// Its own: 10.0.
    Stable,
    /// That of its backports: 11.1 when this was written.
    Backports,
}

/// The folder of a newer QEMU's programs, which `newer-qemu/unpack.sh` puts below the target directory the
/// first time. Why there is none, if it cannot.
pub fn newer_qemu(which: NewerQemu) -> Result<&'static Path, Lack> {
    static FOUND: [OnceLock<Result<PathBuf, Lack>>; 2] = [const { OnceLock::new() }; 2];
    let found = FOUND[which as usize].get_or_init(|| {
        let lack = |why: String| Lack::new(Need::NewerQemu, why);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("newer-qemu/unpack.sh");
        let (name, suite) = match which {
            NewerQemu::Stable => ("newer-qemu", "trixie"),
            NewerQemu::Backports => ("newer-qemu-backports", "trixie-backports"),
        };
        let dir = target_dir().join(name);
        let output = Command::new(&script).arg(&dir).arg(suite).stdin(Stdio::null()).output();
        let output = output.map_err(|error| lack(format!("{}: {error}", script.display())))?;
        if output.status.success() {
            return Ok(dir.join("bin"));
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        Err(lack(format!("Debian 13's QEMU cannot be unpacked ({}): {last}", output.status)))
    });
    found.as_ref().map(PathBuf::as_path).map_err(Clone::clone)
}

/// Cargo's directory of this build, where `ringway` is: test programs are in `deps` below it.
pub fn target_dir() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    match program.parent().and_then(Path::parent) {
        Some(dir) if program.parent().is_some_and(|dir| dir.ends_with("deps")) => dir.to_owned(),
        _ => program.parent().map_or_else(std::env::temp_dir, Path::to_owned),
    }
}

/// Makes a disk of 256 MiB that boots: the first `mib` are a file system with boot loader, kernel and its
/// words.
pub(crate) fn boot_disk(image: &Path, mib: u32, words: &str) -> Result<()> {
    let files = guest_files()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/boot-disk.sh");
    let mut command = Command::new(&script);
    command.arg(image).arg(mib.to_string()).arg(&files.kernel).arg(&files.initrd).arg(words);
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("start {}", script.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "no disk that boots: {said}");
    Ok(())
}
