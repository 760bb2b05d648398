//! Operations that change a file, as entries of the submission queue.

use super::{IoUring, iovec, length};
use crate::engine::Io;
use crate::sys;
use io_uring::types::Fd;
use io_uring::{opcode, squeue};
use ringway_core::Segment;

/// `BLOCK_URING_CMD_DISCARD`, `_IO(0x12, 0)` of `linux/blkdev.h`, since Linux 6.12.
const DISCARD: u32 = 0x1200;

impl IoUring {
    #[inline]
    pub(super) fn write(
        fd: Fd,
        segments: &[Segment],
        buf: Option<u16>,
        offset: u64,
        rw: i32,
    ) -> squeue::Entry {
        match (segments, buf) {
            (&[one], None) => {
                opcode::Write::new(fd, one.base, length(one)).offset(offset).rw_flags(rw).build()
            }
            (&[one], Some(buf)) => {
                let write = opcode::WriteFixed::new(fd, one.base, length(one), buf);
                write.offset(offset).rw_flags(rw).build()
            }
            (_, None) => {
                let (iov, count) = iovec(segments);
                opcode::Writev::new(fd, iov, count).offset(offset).rw_flags(rw).build()
            }
            (_, Some(buf)) => {
                let (iov, count) = iovec(segments);
                opcode::WritevFixed::new(fd, iov, count, buf).offset(offset).rw_flags(rw).build()
            }
        }
    }

    #[inline]
    pub(super) fn allocate(io: &Io<'_>, fd: Fd, mode: i32) -> squeue::Entry {
        let offset = sys::kernel_offset(io.offset) as u64;
        opcode::Fallocate::new(fd, io.len).offset(offset).mode(mode).build()
    }

    #[inline]
    pub(super) fn discard(io: &Io<'_>, fd: Fd) -> squeue::Entry {
        // The length goes where `addr3` is, the first half of the command's data.
        let mut cmd = [0; 16];
        cmd[..8].copy_from_slice(&io.len.to_ne_bytes());
        opcode::UringCmd16::new(fd, DISCARD).addr(Some(io.offset)).cmd(cmd).build()
    }
}
