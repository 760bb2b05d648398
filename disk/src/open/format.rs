//! Image formats other than raw, known by their magic numbers.
//!
//! A format is never chosen by what is found here: a guest writes these bytes as it likes (hazard
//! B16). It is only a reason to ask before a file is served as raw that was not meant to be.

use super::foreign::ForeignFormat;
use super::probe::FileKind;
use super::{OpenError, OpenOptions};
use ringway_core::mem::Pool;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Reads have this length, in bytes, and begin at multiples of it: so they suit O_DIRECT.
const UNIT: usize = 65536;

/// Bytes of the sector that ends a file; VHD and DMG have their footer there.
const TAIL: u64 = 512;

/// The magic numbers at the start: which bytes, from which byte on.
///
/// Sources: QEMU docs/interop/{qcow2,qed_spec,parallels}; "Virtual Disk Format" 5.0, VMware; [MS-VHDX]
/// 2.2.1; "Virtual Hard Disk Image Format Specification" 1.0, Microsoft; LUKS2 on-disk format 1.1.
const MAGIC: &[(usize, &[u8], ForeignFormat)] = &[
    (0, b"QFI\xfb\0\0\0\x01", ForeignFormat::Qcow),
    (0, b"QFI\xfb", ForeignFormat::Qcow2),
    (0, b"QED\0", ForeignFormat::Qed),
    (0, b"KDMV", ForeignFormat::Vmdk),
    (0, b"COWD", ForeignFormat::Vmdk),
    (0, b"\xbe\xba\xfe\xca\0\0\0\0", ForeignFormat::Vmdk), // SE sparse
    (0, b"# Disk DescriptorFile", ForeignFormat::Vmdk),
    (0, b"vhdxfile", ForeignFormat::Vhdx),
    (0, b"conectix", ForeignFormat::Vhd), // dynamic: a copy of the footer
    (64, b"\x7f\x10\xda\xbe", ForeignFormat::Vdi),
    (0, b"WithoutFreeSpace", ForeignFormat::Parallels),
    (0, b"WithouFreSpacExt", ForeignFormat::Parallels),
    (0, b"Bochs Virtual HD Image", ForeignFormat::Bochs),
    (0, b"LUKS\xba\xbe\0\x01", ForeignFormat::Luks),
    (0, b"LUKS\xba\xbe\0\x02", ForeignFormat::Luks),
];

/// The magic numbers of the last sector.
const FOOTERS: &[(&[u8], ForeignFormat)] =
    &[(b"conectix", ForeignFormat::Vhd), (b"koly", ForeignFormat::Dmg)];

impl ForeignFormat {
    /// What is found in the first and the last bytes, if it is a format that is known here.
    #[must_use]
    pub fn of_bytes(head: &[u8], tail: &[u8]) -> Option<Self> {
        let at_start = MAGIC
            .iter()
            .find(|(at, magic, _)| head.get(*at..).is_some_and(|bytes| bytes.starts_with(magic)));
        let at_end = || FOOTERS.iter().find(|(magic, _)| tail.starts_with(magic));
        at_start.map(|(_, _, format)| *format).or_else(|| at_end().map(|(_, format)| *format))
    }

    /// What an image of `bytes` bytes begins or ends with. The file may be open with O_DIRECT.
    ///
    /// # Errors
    /// What reading says.
    pub fn of(file: &File, bytes: u64) -> io::Result<Option<Self>> {
        // The last sector may lie in two units.
        let mut pool = Pool::new(2 * UNIT)?;
        let mut pages = pool.acquire(2 * UNIT).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: nothing else uses these pages.
        let memory = unsafe { pages.bytes() };
        let read = read_at(file, &mut memory[..UNIT], 0)?;
        let found = Self::of_bytes(&memory[..read], &[]);
        let Some(last) = bytes.checked_sub(TAIL).filter(|_| found.is_none()) else {
            return Ok(found);
        };
        let from = last / UNIT as u64 * UNIT as u64;
        let read = read_at(file, memory, from)?;
        let skip = usize::try_from(last - from).unwrap_or(read).min(read);
        Ok(Self::of_bytes(&[], &memory[skip..read]))
    }
}

/// Refuses an image that looks as if it were not raw, unless its owner says that it is.
pub(super) fn check(
    path: &Path,
    file: &File,
    bytes: u64,
    kind: FileKind,
    options: &OpenOptions,
) -> Result<(), OpenError> {
    if options.raw {
        return Ok(());
    }
    let found = ForeignFormat::of(file, bytes);
    let found =
        found.map_err(|source| OpenError::Host { path: path.into(), what: "read it", source })?;
    match found {
        None => Ok(()),
        // A host would open its own with dm-crypt, and serve what that makes of it: this is the
        // guest's.
        Some(ForeignFormat::Luks) if kind == FileKind::BlockDevice => {
            tracing::warn!(
                "{}: it begins with a LUKS header and is served as it is, for a guest that encrypts \
                 it; --format raw says so and keeps this line away",
                path.display()
            );
            Ok(())
        }
        Some(format) => Err(OpenError::Foreign { path: path.into(), format }),
    }
}

fn read_at(file: &File, memory: &mut [u8], at: u64) -> io::Result<usize> {
    loop {
        match file.read_at(memory, at) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_magic() {
        let head = |at: usize, magic: &[u8]| {
            let mut head = vec![0; 512];
            head[at..at + magic.len()].copy_from_slice(magic);
            head
        };
        for (at, magic, format) in MAGIC {
            assert_eq!(ForeignFormat::of_bytes(&head(*at, magic), &[]), Some(*format));
            // One byte off is another thing, and so is half of it.
            assert_eq!(ForeignFormat::of_bytes(&head(at + 1, magic), &[]), None);
            assert_eq!(ForeignFormat::of_bytes(&magic[..3.min(magic.len())], &[]), None);
        }
        assert_eq!(ForeignFormat::of_bytes(&[0; 512], b"conectix"), Some(ForeignFormat::Vhd));
        assert_eq!(ForeignFormat::of_bytes(&[0; 512], b"koly"), Some(ForeignFormat::Dmg));
        for raw in [&[0; 512][..], &[], b"LUKS\xba\xbe\0\x03", b"QFI", b"\xeb\x63\x90"] {
            assert_eq!(ForeignFormat::of_bytes(raw, &[]), None);
        }
    }

    #[test]
    fn footers_are_found_at_the_end_of_files_of_any_size() {
        for bytes in [512_u64, 1000, 4096, 65536, 65536 + 100, 65536 + 512, 1 << 20] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(bytes).unwrap();
            assert_eq!(ForeignFormat::of(&file, bytes).unwrap(), None);
            file.write_all_at(b"conectix", bytes - 512).unwrap();
            assert_eq!(
                ForeignFormat::of(&file, bytes).unwrap(),
                Some(ForeignFormat::Vhd),
                "{bytes}"
            );
        }
        let tiny = tempfile::tempfile().unwrap();
        tiny.write_all_at(b"COWD", 0).unwrap();
        assert_eq!(ForeignFormat::of(&tiny, 4).unwrap(), Some(ForeignFormat::Vmdk));
    }
}
