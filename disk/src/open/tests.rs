//! Every way in which a disk cannot be opened, and what must be true when it can.

use super::{Created, ForeignFormat, OpenError, OpenOptions, Source, open};
use crate::disk::{CacheMode, Disk, EngineKind};
use ringway_testkit::{LoopDevice, Need, skip};
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
    if let Source::Path(path) = &options.source
        && !matches!(
            error,
            OpenError::Serial(_) | OpenError::BlockSize { .. } | OpenError::Engine { .. }
        )
    {
        assert!(message.contains(&*path.to_string_lossy()), "{message:?} does not say where");
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
        (folder.path(), "a folder"),
        (&fifo, "a pipe"),
        (&socket, "a socket"),
        (Path::new("/dev/zero"), "a character device"),
    ];
    for (path, kind) in kinds {
        let error = fails(&options(path), &[kind, "raw disk image"]);
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
                file.try_lock().is_ok().then_some(file)
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

// ---- permission ----

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn no_permission() {
    let folder = folder();
    let path = file(&folder, MIB);
    let new = folder.path().join("new.img");
    chmod(folder.path(), 0o555);
    let mut reachable = false;
    as_nobody(|| reachable = path.metadata().is_ok());
    if !reachable {
        return skip(Need::OpenFolder, folder.path().display());
    }
    let read_only = OpenOptions { read_only: true, ..options(&path) };

    chmod(&path, 0);
    as_nobody(|| {
        let error =
            fails(&options(&path), &["no permission", "reading and writing", "--read-only"]);
        assert!(matches!(error, OpenError::Permission { .. }));
        fails(&read_only, &["no permission", "reading. Run"]);
    });
    chmod(&path, 0o444);
    as_nobody(|| {
        fails(&options(&path), &["no permission", "--read-only"]);
        assert!(opens(&read_only).geometry().read_only);
        // The folder is closed to new files.
        let wanted = OpenOptions { create_bytes: Some(MIB), ..options(&new) };
        assert!(matches!(fails(&wanted, &["no permission"]), OpenError::Permission { .. }));
    });
    assert!(!new.exists());
    // The folder is closed altogether.
    chmod(&path, 0o666);
    chmod(folder.path(), 0);
    as_nobody(|| {
        assert!(matches!(fails(&options(&path), &[]), OpenError::Permission { .. }));
    });
    chmod(folder.path(), 0o755);
}

#[test]
fn read_only_file_system() {
    with_mount("tmpfs", libc::MS_RDONLY, |path| {
        let error = fails(&buffered(path), &["no permission", "--read-only"]);
        assert!(matches!(error, OpenError::Permission { .. }));
        let wanted = OpenOptions { read_only: true, ..options(path) };
        assert_eq!(opens(&wanted).geometry().capacity, MIB);
        let new = path.with_file_name("new.img");
        let wanted = OpenOptions { create_bytes: Some(MIB), ..options(&new) };
        fails(&wanted, &["cannot create it"]);
        assert!(!new.exists());
    });
}

// ---- O_DIRECT ----

#[test]
fn direct_is_taken_where_it_works() {
    let folder = folder();
    let path = file(&folder, MIB);
    let disk = opens(&options(&path));
    if disk.cache() != CacheMode::None {
        return skip(Need::Direct, disk.cache_why());
    }
    let alignment = disk.alignment();
    assert!(disk.cache_why().contains("O_DIRECT works"), "{}", disk.cache_why());
    assert!(alignment.offset >= 512 && alignment.offset.is_power_of_two());
    // SAFETY: only asks for the flags of a descriptor of ours.
    let flags =
        unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&**disk.file()), libc::F_GETFL) };
    assert_ne!(flags & libc::O_DIRECT, 0);
    drop(disk);
    for cache in [CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Unsafe] {
        let disk = opens(&OpenOptions { cache: Some(cache), ..options(&path) });
        assert_eq!((disk.cache(), disk.alignment().offset), (cache, 1));
    }
}

