//! Requests of a disk that are held because it has failed them: how many, since when, why. Queues
//! count them here, whoever tells people of it reads.
//!
//! A request is held from its first failure until it is answered or left to a successor, also while
//! it is being tried again. The first one and the last one ring the bell of
//! [`Incidents`](crate::Incidents).

use crate::disk::Disk;
use crate::error_policy::{ErrorPolicy, OnError};
use crate::holding::{HeldRequests, LeftRequest, RESUMABLE_MAX, RESUMABLE_NS, is_no_space};
use crate::incidents::FailedOp;
use ringway_core::file::FileShape;
use ringway_core::{ByteRange, Op};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

impl Disk {
    /// From now on requests that fail go by `policy`; those that are held stay so.
    pub fn set_error_policy(&self, policy: ErrorPolicy) {
        self.holding.policy.store(policy.to_bits(), SeqCst);
    }

    /// What becomes of requests that fail.
    #[must_use]
    pub fn error_policy(&self) -> ErrorPolicy {
        ErrorPolicy::from_bits(self.holding.policy.load(SeqCst))
    }

    /// What becomes of writes for which there is no space: as was chosen, else hold if the image is
    /// sparse. That is a regular file with fewer blocks than its length needs, or one in which guests
    /// may punch holes (discard).
    #[must_use]
    pub fn on_enospc(&self) -> OnError {
        let by_default =
            if self.holding.sparse.load(SeqCst) { OnError::Hold } else { OnError::Report };
        self.error_policy().on_enospc.unwrap_or(by_default)
    }

    /// Looks whether its file is sparse; it may be made longer by now.
    pub(crate) fn find_holes(&self) {
        let file = self.is_real() && !self.block_device && !self.geometry.read_only;
        let has_holes = || {
            // What cannot be asked is taken for sparse: to wait loses nothing.
            FileShape::of(&self.file()).map_or(true, |shape| shape.allocated < shape.bytes)
        };
        self.holding.sparse.store(file && (self.geometry.discard || has_holes()), SeqCst);
    }

    /// The requests that are held, if there are any.
    #[must_use]
    pub fn held(&self) -> Option<HeldRequests> {
        let holding = &self.holding;
        let count = holding.held.load(SeqCst);
        let latest = holding.latest.load(SeqCst);
        let since = |at: &AtomicU64| self.now().saturating_sub(at.load(SeqCst));
        let until = |at: &AtomicU64| at.load(SeqCst).saturating_sub(self.now());
        let by_itself = holding.by_itself.load(SeqCst) > 0;
        (count > 0).then(|| HeldRequests {
            count,
            age: Duration::from_nanos(since(&holding.since_ns)),
            op: FailedOp::from_number(latest >> 32),
            errno: i32::try_from(latest & u64::from(u32::MAX)).unwrap_or(0),
            retry_in: by_itself.then(|| Duration::from_nanos(until(&holding.retry_ns))),
        })
    }

    /// Held requests that are being tried again now.
    #[must_use]
    pub fn held_under_way(&self) -> u64 {
        self.holding.trying.load(SeqCst)
    }

    /// How often requests have begun to be held, while none was. With [`Disk::held`] it tells whoever
    /// looks what has changed since the last look, also if it was over in between.
    #[must_use]
    pub fn held_spells(&self) -> u64 {
        self.holding.spells.load(SeqCst)
    }

    /// Held requests that were left to whoever serves the guest next, so far.
    #[must_use]
    pub fn held_and_left(&self) -> u64 {
        self.holding.left.load(SeqCst)
    }

    /// True if a request that failed with this error is to be held.
    #[cold]
    pub(crate) fn holds(&self, op: Op, errno: i32) -> bool {
        let on = match op {
            Op::Read => self.error_policy().on_read,
            Op::Write | Op::Discard | Op::WriteZeroes if is_no_space(errno) => self.on_enospc(),
            Op::Write | Op::Discard | Op::WriteZeroes => self.error_policy().on_write,
            Op::Flush | Op::GetId => OnError::Report,
        };
        on == OnError::Hold
    }

    /// A request is held: for the first time, or again after it was tried, when its error was
    /// `before`.
    #[cold]
    pub(crate) fn hold(&self, op: Op, errno: i32, before: Option<i32>) {
        let holding = &self.holding;
        let latest = (FailedOp::of(op) as u64) << 32 | u64::from(errno.unsigned_abs());
        holding.latest.store(latest, SeqCst);
        holding.by_itself.fetch_add(u64::from(is_no_space(errno)), SeqCst);
        if let Some(before) = before {
            holding.by_itself.fetch_sub(u64::from(is_no_space(before)), SeqCst);
            holding.trying.fetch_sub(1, SeqCst);
        } else if holding.held.fetch_add(1, SeqCst) == 0 {
            holding.since_ns.store(self.now(), SeqCst);
            holding.spells.fetch_add(1, SeqCst);
            self.incidents.ring();
        }
    }

