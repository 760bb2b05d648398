//! An image's format is what its owner says, never what its first bytes say.

use crate::bench::{Ask, Bench, Memory, Place, Surface, engine};
use ringway_core::{Op, Status};
use ringway_disk::OpenError;

/// A qcow2 header (version 3) of a disk of 1 TiB whose content would come from another file.
fn qcow2_header() -> [u8; 512] {
    const BACKING: &[u8; 13] = b"/etc/hostname";
    let mut header = [0; 512];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb");
    put(4, &3u32.to_be_bytes());
    put(8, &256u64.to_be_bytes()); // backing_file_offset
    put(16, &13u32.to_be_bytes()); // backing_file_size
    put(20, &16u32.to_be_bytes()); // cluster_bits
    put(24, &(1u64 << 40).to_be_bytes()); // size
    put(100, &104u32.to_be_bytes()); // header_length
    put(256, BACKING);
    header
}

/// A guest that writes the header of another format to its disk finds the same disk again, not one
/// of its own making: CH GHSA-jmr4-g2hv-mjj6. Unless its owner has said that the disk is raw it is not
/// served at all, as it might be an image of that format by mistake.
#[test]
fn b16_a_qcow2_header_in_a_raw_disk() {
    const CAPACITY: u64 = 1 << 20;
    let headers: [(&str, [u8; 512]); 4] = [
        ("qcow2", qcow2_header()),
        ("vmdk", {
            let mut header = [0; 512];
            header[..4].copy_from_slice(b"KDMV");
            header
        }),
        ("vhdx", {
            let mut header = [0; 512];
            header[..8].copy_from_slice(b"vhdxfile");
            header
        }),
        ("luks", {
            let mut header = [0; 512];
            header[..8].copy_from_slice(b"LUKS\xba\xbe\0\x02");
            header
        }),
    ];
    for (format, header) in headers {
        for surface in [Surface::Cached, Surface::Bounced] {
            let place = match Place::new(surface, CAPACITY) {
                Ok(place) => place,
                Err(lack) => {
                    lack.skip();
                    continue;
                }
            };
            let mut memory = Memory::new(512, surface.memory_offset());
            memory.bytes().copy_from_slice(&header);
            let mut bench = Bench::new(engine("threads", 4).unwrap(), place.open(), 4).unwrap();
            let written = bench.one(&memory, Ask::new(Op::Write, 0, 512));
            assert_eq!(
                (written, bench.one(&memory, Ask::new(Op::Flush, 0, 0))),
                (Status::Ok, Status::Ok)
            );
            drop(bench);

            // Nobody has said that it is raw, so somebody might have meant it otherwise.
            let refused = place.refused();
            let message = refused.to_string();
            let OpenError::Foreign { format: found, .. } = refused else { panic!("{message}") };
            assert_eq!(found.name(), format);
            assert!(message.contains("--format raw"), "{message}");
            let serve = if format == "qcow2" { "--format qcow2" } else { "qemu-img convert" };
            assert!(message.contains(serve), "{message}");

            let disk = place.open_as_raw();
            assert_eq!(disk.geometry().capacity, CAPACITY, "{format}: as large as the file");
            let mut bench = Bench::new(engine("threads", 4).unwrap(), disk, 4).unwrap();
            memory.bytes().fill(0);
            assert_eq!(bench.one(&memory, Ask::new(Op::Read, 0, 512)), Status::Ok);
            assert!(memory.bytes() == header, "{format}: the guest reads what it wrote");
            let beyond = bench.one(&memory, Ask::new(Op::Read, CAPACITY, 512));
            assert_eq!(beyond, Status::IoError, "{format}: nothing lies beyond the end");
            memory.bytes().fill(1);
            bench.one(&memory, Ask::new(Op::Read, CAPACITY - 512, 512));
            assert!(memory.bytes().iter().all(|&byte| byte == 0), "{format}: still raw");
        }
    }
}