/// ramfs has no O_DIRECT.
#[test]
fn no_direct() {
    with_mount("ramfs", 0, |path| {
        let wanted = OpenOptions { cache: Some(CacheMode::None), ..options(path) };
        let error = fails(&wanted, &["O_DIRECT", "--cache writeback", "file system"]);
        assert!(matches!(error, OpenError::NoDirect { .. }));
        let disk = opens(&options(path));
        assert_eq!(disk.cache(), CacheMode::Writeback, "the next best");
        assert!(disk.cache_why().contains("no O_DIRECT"), "{}", disk.cache_why());
    });
}

/// An image that ends within a block of its device can only be served through the page cache.
#[test]
fn a_device_of_larger_blocks() {
    let folder = folder();
    let device = match LoopDevice::new(folder.path(), MIB, 4096) {
        Ok(device) => device,
        Err(lack) => return lack.skip(),
    };
    let disk = opens(&options(device.path()));
    assert_eq!((disk.cache(), disk.alignment().offset), (CacheMode::None, 4096));
    let geometry = disk.geometry();
    assert_eq!((geometry.capacity, geometry.logical_block), (MIB, 4096));
    assert!(geometry.physical_block >= 4096 && geometry.discard);
    drop(disk);
    let small = OpenOptions { block_size: Some(512), ..options(device.path()) };
    let disk = opens(&small);
    assert_eq!((disk.geometry().logical_block, disk.alignment().offset), (512, 4096));
    // A device is opened exclusively.
    let error = fails(&small, &["in use", &format!("process {}", std::process::id())]);
    assert!(matches!(error, OpenError::InUse { .. }));
    let mounted = OpenOptions { read_only: true, ..options(device.path()) };
    fails(&mounted, &["in use", &format!("process {}", std::process::id())]);
    drop(disk);
    // What a mount does: it locks nothing, but has the device to itself.
    let mount = File::options().read(true).custom_flags(libc::O_EXCL).open(device.path()).unwrap();
    fails(&small, &["in use by the host itself"]);
    drop(mount);
    drop(opens(&small));
}

// ---- locks ----

#[test]
fn c11_the_second_daemon_is_refused() {
    let folder = folder();
    let path = file(&folder, MIB);
    let read_only = OpenOptions { read_only: true, ..options(&path) };
    let us = format!("process {} (", std::process::id());

    let first = opens(&options(&path));
    let error = fails(&options(&path), &["in use", &us, "--read-only"]);
    assert!(matches!(error, OpenError::InUse { .. }));
    fails(&read_only, &["in use", &us]);
    // Under another name it is the same file.
    let link = folder.path().join("link");
    std::fs::hard_link(&path, &link).unwrap();
    fails(&options(&link), &["in use", &us]);

    // The lock lives as long as the I/O: whoever still has the file has the lock.
    let file = std::sync::Arc::clone(first.file());
    drop(first);
    fails(&options(&path), &["in use"]);
    drop(file);
    drop(opens(&options(&path)));

    // Readers share; they keep writers out.
    let readers = [opens(&read_only), opens(&read_only)];
    fails(&options(&path), &["in use"]);
    drop(readers);
    drop(opens(&options(&path)));
}

/// Whoever asks for it waits for a living holder, too, and not for ever.
#[test]
fn c11_a_living_holder_is_waited_for_on_request() {
    let folder = folder();
    let path = file(&folder, MIB);
    let wait = |ms| OpenOptions { lock_wait: Some(Duration::from_millis(ms)), ..options(&path) };
    let first = opens(&options(&path));
    let begun = Instant::now();
    fails(&wait(200), &["in use", &format!("process {} (", std::process::id())]);
    assert!(begun.elapsed() >= Duration::from_millis(200));
    let leaves = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        drop(first);
    });
    drop(open(&wait(20_000)).expect("the holder leaves"));
    leaves.join().unwrap();
}

