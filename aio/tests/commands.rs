//! Commands that reach a driver and come back: of TCP sockets, which every kernel has since 6.7.

use ringway_aio::{Command, Engine, IoUring, IoUringSetup, Reaped};
use ringway_testkit::{Need, skip};
use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// `SOCKET_URING_OP_SIOCINQ` of `linux/io_uring.h`: how many bytes wait to be read.
const BYTES_TO_READ: u32 = 0;
/// `UBLK_U_IO_FETCH_REQ`, `_IOWR('u', 0x20, struct ublksrv_io_cmd)` of `linux/ublk_cmd.h`.
const UBLK_FETCH: u32 = 0xc010_7520;

/// What the driver of `file` answers to a command.
fn ask(engine: &mut IoUring, out: &mut Reaped, command: &Command<'_>) -> i32 {
    out.clear();
    // SAFETY: these commands name no memory.
    unsafe { engine.queue_command(command) }.unwrap();
    engine.submit().unwrap();
    while out.commands.is_empty() {
        engine.wait(Some(Duration::from_secs(30))).unwrap();
        assert_eq!(engine.reap(out), 0, "a command is no operation");
    }
    assert_eq!((out.commands.len(), out.commands[0].tag), (1, command.tag));
    out.commands[0].result
}

#[test]
fn a_driver_answers() {
    let setup = IoUringSetup { commands: 2, ..IoUringSetup::new(4) };
    let mut engine = match IoUring::new(setup) {
        Ok(engine) => engine,
        Err(e) => return skip(Need::IoUring, e),
    };
    let Some(port) = engine.limits().commands else {
        return skip(Need::IoUringFeature, format!("{:?}", engine.features()));
    };
    assert_eq!((port.depth, port.bytes), (2, 16));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (server, _) = listener.accept().unwrap();
    let socket = Arc::new(File::from(OwnedFd::from(server)));
    let file = engine.attach(&socket).unwrap();
    let mut out = Reaped::with_capacity(4, 1).with_commands(2);
    let command = |tag, op, data| Command { tag, file, op, addr: 0, data };
    let first = ask(&mut engine, &mut out, &command(7, BYTES_TO_READ, &[]));
    if first == -libc::EOPNOTSUPP {
        return skip(Need::IoUringFeature, "sockets take no commands (they do since Linux 6.7)");
    }
    assert_eq!(first, 0, "nothing was sent yet");
    let mut sent = 0;
    for bytes in [1, 10, 1000] {
        client.write_all(&vec![7; bytes]).unwrap();
        sent += i32::try_from(bytes).unwrap();
        // Loopback delivers before the write returns.
        assert_eq!(ask(&mut engine, &mut out, &command(8, BYTES_TO_READ, &[])), sent);
    }
    // A driver that is not the command's says so in the kernel's words.
    let ublk = [0; 16];
    assert_eq!(ask(&mut engine, &mut out, &command(9, UBLK_FETCH, &ublk)), -libc::EOPNOTSUPP);
}
