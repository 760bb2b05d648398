//! Tests that are left out are counted, and CI refuses those that are on no list: `tools/skips.sh`.

use ringway_testkit::{Lack, Need, skip};
use std::path::Path;
use std::process::{Command, Output};

/// Set for a run of this file that stands for a run of the tests.
const INNER: &str = "RINGWAY_SKIPS_INNER";

#[test]
fn a_test_that_is_left_out() {
    if std::env::var_os(INNER).is_some() {
        skip(Need::Xen, "a reason\nof two lines\tand a tab");
        Lack::new(Need::Root, "another").skip();
    }
}

/// What the tests of this file record if they lack something.
fn record(folder: &Path) -> std::path::PathBuf {
    let record = folder.join("record");
    let mut inner = Command::new(std::env::current_exe().unwrap());
    inner
        .args(["a_test_that_is_left_out", "--exact"])
        .env(INNER, "1")
        .env("RINGWAY_SKIPS", &record);
    let output = inner.env("CARGO_PKG_NAME", "ringway-testkit").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    record
}

#[test]
fn what_is_left_out_is_recorded_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let recorded = std::fs::read_to_string(record(folder.path())).unwrap();
    assert_eq!(
        recorded,
        "ringway-testkit/skips::a_test_that_is_left_out\txen\ta reason of two lines and a tab\n\
         ringway-testkit/skips::a_test_that_is_left_out\troot\tanother\n"
    );
}

/// Runs `tools/skips.sh` with a list of what may be left out.
fn judge(folder: &Path, list: &str, needs: &[&str], ci: &str) -> (bool, String) {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools");
    std::fs::write(folder.join("list"), list).unwrap();
    let mut judge = Command::new(tools.join("skips.sh"));
    judge.arg(folder.join("record")).arg(folder.join("list")).args(needs).env("CI", ci);
    let Output { status, stdout, stderr } = judge.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&stderr), "");
    (status.success(), String::from_utf8(stdout).unwrap())
}

#[test]
fn ci_refuses_what_is_on_no_list() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    record(folder);
    let both = "# a comment\n\n*/skips::* xen no packages\nringway-testkit/* root no root\n";
    let (passes, said) = judge(folder, both, &[], "true");
    assert!(passes, "{said}");
    assert_eq!(said.matches("skipped, as listed: ringway-testkit/skips::a_test").count(), 2);

    // Another need, and another test.
    for list in [
        "* xen why\n",
        "ringway-testkit/* fuse why\n* xen why\n",
        "ringway-aio/* root why\n* xen why\n",
    ] {
        let (passes, said) = judge(folder, list, &[], "true");
        assert!(!passes, "{list}: {said}");
        assert!(said.contains("1 skips are not in "), "{said}");
        assert!(said.contains("skipped: ringway-testkit/skips::a_test_that_is_left_out: root"));
        assert!(judge(folder, list, &[], "").0, "only in CI");
        assert!(judge(folder, list, &["root"], "true").0, "asked for");
    }

    let (passes, said) = judge(folder, &format!("{both}* fuse no fuse\n"), &[], "true");
    assert!(passes && said.contains("not skipped here, but on the list: * fuse"), "{said}");
    let (passes, said) = judge(folder, "* xen\n", &[], "");
    assert!(!passes && said.contains("say why"), "{said}");
}
