//! What a device says of a command, as an `errno`.

/// Bits of a status that name it: status code type and status code. What is above says whether to try
/// again, and that there is more to know.
const CODE: i32 = 0x7ff;
/// Do not retry: the same command would fail in the same way.
const DO_NOT_RETRY: i32 = 1 << 14;

/// 0, or a negative `errno`, of a completion: below zero it comes from the kernel, above from the device.
#[inline]
pub(super) fn result(completion: i32) -> i32 {
    if completion <= 0 { completion } else { -errno(completion) }
}

/// The numbers are those of the base specification (type 0: generic, 1: of the command, 2: of media and
/// data, 3: of the path). What nobody can do anything about is EIO, as of any disk.
#[cold]
fn errno(status: i32) -> i32 {
    match status & CODE {
        // Invalid command opcode.
        0x001 => libc::EOPNOTSUPP,
        // Invalid field; invalid namespace or format; a range that is too long for the command.
        0x002 | 0x00b | 0x183 => libc::EINVAL,
        // Namespace is write protected; attempted write to a read-only range.
        0x020 | 0x182 => libc::EROFS,
        // Capacity exceeded: a thin device has no room.
        0x081 => libc::ENOSPC,
        // Reservation conflict: another host has it.
        0x083 => libc::EBADE,
        // Command interrupted, namespace not ready, a path that changes or was lost.
        0x021 | 0x082 | 0x300..=0x303 | 0x370 | 0x371 if status & DO_NOT_RETRY == 0 => libc::EAGAIN,
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_become_what_a_disk_would_say() {
        assert_eq!(result(0), 0);
        assert_eq!(result(-libc::EINTR), -libc::EINTR, "the kernel's own");
        for (status, errno) in [
            (0x0001, libc::EOPNOTSUPP),
            (0x4002, libc::EINVAL),
            (0x4020, libc::EROFS),
            (0x4080, libc::EIO), // beyond the end
            (0x0081, libc::ENOSPC),
            (0x4081, libc::ENOSPC),
            (0x0083, libc::EBADE),
            (0x0280, libc::EIO), // write fault
            (0x4281, libc::EIO), // unrecovered read error
            (0x0006, libc::EIO), // internal error
            (0x2006, libc::EIO), // with more in the log
            (0x0082, libc::EAGAIN),
            (0x4082, libc::EIO),
            (0x0370, libc::EAGAIN),
        ] {
            assert_eq!(result(status), -errno, "{status:#x}");
        }
    }
}
