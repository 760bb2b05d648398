//! QEMU's monitor (QMP), as far as tests need it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

/// Emulation on a loaded machine is slow.
const PATIENCE: Duration = Duration::from_secs(90);

/// A connection to the monitor of one QEMU.
#[derive(Debug)]
pub struct Monitor(BufReader<UnixStream>);

impl Monitor {
    /// Connects as soon as QEMU listens on `socket` (`-qmp unix:SOCKET,server=on,wait=off`).
    pub fn connect(socket: &Path) -> Result<Self> {
        let begun = Instant::now();
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if begun.elapsed() > PATIENCE => {
                    return Err(error).context("QEMU has no monitor");
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut monitor = Self(BufReader::new(stream));
        monitor.line()?;
        monitor.ask("qmp_capabilities", "{}")?;
        Ok(monitor)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.0.read_line(&mut line).context("QEMU's monitor does not answer")?;
        ensure!(!line.is_empty(), "QEMU has ended");
        Ok(line)
    }

    /// A command with its arguments, in JSON, and what it returned.
    pub fn ask(&mut self, command: &str, arguments: &str) -> Result<String> {
        let request = format!(r#"{{"execute": "{command}", "arguments": {arguments}}}"#);
        writeln!(self.0.get_mut(), "{request}")?;
        loop {
            let line = self.line()?;
            if line.starts_with(r#"{"error""#) {
                bail!("{request}: {line}");
            }
            // Events come in between.
            if line.starts_with(r#"{"return""#) {
                return Ok(line);
            }
        }
    }

    /// Asks again and again until the answer has `wanted` in it; an error if it has `unwanted`.
    pub fn until(&mut self, command: &str, wanted: &str, unwanted: &str) -> Result<String> {
        let begun = Instant::now();
        loop {
            let answer = self.ask(command, "{}")?;
            if answer.contains(wanted) {
                return Ok(answer);
            }
            ensure!(!answer.contains(unwanted), "{command}: {answer}");
            ensure!(begun.elapsed() < PATIENCE, "{command}: no {wanted} in {answer}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
