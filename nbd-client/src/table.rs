//! What a connection changes of its engine (hot).

use crate::operations::{Operation, Operations};
use ringway_aio::Done;
use std::collections::VecDeque;

/// What a connection changes of its engine.
pub(crate) struct Table<'a> {
    pub(crate) operations: &'a mut Operations,
    pub(crate) ready: &'a mut Vec<Done>,
    pub(crate) syscalls: &'a mut u64,
}

/// Answers an operation, which is over.
#[inline]
pub(crate) fn answer(table: &mut Table<'_>, slot: u32, result: i32) {
    table.ready.push(Done { tag: table.operations.get(slot).tag, result });
    table.operations.end(slot);
}

/// Has operations fail that are not sent.
pub(crate) fn fail(
    table: &mut Table<'_>,
    sending: &mut VecDeque<u32>,
    result: i32,
    which: fn(&Operation) -> bool,
) {
    sending.retain(|&slot| {
        let fails = which(table.operations.get(slot));
        if fails {
            answer(table, slot, result);
        }
        !fails
    });
}
