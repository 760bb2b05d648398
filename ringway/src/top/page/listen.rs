//! Listens to the events of a daemon, on a thread of its own, and anew when the daemon is back.

use crate::ctl;
use ringway_control::protocol::{Event, Problem};
use std::io::{self, BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// How long to wait before a daemon that has ended is looked for again.
const AGAIN: Duration = Duration::from_millis(250);

type Lines = anyhow::Result<Result<BufReader<UnixStream>, Problem>>;

/// Tells each event of the daemon at `socket` from now on, or once why it refuses to tell them. That
/// there is no daemon is for others to tell.
///
/// # Errors
/// That the host has no thread for it.
pub(super) fn listen(
    socket: PathBuf,
    tell: impl Fn(Result<Event, String>) + Send + 'static,
) -> io::Result<()> {
    // What happens once this returns is heard.
    let first = ctl::events(&socket);
    std::thread::Builder::new().name("events".into()).spawn(move || {
        let (mut lines, mut refused): (Lines, bool) = (first, false);
        loop {
            match lines {
                Ok(Ok(lines)) => {
                    refused = false;
                    hear(lines, &tell);
                }
                Ok(Err(problem)) if !refused => {
                    refused = true;
                    tell(Err(problem.message));
                }
                Ok(Err(_)) | Err(_) => {}
            }
            std::thread::sleep(AGAIN);
            lines = ctl::events(&socket);
        }
    })?;
    Ok(())
}

/// Until the daemon ends.
fn hear(lines: BufReader<UnixStream>, tell: &impl Fn(Result<Event, String>)) {
    for line in lines.lines().map_while(Result::ok) {
        // A newer daemon may know others.
        if let Ok(event) = serde_json::from_str(&line) {
            tell(Ok(event));
        }
    }
}
