//! Pages that stay mapped because their front-end uses them again and again (`feature-persistent`).
//!
//! A bounded number; the one that was not used for longest makes room (hazard B15). What is in use
//! by a request never goes.

use super::host::{GrantMapping, Host};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::io;

/// Looks of the clock's hand for each batch, to find pages that nobody uses any more.
const SWEEP: usize = 2;
/// Batches after which a page that was not used is let go.
const STALE: u64 = 8192;

/// A page that is mapped.
struct Page<M> {
    grant: u32,
    mapped: M,
    /// Requests that use it now.
    users: u32,
    /// Used since the hand went by.
    recent: bool,
    used_at: u64,
}

/// Grants are small numbers that no guest chooses for long: a multiplication spreads them.
#[derive(Default)]
pub(super) struct GrantHasher(u64);

impl Hasher for GrantHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32((*byte).into()));
    }

    fn write_u32(&mut self, grant: u32) {
        self.0 = (self.0 ^ u64::from(grant)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

/// Mapped pages by grant.
///
/// # Invariants
/// 1. `places` has the place of each page in `pages`, and nothing else.
/// 2. There are at most `cap` pages.
pub(super) struct Persistent<M> {
    pages: Vec<Option<Page<M>>>,
    places: HashMap<u32, u32, BuildHasherDefault<GrantHasher>>,
    free: Vec<u32>,
    hand: usize,
    batch: u64,
    evicted: u64,
}

impl<M: GrantMapping> Persistent<M> {
    /// Room for `cap` pages. Allocates; nothing else does.
    pub(super) fn new(cap: u32) -> Self {
        Self {
            pages: (0..cap).map(|_| None).collect(),
            places: HashMap::with_capacity_and_hasher(cap as usize, BuildHasherDefault::default()),
            free: (0..cap).rev().collect(),
            hand: 0,
            batch: 0,
            evicted: 0,
        }
    }

    /// Pages that are mapped.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Pages that were let go.
    #[cfg(test)]
    pub(super) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// The place of a page, which stays until [`Persistent::release`]; maps it if it is not yet.
    ///
    /// # Errors
    /// That it cannot be mapped, or that all pages are in use.
    pub(super) fn hold<H: Host<Mapped = M>>(
        &mut self,
        host: &mut H,
        grant: u32,
    ) -> io::Result<u32> {
        let place = match self.places.get(&grant) {
            Some(&place) => place,
            None => {
                let place = match self.free.pop() {
                    Some(place) => place,
                    None => self.evict().ok_or(io::ErrorKind::QuotaExceeded)?,
                };
                let mapped = match host.map(&[grant], true) {
                    Ok(mapped) => mapped,
                    Err(error) => {
                        self.free.push(place);
                        return Err(error);
                    }
                };
                let page = Page { grant, mapped, users: 0, recent: true, used_at: self.batch };
                self.pages[place as usize] = Some(page);
                self.places.insert(grant, place);
                place
            }
        };
        let page = self.pages[place as usize].as_mut().expect("places name pages (invariant 1)");
        page.users += 1;
        (page.recent, page.used_at) = (true, self.batch);
        Ok(place)
    }

    /// Where the page is mapped. It must be held.
    pub(super) fn base(&self, place: u32) -> *mut u8 {
        self.pages[place as usize].as_ref().expect("the page is held").mapped.base()
    }

    /// The request is done with the page.
    pub(super) fn release(&mut self, place: u32) {
        if let Some(page) = &mut self.pages[place as usize] {
            page.users -= 1;
        }
    }

    /// Makes room: the clock's hand goes round and takes the first page that is neither in use nor
    /// was used since it went by.
    fn evict(&mut self) -> Option<u32> {
        for _ in 0..2 * self.pages.len() {
            let at = self.step();
            let Some(page) = &mut self.pages[at] else { continue };
            if page.users > 0 {
                continue;
            }
            if std::mem::take(&mut page.recent) {
                continue;
            }
            self.let_go(at);
            return self.free.pop();
        }
        None
    }

    fn step(&mut self) -> usize {
        let at = self.hand;
        self.hand = (self.hand + 1) % self.pages.len().max(1);
        at
    }

    fn let_go(&mut self, at: usize) {
        if let Some(page) = self.pages[at].take() {
            self.places.remove(&page.grant);
            // At most `cap`, which is a u32.
            #[allow(clippy::cast_possible_truncation)]
            self.free.push(at as u32);
            self.evicted += 1;
        }
    }

    /// Once a batch: lets go what was not used for long, a look at a time.
    pub(super) fn sweep(&mut self) {
        self.batch += 1;
        for _ in 0..SWEEP.min(self.pages.len()) {
            let at = self.step();
            if let Some(page) = &self.pages[at] {
                if page.users == 0 && self.batch - page.used_at > STALE {
                    self.let_go(at);
                }
            }
        }
    }
}
