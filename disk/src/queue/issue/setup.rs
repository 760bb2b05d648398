//! How a queue's way to its engine begins, and how it goes on when the engine was full.

use super::Issuer;
use crate::choices::CacheMode;
use crate::disk::Disk;
use crate::places::Share;
use crate::queue::slots::Slots;
use ringway_aio::{Engine, FileId, Limits};
use std::collections::VecDeque;
use std::sync::Arc;

/// The longest operation, in bytes; longer requests go in parts. From the page cache the bytes are
/// copied within the submission, which must not keep other queues waiting for long.
const fn part_max(cache: CacheMode) -> u32 {
    if matches!(cache, CacheMode::None) { 4 << 20 } else { 1 << 20 }
}

impl Issuer {
    pub(crate) fn new(
        disk: Arc<Disk>,
        limits: &Limits,
        file: FileId,
        tag_base: u64,
        depth: u16,
    ) -> Self {
        debug_assert_eq!(tag_base & 0xffff, 0);
        let max_bytes = limits.max_bytes.min(part_max(disk.cache)).min(disk.nature.max_bytes);
        let through_cache = disk.cache != CacheMode::None && disk.is_real();
        Self {
            image: disk.image(),
            disk,
            limits: Limits { max_bytes, ..limits.clone() },
            file,
            others: Vec::new(),
            tag_base,
            share: None,
            backlog: VecDeque::with_capacity(depth.into()),
            durable_writes: false,
            through_cache,
            durable_bytes: 0,
        }
    }

    /// From now on its operations take places of this part.
    pub(crate) fn set_share(&mut self, share: Arc<Share>) {
        self.share = Some(share);
    }

    /// The disk's first file, as the engine knows it.
    pub(crate) fn file(&self) -> FileId {
        self.file
    }

    /// Hands at most `budget` operations of the backlog to the engine. False if it is still full.
    pub(crate) fn retry<C, E: Engine>(
        &mut self,
        engine: &mut E,
        slots: &Slots<C>,
        budget: usize,
    ) -> bool {
        for _ in 0..budget {
            let Some(&tag) = self.backlog.front() else { break };
            if self.try_issue(engine, tag, &self.operation(slots, tag)).is_err() {
                return false;
            }
            self.backlog.pop_front();
        }
        true
    }
}
