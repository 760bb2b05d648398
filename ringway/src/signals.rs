//! SIGTERM and SIGINT: the first one asks to stop, the second one does not ask. SIGUSR1 asks for
//! news.

use rustix::event::{EventfdFlags, eventfd};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use signal_hook::low_level;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A descriptor that becomes readable, and stays so, with the first SIGTERM or SIGINT. The second
/// one ends the process at once with 128 plus its number.
///
/// # Errors
/// What the host says.
pub(crate) fn stop_event() -> io::Result<Arc<OwnedFd>> {
    let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let event = Arc::clone(&stop);
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut asked = false;
        for signal in &mut signals {
            if asked {
                low_level::exit(128 + signal);
            }
            asked = true;
            tracing::info!(
                "stopping once all requests in flight are done; a second signal ends at once"
            );
            // One write can not fill the counter.
            let _ = rustix::io::write(&*event, &1u64.to_ne_bytes());
        }
    })?;
    Ok(stop)
}

/// Does `act` with each SIGUSR1, on a thread of its own.
///
/// # Errors
/// What the host says.
pub(crate) fn on_usr1(act: impl Fn() + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new([SIGUSR1])?;
    std::thread::Builder::new().name("usr1".into()).spawn(move || {
        for _ in &mut signals {
            act();
        }
    })?;
    Ok(())
}
