//! Operations as io_uring's submission queue entries.

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};
use ringway_core::Segment;

use crate::engine::{Command, Io, IoOp};
use crate::sys;

/// `BLOCK_URING_CMD_DISCARD`, `_IO(0x12, 0)` of `linux/blkdev.h`, since Linux 6.12.
const DISCARD: u32 = 0x1200;

/// Bytes of a command's data in an entry of 64 bytes. Entries of 128 bytes have room for 80, which
/// NVMe passthrough needs, but a ring has entries of one size only, and half as many operations to a
/// cache line; ublk's commands fit here.
pub(super) const COMMAND_BYTES: usize = 16;

/// Translates an operation on `segments`; `buffer` is the registered one that they lie in, if any.
#[inline]
pub(super) fn entry(
    io: &Io<'_>,
    fd: Fd,
    segments: &[Segment],
    buffer: Option<u16>,
) -> squeue::Entry {
    let offset = sys::kernel_offset(io.offset).cast_unsigned();
    match io.op {
        IoOp::Read => read(fd, segments, buffer, offset),
        IoOp::Write => write(fd, segments, buffer, offset, 0),
        IoOp::WriteDurable => write(fd, segments, buffer, offset, libc::RWF_DSYNC),
        IoOp::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        IoOp::PunchHole => {
            opcode::Fallocate::new(fd, io.len).offset(offset).mode(sys::PUNCH_HOLE).build()
        }
        IoOp::ZeroRange => {
            opcode::Fallocate::new(fd, io.len).offset(offset).mode(sys::ZERO_RANGE).build()
        }
        IoOp::Discard => {
            // The length goes where `addr3` is, the first half of the command's data.
            let mut cmd = [0; 16];
            cmd[..8].copy_from_slice(&io.len.to_ne_bytes());
            opcode::UringCmd16::new(fd, DISCARD).addr(Some(io.offset)).cmd(cmd).build()
        }
    }
}

/// Translates an operation on a registered buffer, from `address` on.
pub(super) fn entry_registered(io: &Io<'_>, fd: Fd, buffer: u16, address: u64) -> squeue::Entry {
    let at = Segment {
        // The kernel counts in the buffer: this is no pointer that anybody follows.
        base: std::ptr::without_provenance_mut(usize::try_from(address).expect("64 bits")),
        len: usize::try_from(io.len).expect("within limits().max_bytes"),
    };
    entry(io, fd, &[at], Some(buffer))
}

/// Translates a command. Its data has its length in the type: what is shorter ends in zeroes.
#[inline]
pub(super) fn command(command: &Command<'_>, fd: Fd, data: [u8; COMMAND_BYTES]) -> squeue::Entry {
    opcode::UringCmd16::new(fd, command.op).addr(Some(command.addr)).cmd(data).build()
}

#[inline]
fn read(fd: Fd, segments: &[Segment], buffer: Option<u16>, offset: u64) -> squeue::Entry {
    match (segments, buffer) {
        (&[one], None) => opcode::Read::new(fd, one.base, length(one)).offset(offset).build(),
        (&[one], Some(buffer)) => {
            opcode::ReadFixed::new(fd, one.base, length(one), buffer).offset(offset).build()
        }
        (_, None) => {
            let (iov, count) = iovec(segments);
            opcode::Readv::new(fd, iov, count).offset(offset).build()
        }
        (_, Some(buffer)) => {
            let (iov, count) = iovec(segments);
            opcode::ReadvFixed::new(fd, iov, count, buffer).offset(offset).build()
        }
    }
}

#[inline]
fn write(fd: Fd, segments: &[Segment], buf: Option<u16>, offset: u64, rw: i32) -> squeue::Entry {
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
fn length(segment: Segment) -> u32 {
    u32::try_from(segment.len).expect("within limits().max_bytes")
}

#[inline]
fn iovec(segments: &[Segment]) -> (*const libc::iovec, u32) {
    let count = u32::try_from(segments.len()).expect("within limits().max_segments");
    (segments.as_ptr().cast(), count)
}