/// Opens the file as `fence` has it done, and lets `meanwhile` happen before each lock.
fn locked_after(
    path: &Path,
    options: &OpenOptions,
    mut meanwhile: impl FnMut(u32),
) -> (Result<u64, OpenError>, u32) {
    use super::fence::{Fenced, locked};
    let mut times = 0;
    let opened = locked(path, options, || {
        let file = File::options().read(true).write(true).open(path);
        times += 1;
        meanwhile(times);
        Ok((file.unwrap(), ()))
    });
    let opened = match opened {
        Ok((file, ())) => Ok(file.metadata().unwrap().len()),
        Err(Fenced::Open(error) | Fenced::Theirs(error)) => Err(error),
    };
    (opened, times)
}

/// The lock of a file that has no name any more would keep nobody away from the one that has it.
#[test]
fn c11_an_image_that_is_replaced_before_its_lock_is_ours_is_opened_anew() {
    let folder = folder();
    let path = file(&folder, MIB);
    let other = folder.path().join("other");
    let replace = |bytes| {
        let new = File::create(&other).unwrap();
        new.set_len(bytes).unwrap();
        std::fs::rename(&other, &path).unwrap();
    };
    let (bytes, times) = locked_after(&path, &options(&path), |time| {
        if time == 1 {
            replace(2 * MIB);
        }
    });
    assert_eq!((bytes.unwrap(), times), (2 * MIB, 2));
    // Whoever does so all the time keeps us away, and is told of.
    let (error, times) = locked_after(&path, &options(&path), |_| replace(MIB));
    assert!(matches!(error, Err(OpenError::Replaced(_))) && times > 2, "{error:?}");
    let (error, _) = locked_after(&path, &options(&path), |_| std::fs::remove_file(&path).unwrap());
    let error = error.unwrap_err();
    assert!(matches!(error, OpenError::Replaced(_)));
    assert!(error.to_string().contains("it was removed, or replaced"), "{error}");
    // Nothing has happened to a file that only got another name.
    replace(MIB);
    let moved = folder.path().join("moved");
    let (bytes, times) = locked_after(&path, &options(&path), |_| {
        let _ = std::fs::rename(&path, &moved);
        std::os::unix::fs::symlink(&moved, &path).unwrap();
    });
    assert_eq!((bytes.unwrap(), times), (MIB, 1));
}

/// Somebody puts an image of their own where a new file was made: that one is not ours to remove.
#[test]
fn c11_a_file_that_takes_the_place_of_a_new_one_stays() {
    let folder = folder();
    let (path, other) = (folder.path().join("new.img"), folder.path().join("other"));
    let options = OpenOptions { create_bytes: Some(MIB), ..options(&path) };
    let made = Created::if_missing(&path, &options).unwrap();
    std::fs::write(&other, b"theirs").unwrap();
    std::fs::rename(&other, &path).unwrap();
    drop(made);
    assert_eq!(std::fs::read(&path).unwrap(), b"theirs");
    std::fs::remove_file(&path).unwrap();
    let made = Created::if_missing(&path, &options).unwrap();
    std::fs::write(&other, b"theirs").unwrap();
    assert!(!made.keep(Some(&File::open(&other).unwrap())), "not what was made");
    assert!(path.exists());
    std::fs::remove_file(&path).unwrap();
    let made = Created::if_missing(&path, &options).unwrap();
    assert!(made.keep(Some(&File::open(&path).unwrap())));
    drop(Created::if_missing(&path, &options).unwrap());
    assert!(path.exists(), "it was there before");
    std::fs::remove_file(&path).unwrap();
    drop(Created::if_missing(&path, &options).unwrap());
    assert!(!path.exists());
}

/// While one waits for its lock, its holder puts another one in its place.
#[test]
fn c11_who_waited_for_an_image_serves_the_one_that_is_there() {
    let folder = folder();
    let path = file(&folder, MIB);
    let first = opens(&options(&path));
    let waits = OpenOptions { lock_wait: Some(Duration::from_secs(20)), ..options(&path) };
    let second = std::thread::spawn(move || open(&waits).expect("the holder leaves"));
    // If it has not opened the old one by then it opens the new one, which is as well.
    std::thread::sleep(Duration::from_millis(100));
    let new = folder.path().join("new");
    File::create(&new).unwrap().set_len(3 * MIB).unwrap();
    std::fs::rename(&new, &path).unwrap();
    drop(first);
    assert_eq!(second.join().unwrap().capacity(), 3 * MIB);
}

