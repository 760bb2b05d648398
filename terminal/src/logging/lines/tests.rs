use super::*;
use rustix::pipe::{PipeFlags, pipe_with};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};

/// Both ends of a new pipe: what is read, and what is written.
fn pipe() -> (File, OwnedFd) {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    (reader.into(), writer)
}

fn notice(lost: u64) -> Vec<u8> {
    format!("{lost} lost\n").into_bytes()
}

/// A queue whose thread writes into a pipe of 64 KiB.
fn piped() -> (&'static Lines, File, &'static OwnedFd) {
    let (reader, writer) = pipe();
    let lines: &Lines = Box::leak(Box::new(Lines::new()));
    let writer: &OwnedFd = Box::leak(Box::new(writer));
    std::thread::spawn(|| lines.write_all(writer.as_fd(), notice));
    while lines.lock().writer != Writer::Thread {
        std::thread::yield_now();
    }
    (lines, reader, writer)
}

fn line(number: usize) -> Vec<u8> {
    format!("line {number:08}\n").into_bytes()
}

fn read_until(reader: &mut impl Read, end: &str) -> String {
    let mut text = String::new();
    let mut bytes = [0; 4096];
    while !text.ends_with(end) {
        let got = reader.read(&mut bytes).unwrap();
        assert!(got > 0, "it ended: {text}");
        text.push_str(std::str::from_utf8(&bytes[..got]).unwrap());
    }
    text
}

/// What does not fit is counted, and the count is logged where the lines are missing.
#[test]
fn e03_a_reader_that_stalls_costs_lines_and_nobody_waits() {
    let (lines, mut reader, writer) = piped();
    let many = 3 * (BYTES_MAX + (64 << 10)) / line(0).len();
    for number in 0..many {
        lines.push(line(number), writer.as_fd(), notice);
    }
    {
        let state = lines.lock();
        assert!(state.lines.len() <= LINES_MAX && state.bytes <= BYTES_MAX);
        assert!(state.lost > 0);
    }
    // A panic has room all the same.
    assert!(lines.push_last_words(b"last words\n".to_vec(), writer.as_fd(), notice));
    let text = read_until(&mut reader, " lost\n");
    let reported: Vec<&str> = text.lines().filter(|line| line.starts_with("line ")).collect();
    for (number, reported) in reported.iter().enumerate() {
        assert_eq!(*reported, line(number).trim_ascii().escape_ascii().to_string());
    }
    assert!(text.contains("last words\n"));
    assert!(
        text.ends_with(&format!("{} lost\n", many - reported.len())),
        "each is told or counted"
    );
    // And then it goes on as before.
    lines.push(b"again\n".to_vec(), writer.as_fd(), notice);
    assert_eq!(read_until(&mut reader, "\n"), "again\n");
}

/// A process that ends waits for the line that its thread is writing, too.
#[test]
fn e93_the_last_line_is_waited_for_while_it_is_written() {
    let (lines, mut reader, writer) = piped();
    let full = rustix::io::write(writer, &[b'x'; 64 << 10]).unwrap();
    lines.push(b"last\n".to_vec(), writer.as_fd(), notice);
    while !lines.lock().lines.is_empty() {
        std::thread::yield_now();
    }
    let (begun, limit) = (Instant::now(), Duration::from_millis(200));
    lines.flush(limit, writer.as_fd(), notice);
    assert!(begun.elapsed() >= limit, "it is not written yet");
    assert_eq!(read_until(&mut reader, "\n").len(), full + 5);
    lines.flush(Duration::MAX, writer.as_fd(), notice);
}

/// An attempt for each new line, a second apart; none for those that are there.
#[test]
fn e01_a_full_disk_keeps_lines_until_there_is_room() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let lines: &Lines = Box::leak(Box::new(Lines::new()));
    let full: &OwnedFd = Box::leak(Box::new(full.into()));
    std::thread::spawn(|| lines.write_all(full.as_fd(), notice));
    let failures = || lines.lock().failures;
    lines.push(line(0), full.as_fd(), notice);
    while failures() == 0 {
        std::thread::yield_now();
    }
    for number in 1..100_000 {
        lines.push(line(number), full.as_fd(), notice);
    }
    let state = lines.lock();
    assert!(state.lines.len() <= LINES_MAX && state.bytes <= BYTES_MAX);
    assert!(state.lost > 0);
    drop(state);
    // It gives up at once, having tried.
    let before = failures();
    lines.flush(Duration::from_secs(600), full.as_fd(), notice);
    assert!(failures() > before);
    assert!(!lines.lock().is_due(), "it sleeps until another line comes");
}

/// A daemon with one thread, before it starts the one that writes.
#[test]
fn whoever_logs_first_is_not_blocked_either() {
    let (mut reader, writer) = pipe();
    let lines = Lines::new();
    lines.set_writer(Writer::CallerNow);
    let many = 2 * (64 << 10) / line(0).len();
    for number in 0..many {
        lines.push(line(number), writer.as_fd(), notice);
    }
    assert!(!lines.lock().is_empty());
    let read = std::thread::spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).map(|_| text)
    });
    lines.flush(Duration::from_secs(600), writer.as_fd(), notice);
    drop(writer);
    assert_eq!(read.join().unwrap().unwrap().lines().count(), many);
}
