use super::*;

/// A header of version 3 for 1 GiB, with clusters of 64 KiB, and the extensions given.
fn sample(extensions: &[(u32, &[u8])], backing: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 65536];
    bytes[..4].copy_from_slice(&MAGIC);
    put32(&mut bytes, 4, 3);
    put32(&mut bytes, 20, 16);
    put64(&mut bytes, 24, 1 << 30);
    put32(&mut bytes, 36, 2);
    put64(&mut bytes, 40, 3 << 16);
    put64(&mut bytes, 48, 1 << 16);
    put32(&mut bytes, 56, 1);
    put32(&mut bytes, 96, 4);
    put32(&mut bytes, 100, 104);
    let mut at = 104;
    for (kind, data) in extensions {
        put32(&mut bytes, at, *kind);
        put32(&mut bytes, at + 4, u32::try_from(data.len()).unwrap());
        bytes[at + 8..at + 8 + data.len()].copy_from_slice(data);
        at += 8 + data.len().next_multiple_of(8);
    }
    if !backing.is_empty() {
        at += 8;
        put64(&mut bytes, 8, at as u64);
        put32(&mut bytes, 16, u32::try_from(backing.len()).unwrap());
        bytes[at..at + backing.len()].copy_from_slice(backing);
    }
    bytes
}

fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

const FILE: u64 = 4 << 16;

fn parse(bytes: &[u8]) -> Result<Header, Refused> {
    Header::parse(bytes, FILE)
}

/// What a header with one change is refused for.
fn refused(change: impl FnOnce(&mut Vec<u8>)) -> Refused {
    let mut bytes = sample(&[], b"");
    change(&mut bytes);
    parse(&bytes).unwrap_err()
}

#[test]
fn a_header_says_what_it_holds() {
    let bytes = sample(&[(0xe279_2aca, b"qcow2"), (0x1234_5678, b"unknown")], b"../base.qcow2");
    let header = parse(&bytes).unwrap();
    assert_eq!((header.cluster_bytes(), header.l2_entries()), (65536, 8192));
    assert_eq!((header.virtual_size, header.l1_entries, header.refcount_bits()), (1 << 30, 2, 16));
    let backing = header.backing.clone().unwrap();
    assert_eq!((backing.name, backing.format), ("../base.qcow2".into(), Some("qcow2".into())));
    assert_eq!(header.compat(), "1.1");
    assert!(header.may_write().is_ok() && !header.is_dirty() && header.data_file.is_none());
}

#[test]
fn a_header_of_version_2_has_no_features() {
    let mut bytes = sample(&[], b"");
    put32(&mut bytes, 4, 2);
    // What version 3 has there is the first extension: none.
    bytes[72..].fill(0);
    let header = parse(&bytes).unwrap();
    assert_eq!((header.compat(), header.refcount_order, header.features), ("0.10", 4, [0; 3]));
}

#[test]
fn b27_what_cannot_be_is_refused_by_its_name() {
    assert_eq!(refused(|b| b[0] = 0), Refused::NotQcow2);
    assert_eq!(refused(|b| put32(b, 4, 1)), Refused::Version(1));
    assert_eq!(refused(|b| put32(b, 4, 4)), Refused::Version(4));
    assert_eq!(refused(|b| put32(b, 32, 2)), Refused::Encrypted(2));
    assert_eq!(refused(|b| put64(b, 72, 1 << 4)), Refused::ExtendedL2);
    assert_eq!(refused(|b| put64(b, 72, 1 << 9)), Refused::UnknownFeatures("bit 9".into()));
    type Change = fn(&mut Vec<u8>);
    let cases: [(&str, Change); 15] = [
        ("cluster_bits", |b| put32(b, 20, 8)),
        ("cluster_bits", |b| put32(b, 20, 22)),
        ("size", |b| put64(b, 24, u64::MAX)),
        ("l1_size", |b| put32(b, 36, 1)),
        ("l1_size", |b| put32(b, 36, u32::MAX)),
        ("l1_table_offset", |b| put64(b, 40, 0)),
        ("l1_table_offset", |b| put64(b, 40, 4 << 16)),
        ("l1_table_offset", |b| put64(b, 40, (3 << 16) + 8)),
        ("l1_table_offset", |b| put64(b, 40, u64::MAX - 0xffff)),
        ("refcount_table_clusters", |b| put32(b, 56, 0)),
        ("refcount_table_clusters", |b| put32(b, 56, 1000)),
        ("refcount_table_offset", |b| put64(b, 48, 9 << 16)),
        ("nb_snapshots", |b| put32(b, 60, 70000)),
        ("snapshots_offset", |b| put32(b, 60, 1)),
        ("header_length", |b| put32(b, 100, 103)),
    ];
    for (field, change) in cases {
        let error = refused(change);
        assert!(matches!(error, Refused::Field { what, .. } if what == field), "{field}: {error}");
    }
}

