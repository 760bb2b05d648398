use super::*;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn image() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    (folder, path)
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// What programs of QEMU lock, as seen in /proc/locks, and what they look at before.
const QEMUS: [(&str, &[i64]); 5] = [
    ("a machine with a disk", &[100, 101, 201]),
    ("a machine with a disk that is shared", &[100, 101]),
    ("a machine with a read-only disk", &[100, 201]),
    ("qemu-io, qemu-storage-daemon", &[100, 101]),
    ("qemu-io -r, qemu-img info", &[100]),
];

fn as_qemu(file: &File, bytes: &[i64]) -> Result<(), i64> {
    for &byte in bytes {
        set(file, libc::F_RDLCK, byte, 1).unwrap();
    }
    let opposite = |byte: i64| if byte < BARRED { byte + 100 } else { byte - 100 };
    let refused = bytes.iter().map(|&byte| opposite(byte)).find(|&b| is_marked(file, b).unwrap());
    refused.map_or(Ok(()), Err)
}

/// Whoever comes first, reader or writer: what QEMU would refuse is refused, what it would share is
/// shared.
#[test]
fn c11_qemus_locks_exclude_ours_and_ours_exclude_theirs() {
    let (_folder, path) = image();
    for (who, bytes) in QEMUS {
        for read_only in [false, true] {
            let only_reads = !bytes.contains(&101);
            // Who reads a raw image lets others write it, as QEMU has it; a machine does not.
            let shared = only_reads && (read_only || !bytes.contains(&201));
            let (ours, theirs) = (open(&path), open(&path));
            as_qemu(&theirs, bytes).unwrap();
            let what = format!("{who}, then ours, read-only: {read_only}");
            match lock_image(&ours, read_only) {
                Ok(()) => assert!(shared, "{what}"),
                Err(LockError::Marked(byte)) => {
                    assert!(!shared && bytes.contains(&byte), "{what}: {byte}");
                    // Nothing is left behind.
                    assert_eq!(
                        as_qemu(&open(&path), &[100, 101]),
                        if bytes.contains(&201) { Err(201) } else { Ok(()) }
                    );
                    try_flock(&open(&path), false).unwrap();
                }
                Err(error) => panic!("{what}: {error}"),
            }
            drop((ours, theirs));

            let (ours, theirs) = (open(&path), open(&path));
            lock_image(&ours, read_only).unwrap();
            assert_eq!(as_qemu(&theirs, bytes).is_ok(), shared, "ours, {read_only}, then {who}");
        }
    }
}

/// QEMU uses permission to resize only together with others today; that alone is refused, too.
#[test]
fn c11_nobody_else_resizes_what_is_served() {
    let (_folder, path) = image();
    for read_only in [false, true] {
        let (ours, theirs) = (open(&path), open(&path));
        lock_image(&ours, read_only).unwrap();
        assert_eq!(as_qemu(&theirs, &[103]), Err(203));
        unlock_image(&ours);
        assert!(matches!(lock_image(&ours, read_only), Err(LockError::Marked(103))));
    }
}

#[test]
fn c11_readers_share_and_writers_do_not() {
    let (_folder, path) = image();
    let files = [open(&path), open(&path), open(&path)];
    lock_image(&files[0], true).unwrap();
    lock_image(&files[1], true).unwrap();
    assert!(lock_image(&files[2], false).is_err());
    // Again, and for another purpose: only the last one counts.
    lock_image(&files[0], true).unwrap();
    unlock_image(&files[1]);
    unlock_image(&files[0]);
    lock_image(&files[2], false).unwrap();
    lock_image(&files[2], false).unwrap();
    assert!(lock_image(&files[0], true).is_err());
}

/// As `flock`, they belong to the open file: they live as long as anybody holds it (hazard C10), and
/// another descriptor of it that is closed takes nothing away.
#[test]
fn c10_qemus_locks_live_as_long_as_the_open_file() {
    let (_folder, path) = image();
    let ours = open(&path);
    lock_image(&ours, false).unwrap();
    let kept = ours.try_clone().unwrap();
    drop(ours);
    let (again, theirs) = (open(&path), open(&path));
    drop(again);
    assert_eq!(as_qemu(&theirs, &[100, 101, 201]), Err(201));
    drop(kept);
    assert_eq!(as_qemu(&theirs, &[100, 101, 201]), Ok(()));
}

#[test]
fn c11_who_holds_qemus_locks_is_named() {
    let (_folder, path) = image();
    let (ours, theirs) = (open(&path), open(&path));
    as_qemu(&theirs, &[100, 101]).unwrap();
    let error = lock_image(&ours, false).unwrap_err();
    let name = error.holder(&ours);
    assert!(name.starts_with(&format!("process {} (", std::process::id())), "{name}");
    // Gone meanwhile, or hidden.
    drop(theirs);
    assert!(error.holder(&ours).contains("cannot be seen from here"));
}
