//! The words that both sides touch at the same time, and the fence between them: those of the
//! machine, or in tests with `--cfg loom` those of the model checker, which tries all orders in
//! which they can be seen (`models.rs`).

pub(crate) use atomics::{AtomicU16, AtomicU32, AtomicU64, fence, u16_at, u32_at, u64_at};

#[cfg(not(all(test, loom)))]
mod atomics {
    pub(crate) use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, fence};

    macro_rules! word_at {
        ($name:ident, $value:ty, $word:ty) => {
            /// # Safety
            /// `at` is aligned and mapped for `'a`, and nothing touches it but atomically.
            #[inline(always)]
            pub(crate) unsafe fn $name<'a>(at: *mut $value) -> &'a $word {
                // SAFETY: the caller vouches for it.
                unsafe { <$word>::from_ptr(at) }
            }
        };
    }
    word_at!(u16_at, u16, AtomicU16);
    word_at!(u32_at, u32, AtomicU32);
    word_at!(u64_at, u64, AtomicU64);
}

#[cfg(all(test, loom))]
pub(crate) use atomics::forget_all;

#[cfg(all(test, loom))]
mod atomics {
    pub(crate) use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, fence};
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::thread_local;

    // All threads of a model run on one thread of the host.
    macro_rules! word_at {
        ($name:ident, $value:ty, $word:ty, $atomics:ident) => {
            thread_local! {
                static $atomics: RefCell<BTreeMap<usize, Box<$word>>> = RefCell::default();
            }

            /// The model's word for an address; 0 at first.
            ///
            /// # Safety
            /// Not used after `forget_all`.
            pub(crate) unsafe fn $name<'a>(at: *mut $value) -> &'a $word {
                $atomics.with_borrow_mut(|atomics| {
                    let word = atomics.entry(at as usize);
                    let word = word.or_insert_with(|| Box::new(<$word>::new(0)));
                    // SAFETY: the box stays where it is until `forget_all`.
                    unsafe { &*std::ptr::from_ref(&**word) }
                })
            }
        };
    }
    word_at!(u16_at, u16, AtomicU16, WORDS16);
    word_at!(u32_at, u32, AtomicU32, WORDS32);
    word_at!(u64_at, u64, AtomicU64, WORDS64);

    /// At the beginning of each execution of a model, which has new words.
    pub(crate) fn forget_all() {
        WORDS16.with_borrow_mut(BTreeMap::clear);
        WORDS32.with_borrow_mut(BTreeMap::clear);
        WORDS64.with_borrow_mut(BTreeMap::clear);
    }
}

/// Asks for the cache line at `at`, which will be read soon. No address is wrong: nothing is read.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch reads nothing, so that no address can fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}
