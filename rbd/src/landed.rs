//! The way of completions from the library's threads to an engine: a stack that needs no lock and no memory
//! but its own (hot).
//!
//! ```text
//! a thread of librbd:  result → slot; push the slot; wake the engine if it sleeps
//! the engine:          takes all that were pushed, in one step
//! ```

use crate::library::{Handle, Library};
use ringway_aio::bells::Waker;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, AtomicU32};

/// No slot.
const NONE: u32 = u32::MAX;

/// What has completed and was not taken yet.
///
/// # Invariants
/// 1. A slot is on the stack at most once: it is pushed by the one completion of the operation that has
///    it, and has no other operation before it was taken.
/// 2. Each operation under way owns one count of the `Arc`, which its completion gives back last: so this
///    lives for as long as a thread of the library may touch it.
#[derive(Debug)]
pub(crate) struct Landed {
    library: &'static Library,
    head: AtomicU32,
    slots: Box<[LandedSlot]>,
    /// The engine is about to sleep, or sleeps.
    sleeps: AtomicBool,
    waker: Waker,
}

#[derive(Debug)]
struct LandedSlot {
    at: u32,
    next: AtomicU32,
    result: AtomicI64,
    owner: AtomicPtr<Landed>,
}

impl Landed {
    pub(crate) fn new(library: &'static Library, depth: u32, waker: Waker) -> Arc<Self> {
        let slot = |at| LandedSlot {
            at,
            next: AtomicU32::new(NONE),
            result: AtomicI64::new(0),
            owner: AtomicPtr::new(ptr::null_mut()),
        };
        let landed = Arc::new(Self {
            library,
            head: AtomicU32::new(NONE),
            slots: (0..depth).map(slot).collect(),
            sleeps: AtomicBool::new(false),
            waker,
        });
        for slot in &landed.slots {
            slot.owner.store(Arc::as_ptr(&landed).cast_mut(), Relaxed);
        }
        landed
    }

    /// A completion for the operation in slot `at`; it comes back as that slot. `None` if the library has no
    /// memory.
    pub(crate) fn completion(self: &Arc<Self>, at: u32) -> Option<Handle> {
        let argument = ptr::from_ref(&self.slots[at as usize]).cast_mut().cast::<c_void>();
        let mut completion = ptr::null_mut();
        // SAFETY: the argument lives until `land` has been called (invariant 2).
        let rc = unsafe {
            (self.library.rbd_aio_create_completion)(argument, land, &raw mut completion)
        };
        if rc < 0 {
            return None;
        }
        // SAFETY: the pointer is that of a living `Arc`.
        unsafe { Arc::increment_strong_count(Arc::as_ptr(self)) };
        Some(completion)
    }

    /// An operation was not begun: its completion is never called.
    pub(crate) fn forget(self: &Arc<Self>, completion: Handle) {
        // SAFETY: nobody else has it, and it holds the count that `completion` has taken.
        unsafe {
            (self.library.rbd_aio_release)(completion);
            Arc::decrement_strong_count(Arc::as_ptr(self));
        }
    }

    /// True if something was not taken.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.head.load(Relaxed) != NONE
    }

    /// Takes all, the last one first: slots and what the library said.
    #[inline]
    pub(crate) fn take(&self, mut each: impl FnMut(u32, i64)) {
        let mut at = self.head.swap(NONE, Acquire);
        while at != NONE {
            let slot = &self.slots[at as usize];
            // Before it may be used anew.
            let next = slot.next.load(Relaxed);
            each(at, slot.result.load(Relaxed));
            at = next;
        }
    }

    /// True if the engine may sleep: from now on whatever lands wakes it.
    pub(crate) fn may_sleep(&self) -> bool {
        self.sleeps.store(true, SeqCst);
        self.head.load(SeqCst) == NONE
    }

    /// The engine is awake.
    pub(crate) fn awake(&self) {
        self.sleeps.store(false, Relaxed);
    }

    fn push(&self, slot: &LandedSlot, result: i64) {
        slot.result.store(result, Relaxed);
        let mut head = self.head.load(Relaxed);
        loop {
            slot.next.store(head, Relaxed);
            match self.head.compare_exchange_weak(head, slot.at, SeqCst, Relaxed) {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
        if self.sleeps.load(SeqCst) {
            self.waker.wake();
        }
    }
}

/// Called by a thread of the library.
unsafe extern "C" fn land(completion: Handle, argument: *mut c_void) {
    // SAFETY: `completion` has given the library a slot, which lives until the count is given back below.
    let slot = unsafe { &*argument.cast::<LandedSlot>() };
    let owner = slot.owner.load(Relaxed);
    // SAFETY: the owner lives for as long as its slots; it has handed over one count (invariant 2).
    let landed = unsafe { Arc::from_raw(owner.cast_const()) };
    // SAFETY: the completion is done, and this is its last use.
    let result = unsafe {
        let result = (landed.library.rbd_aio_get_return_value)(completion);
        (landed.library.rbd_aio_release)(completion);
        result
    };
    landed.push(slot, result as i64);
}
