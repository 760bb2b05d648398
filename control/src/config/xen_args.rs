//! What a daemon knows of its Xen host's toolstack: `--xen` and the options beside it.

use super::DiskArgs;
use super::xen::{Attached, XenDisk};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use ringway_export::xen::Movement;
use std::path::{Path, PathBuf};

/// Unless another one is named.
const NAME: &str = "vbd3";
/// As above.
const RECORDS: &str = "/run/ringway";

/// What `--xen` is told.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Xen")]
pub struct XenArgs {
    /// Serve the disks that the toolstack of this Xen host attaches (xl: backendtype=tap); options
    /// of disks are those of all of them ([[xen.disk]] of --config can differ).
    #[arg(long, conflicts_with_all = ["image", "socket", "config", "blk_file", "fd", "serial", "queue_size"])]
    pub xen: bool,
    /// The kind of device to serve: the folder backend/NAME in xenstore [default: vbd3].
    #[arg(
        long,
        value_name = "NAME",
        requires = "xen",
        default_value = NAME,
        hide_default_value = true
    )]
    pub xen_name: String,
    /// How data gets to guests and back: copied by the hypervisor, in pages mapped for each request,
    /// in pages that stay mapped, or whichever costs less [default: auto].
    #[arg(long, value_name = "HOW", requires = "xen", default_value = "auto", hide_default_value = true,
          value_parser = PossibleValuesParser::new(Movement::ALL.map(Movement::name)).try_map(|w| w.parse::<Movement>()))]
    pub xen_data: Movement,
    /// Where to record what is in flight, so that guests survive a kill of this process: a folder in
    /// memory (tmpfs) [default: /run/ringway].
    #[arg(
        long,
        value_name = "DIR",
        requires = "xen",
        default_value = RECORDS,
        hide_default_value = true
    )]
    pub xen_records: PathBuf,
    /// How to reach xenstore: the socket of its daemon, or the device /dev/xen/xenbus [default: the
    /// first of them that answers].
    #[arg(long, value_name = "PATH", requires = "xen")]
    pub xen_store: Option<PathBuf>,
}

/// What a daemon knows of its host's toolstack.
#[derive(Debug)]
pub struct XenPlan {
    /// What was said of all disks.
    pub args: XenArgs,
    /// The options of each disk.
    pub disk: DiskArgs,
    /// What is special to some of them; the first that fits counts.
    pub disks: Vec<XenDisk>,
}

impl Default for XenArgs {
    fn default() -> Self {
        Self {
            xen: false,
            xen_name: NAME.into(),
            xen_data: Movement::default(),
            xen_records: RECORDS.into(),
            xen_store: None,
        }
    }
}

impl XenPlan {
    /// The folder that is watched.
    pub fn folder(&self) -> String {
        format!("backend/{}", self.args.xen_name)
    }

    /// The options of a disk, and where they were said; `is_image` tells whether a path leads to its
    /// image.
    pub fn words(
        &self,
        disk: Attached<'_>,
        is_image: impl Fn(&Path) -> bool,
    ) -> (DiskArgs, Option<&str>) {
        match self.disks.iter().find(|table| table.fits(disk, &is_image)) {
            Some(table) => (table.words.clone().or(&self.disk), Some(&table.origin)),
            None => (self.disk.clone(), None),
        }
    }
}
