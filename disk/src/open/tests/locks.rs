//! The lock of an image: who is refused, who waits, and whose file it is then.

use super::*;

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
    let file = first.file();
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
    use crate::open::fence::{Fenced, locked};
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

/// Locks belong to nodes, and a device may have several.
#[test]
fn e79_a_device_is_in_use_by_whatever_node_it_is_named() {
    let folder = folder();
    let device = match LoopDevice::new(folder.path(), MIB, 512) {
        Ok(device) => device,
        Err(lack) => return lack.skip(),
    };
    let node = folder.path().join("node");
    let (name, number) = (CString::new(node.as_os_str().as_bytes()).unwrap(), device.path());
    let number = number.metadata().unwrap().rdev();
    // SAFETY: a path, and no memory besides.
    assert_eq!(unsafe { libc::mknod(name.as_ptr(), libc::S_IFBLK | 0o600, number) }, 0);
    let top = folder.path().join("top.qcow2");
    let backing = Some((Path::new("node"), Format::Raw));
    let new = ringway_image::NewImage { virtual_size: MIB, cluster_bits: 16, backing };
    new.write(&File::create_new(&top).unwrap()).unwrap();
    let overlay = OpenOptions { qcow2: Some(Qcow2::default()), ..buffered(&top) };
    let is_refused = |options: &OpenOptions| {
        let error = open(options).expect_err("it is in use").to_string();
        assert!(error.contains("in use by"), "{error}");
    };
    for (one, other) in [(device.path(), &*node), (&*node, device.path())] {
        let (write, read) = (buffered(one), OpenOptions { read_only: true, ..buffered(other) });
        let writer = opens(&write);
        is_refused(&read);
        is_refused(&overlay);
        drop(writer);
        for reads in [&read, &overlay] {
            let reader = opens(reads);
            is_refused(&write);
            drop(reader);
        }
    }
}

/// An image that was made and cannot be opened goes, unless somebody has waited for its lock.
#[test]
fn c111_what_was_made_is_not_removed_from_under_whoever_has_its_lock() {
    let folder = folder();
    let path = folder.path().join("new.img");
    let made = || {
        let options = OpenOptions { create_bytes: Some(MIB), ..options(&path) };
        Created::if_missing(&path, &options).unwrap()
    };
    let created = made();
    let theirs = File::open(&path).unwrap();
    super::super::lock_image(&theirs, false).unwrap();
    drop(created);
    assert!(path.exists(), "who has its lock serves it");
    drop(theirs);
    std::fs::remove_file(&path).unwrap();
    drop(made());
    assert!(!path.exists());
}
