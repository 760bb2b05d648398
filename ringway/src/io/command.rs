//! The commands, and how they are carried out.

use super::dump::Dump;
use super::medium::Medium;
use super::pattern::{Difference, Pattern};
use clap::error::ErrorKind;
use clap::{Args, Parser};
use ringway_bench::seconds;
use ringway_control::size::Size;
use ringway_terminal::reasons::in_full;
use std::time::{Duration, Instant};

/// One line of a script, or typed.
#[derive(Debug, Parser)]
#[command(
    no_binary_name = true,
    name = "",
    disable_version_flag = true,
    max_term_width = 80,
    help_template = "{subcommands}\n\nSizes and offsets: 512, 64K, 1M, 2G. Patterns: a byte, or \
                     `place`, which depends\non offset and seed.\n"
)]
pub(crate) enum Command {
    /// Read; with -P check what was read, with -v show it.
    #[command(visible_alias = "r")]
    Read {
        #[command(flatten)]
        range: Range,
        /// What must be there: a byte, `place` or `place:SEED`.
        #[arg(short = 'P', value_name = "PATTERN")]
        pattern: Option<Pattern>,
        /// Show the bytes.
        #[arg(short)]
        verbose: bool,
    },
    /// Write a pattern.
    #[command(visible_alias = "w")]
    Write {
        #[command(flatten)]
        range: Range,
        /// A byte, `place` or `place:SEED`.
        #[arg(short = 'P', value_name = "PATTERN", default_value = "0xcd")]
        pattern: Pattern,
    },
    /// Read and check.
    #[command(visible_alias = "v")]
    Verify {
        #[command(flatten)]
        range: Range,
        /// A byte, `place` or `place:SEED`.
        #[arg(short = 'P', value_name = "PATTERN", default_value = "0xcd")]
        pattern: Pattern,
    },
    /// Make zero, without moving data (write-zeroes).
    #[command(visible_aliases = ["z", "write-zeroes"])]
    Zero {
        #[command(flatten)]
        range: Range,
        /// The space may be freed.
        #[arg(short)]
        unmap: bool,
    },
    /// Say that the bytes are no longer needed.
    #[command(visible_alias = "d")]
    Discard {
        #[command(flatten)]
        range: Range,
    },
    /// Make all writes so far durable.
    #[command(visible_alias = "f")]
    Flush,
    /// Show the serial number.
    Id,
    /// Show kind and size.
    Info,
    /// Wait.
    Sleep {
        /// For how long: 100ms, 2s, 1m; a number alone is milliseconds.
        #[arg(value_name = "TIME", value_parser = pause)]
        time: Duration,
    },
    /// End.
    #[command(visible_aliases = ["q", "exit"])]
    Quit,
}

/// Bytes of the disk.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Range {
    /// First byte.
    offset: Size,
    /// How many.
    length: Size,
}

/// Why a line was not carried out.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Help was asked for; here it is.
    Help(String),
    /// No such command, or wrong arguments.
    Usage(String),
    /// It failed.
    Failed(anyhow::Error),
    /// Data were not those expected.
    Differs(Difference, u64),
}

impl Failure {
    /// The exit status of the program.
    pub(crate) fn status(&self) -> u8 {
        match self {
            Self::Help(_) => 0,
            Self::Usage(_) => 2,
            Self::Failed(_) => 1,
            Self::Differs(..) => 3,
        }
    }

    /// In words.
    pub(crate) fn error(&self) -> anyhow::Error {
        match self {
            Self::Help(text) | Self::Usage(text) => anyhow::anyhow!("{}", text.trim_end()),
            Self::Failed(error) => anyhow::anyhow!(in_full(error)),
            Self::Differs(Difference { at, wanted, found, count }, len) => anyhow::anyhow!(
                "byte {at} is {found:#04x} where {wanted:#04x} was expected; {count} of {len} bytes \
                 differ"
            ),
        }
    }
}

/// What comes after a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    GoOn,
    Quit,
}

/// How long to wait; scripts of before say milliseconds by a number alone.
fn pause(word: &str) -> Result<Duration, String> {
    word.parse().map(Duration::from_millis).or_else(|_| seconds(word))
}

/// The command of a line; `None` if it is empty or a comment.
pub(crate) fn parse(line: &str) -> Result<Option<Command>, Failure> {
    let line = line.split('#').next().unwrap_or_default();
    let words: Vec<_> = line.split_whitespace().collect();
    if words.is_empty() {
        return Ok(None);
    }
    match Command::try_parse_from(words) {
        Ok(command) => Ok(Some(command)),
        Err(error) => {
            let text = error.to_string();
            Err(match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                    Failure::Help(text)
                }
                _ => {
                    // The first paragraph says what is wrong; the rest is about a program.
                    let what = text.trim_start_matches("error: ").split("\n\n").next();
                    Failure::Usage(what.unwrap_or_default().to_owned())
                }
            })
        }
    }
}