/// The message names another process, too.
#[test]
fn c11_the_message_names_the_process() {
    let folder = folder();
    let path = file(&folder, MIB);
    let ready = folder.path().join("ready");
    let mut holder = Command::new("flock")
        .arg("--no-fork")
        .arg(&path)
        .args(["sh", "-c", "touch \"$1\"; exec sleep 60", "sh"])
        .arg(&ready)
        .spawn()
        .expect("flock, of util-linux");
    let begun = Instant::now();
    while !ready.exists() && begun.elapsed().as_secs() < 10 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let error = open(&options(&path)).map(drop).unwrap_err().to_string();
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(error.contains(&format!("process {} (", holder.id())), "{error}");
}

// ---- null ----

#[test]
fn null_disks() {
    let null = |bytes| OpenOptions::new(Source::Null { bytes, latency_us: 0 });
    for bytes in [0, 1, 511, 1000] {
        assert!(matches!(fails(&null(bytes), &["multiple of 512"]), OpenError::Size { .. }));
    }
    let disk = opens(&null(1 << 40));
    assert_eq!((disk.engine(), disk.geometry().capacity), (EngineKind::Null, 1 << 40));
    assert_eq!(disk.name(), "null:1T");
    for (bytes, name) in [(1536, "null:1536"), (3 << 29, "null:1536M"), (5 << 30, "null:5G")] {
        assert_eq!(opens(&null(bytes)).name(), name, "as people write it");
    }
    let mut wanted = null(MIB);
    wanted.engine = Some(EngineKind::Threads);
    fails(&wanted, &["threads", "null"]);
    wanted.engine = Some(EngineKind::Null);
    wanted.block_size = Some(4096);
    wanted.read_only = true;
    let geometry = opens(&wanted).geometry();
    assert_eq!((geometry.logical_block, geometry.read_only), (4096, true));
    wanted.block_size = Some(100);
    fails(&wanted, &["512 or 4096"]);
}

// ---- format ----

/// An odd size is no reason to advise another one for an image that is not raw.
#[test]
fn b16_another_format_is_told_before_anything_else() {
    let folder = folder();
    let path = file(&folder, MIB);
    std::fs::write(&path, [b"QFI\xfb\0\0\0\x03".as_slice(), &[0; 1000]].concat()).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    for options in [options(&path), buffered(&path)] {
        for read_only in [false, true] {
            let options = OpenOptions { read_only, ..options.clone() };
            fails(&options, &["looks like a qcow2 image", "qemu-img convert", "--format raw"]);
            let report = super::probe(&options);
            assert_eq!(report.looks_like.map(ForeignFormat::name), Some("qcow2"));
            assert!(matches!(report.verdict, Err(OpenError::Foreign { .. })));
        }
        let raw = OpenOptions { raw: true, ..options };
        assert!(matches!(fails(&raw, &["truncate"]), OpenError::NotWhole { .. }));
    }
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    assert!(super::probe(&options(&self::file(&folder, MIB))).looks_like.is_none());
}

/// On a device LUKS is the guest's: the host's own is opened by dm-crypt, which is served then.
#[test]
fn b16_luks_on_a_block_device_is_served() {
    let folder = folder();
    let device = match LoopDevice::new(folder.path(), MIB, 512) {
        Ok(device) => device,
        Err(lack) => return lack.skip(),
    };
    for (magic, refused) in [(b"LUKS\xba\xbe\0\x01", false), (b"QFI\xfb\0\0\0\x03", true)] {
        let node = File::options().write(true).open(device.path()).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&node, magic, 0).unwrap();
        node.sync_all().unwrap();
        drop(node);
        if refused {
            fails(&options(device.path()), &["qcow2"]);
        }
        let raw = OpenOptions { raw: refused, ..options(device.path()) };
        assert_eq!(opens(&raw).geometry().capacity, MIB);
    }
}
