//! Requests that nobody has answered: noticed in debug builds, nothing at all in others.

/// A part of a token (see [`RequestQueue::Token`](crate::RequestQueue::Token)) that panics in debug
/// builds when the token is dropped instead of answered. It has no size and no code in a release.
///
/// ```
/// use ringway_export::AnswerDue;
///
/// struct Token {
///     entry: u16,
///     due: AnswerDue,
/// }
///
/// fn complete(token: Token) {
///     token.due.settle();
///     println!("answered {}", token.entry);
/// }
///
/// complete(Token { entry: 3, due: AnswerDue::default() });
/// ```
#[derive(Debug, Default)]
#[must_use = "a request that is not answered is lost to the guest"]
pub struct AnswerDue(());

impl AnswerDue {
    /// The request is answered.
    #[inline]
    pub fn settle(self) {
        std::mem::forget(self);
    }
}

#[cfg(debug_assertions)]
impl Drop for AnswerDue {
    fn drop(&mut self) {
        let excused = ABANDONS.get() || std::thread::panicking();
        assert!(excused, "a request was dropped without an answer");
    }
}

#[cfg(debug_assertions)]
thread_local! {
    static ABANDONS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Drops `what`, and with it requests that will never be answered: their guest has heard that nobody
/// serves it any more, or hears it from a successor.
pub fn abandon<T>(what: T) {
    #[cfg(debug_assertions)]
    let _excused = Excused(ABANDONS.replace(true));
    drop(what);
}

/// Ends the excuse, also if the drop panics.
#[cfg(debug_assertions)]
struct Excused(bool);

#[cfg(debug_assertions)]
impl Drop for Excused {
    fn drop(&mut self) {
        ABANDONS.set(self.0);
    }
}

const _: () = assert!(size_of::<AnswerDue>() == 0);

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn dropped(due: AnswerDue) -> bool {
        catch_unwind(AssertUnwindSafe(|| drop(due))).is_ok()
    }

    #[test]
    fn a_request_that_is_dropped_unanswered_panics() {
        assert!(!dropped(AnswerDue::default()));
    }

    #[test]
    fn answered_and_abandoned_requests_do_not() {
        AnswerDue::default().settle();
        abandon([AnswerDue::default(), AnswerDue::default()]);
        // What is dropped after that is not excused by it.
        assert!(!dropped(AnswerDue::default()));
    }

    #[test]
    fn a_panic_that_unwinds_over_a_request_is_not_made_an_abort() {
        let unwound = catch_unwind(|| {
            let _due = AnswerDue::default();
            panic!("something else");
        });
        assert_eq!(unwound.unwrap_err().downcast_ref(), Some(&"something else"));
    }
}
