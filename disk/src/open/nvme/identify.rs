//! What an NVMe namespace says of itself, and what the kernel says of its device.

use ringway_aio::nvme::Facts;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// `NVME_IOCTL_ID`, `_IO('N', 0x40)`.
const NVME_IOCTL_ID: u32 = 0x4e40;
/// `NVME_IOCTL_ADMIN_CMD`, `_IOWR('N', 0x41, struct nvme_admin_cmd)`.
const NVME_IOCTL_ADMIN_CMD: u32 = 0xc048_4e41;
/// The opcode of Identify; with dword 10 = 0 of a namespace.
const IDENTIFY: u8 = 0x06;
/// How long the device may take to say who it is.
const TIMEOUT_MS: u32 = 10_000;

/// The kernel maps any memory as pages of this size, each of which is a segment of its own.
const PAGE: u64 = 4096;
/// Blocks of one command are counted by 16 bits, from 0.
const BLOCKS_MAX: u64 = 1 << 16;

/// `struct nvme_passthru_cmd` of `linux/nvme_ioctl.h`.
#[repr(C)]
#[derive(Default)]
struct AdminCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    dwords_2_3: [u32; 2],
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    dwords_10_15: [u32; 6],
    timeout_ms: u32,
    result: u32,
}

const _: () = assert!(size_of::<AdminCommand>() == 72);

/// The data structure of Identify Namespace.
pub(super) struct Identity([u8; 4096]);

/// The identifier of the namespace whose character device this is.
pub(super) fn namespace_id(file: &File) -> io::Result<u32> {
    // SAFETY: it has no argument.
    let id = unsafe { libc::ioctl(file.as_raw_fd(), NVME_IOCTL_ID as _) };
    u32::try_from(id).map_err(|_| io::Error::last_os_error())
}

/// Asks the namespace what it is. Before Linux 6.2 that takes CAP_SYS_ADMIN.
pub(super) fn identify(file: &File, id: u32) -> io::Result<Identity> {
    let mut identity = Identity([0; 4096]);
    let mut command = AdminCommand {
        opcode: IDENTIFY,
        namespace: id,
        addr: (&raw mut identity.0).expose_provenance() as u64,
        data_len: 4096,
        timeout_ms: TIMEOUT_MS,
        ..AdminCommand::default()
    };
    // SAFETY: the device writes 4096 bytes to `identity`, the kernel the result to `command`.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), NVME_IOCTL_ADMIN_CMD as _, &raw mut command) };
    match rc {
        0 => Ok(identity),
        ..0 => Err(io::Error::last_os_error()),
        status => Err(io::Error::other(format!("the device answers with status {status:#x}"))),
    }
}

impl Identity {
    /// NSZE: its size in blocks.
    pub(super) fn blocks(&self) -> u64 {
        let bytes: [u8; 8] = std::array::from_fn(|at| self.0[at]);
        u64::from_le_bytes(bytes)
    }

    /// NSATTR: nobody may write to it now.
    pub(super) fn is_write_protected(&self) -> bool {
        self.0[99] & 1 != 0
    }

    /// Its blocks have 2^this bytes, if they can be served.
    pub(super) fn block_shift(&self) -> Result<u8, String> {
        // FLBAS: the format in use, whose number has bits in two places; LBAF: what that is.
        let format = usize::from(self.0[26] & 0xf | (self.0[26] >> 1) & 0x30);
        let at = 128 + 4 * format;
        let (metadata, shift) = (u16::from_le_bytes([self.0[at], self.0[at + 1]]), self.0[at + 2]);
        if metadata != 0 {
            return Err(format!(
                "its blocks carry {metadata} bytes of metadata, which no guest would see. Format it \
                 without (`nvme format --lbaf`), or serve its block device"
            ));
        }
        match shift {
            9 | 12 => Ok(shift),
            9..=16 => Err(format!("blocks of {} bytes are not served", 1u32 << shift)),
            _ => Err(format!("it says that its blocks have 2^{shift} bytes")),
        }
    }

    /// DLFEAT: Write Zeroes may deallocate, and what is deallocated reads as zeroes.
    fn deallocates_zeroed(&self) -> bool {
        self.0[33] & 0b111 == 1 && self.0[33] & 0b1000 != 0
    }
}

/// What the kernel has found out of a device, with what it knows of the mistakes of some: the queue of
/// its block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Queue {
    pub(super) max_bytes: u64,
    pub(super) max_segments: u64,
    pub(super) discard_bytes: u64,
    pub(super) discard_granularity: u64,
    pub(super) zero_bytes: u64,
    pub(super) physical_block: u64,
    pub(super) optimal_io: u64,
    pub(super) is_zoned: bool,
}

