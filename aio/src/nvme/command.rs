//! Commands of NVMe as the kernel takes them: `struct nvme_uring_cmd` of `linux/nvme_ioctl.h`, whose
//! dwords 10 to 15 are those of the NVM Command Set (hot).

use super::namespace::Facts;

/// The kernel's structure, and the room for it in an entry of 128 bytes.
pub(super) type Bytes = [u8; 80];

/// `NVME_URING_CMD_IO`, `_IOWR('N', 0x80, struct nvme_uring_cmd)`: `addr` is memory.
pub(super) const IO: u32 = 0xc048_4e80;
/// `NVME_URING_CMD_IO_VEC`: `addr` is a list of `struct iovec`, and the length its entries.
pub(super) const IO_VEC: u32 = 0xc048_4e81;

/// Opcodes of the NVM Command Set.
mod opcode {
    pub(super) const FLUSH: u8 = 0x00;
    pub(super) const WRITE: u8 = 0x01;
    pub(super) const READ: u8 = 0x02;
    pub(super) const WRITE_ZEROES: u8 = 0x08;
    pub(super) const DATASET_MANAGEMENT: u8 = 0x09;
}

/// Dword 12 of Write: on stable media before it completes.
const FORCE_UNIT_ACCESS: u32 = 1 << 30;
/// Dword 12 of Write Zeroes: the blocks are to be deallocated.
const DEALLOCATE_ZEROED: u32 = 1 << 25;
/// Dword 11 of Dataset Management: the blocks are to be deallocated.
const DEALLOCATE: u32 = 1 << 2;

/// What a transfer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    Read,
    Write,
    /// Durable when it completes.
    WriteDurable,
}

/// The blocks of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    pub(super) first: u64,
    pub(super) count: u64,
}

/// The memory of a command: an address and a length, of bytes or of entries of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) addr: u64,
    pub(super) len: u32,
}

/// One range of Dataset Management, as the device reads it (little endian).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub(super) struct DiscardRange {
    attributes: u32,
    count: u32,
    first: u64,
}

const _: () = assert!(size_of::<DiscardRange>() == 16);

impl DiscardRange {
    pub(super) fn new(blocks: Blocks) -> Self {
        // At most `Facts::discard_blocks`.
        #[allow(clippy::cast_possible_truncation)]
        let count = blocks.count as u32;
        Self { attributes: 0, count: count.to_le(), first: blocks.first.to_le() }
    }
}

/// Read or Write. There is one block at least, and no more than [`Facts::max_bytes`].
#[inline]
pub(super) fn transfer(facts: &Facts, what: Transfer, blocks: Blocks, memory: Memory) -> Bytes {
    let (opcode, flags) = match what {
        Transfer::Read => (opcode::READ, 0),
        Transfer::Write => (opcode::WRITE, 0),
        Transfer::WriteDurable => (opcode::WRITE, FORCE_UNIT_ACCESS),
    };
    ranged(facts, opcode, blocks, flags, memory)
}

/// Flush, of the whole namespace.
pub(super) fn flush(facts: &Facts) -> Bytes {
    command(facts, opcode::FLUSH, Memory { addr: 0, len: 0 }, [0; 3])
}

/// Write Zeroes, at most [`Facts::zero_blocks`] of them; `deallocate` has the device give them back.
pub(super) fn write_zeroes(facts: &Facts, blocks: Blocks, deallocate: bool) -> Bytes {
    let flags = if deallocate { DEALLOCATE_ZEROED } else { 0 };
    ranged(facts, opcode::WRITE_ZEROES, blocks, flags, Memory { addr: 0, len: 0 })
}

/// Dataset Management with one range, which is at `range` until the command is done.
pub(super) fn discard(facts: &Facts, range: u64) -> Bytes {
    let memory = Memory { addr: range, len: 16 };
    // The number of ranges is counted from 0.
    command(facts, opcode::DATASET_MANAGEMENT, memory, [0, DEALLOCATE, 0])
}

/// A command for a range of blocks, whose count is counted from 0.
#[inline]
fn ranged(facts: &Facts, opcode: u8, blocks: Blocks, flags: u32, memory: Memory) -> Bytes {
    debug_assert!((1..=1 << 16).contains(&blocks.count), "{blocks:?}");
    // Two halves of 64 bits, and a count of 16 bits.
    #[allow(clippy::cast_possible_truncation)]
    let dwords = {
        let count = blocks.count.wrapping_sub(1) as u16;
        [blocks.first as u32, (blocks.first >> 32) as u32, u32::from(count) | flags]
    };
    command(facts, opcode, memory, dwords)
}

