//! `ringway ctl events`: prints what the daemon tells, line by line.

use crate::happened::words;
use anyhow::{Context, bail};
use ringway_control::protocol::Event;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Prints the events that come on a connection to the daemon at `path`, until that ends, or nobody reads any
/// more: as they are, or for `people`.
///
/// # Errors
/// One message: the daemon has ended.
pub(super) fn print(
    path: &Path,
    mut lines: BufReader<UnixStream>,
    people: bool,
) -> anyhow::Result<()> {
    let mut line = Vec::new();
    let mut out = std::io::stdout().lock();
    loop {
        line.clear();
        let got = lines.read_until(b'\n', &mut line);
        if got.with_context(|| path.display().to_string())? == 0 {
            bail!("{}: the daemon has ended", path.display());
        }
        // What a later daemon tells in another form is printed as it is.
        let event = serde_json::from_slice(&line).ok().filter(|_| people);
        let text = event.map_or_else(|| line.clone(), |event| in_words(event).into_bytes());
        match out.write_all(&text).and_then(|()| out.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            written => written.context("cannot write to standard output")?,
        }
    }
}

/// `2026-01-01 12:00:00  vm1.img  resized: from 10 GiB to 20 GiB; guest told: yes`
fn in_words(event: Event) -> String {
    let time = local_time(event.time_us / 1_000_000);
    let of = event.image.unwrap_or("the daemon".into());
    let (what, _, more) = words(event.happened);
    let more = if more.is_empty() { more } else { format!(": {more}") };
    // Images may have any name: nothing that a terminal would obey.
    let line = format!("{time}  {of}  {what}{more}").replace(char::is_control, "?");
    line + "\n"
}

/// Seconds since 1970, as clocks on the wall here show them.
fn local_time(seconds: u64) -> String {
    let seconds = libc::time_t::try_from(seconds).unwrap_or_default();
    let mut tm = std::mem::MaybeUninit::<libc::tm>::zeroed();
    // SAFETY: both are places of these types, and all zeroes are a `tm`, should it fail.
    let tm = unsafe {
        libc::localtime_r(&raw const seconds, tm.as_mut_ptr());
        tm.assume_init()
    };
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        tm.tm_year + 1900,
        tm.tm_mon + 1,
        tm.tm_mday,
        tm.tm_hour,
        tm.tm_min,
        tm.tm_sec
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_one_line_of_words() {
        let event = |fields: serde_json::Value| -> Event {
            let mut event = json!({"version": 1, "number": 9, "time_us": 1_767_225_600_000_000u64});
            let all = event.as_object_mut().unwrap();
            all.extend(fields.as_object().unwrap().clone());
            serde_json::from_value(event).unwrap()
        };
        let line = in_words(event(json!({"id": 3, "image": "a\u{1b}[2J", "event": "paused"})));
        // The first second of 2026, or the last ones before it, as zones have it.
        assert!(line.starts_with("2025-12-31 ") || line.starts_with("2026-01-01 "), "{line}");
        assert!(line.ends_with("  a?[2J  paused\n"), "{line}");
        let limits = json!({"iops": 500});
        let changed = json!({"event": "limits-changed", "limits": limits, "limit_group": "gold"});
        let line = in_words(event(changed));
        assert!(line.ends_with("  the daemon  limits changed: group gold: iops 500\n"), "{line}");
    }
}