    /// A held request is tried again.
    pub(crate) fn try_held(&self) {
        self.holding.trying.fetch_add(1, SeqCst);
    }

    /// When a held request is tried again by itself, in the disk's time.
    pub(crate) fn try_held_at(&self, ns: u64) {
        self.holding.retry_ns.store(ns, SeqCst);
    }

    /// A request is held no more: it is answered, after it was tried again or not.
    #[cold]
    pub(crate) fn release_held(&self, errno: i32, tried: bool) {
        let holding = &self.holding;
        holding.trying.fetch_sub(u64::from(tried), SeqCst);
        holding.by_itself.fetch_sub(u64::from(is_no_space(errno)), SeqCst);
        if holding.held.fetch_sub(1, SeqCst) == 1 {
            self.incidents.ring();
        }
    }

    /// As [`Disk::release_held`], and it was left to whoever serves the guest next: `since_ns` is when it failed first.
    #[cold]
    pub(crate) fn leave_held(&self, errno: i32, (op, range): (Op, ByteRange), since_ns: u64) {
        self.holding.left.fetch_add(1, SeqCst);
        let mut resumable = self.resumable();
        let left_ns = self.now();
        resumable.retain(|left| left_ns.saturating_sub(left.left_ns) < RESUMABLE_NS);
        if resumable.len() < RESUMABLE_MAX {
            resumable.push(LeftRequest { op, range, since_ns, left_ns });
        }
        drop(resumable);
        self.release_held(errno, false);
    }

    /// When a request failed first that another queue has left, in the disk's time.
    #[cold]
    pub(crate) fn held_since(&self, op: Op, range: ByteRange) -> Option<u64> {
        let now = self.now();
        let mut resumable = self.resumable();
        resumable.retain(|left| now.saturating_sub(left.left_ns) < RESUMABLE_NS);
        let at = resumable.iter().position(|left| left.op == op && left.range == range)?;
        Some(resumable.swap_remove(at).since_ns)
    }

    fn resumable(&self) -> MutexGuard<'_, Vec<LeftRequest>> {
        self.holding.resumable.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CustomDisk;
    use crate::choices::EngineKind;
    use crate::storage::Flush;
    use std::fs::File;
    use std::io::Write;
    use std::sync::Arc;

    const BYTES: u64 = 64 << 10;

    type Change = fn(&mut Disk);

    fn image(full: bool) -> File {
        let mut file = tempfile::tempfile().unwrap();
        if full {
            file.write_all(&vec![0x5a; usize::try_from(BYTES).unwrap()]).unwrap();
            file.sync_all().unwrap();
        }
        file.set_len(BYTES).unwrap();
        file
    }

    #[test]
    fn an_image_is_sparse_if_it_has_holes_or_may_get_some() {
        let cases: [(&str, bool, Change, OnError); 7] = [
            ("full", true, |_| (), OnError::Report),
            ("holes", false, |_| (), OnError::Hold),
            ("full, discard", true, |disk| disk.geometry.discard = true, OnError::Hold),
            ("holes, discard", false, |disk| disk.geometry.discard = true, OnError::Hold),
            ("read-only", false, |disk| disk.geometry.read_only = true, OnError::Report),
            ("block device", false, |disk| disk.block_device = true, OnError::Report),
            ("no file", false, |disk| disk.nature.flush = Flush::Engine, OnError::Report),
        ];
        for (what, full, change, right) in cases {
            let mut disk = CustomDisk::new(BYTES).open(None).unwrap();
            disk.engine = EngineKind::Threads;
            disk.nature.flush = Flush::Host;
            disk.geometry.discard = false;
            disk.active.get_mut().unwrap().file = Arc::new(image(full));
            change(&mut disk);
            disk.find_holes();
            assert_eq!(disk.on_enospc(), right, "{what}");
            // What was chosen counts more.
            for chosen in OnError::ALL {
                let on_enospc = Some(chosen);
                disk.set_error_policy(ErrorPolicy { on_enospc, ..ErrorPolicy::default() });
                assert_eq!(disk.on_enospc(), chosen, "{what}");
            }
        }
    }
}
