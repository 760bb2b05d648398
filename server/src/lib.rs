//! The daemon: disks, from their files to their sockets, in a sandbox. `ringway serve` is this.

mod accept;
mod activation;
mod attach;
mod bell;
mod command;
mod control;
mod daemon;
mod deadline;
mod disks;
mod dying;
mod endpoint;
mod events;
#[cfg(test)]
mod heard;
mod held;
mod host;
mod image;
mod incidents;
mod isolate;
mod limits;
mod line;
mod metrics;
#[cfg(not(feature = "xen"))]
mod no_xen;
mod notify;
mod numbers;
mod paths;
mod pools;
mod promise;
mod pulse;
mod ready;
pub mod sandbox;
mod served;
mod signals;
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
pub use ready::{attach_lines, disk_line};
