//! Images from arbitrary bytes: mostly well formed, with changes anywhere.
//!
//! [`check_case`] is one function for three uses: the corpus test below, thousands of mutated headers,
//! and the target `image` of cargo-fuzz.

use crate::chain::{Chain, Top};
use crate::check::{CheckOptions, check, repair_leaks};
use crate::create::NewImage;
use crate::format::Format;
use crate::header::Header;
use crate::refused::Refused;
use crate::snapshot::Snapshot;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of the largest image of a case.
const BYTES_MAX: u64 = 1 << 20;
/// Entries that a check looks at.
const STEPS: u64 = 1 << 20;
/// Bytes of one change: where, how many of its bytes count, and the bytes.
const CHANGE: usize = 11;

/// What became of a case.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// No image.
    Refused(Refused),
    /// One that was gone through: its errors and leaks.
    Checked(u64, u64),
}

/// Makes an image as the first bytes say, changes it as the others say, and asks everything of it.
/// Panics if a bound is not held.
///
/// # Panics
/// As was said.
pub fn check_case(data: &[u8]) -> Outcome {
    let bytes = image(data);
    let len = bytes.len() as u64;
    let parsed = Header::read(&bytes[..], len).expect("memory can be read");
    let header = match parsed {
        Ok(header) => header,
        Err(refused) => {
            assert!(!refused.to_string().contains(char::is_control), "{refused}");
            return Outcome::Refused(refused);
        }
    };
    judge(&header, len);
    if let Ok((snapshots, table)) = Snapshot::read_all(&bytes[..], &header, len).expect("memory") {
        assert!(snapshots.len() == header.snapshots as usize && table <= len);
    }
    // Small ranges, so that there are several of them.
    let options = CheckOptions { range: 64, steps: STEPS };
    let narrow = match check(&bytes[..], &header, len, options).expect("memory can be read") {
        Ok(findings) => findings,
        Err(refused) => return Outcome::Refused(refused),
    };
    let wide = CheckOptions { range: 1 << 20, steps: STEPS };
    let all = check(&bytes[..], &header, len, wide).expect("memory").expect("fewer steps");
    let count = |found: &crate::check::Findings| (found.errors, found.leaks, found.end);
    assert_eq!(count(&narrow), count(&all), "{narrow:?}\n{all:?}");
    if narrow.errors == 0 && narrow.leaks > 0 {
        repaired(&bytes, &header, narrow.leaks);
    }
    follow(&bytes);
    Outcome::Checked(narrow.errors, narrow.leaks)
}

/// What every header that is accepted keeps to.
fn judge(header: &Header, file_bytes: u64) {
    let within = |at: u64, bytes: u64| at.checked_add(bytes).is_some_and(|end| end <= file_bytes);
    assert!(within(header.l1_offset, u64::from(header.l1_entries) * 8) || header.l1_entries == 0);
    let reach = u128::from(header.l1_entries) << (2 * header.cluster_bits - 3);
    assert!(reach >= u128::from(header.virtual_size), "{header:?}");
    let table = u64::from(header.refcount_table_clusters) << header.cluster_bits;
    assert!(within(header.refcount_table_offset, table), "{header:?}");
    assert!(header.backing.as_ref().is_none_or(|b| b.name.as_os_str().len() <= 1023));
}

/// Leaks of a whole image can be repaired, and are gone then.
fn repaired(bytes: &[u8], header: &Header, leaks: u64) {
    let mut file = tempfile_in_memory();
    file.write_all(bytes).expect("memory can be written");
    let options = CheckOptions { range: 64, steps: STEPS };
    let len = bytes.len() as u64;
    let found = repair_leaks(&file, header, len, options).expect("memory").expect("as before");
    assert_eq!((found.leaks, found.leaks_fixed), (leaks, leaks));
    let header = Header::read(&file, len).expect("memory").expect("a repaired header");
    let found = check(&file, &header, len, options).expect("memory").expect("as before");
    assert_eq!((found.errors, found.leaks), (0, 0), "{found:?}");
}

