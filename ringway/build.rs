//! Finds out from what the program is made, for `ringway --version`.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let commit = commit(Path::new(&root)).unwrap_or_else(|| "unknown".into());
    println!("cargo:rustc-env=RINGWAY_COMMIT={commit}");
    let features: Vec<_> =
        [("CARGO_FEATURE_XEN", "xen"), ("CARGO_FEATURE_KILL_POINTS", "kill-points")]
            .into_iter()
            .filter(|(variable, _)| env::var_os(variable).is_some())
            .map(|(_, feature)| feature)
            .collect();
    let features = if features.is_empty() { "none".into() } else { features.join(" ") };
    println!("cargo:rustc-env=RINGWAY_FEATURES={features}");
    let of = |name: &str| env::var(name).expect("cargo sets it");
    println!("cargo:rustc-env=RINGWAY_BUILD={} {}", of("TARGET"), of("PROFILE"));
}

/// The commit: as packagers say, as an archive of git or a crate has recorded it, or of this working
/// copy. `None` where nobody knows.
fn commit(root: &Path) -> Option<String> {
    println!("cargo:rerun-if-env-changed=RINGWAY_COMMIT");
    for file in ["commit.txt", ".cargo_vcs_info.json", "build.rs"] {
        watch(&root.join(file));
    }
    let said = env::var("RINGWAY_COMMIT").ok();
    let archived = || std::fs::read_to_string(root.join("commit.txt")).ok();
    let packaged = || std::fs::read_to_string(root.join(".cargo_vcs_info.json")).ok();
    said.and_then(|text| number(&text))
        .or_else(|| number(&archived()?))
        .or_else(|| number(packaged()?.split_once("\"sha1\":")?.1))
        .or_else(|| of_working_copy(root))
}

/// The first number of a commit in `text`, if it begins with one: twelve digits of it.
fn number(text: &str) -> Option<String> {
    let text = text.trim_start_matches([' ', '\n', '"']);
    let digits: String = text.chars().take_while(char::is_ascii_hexdigit).take(12).collect();
    (digits.len() >= 7).then_some(digits)
}

/// Of the working copy whose folder `ringway` this is: sources that were unpacked within another one
/// are none of its commits.
fn of_working_copy(root: &Path) -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim_end().to_owned())
    };
    git(&["ls-files", "--error-unmatch", "Cargo.toml"])?;
    // What names a commit.
    for file in ["HEAD", "refs/heads", "packed-refs"] {
        watch(&root.join(git(&["rev-parse", "--git-path", file])?));
    }
    number(&git(&["rev-parse", "HEAD"])?)
}

/// Looks again when this file changes. One that is not there would have the program built anew each time.
fn watch(path: &Path) {
    if path.exists() {
        println!("cargo:rerun-if-changed={}", path.display());
    }
}