/// The structure: opcode, namespace, memory and dwords 10 to 12; everything else is 0. The kernel's own
/// time limit holds.
#[inline]
fn command(facts: &Facts, opcode: u8, memory: Memory, dwords: [u32; 3]) -> Bytes {
    let mut bytes = [0; 80];
    bytes[0] = opcode;
    bytes[4..8].copy_from_slice(&facts.id.to_ne_bytes());
    bytes[24..32].copy_from_slice(&memory.addr.to_ne_bytes());
    bytes[36..40].copy_from_slice(&memory.len.to_ne_bytes());
    bytes[40..44].copy_from_slice(&dwords[0].to_ne_bytes());
    bytes[44..48].copy_from_slice(&dwords[1].to_ne_bytes());
    bytes[48..52].copy_from_slice(&dwords[2].to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: Facts = Facts {
        id: 0x0102_0304,
        block_shift: 9,
        max_bytes: 1 << 20,
        discard_blocks: u32::MAX,
        zero_blocks: 1 << 16,
        deallocates_zeroed: true,
    };

    /// A dword of the structure: its fields are where `linux/nvme_ioctl.h` has them.
    fn dword(bytes: &Bytes, at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    fn qword(bytes: &Bytes, at: usize) -> u64 {
        u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn transfers_are_as_the_command_set_says() {
        let blocks = Blocks { first: 0x1234_5678_9abc, count: 8 };
        let memory = Memory { addr: 0x7fff_0000_1000, len: 4096 };
        let read = transfer(&FACTS, Transfer::Read, blocks, memory);
        assert_eq!((read[0], dword(&read, 4)), (2, 0x0102_0304));
        assert_eq!((qword(&read, 24), dword(&read, 36)), (0x7fff_0000_1000, 4096));
        assert_eq!((dword(&read, 40), dword(&read, 44)), (0x5678_9abc, 0x1234));
        assert_eq!(dword(&read, 48), 7, "blocks are counted from 0");
        // No metadata, no time limit of ours, nothing in what is reserved.
        assert_eq!((qword(&read, 16), dword(&read, 32), dword(&read, 64)), (0, 0, 0));
        assert!(read[52..].iter().chain(&read[1..4]).all(|&byte| byte == 0));
        let write = transfer(&FACTS, Transfer::Write, blocks, memory);
        assert_eq!((write[0], &write[1..]), (1, &read[1..]));
        let durable = transfer(&FACTS, Transfer::WriteDurable, blocks, memory);
        assert_eq!((durable[0], dword(&durable, 48)), (1, 0x4000_0007));
        let most = Blocks { first: 0, count: 1 << 16 };
        assert_eq!(dword(&transfer(&FACTS, Transfer::Read, most, memory), 48), 0xffff);
    }

    #[test]
    fn what_moves_no_data_is_as_the_command_set_says() {
        let blocks = Blocks { first: 5, count: 1 << 16 };
        let plain = write_zeroes(&FACTS, blocks, false);
        assert_eq!((plain[0], dword(&plain, 40), dword(&plain, 48)), (8, 5, 0xffff));
        assert_eq!((qword(&plain, 24), dword(&plain, 36)), (0, 0), "no memory");
        assert_eq!(dword(&write_zeroes(&FACTS, blocks, true), 48), 0x0200_ffff);
        let flush = flush(&FACTS);
        assert_eq!((flush[0], dword(&flush, 4)), (0, 0x0102_0304));
        assert!(flush[8..].iter().all(|&byte| byte == 0));
        let discard = discard(&FACTS, 0x1000);
        assert_eq!((discard[0], qword(&discard, 24), dword(&discard, 36)), (9, 0x1000, 16));
        assert_eq!((dword(&discard, 40), dword(&discard, 44), dword(&discard, 48)), (0, 4, 0));
        let range = DiscardRange::new(Blocks { first: 7, count: 9 });
        assert_eq!((range.attributes, range.count, range.first), (0, 9u32.to_le(), 7u64.to_le()));
    }
}
