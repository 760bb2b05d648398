//! Every way in which a disk cannot be opened, and what must be true when it can.

mod formats;
mod host;
mod locks;

use super::image_lock::try_flock;
use super::{Base, Created, ForeignFormat, OpenError, OpenOptions, Qcow2, Source, open, place};
use crate::choices::{CacheMode, EngineKind};
use crate::disk::Disk;
use ringway_image::Format;
use ringway_testkit::{LoopDevice, Mounted, Need, skip};
use std::ffi::CString;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// Where the test program lies: a real file system, unlike `/tmp` on some hosts.
fn folder() -> TempDir {
    let program = std::env::current_exe().expect("we are a program");
    tempfile::tempdir_in(program.parent().expect("a folder")).expect("a folder")
}

fn file(folder: &TempDir, bytes: u64) -> PathBuf {
    let path = folder.path().join("disk.img");
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn options(path: &Path) -> OpenOptions {
    OpenOptions::new(Source::Path(path.into()))
}

fn buffered(path: &Path) -> OpenOptions {
    OpenOptions { cache: Some(CacheMode::Writeback), ..options(path) }
}

/// Another test that starts a process has our files, and their locks, until that process runs its
/// own program: that is waited for.
fn opens(options: &OpenOptions) -> Disk {
    let begun = Instant::now();
    loop {
        match open(options) {
            Ok(disk) => return disk,
            Err(OpenError::InUse { .. }) if begun.elapsed() < Duration::from_secs(10) => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// The error of a disk that does not open; its message names the file and all of `words`.
#[track_caller]
fn fails(options: &OpenOptions, words: &[&str]) -> OpenError {
    let error = open(options).expect_err("it must not open");
    let message = error.to_string();
    if let Source::Path(path) = &options.source {
        if !matches!(
            error,
            OpenError::Serial(_) | OpenError::BlockSize { .. } | OpenError::Engine { .. }
        ) {
            assert!(message.contains(&*path.to_string_lossy()), "{message:?} does not say where");
        }
    }
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
    assert!(!message.contains('\n'), "{message:?} is one line");
    error
}

fn is_root() -> bool {
    // SAFETY: no preconditions.
    unsafe { libc::geteuid() == 0 }
}

/// Runs `test` on a thread that root's rights over files do not reach. False if we are not root:
/// then no thread has them.
fn as_nobody(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            // SAFETY: changes the rights of this thread alone, which ends here.
            unsafe {
                libc::setfsgid(65534);
                libc::setfsuid(65534);
            }
            test();
        });
        run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Runs `test` on a thread with mounts of its own, with `kind` mounted on a folder. The host sees
/// nothing of it.
fn with_mount(kind: &str, flags: libc::c_ulong, test: impl FnOnce(&Path) + Send) {
    if !is_root() {
        return skip(Need::Root, "to mount file systems");
    }
    let folder = folder();
    let kind = CString::new(kind).unwrap();
    let at = CString::new(folder.path().as_os_str().as_bytes()).unwrap();
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            let none = std::ptr::null();
            // SAFETY: constant or owned C strings; the mounts are of this thread alone, which ends
            // here.
            let mounted = unsafe {
                libc::unshare(libc::CLONE_NEWNS) == 0
                    && libc::mount(
                        none,
                        c"/".as_ptr(),
                        none,
                        libc::MS_REC | libc::MS_PRIVATE,
                        none.cast(),
                    ) == 0
                    && libc::mount(c"none".as_ptr(), at.as_ptr(), kind.as_ptr(), 0, none.cast())
                        == 0
            };
            if !mounted {
                return Err(std::io::Error::last_os_error());
            }
            let path = folder.path().join("disk.img");
            File::create(&path).unwrap().set_len(MIB).unwrap();
            // SAFETY: as above.
            let done = unsafe {
                libc::mount(none, at.as_ptr(), none, libc::MS_REMOUNT | flags, none.cast())
            };
            assert!(flags == 0 || done == 0, "remount: {}", std::io::Error::last_os_error());
            test(&path);
            Ok(())
        });
        let ran = run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if let Err(why) = ran {
            skip(Need::Mount, format_args!("{}: {why}", kind.to_string_lossy()));
        }
    });
}

// ---- there is nothing to open ----

#[test]
fn missing() {
    let folder = folder();
    let path = folder.path().join("no.img");
    let error = fails(&options(&path), &["no such file", "--size"]);
    assert!(matches!(error, OpenError::Missing(_)));
    assert!(!path.exists(), "nothing is created unasked");
}

