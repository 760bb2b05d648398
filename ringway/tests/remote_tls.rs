//! Disks of NBD servers over TLS, from outside: row F14 of docs/hazards.md, with stock servers and our own.

use crate::common::guest::wait_for as until;
use crate::common::nbd::{Server, server};
use crate::common::{Daemon, PATIENCE, authorities, folder, ringway, run, text};
use ringway_driver::{BlkQueue, Device, Options};
use ringway_testkit::{Need, skip};
use std::net::TcpListener;
use std::path::Path;

const MIB: usize = 1 << 20;

/// A folder with certificates and a disk; `None` if there is no program to make them.
fn with_certificates() -> Option<tempfile::TempDir> {
    let dir = folder();
    if !authorities(dir.path()) {
        skip(Need::Nbd, "openssl");
        return None;
    }
    let content: Vec<u8> = (0..1u32 << 20).flat_map(u32::to_le_bytes).collect();
    std::fs::write(dir.path().join("disk.img"), content).unwrap();
    Some(dir)
}

fn export(dir: &Path, folder: &str) -> String {
    let here = dir.display();
    format!("nbds+unix:///d?socket={here}/n.sock&tls-certificates={here}/{folder}")
}

const NBDKIT: &[&str] =
    &["-f", "-U", "n.sock", "--tls=require", "--tls-certificates=server", "file", "disk.img"];
const QEMU_NBD: &[&str] = &[
    "-t",
    "-f",
    "raw",
    "-k",
    "DIR/n.sock",
    "-x",
    "d",
    "--object",
    "tls-creds-x509,id=t,endpoint=server,dir=server,verify-peer=on",
    "--tls-creds",
    "t",
    "disk.img",
];
const OURS: &[&str] = &[
    "nbd",
    "disk.img",
    "--format",
    "raw",
    "--listen",
    "unix:n.sock",
    "--export",
    "d",
    "--tls-cert",
    "server/server-cert.pem",
    "--tls-key",
    "server/server-key.pem",
];

/// Servers with their words, and what of this client they want.
fn servers() -> Vec<(&'static str, Vec<&'static str>, &'static str)> {
    vec![
        ("nbdkit", NBDKIT.into(), "bare"),
        ("nbdkit", [&["--tls-verify-peer"], NBDKIT].concat(), "full"),
        ("qemu-nbd", QEMU_NBD.into(), "full"),
        ("ringway", OURS.into(), "bare"),
        ("ringway", [OURS, &["--tls-ca", "ca-cert.pem"]].concat(), "full"),
    ]
}

fn start(dir: &Path, program: &str, args: &[&str]) -> Option<Server> {
    let args: Vec<_> = args.iter().map(|a| a.replace("DIR", dir.to_str().unwrap())).collect();
    server(dir, program, &args.iter().map(String::as_str).collect::<Vec<_>>())
}

fn connect(dir: &Path) -> Device {
    let options = Options::new().queues(1).patience(PATIENCE).reconnect(PATIENCE);
    options.memory(8 << 20).connect(dir.join("s")).unwrap()
}

