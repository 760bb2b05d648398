//! What the host allows: permission, and O_DIRECT on devices of large and small blocks.

use super::*;

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
        unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&*disk.file()), libc::F_GETFL) };
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

// ---- files of different blocks in one chain ----

/// What is written to the image is read, modified and written in blocks that all files of its chain take: none
/// is larger than a cluster, whose neighbour may be anybody's.
#[test]
fn c46_no_file_of_a_chain_asks_for_blocks_larger_than_clusters_of_the_first() {
    let folder = folder();
    let device = match LoopDevice::new(folder.path(), 64 * MIB, 4096) {
        Ok(device) => device,
        Err(lack) => return lack.skip(),
    };
    let made = Command::new("mkfs.ext4").args(["-q", "-b", "4096"]).arg(device.path()).status();
    if !made.is_ok_and(|status| status.success()) {
        return skip(Need::Mount, "mkfs.ext4 fails");
    }
    let at = folder.path().join("large");
    let large = match Mounted::new(at, &["-t", "ext4", &device.path().to_string_lossy()]) {
        Ok(large) => large,
        Err(lack) => return lack.skip(),
    };
    let small = folder.path().join("small");
    let small = match Mounted::on_file(small, "ext4", &["-q"], 64 << 20) {
        Ok(small) => small,
        Err(lack) => return lack.skip(),
    };
    let base = large.path().join("base.raw");
    File::create(&base).unwrap().set_len(MIB).unwrap();
    for (cluster_bits, block) in [(9, 512), (11, 512), (12, 4096), (16, 4096)] {
        let path = small.path().join(format!("{cluster_bits}.qcow2"));
        let new = ringway_image::NewImage {
            virtual_size: MIB,
            cluster_bits,
            backing: Some((&base, ringway_image::Format::Raw)),
        };
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        new.write(&file).unwrap();
        let mut options = OpenOptions { cache: Some(CacheMode::None), ..options(&path) };
        options.qcow2 =
            Some(crate::Qcow2 { backing_root: Some("/".into()), ..crate::Qcow2::default() });
        let disk = opens(&options);
        let found = disk.alignment();
        assert_eq!(found.offset.max(found.memory), block, "clusters of 1 << {cluster_bits}");
    }
}
