//! The stores of a device that outlive it: what it writes to rings and to the record of what is in
//! flight. Tests kill the device before any of them, and campaigns the whole daemon.

/// To be called before each store that another process can see.
#[cfg(not(test))]
#[inline(always)]
pub(super) fn next_store() {
    ringway_core::kill_point!(Store);
}

#[cfg(test)]
pub(super) use kill::{killed_at, next_store};

#[cfg(test)]
mod kill {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    struct Killed;

    std::thread_local! {
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// Ends the device of [`killed_at`] when its time has come.
    pub(in super::super) fn next_store() {
        match LEFT.get() {
            None => {}
            // Not by `panic!`: nothing is printed, and no store follows.
            Some(0) => resume_unwind(Box::new(Killed)),
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }

    /// Runs `life` until it has made `stores` stores and is about to make another one; then it is
    /// dead, and the memory is as these stores have left it. `Some` if it lived to its end.
    pub(in super::super) fn killed_at<T>(stores: u32, life: impl FnOnce() -> T) -> Option<T> {
        LEFT.set(Some(stores));
        let end = catch_unwind(AssertUnwindSafe(life));
        LEFT.set(None);
        match end {
            Ok(lived) => Some(lived),
            Err(end) if end.is::<Killed>() => None,
            Err(failed) => resume_unwind(failed),
        }
    }
}
