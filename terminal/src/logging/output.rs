//! What a daemon prints on standard output: whoever does not read it keeps nobody waiting.

use anstream::{AutoStream, ColorChoice, adapter::strip_str};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

/// How long to wait for the reader.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Prints; goes on after a second at most. A reader that has gone is no failure.
pub fn print(text: &str) {
    let colored = AutoStream::choice(&io::stdout()) != ColorChoice::Never;
    let text = if colored { text.to_owned() } else { strip_str(text).to_string() };
    let (done, is_done) = sync_channel(1);
    // One that blocks for ever holds nothing but its text.
    let thread = std::thread::Builder::new().name("output".into()).spawn(move || {
        write(text.as_bytes());
        let _ = done.send(());
    });
    if thread.is_ok() {
        let _ = is_done.recv_timeout(TIMEOUT);
    }
}

fn write(mut text: &[u8]) {
    let out = rustix::stdio::stdout();
    while !text.is_empty() {
        match rustix::io::write(out, text) {
            Ok(written) => text = &text[written..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let _ = poll(&mut [PollFd::new(&out, PollFlags::OUT)], None);
            }
            Err(_) => return,
        }
    }
}
