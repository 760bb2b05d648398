//! What a batch writes into one cluster: it is planned by the image's thread, and carried out by whoever
//! comes to it (`crew.rs`).

use crate::aligned::Aligned;
use crate::ask::Ask;
use crate::file::BlockFile;
use ringway_core::Op;
use ringway_core::mem::Segments;
use std::io;
use std::ops::Range;

/// A part of a request.
#[derive(Debug)]
struct Part {
    /// Which request of the batch.
    ask: usize,
    /// Its memory, and where in that the part begins; null: zeroes.
    memory: *const Segments,
    skip: u64,
    /// Which bytes of the cluster.
    bytes: Range<usize>,
}

// SAFETY: whoever asks vouches for the memory until the answer is there (`ImageClient::ask`), and whoever
// plans answers only once this has been carried out or dropped.
unsafe impl Send for Part {}

impl Part {
    fn gather(&self, into: &mut [u8]) {
        if self.memory.is_null() {
            into.fill(0);
            return;
        }
        // SAFETY: the list and its memory are valid until the answer (`ImageClient::ask`).
        let copied = unsafe { (*self.memory).gather(self.skip, into) };
        debug_assert_eq!(copied, into.len(), "a request has as much memory as range");
    }
}

/// Where what a cluster held is, up to so many bytes behind its beginning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// In which file, and where; `None`: it reads as zeroes.
    pub(crate) from: Option<(u8, u64)>,
    pub(crate) end: usize,
}

/// What a batch writes into one cluster, which nobody else writes meanwhile.
#[derive(Debug)]
pub(crate) struct ClusterWrite {
    /// Which cluster of the disk.
    pub(crate) cluster: u64,
    /// Where it begins in the file.
    pub(crate) host: u64,
    /// What it held; empty: only the parts are written.
    held: Vec<Piece>,
    /// In the order in which they were asked for.
    parts: Vec<Part>,
}

impl ClusterWrite {
    /// Nothing yet, into the cluster at `host`. All of it is written if `held` says what it held.
    pub(crate) fn new(cluster: u64, host: u64, held: Vec<Piece>) -> Self {
        Self { cluster, host, held, parts: Vec::new() }
    }

    /// Has a part of a request be written into it, or zeroes, as it asks for: what begins `done` bytes
    /// behind its beginning.
    pub(crate) fn push(&mut self, index: usize, ask: &Ask, done: u64, bytes: Range<usize>) {
        let memory = if ask.op == Op::Write { ask.memory } else { std::ptr::null() };
        self.parts.push(Part { ask: index, memory, skip: ask.skip + done, bytes });
    }

    /// The requests that it is for.
    pub(crate) fn asks(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().map(|part| part.ask)
    }

    /// Writes into file number `data` of `files`.
    ///
    /// # Errors
    /// What the host says: any part of it may be written then.
    pub(crate) fn carry_out(
        &self,
        files: &[BlockFile],
        data: u8,
        buffer: &mut Aligned,
    ) -> io::Result<()> {
        let data = &files[usize::from(data)];
        // At most a page or so.
        #[allow(clippy::cast_possible_truncation)]
        let unit = data.unit() as u32;
        let Some(&Piece { end, .. }) = self.held.last() else {
            return self.parts.iter().try_for_each(|part| {
                let bytes = buffer.room(part.bytes.len(), unit);
                part.gather(bytes);
                data.write_at(bytes, self.host + part.bytes.start as u64)
            });
        };
        let whole = buffer.room(end, unit);
        let mut begin = 0;
        for piece in &self.held {
            let bytes = &mut whole[begin..piece.end];
            match piece.from {
                None => bytes.fill(0),
                Some((file, at)) => files[usize::from(file)].read_whole(bytes, at)?,
            }
            begin = piece.end;
        }
        for part in &self.parts {
            part.gather(&mut whole[part.bytes.clone()]);
        }
        data.write_at(whole, self.host)
    }
}
