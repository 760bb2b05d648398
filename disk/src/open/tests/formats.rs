//! Disks without a file, and files that look like another format.

use super::*;

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
            fails(&options, &["looks like a qcow2 image", "--format qcow2", "--format raw"]);
            let report = crate::open::probe(&options);
            assert_eq!(report.looks_like.map(ForeignFormat::name), Some("qcow2"));
            assert!(matches!(report.verdict, Err(OpenError::Foreign { .. })));
        }
        let raw = OpenOptions { raw: true, ..options };
        assert!(matches!(fails(&raw, &["truncate"]), OpenError::NotWhole { .. }));
    }
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    assert!(crate::open::probe(&options(&self::file(&folder, MIB))).looks_like.is_none());
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