/// Whatever names the image has, none of them leads out of its folder.
fn follow(bytes: &[u8]) {
    let mut file = tempfile_in_memory();
    file.write_all(bytes).expect("memory can be written");
    // A folder with files that are always there, and that nobody can lock.
    let folder = Path::new("/proc/self/fdinfo").canonicalize().expect("/proc is mounted");
    let name = folder.join("image.qcow2");
    let top = Top { file, name, format: Format::Qcow2, read_only: true };
    let mut lock = |_: &File, name: &Path, _| {
        let real = name.canonicalize().unwrap_or_else(|_| folder.join("gone"));
        assert!(real.starts_with(&folder), "{} was opened", real.display());
        Err("never".into())
    };
    if let Err(error) = Chain::open(top, None, &mut lock) {
        assert!(!error.to_string().contains(char::is_control), "{error}");
    }
}

fn tempfile_in_memory() -> File {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    rustix::fs::memfd_create("ringway-image-case", flags).expect("a file in memory").into()
}

/// A new image, and changes to it.
fn image(data: &[u8]) -> Vec<u8> {
    let (shape, changes) = data.split_at(data.len().min(4));
    let shape = |at: usize| u64::from(shape.get(at).copied().unwrap_or(0));
    let cluster_bits = 9 + u32::try_from(shape(0) % 4).unwrap_or(0);
    let base = Path::new("../base image.raw");
    let backing = (shape(1) % 3 == 0).then_some((base, Format::Raw));
    let new = NewImage { virtual_size: (shape(2) + 1) << 15, cluster_bits, backing };
    let file = tempfile_in_memory();
    new.write(&file).expect("such an image can be made");
    let room = file.metadata().expect("it is open").len() + shape(3) * 512;
    let mut bytes = vec![0; usize::try_from(room.min(BYTES_MAX)).unwrap_or(0)];
    file.read_at(&mut bytes, 0).expect("memory can be read");
    for change in changes.chunks_exact(CHANGE) {
        apply(&mut bytes, change, 1 << cluster_bits);
    }
    bytes
}

/// One change: to the header, to an entry of a table, or anywhere.
fn apply(bytes: &mut [u8], change: &[u8], cluster: usize) {
    let place = usize::from(u16::from_be_bytes([change[0], change[1]]));
    let (kind, place) = (place % 4, place / 4);
    if kind >= 2 {
        // Entries that lead somewhere: a cluster of the file, with a flag or none.
        let table = (1 + place % 4) * cluster;
        let entry = (table + place / 4 % 8 * 8).min(bytes.len() - 8);
        let target = u64::from(change[3]) % (bytes.len() / cluster) as u64 * cluster as u64;
        let flags = u64::from(change[4] % 4) << 62 | u64::from(change[5] % 8 == 0);
        bytes[entry..entry + 8].copy_from_slice(&(target | flags).to_be_bytes());
        return;
    }
    let at = if kind == 0 { place % 136 } else { place % bytes.len() };
    let count = (1 + usize::from(change[2] % 8)).min(bytes.len() - at);
    bytes[at..at + count].copy_from_slice(&change[3..3 + count]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringway_testkit::Rng;

    #[test]
    fn the_fuzz_corpus_of_images_passes() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/image");
        let mut files: Vec<_> =
            std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(files.len() >= 20, "the corpus has only {} files", files.len());
        for file in files {
            println!("{}", file.display());
            check_case(&std::fs::read(&file).unwrap());
        }
    }

    #[test]
    fn b27_mutated_images_are_refused_or_gone_through() {
        let mut random = Rng::for_test("mutated images");
        let (mut refused, mut whole, mut harmed) = (0, 0, 0);
        for case in 0..6000 {
            let len = 4 + CHANGE * (case % 6);
            let mut data: Vec<u8> = (0..len).map(|_| random.next_u64().to_le_bytes()[2]).collect();
            // Small numbers pass more often than large ones.
            for change in data[4..].chunks_exact_mut(CHANGE).filter(|change| change[2] & 8 != 0) {
                change[3..10].fill(0);
            }
            match check_case(&data) {
                Outcome::Refused(_) => refused += 1,
                Outcome::Checked(0, 0) => whole += 1,
                Outcome::Checked(..) => harmed += 1,
            }
        }
        println!("{refused} refused, {whole} whole, {harmed} harmed");
        assert!(refused > 500 && whole > 500 && harmed > 500);
    }
}