impl Queue {
    /// As sysfs has it, in the folder of the block device.
    pub(super) fn of(folder: &Path) -> Self {
        let word = |name: &str| std::fs::read_to_string(folder.join("queue").join(name)).ok();
        let number = |name| word(name).and_then(|text| text.trim().parse::<u64>().ok());
        Self {
            max_bytes: number("max_hw_sectors_kb").unwrap_or(0) << 10,
            max_segments: number("max_segments").unwrap_or(0),
            discard_bytes: number("discard_max_hw_bytes").unwrap_or(0),
            discard_granularity: number("discard_granularity").unwrap_or(0),
            zero_bytes: number("write_zeroes_max_bytes").unwrap_or(0),
            physical_block: number("physical_block_size").unwrap_or(0),
            optimal_io: number("optimal_io_size").unwrap_or(0),
            is_zoned: word("zoned").is_some_and(|zoned| zoned.trim() != "none"),
        }
    }

    /// What is to be known of a namespace.
    pub(super) fn facts(&self, id: u32, identity: &Identity, shift: u8) -> Facts {
        // Memory that begins within a page takes one segment more than it has pages.
        let mapped = self.max_segments.saturating_sub(1).max(1) * PAGE;
        let most = self.max_bytes.max(PAGE).min(mapped).min(BLOCKS_MAX << shift);
        let blocks = |bytes: u64, most: u64| u32::try_from((bytes >> shift).min(most));
        Facts {
            id,
            block_shift: shift,
            max_bytes: u32::try_from(most >> shift << shift).unwrap_or(1 << 20),
            discard_blocks: blocks(self.discard_bytes, u32::MAX.into()).unwrap_or(u32::MAX),
            zero_blocks: blocks(self.zero_bytes, BLOCKS_MAX).unwrap_or(0),
            deallocates_zeroed: identity.deallocates_zeroed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1000 blocks of 512 bytes in format 0, as the base specification lays it out.
    fn identity() -> Identity {
        let mut bytes = [0; 4096];
        bytes[..8].copy_from_slice(&1000u64.to_le_bytes());
        bytes[33] = 0b1001;
        bytes[130] = 9;
        Identity(bytes)
    }

    #[test]
    fn what_a_namespace_says_is_understood() {
        let mut it = identity();
        assert_eq!((it.blocks(), it.block_shift(), it.is_write_protected()), (1000, Ok(9), false));
        assert!(it.deallocates_zeroed());
        it.0[33] = 0b1000;
        assert!(!it.deallocates_zeroed(), "what is deallocated may read as anything");
        it.0[99] = 1;
        assert!(it.is_write_protected());
        // Format 3 of 4096 bytes, and then 17, whose number is in two places.
        (it.0[26], it.0[128 + 12 + 2]) = (3, 12);
        assert_eq!(it.block_shift(), Ok(12));
        (it.0[26], it.0[128 + 68 + 2]) = (0x21, 12);
        assert_eq!(it.block_shift(), Ok(12));
        it.0[128 + 68] = 8;
        assert!(it.block_shift().unwrap_err().contains("8 bytes of metadata"));
        (it.0[26], it.0[130]) = (0, 13);
        assert!(it.block_shift().is_err());
        it.0[130] = 255;
        assert!(it.block_shift().is_err());
    }

    #[test]
    fn no_command_is_longer_than_device_and_kernel_take() {
        let queue = Queue {
            max_bytes: 512 << 10,
            max_segments: 127,
            discard_bytes: 2 << 40,
            zero_bytes: 512 << 10,
            ..Queue::default()
        };
        let facts = queue.facts(7, &identity(), 9);
        assert_eq!((facts.id, facts.max_bytes), (7, 126 * 4096), "any memory fits its segments");
        assert_eq!((facts.discard_blocks, facts.zero_blocks), (u32::MAX, 1024));
        let few = Queue { max_bytes: 8192, max_segments: 3, ..queue };
        assert_eq!(few.facts(7, &identity(), 12).max_bytes, 8192);
        let many =
            Queue { max_bytes: 1 << 40, max_segments: 1 << 30, zero_bytes: 1 << 40, ..queue };
        let facts = many.facts(7, &identity(), 9);
        assert_eq!((facts.max_bytes, facts.zero_blocks), (512 << 16, 1 << 16));
        let none = Queue::default().facts(7, &identity(), 12);
        assert_eq!((none.max_bytes, none.discard_blocks, none.zero_blocks), (4096, 0, 0));
    }
}