/// A disk and how much to say of it.
#[derive(Debug)]
pub(crate) struct Session {
    medium: Medium,
    quiet: bool,
}

impl Session {
    pub(crate) fn new(medium: Medium, quiet: bool) -> Self {
        Self { medium, quiet }
    }

    pub(crate) fn medium(&self) -> &Medium {
        &self.medium
    }

    /// Carries out a line.
    pub(crate) fn line(&mut self, line: &str) -> Result<Next, Failure> {
        let command = match parse(line) {
            Err(Failure::Help(text)) => {
                say(text.trim_end()).map_err(Failure::Failed)?;
                return Ok(Next::GoOn);
            }
            parsed => parsed?,
        };
        let Some(command) = command else { return Ok(Next::GoOn) };
        self.carry_out(command)
    }

    fn carry_out(&mut self, command: Command) -> Result<Next, Failure> {
        let begin = Instant::now();
        let medium = &mut self.medium;
        let (word, range) = match command {
            Command::Read { range, pattern, verbose } => {
                self.read(range, pattern, verbose)?;
                ("read", Some(range))
            }
            Command::Verify { range, pattern } => {
                self.read(range, Some(pattern), false)?;
                ("verified", Some(range))
            }
            Command::Write { range, pattern } => {
                let (Size(offset), Size(len)) = (range.offset, range.length);
                let fill = |at, bytes: &mut [u8]| pattern.fill(at, bytes);
                medium.write(offset, len, fill).map_err(Failure::Failed)?;
                ("wrote", Some(range))
            }
            Command::Zero { range, unmap } => {
                let (Size(offset), Size(len)) = (range.offset, range.length);
                medium.zero(offset, len, unmap).map_err(Failure::Failed)?;
                ("zeroed", Some(range))
            }
            Command::Discard { range } => {
                let (Size(offset), Size(len)) = (range.offset, range.length);
                medium.discard(offset, len).map_err(Failure::Failed)?;
                ("discarded", Some(range))
            }
            Command::Flush => {
                medium.flush().map_err(Failure::Failed)?;
                ("flushed", None)
            }
            Command::Id => {
                medium.id().and_then(|id| say(&id)).map_err(Failure::Failed)?;
                return Ok(Next::GoOn);
            }
            Command::Info => {
                say(&medium.facts()).map_err(Failure::Failed)?;
                return Ok(Next::GoOn);
            }
            Command::Sleep { time } => {
                std::thread::sleep(time);
                return Ok(Next::GoOn);
            }
            Command::Quit => return Ok(Next::Quit),
        };
        if !self.quiet {
            say(&report(word, range, begin.elapsed())).map_err(Failure::Failed)?;
        }
        Ok(Next::GoOn)
    }

    fn read(&mut self, range: Range, want: Option<Pattern>, show: bool) -> Result<(), Failure> {
        let (Size(offset), Size(len)) = (range.offset, range.length);
        let (mut dump, mut differs) = (Dump::default(), None::<Difference>);
        let read = self.medium.read(offset, len, |at, bytes| {
            if show {
                say(dump.lines(at, bytes).trim_end())?;
            }
            if let Some(found) = want.and_then(|pattern| pattern.check(at, bytes)) {
                differs.get_or_insert(Difference { count: 0, ..found }).count += found.count;
            }
            Ok(())
        });
        read.map_err(Failure::Failed)?;
        differs.map_or(Ok(()), |differs| Err(Failure::Differs(differs, len)))
    }
}

fn report(word: &str, range: Option<Range>, took: Duration) -> String {
    let ms = took.as_secs_f64() * 1e3;
    let Some(Range { offset: Size(offset), length }) = range else {
        return format!("{word}  {ms:.3} ms");
    };
    let rate = length.0 as f64 / took.as_secs_f64().max(1e-9);
    // Far below 2^64.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let rate = Size(rate as u64);
    format!("{word} {length} at {offset}  {ms:.3} ms  {rate}/s")
}

/// Prints a line, if there is one.
///
/// # Errors
/// As of [`ringway_terminal::output::print`].
pub(crate) fn say(line: &str) -> anyhow::Result<()> {
    if line.is_empty() { Ok(()) } else { ringway_terminal::output::print(&format!("{line}\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_language_is_sound() {
        Command::command().debug_assert();
        assert!(matches!(parse("  # nothing"), Ok(None)));
        assert!(matches!(parse("w -P 7 1M 4K # all"), Ok(Some(Command::Write { .. }))));
        assert!(matches!(parse("help write"), Err(Failure::Help(_))));
        for line in ["wrote 0 1", "read 0", "read x 1", "write -P 256 0 1", "flush 1"] {
            let Err(Failure::Usage(text)) = parse(line) else { panic!("{line}") };
            assert!(!text.is_empty() && !text.contains("Usage"), "{text}");
        }
    }
}
