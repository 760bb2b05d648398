//! Configuration files from arbitrary bytes: mostly well formed, with mistakes anywhere.
//!
//! [`check`] is one function for two uses: the corpus test below, and the target `config` of
//! cargo-fuzz.

use std::fmt::Write as _;
use std::path::Path;

/// Lines of the first table, and of a disk's. Those with `%` hold a number of the case's choice,
/// those with `$` a word, `&` the number of the disk.
const DAEMON: [&str; 16] = [
    "workers = %",
    "poll = 'adaptive'",
    "poll = 'never'",
    "poll = '$'",
    "poll-max-us = %",
    "poll-budget = %",
    "overdue = %",
    "pin-memory = true",
    "sandbox = '$'",
    "user = '$'",
    "stats = true",
    "log-format = 'json'",
    "log-level = 'warn'",
    "log-level = '$'",
    "# $",
    "$ = %",
];
const DISK: [&str; 22] = [
    "size = '%K'",
    "size = %",
    "size = '$'",
    "read-only = true",
    "serial = '$'",
    "block-size = 4096",
    "block-size = %",
    "queues = 4",
    "queues = %",
    "queue-size = 256",
    "queue-size = %",
    "engine = 'auto'",
    "engine = 'threads'",
    "engine = '$'",
    "cache = 'none'",
    "cache = 'writeback'",
    "cache = '$'",
    "socket-mode = '%'",
    "socket-group = '%'",
    "isolate = true",
    "\"serial\" = \"\"\"$\"\"\" # %",
    "$ = { a = %, b = [1, '$'] }",
];

/// What a disk's table begins with, by choice; most are plain.
const IMAGES: [&str; 10] = [
    "image = 'd&'",
    "image = 'd&'",
    "image = 'd&'",
    "image = 'd&'",
    "image = 'd&'",
    "image = 'null:1G'",
    "image = 'null:%G'",
    "image = 'null:1G,latency=%us'",
    "image = 'sim:ssd:%M'",
    "image = '$'",
];

/// What became of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A plan for so many disks.
    Plan(usize),
    /// A message.
    Refused,
}

/// The text that `data` describes.
fn text(data: &[u8]) -> String {
    let mut data = data.iter().copied();
    let mut byte = move || data.next();
    let mut text = String::new();
    let mut disks = 0;
    let mut lines: &[&str] = &DAEMON;
    while let Some(choice) = byte() {
        match choice {
            0..50 => {
                lines = &DISK;
                disks += 1;
                text.push_str("[[disk]]\n");
                put(&mut text, IMAGES[usize::from(choice % 10)], disks, &mut byte);
                let socket = if choice < 45 { "socket = 's&'" } else { "socket = '$'" };
                put(&mut text, socket, disks, &mut byte);
            }
            247..250 => {
                text.push_str("[[xen.disk]]\n");
                put(
                    &mut text,
                    ["vdev = 'xvd$'", "guest = '$'", "image = '$'"][usize::from(choice) - 247],
                    disks,
                    &mut byte,
                );
            }
            250.. => {
                // Anything at all, in the middle of anything.
                let raw: Vec<u8> = (0..choice % 6).filter_map(|_| byte()).collect();
                text.push_str(&String::from_utf8_lossy(&raw));
            }
            _ => put(&mut text, lines[usize::from(choice) % lines.len()], disks, &mut byte),
        }
    }
    text
}

/// A line, with numbers and words for its letters.
fn put(text: &mut String, line: &str, disk: u32, byte: &mut impl FnMut() -> Option<u8>) {
    for letter in line.chars() {
        match letter {
            '%' => number(text, byte),
            '$' => word(text, byte),
            '&' => text.push_str(&disk.to_string()),
            letter => text.push(letter),
        }
    }
    text.push('\n');
}

fn number(text: &mut String, byte: &mut impl FnMut() -> Option<u8>) {
    let choice = byte().unwrap_or(0);
    let number: i128 = match choice {
        0..200 => i128::from(choice % 70),
        200..230 => 1 << (choice % 64),
        230..240 => -i128::from(choice),
        240..248 => i128::from(u64::MAX) + i128::from(choice) - 244,
        _ => i128::from(u16::MAX) + i128::from(choice) - 250,
    };
    let _ = write!(text, "{number}");
}

fn word(text: &mut String, byte: &mut impl FnMut() -> Option<u8>) {
    const WORDS: [&str; 16] = [
        "",
        "a",
        "./a",
        "../a",
        "/",
        "d1",
        "s1",
        "./d2",
        "none",
        "io_uring",
        "10G",
        "1.5T",
        "null:",
        "sim:hdd",
        "é",
        "a serial of more than twenty bytes",
    ];
    match byte().unwrap_or(0) {
        choice @ 0..240 => text.push_str(WORDS[usize::from(choice) % 16]),
        choice => {
            let raw: Vec<u8> = (0..choice - 239).filter_map(|_| byte()).collect();
            text.push_str(&String::from_utf8_lossy(&raw));
        }
    }
}

/// Reads the file that `data` describes. Panics if what comes out is neither a plan that can be
/// carried out nor a message that names the file.
pub fn check(data: &[u8]) -> Outcome {
    let text = text(data);
    let path = Path::new("conf/disks.toml");
    match super::file::parse(&text, path, super::Location::of) {
        Err(message) => {
            assert!(message.contains("disks.toml"), "{message}\n{text}");
            Outcome::Refused
        }
        Ok(plan) => {
            assert!(plan.disks.is_empty() == plan.xen.is_some(), "{text}");
            assert!(plan.daemon.polling().is_ok() && plan.daemon.workers != Some(0), "{text}");
            for disk in &plan.disks {
                assert!((1..=256).contains(&disk.queues), "{text}");
                let size = disk.queue_size;
                assert!((4..=32768).contains(&size) && size.is_power_of_two(), "{text}");
                assert!(disk.origin.starts_with("conf/disks.toml, line "), "{text}");
            }
            Outcome::Plan(plan.disks.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fuzz_corpus_of_configurations_passes() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/config");
        let mut files: Vec<_> =
            std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(files.len() >= 20, "the corpus has only {} files", files.len());
        for file in files {
            println!("{}", file.display());
            check(&std::fs::read(&file).unwrap());
        }
    }

    #[test]
    fn configurations_are_mostly_valid() {
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        let (mut plans, mut refused) = (0, 0);
        for case in 0..4000 {
            let data: Vec<u8> = (0..1 + case % 12)
                .map(|_| {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    random.to_le_bytes()[4]
                })
                .collect();
            match check(&data) {
                Outcome::Plan(_) => plans += 1,
                Outcome::Refused => refused += 1,
            }
        }
        println!("{plans} plans, {refused} refused");
        assert!(plans > 200 && refused > 200);
    }
}