#[test]
fn an_unknown_feature_has_the_name_that_the_image_gives_it() {
    let mut entry = [0; 48];
    entry[1] = 9;
    entry[2..10].copy_from_slice(b"zon\x1bed\n!");
    let mut bytes = sample(&[(0x6803_f857, &entry)], b"");
    put64(&mut bytes, 72, 1 << 9 | 1 << 40);
    let text = parse(&bytes).unwrap_err().to_string();
    assert!(text.contains("bit 9 (zon?ed?!), bit 40"), "{text}");
}

#[test]
fn a_compression_type_and_its_feature_go_together() {
    let with = |feature: u64, length: u32, kind: u8| {
        let mut bytes = sample(&[], b"");
        put64(&mut bytes, 72, feature);
        put32(&mut bytes, 100, length);
        bytes[104] = kind;
        parse(&bytes).map(|header| header.compression)
    };
    assert_eq!(with(1 << 3, 112, 1), Ok(Compression::Zstd));
    assert_eq!(with(0, 112, 0), Ok(Compression::Zlib));
    assert_eq!(with(1 << 3, 112, 0), Err(Refused::Compression(0)));
    assert_eq!(with(1 << 3, 112, 2), Err(Refused::Compression(2)));
    assert_eq!(with(0, 112, 1), Err(Refused::Compression(1)));
}

#[test]
fn what_writing_would_spoil_may_be_read() {
    let mut directory = [0; 24];
    put32(&mut directory, 0, 3);
    let mut bytes = sample(&[(0x2385_2875, &directory)], b"");
    // Whoever wrote last did not know bitmaps: they are wrong already.
    assert_eq!(parse(&bytes).unwrap().may_write(), Ok(()));
    put64(&mut bytes, 88, 1 | 1 << 7);
    let header = parse(&bytes).unwrap();
    assert_eq!(header.may_write(), Err(Refused::Bitmaps(3)));
    assert_eq!(header.unknown_autoclear(), 1 << 7);
    put64(&mut bytes, 88, 0);
    put64(&mut bytes, 72, 1);
    let header = parse(&bytes).unwrap();
    assert_eq!(header.may_write(), Err(Refused::Dirty));
    put64(&mut bytes, 72, 2);
    let header = parse(&bytes).unwrap();
    assert_eq!((header.is_corrupt(), header.may_write()), (true, Err(Refused::Corrupt)));
}

#[test]
fn names_are_within_the_first_cluster() {
    let with = |at: u64, len: u32| {
        let mut bytes = sample(&[], b"");
        put64(&mut bytes, 8, at);
        put32(&mut bytes, 16, len);
        parse(&bytes).map(|header| header.backing.map(|backing| backing.name))
    };
    assert_eq!(with(0, 10), Ok(None));
    assert_eq!(with(200, 0), Ok(None));
    for (at, len) in [(65530, 10), (u64::MAX, 1), (1 << 20, 4), (200, 1024), (200, u32::MAX)] {
        let error = with(at, len).unwrap_err();
        assert!(error.to_string().contains("backing_file"), "{error}");
    }
}

#[test]
fn extensions_that_are_cut_off_are_refused() {
    let mut bytes = sample(&[(0xe279_2aca, b"raw")], b"");
    put32(&mut bytes, 108, 65536);
    assert_eq!(parse(&bytes), Err(Refused::Truncated("a header extension")));
    // No extension reaches into the name.
    let mut bytes = sample(&[(0xe279_2aca, b"raw")], b"base");
    put64(&mut bytes, 8, 113);
    assert_eq!(parse(&bytes), Err(Refused::Truncated("a header extension")));
}

#[test]
fn a_file_that_ends_early_is_no_image() {
    let bytes = sample(&[], b"");
    for len in 0..104 {
        assert!(Header::parse(&bytes[..len], FILE).is_err(), "{len}");
        assert!(Header::read(&bytes[..len], len as u64).unwrap().is_err(), "{len}");
    }
    assert!(Header::read(&bytes[..], FILE).unwrap().is_ok());
}