fn said(dir: &Path, args: &[&str]) -> (bool, String) {
    let mut command = ringway();
    command.args(args).current_dir(dir);
    let output = run(command);
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn f14_each_server_is_reached_over_tls_and_reached_again() {
    let Some(dir) = with_certificates() else { return };
    let dir = dir.path();
    for (program, args, folder) in servers() {
        let content = std::fs::read(dir.join("disk.img")).unwrap();
        let Some(first) = start(dir, program, &args) else { continue };
        let export = export(dir, folder);
        let (well, message) = said(dir, &["copy", "--force", "--verify", &export, "b.img"]);
        assert!(well, "{program} {folder}: {message}");
        assert!(std::fs::read(dir.join("b.img")).unwrap() == content, "{program} {folder}");
        let args_of_disk = [&export, "--socket", "s", "--cache", "writethrough"];
        let daemon = Daemon::serve(dir, &args_of_disk);
        let mut device = connect(dir);
        let mut queue: BlkQueue<()> = device.queue().unwrap();
        assert!(crate::common::write(&device, &mut queue, 3, 7), "{}", daemon.log());
        drop(first);
        let _second = start(dir, program, &args);
        assert!(crate::common::write(&device, &mut queue, 5, 9), "{}", daemon.log());
        assert_eq!(crate::common::read(&device, &mut queue, 3), [7; 512]);
        queue.flush(()).unwrap();
        assert!(crate::common::finish(&mut queue).0, "{}", daemon.log());
        until("that is told", || daemon.log().contains("connected to the NBD server again"));
        drop((queue, device));
        daemon.stop();
        let now = std::fs::read(dir.join("disk.img")).unwrap();
        assert!(
            now[3 * 512..][..512] == [7; 512] && now[5 * 512..][..512] == [9; 512],
            "{program}"
        );
        assert_eq!(now.len(), 4 * MIB);
    }
}

/// Nobody but the helper process has the client's key: not the daemon, whose workers carry data.
#[test]
fn f14_keys_stay_with_the_helper_process() {
    let Some(dir) = with_certificates() else { return };
    let dir = dir.path();
    let args = [&["--tls-verify-peer"], NBDKIT].concat();
    let Some(_server) = start(dir, "nbdkit", &args) else { return };
    let daemon = Daemon::serve(dir, &[&export(dir, "full"), "--socket", "s"]);
    let names =
        |pid| -> Vec<String> { crate::common::threads(pid).iter().map(|t| t.name()).collect() };
    let carries = |pid| names(pid).iter().any(|name| name == "nbd-tls");
    assert!(!carries(daemon.pid()), "{:?}", names(daemon.pid()));
    until("a thread carries TLS", || {
        crate::common::children(daemon.pid()).into_iter().any(carries)
    });
    daemon.stop();
}

#[test]
fn f14_what_is_wrong_with_tls_is_told() {
    let Some(dir) = with_certificates() else { return };
    let dir = dir.path();
    let fails = |image: &str, wanted: &str| {
        let (well, message) = said(dir, &["info", image]);
        assert!(!well && message.contains(wanted), "{image}: {message}");
    };
    {
        let Some(_server) = start(dir, "nbdkit", NBDKIT) else { return };
        fails(&export(dir, "wrong"), "not of an authority in");
        fails(&(export(dir, "bare") + "&tls-hostname=vm.example"), "is not for 'vm.example'");
        fails(
            &(export(dir, "bare") + "&tls-hostname=a b"),
            "no name that a certificate could have",
        );
        fails(&export(dir, "nowhere"), "nowhere/ca-cert.pem: No such file");
        fails(&export(dir, "garbage"), "garbage/ca-cert.pem: there is no CERTIFICATE in it");
        fails(&format!("nbd:unix:{}/n.sock:d", dir.display()), "the server wants TLS");
        assert!(said(dir, &["info", &export(dir, "bare")]).0);
    }
    for (program, args) in [
        ("nbdkit", [&["--tls-verify-peer"], NBDKIT].concat()),
        ("qemu-nbd", QEMU_NBD.into()),
        ("ringway", [OURS, &["--tls-ca", "ca-cert.pem"]].concat()),
    ] {
        let Some(_server) = start(dir, program, &args) else { continue };
        let (well, message) = said(dir, &["info", &export(dir, "bare")]);
        assert!(!well && message.contains("TLS: the server"), "{program}: {message}");
        assert!(
            message.contains("client-cert.pem") || message.contains("must suit it"),
            "{message}"
        );
    }
    {
        let Some(_server) = start(dir, "nbdkit", &["-f", "-U", "n.sock", "file", "disk.img"])
        else {
            return;
        };
        fails(&export(dir, "bare"), "the server does not speak TLS");
    }
    std::fs::rename(dir.join("expired/server-cert.pem"), dir.join("server/server-cert.pem"))
        .unwrap();
    let Some(_server) = start(dir, "nbdkit", NBDKIT) else { return };
    // It expires a second after it was made.
    until("it has expired", || {
        let (well, message) = said(dir, &["info", &export(dir, "bare")]);
        !well && message.contains("the certificate of the server has expired")
    });
}

#[test]
fn f14_a_server_that_falls_into_plain_or_noise_is_left() {
    use std::io::{Read, Write};
    let Some(dir) = with_certificates() else { return };
    let dir = dir.path();
    // Hello, then this for the answer to NBD_OPT_STARTTLS, then that.
    let ack = [&0x0003_e889_0455_65a9u64.to_be_bytes()[..], &[0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0]];
    let ack = ack.concat();
    for (then, wanted) in [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), "TLS: "),
        (ack.clone(), "TLS: "),
        (Vec::new(), "the server ended the connection"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let ack = ack.clone();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
            stream.read_exact(&mut [0; 20]).unwrap();
            stream.write_all(&[&ack[..], &then].concat()).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        });
        let here = dir.display();
        let image = format!("nbds://127.0.0.1:{port}/d?tls-certificates={here}/bare");
        let (well, message) = said(dir, &["info", &image]);
        assert!(!well && message.contains(wanted), "{message}");
        server.join().unwrap();
    }
}
