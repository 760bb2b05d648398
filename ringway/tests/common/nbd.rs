//! NBD servers for disks that are elsewhere: stock ones and our own.

use super::guest::wait_for;
use super::ringway;
use ringway_testkit::{Need, skip};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A server; dropping it kills it.
pub(crate) struct Server(pub(crate) Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server that listens at `n.sock`; `None` if it is not here.
pub(crate) fn server(dir: &Path, program: &str, args: &[&str]) -> Option<Server> {
    let socket = dir.join("n.sock");
    let _ = std::fs::remove_file(&socket);
    server_at(dir, program, args, || UnixStream::connect(&socket).is_ok())
}

/// The same for one that listens somewhere else.
pub(crate) fn server_at(
    dir: &Path,
    program: &str,
    args: &[&str],
    listens: impl Fn() -> bool,
) -> Option<Server> {
    let mut command = if program == "ringway" { ringway() } else { Command::new(program) };
    command.args(args).current_dir(dir).stdin(Stdio::null()).stdout(Stdio::null());
    let Ok(child) = command.stderr(Stdio::null()).spawn() else {
        skip(if program.starts_with("qemu") { Need::Qemu } else { Need::Nbd }, program);
        return None;
    };
    let server = Server(child);
    wait_for("the server listens", listens);
    Some(server)
}