#[test]
fn c88_what_was_served_before_is_not_made_again() {
    let folder = folder();
    let path = folder.path().join("no.img");
    let served_before = Some("served-1".into());
    let raw = OpenOptions { create_bytes: Some(MIB), served_before, ..options(&path) };
    let base = Some(Base { path: file(&folder, MIB), format: Some(Format::Raw), export: None });
    let qcow2 = Some(Qcow2 { base, ..Qcow2::default() });
    let clone = OpenOptions { qcow2, create_bytes: None, ..raw.clone() };
    for mut wanted in [raw, clone] {
        let error = fails(&wanted, &["was served before", "ringway create", "served-1"]);
        assert!(matches!(error, OpenError::Gone { .. }));
        assert!(!path.exists(), "nothing is made");
        wanted.served_before = None;
        drop(opens(&wanted));
        // One that is there is served.
        wanted.served_before = Some("served-1".into());
        drop(opens(&wanted));
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn missing_folder() {
    let folder = folder();
    let path = folder.path().join("no/such/disk.img");
    let wanted = OpenOptions { create_bytes: Some(MIB), ..options(&path) };
    assert!(matches!(fails(&wanted, &["folder does not exist"]), OpenError::NoFolder(_)));
    assert!(matches!(fails(&options(&path), &["folder does not exist"]), OpenError::NoFolder(_)));
    assert!(!folder.path().join("no").exists());
}

#[test]
fn link_to_nowhere() {
    let folder = folder();
    let path = folder.path().join("link");
    symlink(folder.path().join("gone"), &path).unwrap();
    let wanted = OpenOptions { create_bytes: Some(MIB), ..options(&path) };
    assert!(matches!(fails(&wanted, &[]), OpenError::Missing(_)));
    assert!(!folder.path().join("gone").exists(), "nothing is created where a link points");
}

#[test]
fn not_a_disk() {
    let folder = folder();
    let fifo = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let socket = folder.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    let kinds = [
        (folder.path(), "a folder", "Name a disk image"),
        (&fifo, "a pipe", "Name a disk image"),
        (&socket, "a socket", "say vhost-user:/"),
        (Path::new("/dev/zero"), "a character device", "Name a disk image"),
    ];
    for (path, kind, instead) in kinds {
        let error = fails(&options(path), &[kind, instead]);
        assert!(matches!(error, OpenError::NotADisk { .. }), "{error}");
    }
}

#[test]
fn empty() {
    let folder = folder();
    for options in [options(&file(&folder, 0)), buffered(&file(&folder, 0))] {
        assert!(matches!(fails(&options, &["empty", "truncate"]), OpenError::Empty(_)));
    }
}

#[test]
fn not_a_whole_number_of_blocks() {
    let folder = folder();
    for bytes in [1, 511, 513, MIB - 1, MIB + 100] {
        let error =
            fails(&options(&file(&folder, bytes)), &["multiple of 512", "truncate -s %512"]);
        assert!(matches!(error, OpenError::NotWhole { bytes: b, unit: 512, .. } if b == bytes));
    }
    let path = file(&folder, MIB + 512);
    assert_eq!(opens(&options(&path)).geometry().capacity, MIB + 512);
    let large = OpenOptions { block_size: Some(4096), ..buffered(&path) };
    assert!(matches!(fails(&large, &["4096"]), OpenError::NotWhole { unit: 4096, .. }));
    assert_eq!(path.metadata().unwrap().len(), MIB + 512, "the file is as it was");
}

// ---- options that cannot be ----

#[test]
fn serials() {
    let folder = folder();
    let path = file(&folder, MIB);
    let with = |serial: &str| OpenOptions { serial: Some(serial.into()), ..options(&path) };
    for bad in ["", "123456789012345678901", "gr\u{fc}n", "tab\there", "line\n"] {
        let error = open(&with(bad)).unwrap_err();
        assert!(matches!(error, OpenError::Serial(_)), "{bad:?}: {error}");
        assert!(error.to_string().contains("20 bytes"), "{error}");
    }
    for good in ["1", "12345678901234567890", "RW 01-a/b"] {
        let disk = opens(&with(good));
        assert_eq!(&disk.serial()[..good.len()], good.as_bytes());
        assert!(disk.serial()[good.len()..].iter().all(|&byte| byte == 0), "zero padded");
    }
    let first = *opens(&options(&path)).serial();
    assert_eq!(first, *opens(&options(&path)).serial(), "the same at every start");
    let other = folder.path().join("other.img");
    File::create(&other).unwrap().set_len(MIB).unwrap();
    assert_ne!(first, *opens(&options(&other)).serial(), "another for another file");
    // One place is one place, and two images of one name are in two folders.
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(folder.path(), &link).unwrap();
    let same = link.join(path.file_name().unwrap());
    assert_eq!(first, *opens(&options(&same)).serial(), "by another spelling");
    let name = Path::new("disk.img");
    assert_eq!(place(name), place(&std::env::current_dir().unwrap().join(name)));
}

#[test]
fn block_sizes() {
    let folder = folder();
    let path = file(&folder, MIB);
    for size in [0, 1, 256, 511, 513, 1024, 2048, 8192, u32::MAX] {
        let wanted = OpenOptions { block_size: Some(size), ..options(&path) };
        let error = fails(&wanted, &["512 or 4096"]);
        assert!(matches!(error, OpenError::BlockSize { size: s, .. } if s == size));
    }
    for size in [512, 4096] {
        let disk = opens(&OpenOptions { block_size: Some(size), ..options(&path) });
        let geometry = disk.geometry();
        assert_eq!(geometry.logical_block, size);
        assert!(geometry.physical_block >= size && geometry.discard_granularity >= size);
    }
    assert_eq!(opens(&options(&path)).geometry().logical_block, 512, "what images are made of");
}

#[test]
fn engines() {
    let folder = folder();
    let path = file(&folder, MIB);
    let works = |engine| (engine, Ok("because".to_owned()));
    let fails_here = (EngineKind::IoUring, Err("the kernel forbids it".to_owned()));
    let mut wanted = buffered(&path);
    wanted.engines = vec![fails_here, works(EngineKind::Threads)];

    let disk = opens(&wanted);
    assert_eq!((disk.engine(), disk.engine_why()), (EngineKind::Threads, "because"));
    drop(disk);

    wanted.engine = Some(EngineKind::IoUring);
    fails(&wanted, &["--engine io_uring", "the kernel forbids it", "auto"]);
    wanted.engine = Some(EngineKind::LinuxAio);
    fails(&wanted, &["O_DIRECT"]);
    wanted.engine = Some(EngineKind::Null);
    fails(&wanted, &["null", "lose every write"]);
    wanted.engine = None;
    wanted.engines.clear();
    fails(&wanted, &["no engine"]);
}

// ---- files that are made ----

#[test]
fn a_missing_file_is_created_sparse_and_private() {
    let folder = folder();
    let path = folder.path().join("new.img");
    let wanted = OpenOptions { create_bytes: Some(1 << 33), ..options(&path) };
    let disk = opens(&wanted);
    assert!(disk.created());
    assert_eq!(disk.geometry().capacity, 1 << 33);
    let meta = path.metadata().unwrap();
    assert_eq!((meta.len(), meta.blocks(), meta.mode() & 0o777), (1 << 33, 0, 0o600));
    drop(disk);
    let again = opens(&wanted);
    assert!(!again.created(), "it was there this time");
}

/// Who creates a file may lose the race for its lock; it is the other one's then.
#[test]
fn a_new_file_is_not_removed_under_another_owner() {
    let folder = folder();
    let (begun, mut snatched) = (Instant::now(), 0);
    for round in 0.. {
        if snatched == 3 || begun.elapsed() > Duration::from_secs(30) {
            break;
        }
        let path = folder.path().join(format!("{round}.img"));
        let wanted = OpenOptions { create_bytes: Some(MIB), ..options(&path) };
        let there = || File::options().read(true).write(true).open(&path);
        let spinning = Barrier::new(2);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                spinning.wait();
                let file = loop {
                    if let Ok(file) = there() {
                        break file;
                    }
                };
                try_flock(&file, false).is_ok().then_some(file)
            });
            spinning.wait();
            let opened = open(&wanted);
            let other = other.join().unwrap();
            assert!(opened.is_err() || other.is_none(), "one of them has the lock");
            snatched += u32::from(other.is_some());
            assert!(path.exists(), "round {round}");
        });
    }
    assert!(snatched > 0, "nobody was ever faster");
}

