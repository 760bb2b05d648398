//! `ringway nbd` with TLS: stock clients copy over it, and nobody else gets anything.
#![allow(missing_docs)]

use crate::common::{Daemon, PATIENCE, authorities, folder, ringway, run, text};
use ringway_testkit::{Need, skip};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output};

const MIB: usize = 1 << 20;

/// What a program says; `None` if it is not here.
fn stock(dir: &Path, program: &str, args: &[&str]) -> Option<Output> {
    let output = Command::new(program).args(args).current_dir(dir).output();
    if output.is_err() {
        skip(if program.starts_with("qemu") { Need::Qemu } else { Need::Nbd }, program);
    }
    output.ok()
}

fn well(dir: &Path, program: &str, args: &[&str]) -> Option<String> {
    let output = stock(dir, program, args)?;
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {said}");
    Some(said)
}

const WITH_TLS: [&str; 8] = [
    "disk.img",
    "--listen",
    "127.0.0.1:0",
    "--tls-cert",
    "server-cert.pem",
    "--tls-key",
    "server-key.pem",
    "--export=d",
];

/// A folder with certificates and a disk; `None` if there is no program to make them.
fn with_certificates() -> Option<tempfile::TempDir> {
    let dir = folder();
    if !authorities(dir.path()) {
        skip(Need::Nbd, "openssl");
        return None;
    }
    let content: Vec<u8> = (0..1u32 << 20).flat_map(u32::to_le_bytes).collect();
    std::fs::write(dir.path().join("from.img"), content).unwrap();
    std::fs::write(dir.path().join("disk.img"), vec![0; 4 * MIB]).unwrap();
    Some(dir)
}

/// Serves; the daemon, and its port.
fn serve(dir: &Path, more: &[&str]) -> (Daemon, u16) {
    let mut command = ringway();
    command.arg("nbd").args(WITH_TLS).args(more).current_dir(dir);
    let mut daemon = Daemon::start(command);
    let mut message = daemon.ready.clone();
    let mut goes_on = true;
    while goes_on && !message.contains("nbds://") {
        let line = daemon.next_line();
        goes_on = !line.is_empty();
        message += &line;
    }
    let uri = message.split_whitespace().find(|word| word.starts_with("nbds://")).expect("a URI");
    let port = uri.trim_end_matches("/d").rsplit(':').next().unwrap().parse().unwrap();
    (daemon, port)
}

#[test]
fn stock_clients_copy_over_tls_and_plain_ones_get_nothing() {
    let Some(dir) = with_certificates() else { return };
    let dir = dir.path();
    for (more, folder) in [(&[][..], "bare"), (&["--tls-ca", "ca-cert.pem"], "full")] {
        let (daemon, port) = serve(dir, more);
        let at = dir.join(folder);
        let uri = format!("nbds://localhost:{port}/d?tls-certificates={}", at.display());
        if well(dir, "nbdcopy", &["--connections=4", "from.img", &uri]).is_none() {
            return;
        }
        well(dir, "nbdcopy", &["--connections=2", &uri, "back.img"]);
        let [from, back] = ["from.img", "back.img"].map(|name| std::fs::read(dir.join(name)));
        assert!(from.unwrap() == back.unwrap(), "{folder}");
        let creds = format!("tls-creds-x509,id=t,endpoint=client,dir={folder}");
        let image = format!("driver=nbd,host=localhost,port={port},tls-creds=t,export=d");
        let args = ["compare", "--object", &creds, "--image-opts", &image];
        well(dir, "qemu-img", &[&args[..], &["driver=file,filename=from.img"]].concat());
        // In plain, for another authority, or without a certificate where one is asked for.
        let plain = format!("nbd://localhost:{port}/d");
        let wrong = uri.replace(folder, "wrong");
        let bare = uri.replace(folder, "bare");
        let refused = [Some(plain), Some(wrong), (folder == "full").then_some(bare)];
        for uri in refused.iter().flatten() {
            let output = stock(dir, "nbdinfo", &["--size", uri]).unwrap();
            assert!(!output.status.success(), "{uri}: {}", text(&output.stdout));
        }
        well(dir, "nbdinfo", &["--size", &uri]);
        daemon.stop();
    }
}

/// Says what begins a handshake, and asks for TLS.
fn ask_for_tls(port: u16) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0").unwrap();
    let mut answer = [0; 20];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[8..], *b"\0\0\0\x05\0\0\0\x01\0\0\0\0");
    stream
}

/// What is no TLS after STARTTLS, among it an option in plain that somebody has slipped in, ends the
/// connection; others are served.
#[test]
fn d13_what_is_no_tls_ends() {
    let Some(dir) = with_certificates() else { return };
    let (daemon, port) = serve(dir.path(), &[]);
    let option = b"IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";
    let huge_record = [&b"\x16\x03\x01\xff\xff"[..], &[0; 70_000]].concat();
    for garbage in [&option[..], &[0x80; 4096], &huge_record, b"\x16\x03\x01"] {
        let mut stream = ask_for_tls(port);
        // It may have been left in the middle.
        let _ = stream.write_all(garbage);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut message = Vec::new();
        let _ = stream.read_to_end(&mut message);
        // At most an alert.
        assert!(message.len() <= 64 && !message.starts_with(b"\0\x03\xe8\x89"), "{message:?}");
    }
    let _silent: Vec<_> = (0..8).map(|_| ask_for_tls(port)).collect();
    let at = dir.path().join("bare");
    let uri = format!("nbds://localhost:{port}/d?tls-certificates={}", at.display());
    well(dir.path(), "nbdinfo", &["--size", &uri]);
    daemon.stop();
}

#[test]
fn wrong_files_are_told_by_their_names() {
    let Some(dir) = with_certificates() else { return };
    let dir = dir.path();
    std::fs::write(dir.join("empty.pem"), "").unwrap();
    for (cert, key, ca, fragment) in [
        ("none.pem", "server-key.pem", "ca-cert.pem", "none.pem: No such file"),
        ("empty.pem", "server-key.pem", "ca-cert.pem", "empty.pem: there is no CERTIFICATE"),
        ("server-cert.pem", "empty.pem", "ca-cert.pem", "empty.pem: there is no PRIVATE KEY"),
        ("server-cert.pem", "client-key.pem", "ca-cert.pem", "client-key.pem: "),
        ("server-cert.pem", "server-key.pem", "server-key.pem", "server-key.pem: there is no CERT"),
    ] {
        let mut command = ringway();
        command.args(["nbd", "disk.img", "--listen", "unix:n", "--tls-cert", cert]);
        command.args(["--tls-key", key, "--tls-ca", ca]).current_dir(dir);
        let output = run(command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(fragment), "{fragment}: {said}");
        assert!(!dir.join("n").exists());
    }
}
