//! QEMU's programs.

use std::path::Path;
use std::process::{Command, Output};

/// True if they are here.
pub(crate) fn is_here() -> bool {
    let here = |program| Command::new(program).arg("--version").output().is_ok();
    let both = here("qemu-img") && here("qemu-io");
    if !both {
        ringway_testkit::skip(ringway_testkit::Need::Qemu, "qemu-img and qemu-io".to_owned());
    }
    both
}

fn run(program: &str, args: &[&str]) -> Output {
    Command::new(program).args(args).output().unwrap()
}

/// Runs `qemu-img`, which must succeed.
pub(crate) fn img(args: &[&str]) {
    let output = run("qemu-img", args);
    assert!(output.status.success(), "qemu-img {args:?}: {}", words(&output));
}

/// Runs commands of `qemu-io` on a qcow2 image.
pub(crate) fn io(path: &Path, commands: &[String]) {
    let mut args = vec!["-f", "qcow2"];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(path.to_str().unwrap());
    let output = run("qemu-io", &args);
    assert!(output.status.success(), "qemu-io {args:?}: {}", words(&output));
}

/// What `qemu-img check` says: without errors, and with leaks only if they may be.
pub(crate) fn check(path: &Path, leaks: bool) {
    let output = run("qemu-img", &["check", "-f", "qcow2", path.to_str().unwrap()]);
    let code = output.status.code();
    let fine = code == Some(0) || (leaks && code == Some(3));
    assert!(fine, "qemu-img check {}: {code:?} {}", path.display(), words(&output));
}

/// Whether some of an image's own clusters are compressed, by `qemu-img check`.
pub(crate) fn has_compressed(path: &Path) -> bool {
    let args = ["check", "-f", "qcow2", "--output=json", path.to_str().unwrap()];
    let output = run("qemu-img", &args);
    assert!(output.status.success(), "{args:?}: {}", words(&output));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    found["compressed-clusters"].as_u64().is_some_and(|count| count > 0)
}

/// All bytes of an image's disk, or of one of its snapshots.
pub(crate) fn content(path: &Path, snapshot: Option<&str>) -> Vec<u8> {
    let out = path.with_extension("content");
    let (from, to) = (path.to_str().unwrap(), out.to_str().unwrap());
    let mut args = vec!["convert", "-f", "qcow2", "-O", "raw"];
    let name = snapshot.map(|name| format!("snapshot.name={name}"));
    if let Some(name) = &name {
        args.extend(["-l", name]);
    }
    args.extend([from, to]);
    img(&args);
    let bytes = std::fs::read(&out).unwrap();
    std::fs::remove_file(&out).unwrap();
    bytes
}

/// The parts of an image's disk that read as zeroes and are in no file, by `qemu-img map`: where they
/// begin, and their lengths.
pub(crate) fn nowhere(path: &Path) -> Vec<(u64, u64)> {
    let args = ["map", "-f", "qcow2", "--output=json", path.to_str().unwrap()];
    let output = run("qemu-img", &args);
    assert!(output.status.success(), "{args:?}: {}", words(&output));
    let map: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |extent: &serde_json::Value, name: &str| extent[name].as_u64().unwrap();
    let extents = map.as_array().unwrap().iter();
    let zero = extents.filter(|extent| extent["zero"] == true && extent["data"] == false);
    zero.map(|extent| (number(extent, "start"), number(extent, "length"))).collect()
}

fn words(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&text).into_owned()
}
