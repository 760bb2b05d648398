//! Where the process of one disk begins.

use super::inside::Inside;
use super::mouth::Mouth;
use super::process::{Ear, hear};
use super::protocol::{FromProcess, ProcessSetup};
use crate::bell::event;
use crate::connection::Connection;
use crate::daemon::Daemon;
use crate::endpoint::inherited;
use crate::hung::Hung;
use anyhow::{Context, anyhow};
use ringway_control::log::LogArgs;
use ringway_terminal::logging;
use ringway_terminal::reasons::in_full;
use std::io::BufReader;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

/// Serves one disk as a daemon says, by the inherited line `fd`.
///
/// # Errors
/// What has ended it.
pub(crate) fn run(fd: i32, log: &LogArgs) -> anyhow::Result<ExitCode> {
    let stream = inherited(fd).context("--isolated is for processes that a daemon starts")?;
    let _ = rustix::thread::set_name(c"ringway-disk");
    // Nobody gives it up from this side.
    let line = Arc::new(Connection::new(stream.into(), Arc::new(event()?))?);
    let mut ear = BufReader::new(Ear(Arc::clone(&line)));
    let Some(setup) = hear::<ProcessSetup>(&mut ear)? else { return Ok(ExitCode::FAILURE) };
    logging::start(log, setup.log_format, setup.log_level);
    logging::serve_guests();
    logging::tell_panics();
    let (name, commanded, sampled) = (setup.name.clone(), setup.commanded, setup.sampled);
    let mouth = Arc::new(Mouth(Mutex::new(line)));
    let (added, files) = (setup.added, setup.files.clone());
    let inside = Inside { name, added, commanded, sampled, files, ear, mouth: Arc::clone(&mouth) };
    let start = || {
        let plan = setup.into_plan()?;
        let polling = plan.daemon.polling().map_err(|(_, error)| anyhow!(error))?;
        // Who has started it has looked at its files.
        Daemon::start(plan, &Hung::default(), polling, None, Some(inside), &LogArgs::default())
    };
    let daemon = match start() {
        Ok(daemon) => daemon,
        Err(error) => {
            mouth.say(&FromProcess::Failed(in_full(&error)));
            return Ok(ExitCode::FAILURE);
        }
    };
    daemon.run()
}
