//! Limits of requests and bytes per second, with the words and the meaning of QEMU's throttle groups.
//!
//! A [`Throttle`] is a set of leaky buckets, for one disk or for a group of disks. A [`Member`] is a
//! disk's part in one, and a [`Gate`] one queue's hand on all that its disk is a member of. A gate
//! takes credit in portions of half a millisecond's worth, so that queues on different threads seldom
//! write to what they share. Nothing here asks for the time: whoever calls says what it is.
//!
//! ```
//! use ringway_core::Op;
//! use ringway_throttle::{Gate, LimitKind, Member, Rates};
//!
//! let mut rates = Rates::default();
//! rates[LimitKind::Iops].avg = Some(100);
//! let mut gate = Gate::new(vec![Member::alone(&rates)?]).expect("there is a limit");
//! let (mut now, mut passed) = (0, 0);
//! while passed < 30 {
//!     if gate.open(true, || now) {
//!         gate.take(Op::Read, 4096);
//!         gate.settle(|| now);
//!         passed += 1;
//!     } else {
//!         now += gate.wait(now).expect("it is closed");
//!     }
//! }
//! // A tenth of a second's worth passes at once, and a request every 10 ms from then on.
//! assert_eq!(now / 1_000_000, 190);
//! # Ok::<(), ringway_throttle::RatesError>(())
//! ```

mod bucket;
mod gate;
mod member;
mod rates;
mod waiting;

pub use gate::{Gate, Throttled};
pub use member::{Member, Throttle};
pub use rates::{LimitKind, RATE_MAX, Rate, Rates, RatesError};
