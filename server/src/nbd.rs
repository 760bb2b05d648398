//! `ringway nbd`: disks for NBD clients. The daemon is that of `ringway serve`, with another transport.

use super::command::{start, usage};
use crate::sandbox;
use crate::signals::Signals;
use clap::{Args, Command};
use ringway_control::config::{
    DaemonArgs, DiskArgs, DiskSpec, EachDisk, NbdAddress, NbdSecurity, Place, Plan,
};
use ringway_control::log::LogArgs;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  ringway nbd disk.img --listen unix:/run/ringway/disk.sock
  ringway nbd disk.img --format raw --listen 127.0.0.1:10809 --export vm1
  ringway nbd /dev/vg0/snap --read-only --listen unix:/run/ringway/snap.sock
  ringway nbd vm1.qcow2 vm2.qcow2 --format qcow2 --listen unix:vms.sock
  ringway nbd disk.img --listen 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
  nbdinfo 'nbd+unix:///?socket=/run/ringway/disk.sock'
  nbdcopy 'nbd+unix:///?socket=/run/ringway/snap.sock' backup.img
  qemu-img convert nbd://127.0.0.1/vm1 -O qcow2 vm1.qcow2

With --tls-cert and --tls-key clients need TLS at ports, and may use it at Unix
sockets. Without, nobody asks clients who they are, and what goes over a network
can be read and changed on its way: then only Unix sockets and addresses of this
host alone (127.0.0.1, ::1) are taken, unless --insecure says that the network
is a safe one.

A client that is killed, or whose connection is lost, connects again; what was
answered is there, and what was flushed is durable. SIGTERM and SIGINT:
requests in flight are completed and answered, then the exit status is 0.
Exit status: 0 stopped by signal, 1 failed, 2 wrong usage, 128+N second
signal N.";

/// The options of `ringway nbd`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct NbdArgs {
    #[command(flatten)]
    disk: DiskArgs,
    /// More of them; all that is said here holds for each. Clients call them by their files' names.
    #[arg(value_name = "IMAGE", help_heading = None::<&str>)]
    more: Vec<PathBuf>,
    /// Where clients connect: unix:PATH, or an address of this host with a port, such as
    /// 127.0.0.1:10809.
    #[arg(long, value_name = "ADDRESS", required = true, help_heading = "NBD")]
    listen: NbdAddress,
    #[command(flatten)]
    security: NbdSecurity,
    #[command(flatten)]
    daemon: DaemonArgs,
}

/// Carries out `ringway nbd`. Options that do not go together end the process as wrong ones of
/// `command` do.
///
/// # Errors
/// One message: what is wrong, where, what to do.
pub fn run_nbd(args: NbdArgs, log: &LogArgs, command: &mut Command) -> anyhow::Result<ExitCode> {
    Signals::hold_news()?;
    sandbox::prepare();
    let (daemon, nbd) = (args.daemon.clone(), args.security.clone());
    let disks = specs(args).unwrap_or_else(|error| usage(command, &error));
    let mut plan = Plan { disks, daemon, nbd, ..Plan::default() };
    plan.check_nbd(&plan.nbd).unwrap_or_else(|error| usage(command, &error));
    plan.daemon.each = EachDisk::default();
    plan.resolve_groups(sandbox::group_number).map_err(anyhow::Error::msg)?;
    start(plan, None, log, command)
}

/// The disks that are meant.
fn specs(args: NbdArgs) -> Result<Vec<DiskSpec>, String> {
    let mut disk = args.disk;
    let image = disk.image.take().ok_or("no disk to serve: name an IMAGE")?;
    if disk.socket.is_some() || disk.nbd.is_some() {
        return Err("--socket, --nbd: where NBD clients connect is said by --listen".into());
    }
    if !args.more.is_empty() && disk.export.is_some() {
        return Err("--export names one disk, and several are called by their files' names".into());
    }
    disk.nbd = Some(args.listen);
    if args.more.is_empty() && disk.export.is_none() {
        disk.export = Some(String::new());
    }
    let spec = |image: PathBuf| {
        let mut disk = disk.clone();
        let place = disk.take_nbd(&image)?.ok_or("no place for NBD clients")?;
        disk.into_spec(&image, Place::Nbd(place))
    };
    std::iter::once(image).chain(args.more).map(spec).collect()
}
