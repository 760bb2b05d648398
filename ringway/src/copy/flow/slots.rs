//! The places for pieces on their way, and their memory.

use super::mode::{DST, Mode, SRC};
use crate::copy::end::{DIRECT, End, Memory, Method, Verb};
use crate::copy::extents::Item;
use crate::copy::zero::UNIT;
use anyhow::Context;
use ringway_core::Segment;
use ringway_core::mem::Mapping;

/// A part of a slot's work.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) end: usize,
    pub(super) verb: Verb,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) done: u64,
    /// How the rest of it was given last.
    pub(super) method: Method,
    /// Where in the slot's memory.
    pub(super) at: usize,
    /// Every piece comes from the same memory: zeroes.
    pub(super) repeat: bool,
    pub(super) segment: Box<Segment>,
}

#[derive(Debug)]
pub(super) struct CopySlot {
    pub(super) memory: [Memory; 2],
    pub(super) busy: Option<Item>,
    pub(super) parts: Vec<Transfer>,
    pub(super) pending: usize,
    pub(super) writing: bool,
}

/// Memory for every slot. A disk's is shared with its server; a file takes what the other end has,
/// or our own. To compare, both ends need memory of their own.
pub(super) fn slots_of(
    ends: &[End; 2],
    mode: Mode,
    count: usize,
    chunk: usize,
    own: &mut Vec<Mapping>,
) -> anyhow::Result<Vec<CopySlot>> {
    let mut fresh = || -> anyhow::Result<*mut u8> {
        let mapping = Mapping::anonymous(count * chunk).context("no memory for buffers")?;
        let base = mapping.at(0);
        // SAFETY: a hint about memory of ours.
        unsafe { libc::madvise(base.cast(), count * chunk, libc::MADV_HUGEPAGE) };
        own.push(mapping);
        Ok(base)
    };
    let is_disk = ends.each_ref().map(|end| matches!(end, End::Disk(_)));
    let mut bases = [std::ptr::null_mut(); 2];
    match (mode, is_disk) {
        (Mode::Compare, _) => {
            for end in [SRC, DST] {
                if !is_disk[end] {
                    bases[end] = fresh()?;
                }
            }
        }
        (_, [false, false]) => bases = [fresh()?; 2],
        _ => {}
    }
    let mut slots = Vec::with_capacity(count);
    for index in 0..count {
        let mut memory = bases.map(|base| {
            let base = if base.is_null() { base } else { base.wrapping_add(index * chunk) };
            Memory { base, pieces: Vec::new() }
        });
        for (end, memory) in ends.iter().zip(&mut memory) {
            if let End::Disk(disk) = end {
                let buffer = disk.device.pool().alloc(chunk.next_multiple_of(disk.piece));
                let mut buffer = buffer.context("out of shared memory")?;
                memory.base = buffer.as_mut_ptr();
                while buffer.capacity() > disk.piece {
                    let (first, rest) = buffer.split_at(disk.piece);
                    memory.pieces.push(Some(first));
                    buffer = rest;
                }
                memory.pieces.push(Some(buffer));
            }
        }
        if matches!(mode, Mode::Copy { .. }) {
            let [src, dst] = &mut memory;
            if src.base.is_null() {
                src.base = dst.base;
            } else if dst.base.is_null() {
                dst.base = src.base;
            }
        }
        let parts = Vec::with_capacity(chunk / UNIT + 2);
        slots.push(CopySlot { memory, busy: None, parts, pending: 0, writing: false });
    }
    debug_assert!(chunk % usize::try_from(DIRECT)? == 0);
    Ok(slots)
}
