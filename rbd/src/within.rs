//! What may wait for the cluster, and for how long.

use crate::error::RbdError;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Does something that may wait for the cluster, for so long. What takes longer is left behind.
pub(crate) fn within<T: Send + 'static>(
    step: &'static str,
    most: Duration,
    act: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RbdError> {
    let (done, is_done) = sync_channel(1);
    std::thread::Builder::new().name("rbd-open".into()).spawn(move || {
        // Nobody waits any more for what came too late.
        let _ = done.send(act());
    })?;
    is_done.recv_timeout(most).map_err(|error| match error {
        RecvTimeoutError::Timeout => RbdError::Silent { step, seconds: most.as_secs() },
        RecvTimeoutError::Disconnected => {
            std::io::Error::other("a thread panicked that opens an image").into()
        }
    })
}
