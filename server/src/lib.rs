//! The daemon: disks, from their files to their sockets, in a sandbox. `ringway serve` is this, and a
//! program of your own can be:
//!
//! ```
//! use clap::{CommandFactory, Parser};
//! use ringway_control::log::LogArgs;
//! use ringway_server::ServeArgs;
//!
//! #[derive(Parser)]
//! struct Cli {
//!     #[command(flatten)]
//!     serve: ServeArgs,
//!     #[command(flatten)]
//!     log: LogArgs,
//! }
//!
//! # fn main() -> anyhow::Result<()> {
//! // `Cli::parse()` in a program. With an image and `--socket` instead it serves until SIGTERM.
//! let cli = Cli::parse_from(["my-daemon", "--print-capabilities"]);
//! let ended = ringway_server::run(cli.serve, &cli.log, &mut Cli::command())?;
//! # assert_eq!(ended, std::process::ExitCode::SUCCESS);
//! # Ok(())
//! # }
//! ```
//!
//! It starts as a process with one thread and takes the whole process: the sandbox is for good. What
//! serves disks within a program is `ringway-vhost-user`.

mod accept;
mod activation;
mod attach;
mod bell;
mod clock;
mod command;
mod configured;
mod connection;
mod control;
mod daemon;
mod deadline;
mod departure;
mod disks;
mod dying;
mod endpoint;
mod events;
#[cfg(test)]
mod heard;
mod held;
mod host;
mod hung;
mod image;
mod incidents;
mod isolate;
mod job;
mod limits;
mod metrics;
mod nbd;
mod nbd_clients;
#[cfg(not(feature = "xen"))]
mod no_xen;
mod notify;
mod paths;
mod pools;
mod promise;
mod pulse;
mod ready;
mod reload;
pub mod sandbox;
mod served;
mod service;
mod session_threads;
mod signals;
mod sizing;
mod spread;
mod stats;
mod survive;
#[cfg(feature = "xen")]
mod toolstack;
mod watchdog;
#[cfg(feature = "xen")]
mod xen;

#[cfg(not(feature = "xen"))]
use no_xen as toolstack;
#[cfg(not(feature = "xen"))]
use no_xen as xen;

pub use attach::{Attach, QemuVersion};
pub use command::{ServeArgs, run};
pub use image::named_format;
pub use nbd::{NbdArgs, run_nbd};
pub use ready::{attach_lines, disk_line};
