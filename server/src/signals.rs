//! SIGTERM and SIGINT: the first one asks to stop, the second one does not ask. SIGUSR1 asks for
//! news, SIGHUP to read the configuration again.
//!
//! The signals are blocked in every thread and read from a descriptor, so that no thread that serves
//! a queue is ever interrupted, and no handler runs anywhere.

use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Signals that do not say stop.
const NEWS: [Signal; 2] = [Signal::SIGUSR1, Signal::SIGHUP];

/// The signals of this process, not listened to yet.
pub(crate) struct Signals {
    stop: SignalFd,
    news: SignalFd,
    /// Rung by the first signal that says stop.
    stopped: OwnedFd,
}

impl Signals {
    /// Holds those back that are no wish to stop, until somebody [listens](Self::listen): before that
    /// they would end the process. For the first thread, first of all. A write beyond the limit of file
    /// sizes (`ulimit -f`) fails from now on, in processes that are started as well: it would end the
    /// process, with all of its disks, and each one that tries that request again.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn hold_news() -> io::Result<()> {
        // SAFETY: no handler runs.
        unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) }?;
        let news: SigSet = NEWS.into_iter().collect();
        Ok(news.thread_block()?)
    }

    /// Takes the signals over. Only from the first thread, before there is another: those that start
    /// later inherit that they are blocked.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn take() -> io::Result<Self> {
        let take = |signals: &[Signal]| -> nix::Result<SignalFd> {
            let set: SigSet = signals.iter().copied().collect();
            set.thread_block()?;
            SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC)
        };
        Ok(Self {
            stop: take(&[Signal::SIGTERM, Signal::SIGINT])?,
            news: take(&NEWS)?,
            stopped: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Listens, on a thread for each kind. `news` is called with each SIGUSR1, `again` with
    /// each SIGHUP. If not `alone`, somebody
    /// else says when to stop: the first SIGTERM or SIGINT is for that one, too, and goes unheard.
    ///
    /// The descriptor becomes readable, and stays so, with the first SIGTERM or SIGINT. The second one
    /// ends the process at once with 128 plus its number.
    ///
    /// # Errors
    /// What the host says.
    pub(crate) fn listen(
        self,
        alone: bool,
        news: impl Fn() + Send + 'static,
        again: impl Fn() + Send + 'static,
    ) -> io::Result<Arc<OwnedFd>> {
        let stop = Arc::new(self.stopped);
        let event = Arc::clone(&stop);
        let signals = self.stop;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            let mut asked = false;
            while let Some(signal) = next(&signals) {
                if asked {
                    // SAFETY: ends the process; nothing of it has to be put in order.
                    unsafe { libc::_exit(128 + signal) };
                }
                asked = true;
                if !alone {
                    continue;
                }
                tracing::info!(
                    "stopping once all requests in flight are done; a second signal ends at once"
                );
                // One write can not fill the counter.
                let _ = rustix::io::write(&*event, &1u64.to_ne_bytes());
            }
        })?;
        let signals = self.news;
        std::thread::Builder::new().name("usr1".into()).spawn(move || {
            while let Some(signal) = next(&signals) {
                match signal {
                    libc::SIGHUP => again(),
                    _ => news(),
                }
            }
        })?;
        Ok(stop)
    }
}

/// Waits for one: its number.
fn next(signals: &SignalFd) -> Option<i32> {
    loop {
        match signals.read_signal() {
            Ok(Some(signal)) => return i32::try_from(signal.ssi_signo).ok(),
            Ok(None) | Err(nix::Error::EINTR) => {}
            Err(error) => {
                tracing::error!("signals cannot be read any more: {error}");
                return None;
            }
        }
    }
}
