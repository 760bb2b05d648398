//! What a command that takes its time hears of signals.

use ringway_terminal::signals;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// From now on the first signal that asks a command to end is noted: its number, else 0. The second one
/// does not ask.
///
/// # Errors
/// What the host says.
pub(crate) fn listen() -> io::Result<Arc<AtomicUsize>> {
    let signal = Arc::new(AtomicUsize::new(0));
    for number in signals::that_end() {
        let status = 128 + number;
        let asked = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register_conditional_shutdown(number, status, Arc::clone(&asked))?;
        signal_hook::flag::register(number, asked)?;
        let value = usize::try_from(number).unwrap_or(1);
        signal_hook::flag::register_usize(number, Arc::clone(&signal), value)?;
    }
    Ok(signal)
}
