//! Configuration files from arbitrary bytes: each is a plan, or a message that names the file.

#![no_main]
#![allow(dead_code, unused_imports)]

// The program is no library; the files of its folder `config` are taken by their paths.
#[path = "../../ringway/src/config/case.rs"]
mod case;
#[path = "../../ringway/src/config/claim.rs"]
mod claim;
#[path = "../../ringway/src/config/cpus.rs"]
mod cpus_list;
#[path = "../../ringway/src/config/disk.rs"]
mod disk;
#[path = "../../ringway/src/config/file.rs"]
mod file;
#[path = "../../ringway/src/logging/words.rs"]
mod logging;
#[path = "../../ringway/src/config/plan.rs"]
mod plan;
#[path = "../../ringway/src/size.rs"]
mod size;
#[path = "../../ringway/src/config/sockets.rs"]
mod sockets;
#[path = "../../ringway/src/config/xen.rs"]
mod xen;
#[path = "../../ringway/src/config/xen_args.rs"]
mod xen_args;

use claim::{Claim, Location};
use cpus_list::CpuList;
use disk::{Choice, DiskArgs, DiskSpec, Format, Place, is_unreal};
use plan::{DaemonArgs, EachDisk, Plan, cpus};
use sockets::{SocketMode, SocketRule};
use xen_args::{XenArgs, XenPlan};


libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    case::check(data);
});
