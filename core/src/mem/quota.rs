//! How much of this process's address space its peers may have mapped.
//!
//! A sparse file is as long as its owner says and costs nothing, but mapping it takes address space
//! here, and a process without any dies of its next allocation, with everybody it serves.

use super::error::MappingError;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes that all peers of a process may have mapped together: three quarters of the 2^47 bytes that a
/// process has on x86-64.
///
/// No bound for a single peer is fixed beside it, because the largest guests (16 TiB, and twice that
/// for the moment in which a new memory table takes the place of the old one) are as large as thousands
/// of ordinary ones. A peer may have as much as is left for all others then: 48 TiB if it is the only
/// one, and three of these guests side by side. However greedy k of them are, the next one may map
/// 96 TiB / 2^(k+1), so it takes many clients that agree with each other to shut out a guest of an
/// ordinary size, and none of them ends the process.
const MAPPED_MAX: u64 = 96 << 40;

/// Pieces of memory that are mapped once more so that they adjoin, of all peers together. Each is a mapping
/// of its own for the kernel, which lets a process have 65,530 (vm.max_map_count): half of these are for
/// memory regions (`sigbus.rs`), a quarter for pieces. A ring of 1024 descriptors has at most 9.
const PIECES_MAX: u64 = 16_384;

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// Bytes of address space.
    Bytes,
    /// Pieces that are mapped once more.
    Pieces,
}

impl Kind {
    fn most(self) -> u64 {
        match self {
            Self::Bytes => MAPPED_MAX,
            Self::Pieces => PIECES_MAX,
        }
    }
}

/// What all peers have, of each kind. Maps are made and dropped by control threads only.
static MAPPED: Mutex<[u64; 2]> = Mutex::new([0; 2]);

/// What one peer has mapped.
#[derive(Debug, Default)]
pub struct Quota {
    /// Of each kind. Changed under the lock of [`MAPPED`].
    mine: [AtomicU64; 2],
}

/// A part of a quota, given back when dropped.
#[derive(Debug)]
pub(super) struct Taken {
    quota: Arc<Quota>,
    kind: Kind,
    amount: u64,
}

impl Quota {
    /// Takes `asked` of it.
    pub(super) fn take(self: &Arc<Self>, kind: Kind, asked: u64) -> Result<Taken, MappingError> {
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, mine) = (&mut mapped[kind as usize], &self.mine[kind as usize]);
        let have = mine.load(Relaxed);
        let room = room(kind.most(), *all, have);
        if asked > room {
            return Err(match kind {
                Kind::Bytes => MappingError::Quota { asked, have, room },
                Kind::Pieces => MappingError::Pieces { asked, have, room },
            });
        }
        *all += asked;
        mine.store(have + asked, Relaxed);
        Ok(Taken { quota: Arc::clone(self), kind, amount: asked })
    }
}

/// What a peer that has `mine` of `mapped`, which are `most` at most, may have in addition, so that as much
/// is left as it has then.
fn room(most: u64, mapped: u64, mine: u64) -> u64 {
    most.saturating_sub(mapped).saturating_sub(mine) / 2
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        mapped[self.kind as usize] -= self.amount;
        self.quota.mine[self.kind as usize].fetch_sub(self.amount, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIB: u64 = 1 << 40;

    fn room(mapped: u64, mine: u64) -> u64 {
        super::room(MAPPED_MAX, mapped, mine)
    }

    fn take(quota: &Arc<Quota>, bytes: u64) -> Result<Taken, MappingError> {
        quota.take(Kind::Bytes, bytes)
    }

    #[test]
    fn large_guests_fit_and_nobody_takes_all() {
        assert_eq!(room(0, 0), 48 * TIB);
        // Three guests of 16 TiB, the last of which gets a new memory table.
        assert!(room(2 * 16 * TIB, 0) >= 16 * TIB && room(3 * 16 * TIB, 16 * TIB) >= 16 * TIB);
        let greedy = (0..6).fold(0, |mapped, _| mapped + room(mapped, 0));
        assert_eq!(room(greedy, 0), 3 * TIB / 4);
        assert_eq!((room(MAPPED_MAX, 1), room(1, MAPPED_MAX), room(u64::MAX, u64::MAX)), (0, 0, 0));
        // Little by little is no way around it.
        let bit_by_bit = (0..1000).fold(0, |mine, _| mine + room(mine, mine));
        assert_eq!(bit_by_bit, 48 * TIB);
    }

    #[test]
    fn what_was_taken_is_given_back() {
        let (one, other) = (Arc::new(Quota::default()), Arc::new(Quota::default()));
        let some = take(&one, 40 * TIB).unwrap();
        let refused = take(&one, 40 * TIB).unwrap_err();
        assert!(refused.to_string().contains(&(40 * TIB).to_string()), "{refused}");
        let theirs = take(&other, 20 * TIB).unwrap();
        drop(some);
        drop(theirs);
        drop(take(&one, 40 * TIB).unwrap());
        assert_eq!(one.mine[0].load(Relaxed), 0);
    }

    #[test]
    fn a28_pieces_are_counted_beside_bytes_and_nobody_takes_all() {
        let (one, other) = (Arc::new(Quota::default()), Arc::new(Quota::default()));
        let room = |quota: &Arc<Quota>| match quota.take(Kind::Pieces, u64::MAX) {
            Err(MappingError::Pieces { room, .. }) => room,
            other => panic!("{other:?}"),
        };
        let most = room(&one);
        let some = one.take(Kind::Pieces, most).unwrap();
        assert!(one.take(Kind::Pieces, 1).is_err() && room(&other) >= most / 2);
        assert!(one.take(Kind::Bytes, TIB).is_ok(), "of bytes it has none yet");
        drop(some);
        assert_eq!(room(&one), most);
    }
}
