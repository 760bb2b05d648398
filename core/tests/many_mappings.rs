//! The table of watched mappings, in a process of its own: it is filled to the end here.
#![allow(missing_docs)]

use ringway_core::mem::Mapping;
use std::fs::File;
use std::os::fd::FromRawFd;

#[test]
#[cfg_attr(miri, ignore = "needs memfd")]
fn b03_the_table_of_mappings_has_an_end() {
    // SAFETY: memfd_create returns a new descriptor that nobody else owns.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"many".as_ptr(), 0)) };
    file.set_len(4096).unwrap();
    let mut all = Vec::new();
    let error = loop {
        match Mapping::of_file(&file, 0, 4096) {
            Ok(mapping) => all.push(mapping),
            Err(error) => break error.to_string(),
        }
        assert!(all.len() <= 32768, "the table has no end");
    };
    println!("{} mappings: {error}", all.len());
    assert_eq!(all.len(), 32768);
    assert!(error.contains("more than 32768 memory regions are mapped"), "{error}");
    // Those that are there are watched: all places of the table are in use or none was lost.
    file.set_len(0).unwrap();
    for mapping in [&all[0], &all[all.len() / 2], &all[all.len() - 1]] {
        // SAFETY: the mapping is one page; what was behind it is replaced by zeroes.
        assert_eq!(unsafe { mapping.at(0).read_volatile() }, 0);
        assert!(mapping.is_lost());
    }
    // And all places come back.
    let count = all.len();
    drop(all);
    file.set_len(4096).unwrap();
    let again: Vec<_> = (0..count).map(|_| Mapping::of_file(&file, 0, 4096).unwrap()).collect();
    assert_eq!(again.len(), count);
}
