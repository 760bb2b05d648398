//! One operation of an engine, for threads that wait for it: jobs, tables, tools.

use std::io;

use crate::engine::{Engine, FileId, Io, IoMemory, IoOp, Reaped};
use ringway_core::Segment;

/// Reads from byte `at` on of what `attach` makes known to the engine, as much as fits or one operation may have; 0 at
/// the end. The engine ends with it: one that is kept, and that nobody looks after, would not hear that its connection
/// is lost.
///
/// # Errors
/// What the engine says.
pub fn read_at<E: Engine>(
    engine: E,
    attach: impl FnOnce(&mut E) -> io::Result<FileId>,
    buffer: &mut [u8],
    at: u64,
) -> io::Result<usize> {
    let len = buffer.len().min(engine.limits().max_bytes as usize);
    let list = [Segment { base: buffer.as_mut_ptr(), len }];
    // Bound behind the list, so that it is dropped before: that waits until nobody uses the memory.
    let mut engine = engine;
    let (op, file, len) = (IoOp::Read, attach(&mut engine)?, len as u64);
    let io = Io { tag: 0, op, file, offset: at, len, memory: IoMemory::Segments(&list) };
    // SAFETY: memory and list outlive the engine, and nobody touches them meanwhile. The operation is within the limits,
    // and the file attached.
    unsafe { engine.queue(&io) }.map_err(|_| io::ErrorKind::ResourceBusy)?;
    let mut out = Reaped::with_capacity(1, 0);
    while engine.reap(&mut out) == 0 {
        engine.submit_and_wait(None)?;
    }
    let result = out.done[0].result;
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Threads, ThreadsSetup};
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    fn read(file: &Arc<File>, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        let engine = Threads::new(ThreadsSetup::new(4)).unwrap();
        read_at(engine, |engine| engine.attach(file), buffer, at)
    }

    #[test]
    fn c99_who_waits_gets_its_bytes() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&(0..=255).collect::<Vec<u8>>(), 0).unwrap();
        let file = Arc::new(file);
        let mut bytes = [0; 8];
        assert_eq!(read(&file, &mut bytes, 7).unwrap(), 8);
        assert_eq!(bytes, [7, 8, 9, 10, 11, 12, 13, 14]);
        assert_eq!(read(&file, &mut bytes, 252).unwrap(), 4, "its end");
        assert_eq!(read(&file, &mut bytes, 256).unwrap(), 0);
        let write_only = tempfile::NamedTempFile::new().unwrap();
        let file = Arc::new(File::options().write(true).open(write_only.path()).unwrap());
        let error = read(&file, &mut bytes, 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
    }
}
