//! What sessions notice about a disk and its guest, for whoever listens beside the log.

use std::sync::OnceLock;

/// Something that has happened to an offered disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A front-end is there.
    Connected,
    /// It has gone, or its connection was ended: why, if not by itself.
    Disconnected {
        /// What was wrong.
        why: Option<String>,
    },
    /// A guest has broken one of its queues, which takes no more requests.
    Broken {
        /// Its number.
        queue: usize,
        /// What was wrong.
        why: String,
    },
    /// Requests that a predecessor left in flight are carried out.
    Recovered {
        /// The number of their queue.
        queue: usize,
        /// How many.
        requests: usize,
    },
}

/// Hears notices, on the threads of sessions. It must not block.
pub type Listener = Box<dyn Fn(Notice) + Send + Sync>;

/// Who listens; at most one.
#[derive(Default)]
pub(crate) struct Notices(OnceLock<Listener>);

impl Notices {
    /// Listens from now on; only the first one does.
    pub(crate) fn listen(&self, listener: Listener) {
        let _ = self.0.set(listener);
    }

    pub(crate) fn tell(&self, notice: Notice) {
        if let Some(listener) = self.0.get() {
            listener(notice);
        }
    }
}
