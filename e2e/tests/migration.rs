//! QEMU migrates a machine whose disk is served here to a second QEMU on the same host. The
//! machine has no more than its firmware, which looks for something to boot on the disk: that is a
//! virtio-blk driver, too, and it needs no guest image.
#![allow(missing_docs)]

use ringway_disk::{EngineKind, Source};
use ringway_testkit::rig::{Rig, RigOptions};
use ringway_testkit::{Need, skip};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Emulation on a loaded machine is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// A QEMU of the oldest kind there is. Dropping it ends it.
struct Machine {
    child: Child,
    monitor: BufReader<UnixStream>,
}

impl Machine {
    /// Starts it with the disk at `socket`; `None` if there is no QEMU.
    fn start(
        folder: &Path,
        name: &str,
        socket: &Path,
        packed: bool,
        more: &[&str],
    ) -> Option<Self> {
        let monitor = folder.join(format!("{name}.qmp"));
        let packed = if packed { "on" } else { "off" };
        let child = Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg", "-m", "64M", "-display", "none", "-nodefaults"])
            .args(["-object", "memory-backend-memfd,id=mem,size=64M,share=on"])
            .args(["-machine", "pc,memory-backend=mem", "-chardev"])
            .arg(format!("socket,id=disk0,path={}", socket.display()))
            .arg("-device")
            .arg(format!("vhost-user-blk-pci,chardev=disk0,num-queues=1,packed={packed}"))
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .args(more)
            .stdin(Stdio::null())
            .spawn()
            .ok()?;
        let mut machine = Self { child, monitor: BufReader::new(UnixStream::pair().unwrap().0) };
        let begun = Instant::now();
        let stream = loop {
            if let Ok(stream) = UnixStream::connect(&monitor) {
                break stream;
            }
            assert_eq!(machine.child.try_wait().unwrap(), None, "{name} has ended");
            assert!(begun.elapsed() < PATIENCE, "{name} has no monitor");
            std::thread::sleep(Duration::from_millis(10));
        };
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        machine.monitor = BufReader::new(stream);
        machine.line();
        machine.ask(r#"{"execute": "qmp_capabilities"}"#);
        Some(machine)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.monitor.read_line(&mut line).expect("the monitor answers");
        assert!(!line.is_empty(), "QEMU has ended");
        line
    }

    /// A command of the monitor, and its answer.
    fn ask(&mut self, command: &str) -> String {
        writeln!(self.monitor.get_mut(), "{command}").unwrap();
        loop {
            let line = self.line();
            assert!(!line.starts_with(r#"{"error""#), "{command}: {line}");
            // Events come in between.
            if line.starts_with(r#"{"return""#) {
                return line;
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until `rig` has been asked for more than `before` requests; returns how many.
fn requests(rig: &Rig, before: u64) -> u64 {
    let begun = Instant::now();
    loop {
        let now = rig.stats().iter().map(|worker| worker.requests).sum();
        if now > before {
            return now;
        }
        assert!(begun.elapsed() < PATIENCE, "no request of the firmware");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn a_machine_is_migrated(packed: bool) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let options = || {
        let source = Source::Null { bytes: 1 << 30, latency_us: 0 };
        RigOptions::new(source, EngineKind::Null)
    };
    let (mut here, mut there) = (Rig::start(&options()), Rig::start(&options()));
    here.listen(&path("here"));
    there.listen(&path("there"));
    let incoming = format!("unix:{}", path("migration").display());
    let machine =
        |name: &str, more: &[&str]| Machine::start(folder.path(), name, &path(name), packed, more);
    let Some(mut source) = machine("here", &[]) else {
        return skip(Need::Qemu, "apt install qemu-system-x86");
    };
    let mut target = machine("there", &["-incoming", &incoming]).expect("a second QEMU");
    requests(&here, 0);
    // Refused by QEMU if the back-end cannot log what it writes.
    source.ask(&format!(r#"{{"execute": "migrate", "arguments": {{"uri": "{incoming}"}}}}"#));
    let begun = Instant::now();
    loop {
        let answer = source.ask(r#"{"execute": "query-migrate"}"#);
        assert!(!answer.contains(r#""status": "failed""#), "{answer}");
        if answer.contains(r#""status": "completed""#) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{answer}");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(source);
    assert!(target.ask(r#"{"execute": "query-status"}"#).contains("running"));
    // The firmware starts over on the other side and finds its disk.
    let before = there.stats().iter().map(|worker| worker.requests).sum();
    target.ask(r#"{"execute": "system_reset"}"#);
    requests(&there, before);
}

#[test]
fn a_machine_with_a_split_ring_is_migrated() {
    a_machine_is_migrated(false);
}

#[test]
fn a_machine_with_a_packed_ring_is_migrated() {
    a_machine_is_migrated(true);
}
