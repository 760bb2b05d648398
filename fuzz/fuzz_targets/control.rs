//! Requests at the control socket from arbitrary bytes: each is a request, or a problem with a
//! message.

#![no_main]
#![allow(dead_code, unused_imports)]

// The program is no library; files of it are taken by their paths.
#[path = "../../ringway/src/serve/control/case.rs"]
mod case;
#[path = "../../ringway/src/config/claim.rs"]
mod claim;
#[path = "../../ringway/src/control.rs"]
mod control;
#[path = "../../ringway/src/config/cpus.rs"]
mod cpus_list;
#[path = "../../ringway/src/config/disk.rs"]
mod disk;
#[path = "../../ringway/src/logging/words.rs"]
mod logging;
#[path = "../../ringway/src/config/plan.rs"]
mod plan;
#[path = "../../ringway/src/size.rs"]
mod size;
#[path = "../../ringway/src/config/sockets.rs"]
mod sockets;
#[path = "../../ringway/src/serve/control/words.rs"]
mod words;

use claim::{Claim, Location};
use cpus_list::CpuList;
use disk::{Choice, DiskArgs, DiskSpec, Place};
use plan::{DaemonArgs, EachDisk, Plan, cpus};
use sockets::{SocketMode, SocketRule};

mod config {
    pub(crate) use crate::disk::{DiskArgs, DiskSpec, Place, is_unreal};
}

/// Requests know nothing of Xen's toolstack.
#[derive(Debug)]
pub(crate) struct XenPlan;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    case::check(data);
});
