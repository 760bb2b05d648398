//! The program under valgrind, which counts its instructions (docs/performance.md) and hides the vDSO.

mod common;

use common::{Daemon, PATIENCE, folder, ringway, serial};
use ringway_driver::Options;
use ringway_testkit::{Need, skip};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

#[test]
fn a_disk_is_served_without_the_vdso() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return skip(Need::Valgrind, "apt install valgrind");
    }
    let dir = folder();
    let program = ringway().get_program().to_owned();
    let mut command = Command::new("valgrind");
    command.args(["--tool=none", "-q"]).arg(program).current_dir(dir.path());
    // Its own calls are none that the sandbox would allow. Metrics ask for the CPU time.
    command.args(["serve", "null:1M", "--serial", "counted", "--socket", "s", "--sandbox", "off"]);
    command.args(["--metrics", "unix:m"]);
    let daemon = Daemon::start(command);
    let mut device = Options::new().patience(PATIENCE).connect(dir.path().join("s")).unwrap();
    let mut queues = device.queues::<()>().unwrap();
    assert_eq!(serial(&device, &mut queues[0]), "counted");
    let mut metrics = UnixStream::connect(dir.path().join("m")).unwrap();
    metrics.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    metrics.read_to_string(&mut page).unwrap();
    assert!(page.contains("\nprocess_cpu_seconds_total "), "{page}");
    drop((queues, device));
    daemon.stop();
}