#[test]
fn an_existing_file_is_never_resized() {
    let folder = folder();
    let path = file(&folder, MIB);
    std::fs::write(&path, vec![7; 4096]).unwrap();
    for create_bytes in [MIB, 512, 1000] {
        let disk = opens(&OpenOptions { create_bytes: Some(create_bytes), ..options(&path) });
        assert!(!disk.created());
        assert_eq!(disk.geometry().capacity, 4096);
    }
    assert_eq!(std::fs::read(&path).unwrap(), vec![7; 4096]);
}

#[test]
fn a_size_nobody_can_use() {
    let folder = folder();
    let path = folder.path().join("new.img");
    for bytes in [0, 1, 511, 1000] {
        let wanted = OpenOptions { create_bytes: Some(bytes), ..options(&path) };
        assert!(matches!(fails(&wanted, &["multiple of 512"]), OpenError::Size { .. }));
        assert!(!path.exists());
    }
    let wanted = OpenOptions { create_bytes: Some(9 << 60), ..options(&path) };
    assert!(matches!(fails(&wanted, &["new.img", "less than 8 EiB"]), OpenError::TooLarge { .. }));
    assert!(!path.exists());
}

#[test]
fn what_was_created_goes_if_the_disk_does_not_open() {
    let folder = folder();
    let path = folder.path().join("new.img");
    let made = |change: fn(&mut OpenOptions)| {
        let mut options = OpenOptions { create_bytes: Some(MIB + 512), ..buffered(&path) };
        change(&mut options);
        options
    };
    // Beyond what file systems hold.
    fails(&made(|o| o.create_bytes = Some((1 << 63) - 512)), &["size"]);
    assert!(!path.exists());
    fails(&made(|o| o.block_size = Some(4096)), &["4096"]);
    assert!(!path.exists());
    fails(&made(|o| o.block_size = Some(1024)), &[]);
    assert!(!path.exists());
    fails(&made(|o| o.serial = Some("x".repeat(21))), &[]);
    assert!(!path.exists());
    fails(&made(|o| o.engine = Some(EngineKind::Null)), &[]);
    assert!(!path.exists());
    assert!(opens(&made(|_| {})).created());
}
