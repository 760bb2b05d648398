//! What workers have promised to tell the watchdog.

use ringway_disk::EngineKind;
use ringway_export::Findings;
use std::sync::mpsc::Receiver;

/// A worker, by engine and number.
pub(crate) type WorkerId = (EngineKind, usize);

/// What a worker has promised to tell.
pub(crate) type Promise = Receiver<Findings>;

/// Whether a worker is_pending an answer.
pub(crate) type IsPending<'a> = &'a dyn Fn(WorkerId) -> bool;

/// Of all that were asked.
pub(crate) type Promises = Vec<(WorkerId, Promise)>;
