//! Serves a disk to a guest: rings on one hand, a disk on the other.
//!
//! What all transports share. `worker.rs` is the loop and the only file that sees both a ring and a
//! disk. A transport has a crate of its own, with the queues ([`RequestQueue`]) and their control
//! plane: `ringway-vhost-user`, `ringway-xen-blkback`, `ringway-nbd`.

mod answer;
mod clock;
mod command;
mod export;
mod latency;
mod limit;
mod memory;
mod notice;
mod peer_eventfd;
mod penalty;
mod pinned;
mod polling;
mod pool;
mod quarantine;
mod queue;
mod queue_id;
mod ring_pool;
mod sampler;
mod session_inbox;
mod stats;
mod totals;
mod waiting;
mod worker;
mod worker_options;

pub use answer::{AnswerDue, abandon};
pub use command::{
    Alarm, Findings, Handle, Inbox, QueueFindings, QueueId, Raise, Rouse, Stopped, command_channel,
};
pub use export::{
    ChangeError, Counts, Export, ExportOptions, ExportReport, GuestNotice, LockWait, Names,
    Offered, QueueReport, Resized, Retried,
};
pub use latency::Latency;
pub use limit::{Limit, Limits, Pass, on_suppressed, tell_suppressed};
pub use memory::SharedMemory;
pub use notice::{Listener, Notice};
pub use peer_eventfd::{PeerEventfd, watchdog_signal};
pub use polling::Polling;
pub use pool::{
    Cpus, ENGINE_DEPTH, OnFailure, Pool, PoolOptions, WorkerOptions, engines_to_choose,
    install_handlers, usable_engines,
};
pub use quarantine::Quarantine;
pub use queue::{Armed, Broken, Pop, QueueLifecycle, RequestQueue};
pub use ring_pool::RingPool;
pub use session_inbox::{SessionCommand, SessionInbox};
pub use stats::{QueueStats, WorkerStats};
pub use totals::{DURATION_BOUNDS_NS, Durations, OPERATIONS, QueueTotals};
pub use worker::Worker;
