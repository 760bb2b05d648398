//! `--xen` and the options beside it.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Unless another one is named.
const NAME: &str = "vbd3";
/// As above.
const RECORDS: &str = "/run/ringway/state";

/// How data gets to guests of Xen and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum XenData {
    /// Whichever costs less, found by trying; persistent grants are offered.
    #[default]
    Auto,
    /// The hypervisor copies.
    Copy,
    /// The pages of each request are mapped for as long as it takes.
    Map,
    /// Pages stay mapped, if the front-end uses the same ones again.
    Persistent,
}

impl XenData {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Copy, Self::Map, Self::Persistent];

    /// The word for users.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Copy => "copy",
            Self::Map => "map",
            Self::Persistent => "persistent",
        }
    }
}

impl fmt::Display for XenData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for XenData {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|data| data.name() == word).ok_or_else(|| {
            format!("'{word}' is not one of {}", Self::ALL.map(Self::name).join(", "))
        })
    }
}

/// What says that there are other disks than those of a Xen host. (A required option that goes with none of what is
/// there is not missed by clap.)
const ELSEWHERE: [&str; 5] = ["image", "socket", "config", "blk_file", "fd"];

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
        conflicts_with_all = ELSEWHERE,
        default_value = NAME,
        hide_default_value = true
    )]
    pub xen_name: String,
    /// How data gets to guests and back: copied by the hypervisor, in pages mapped for each request,
    /// in pages that stay mapped, or whichever costs less [default: auto].
    #[arg(long, value_name = "HOW", requires = "xen",
        conflicts_with_all = ELSEWHERE, default_value = "auto", hide_default_value = true,
          value_parser = PossibleValuesParser::new(XenData::ALL.map(XenData::name)).try_map(|w| w.parse::<XenData>()))]
    pub xen_data: XenData,
    /// Where to record what is in flight, so that guests survive a kill of this process: a folder in
    /// memory (tmpfs) [default: /run/ringway/state].
    #[arg(
        long,
        value_name = "DIR",
        requires = "xen",
        conflicts_with_all = ELSEWHERE,
        default_value = RECORDS,
        hide_default_value = true
    )]
    pub xen_records: PathBuf,
    /// How to reach xenstore: the socket of its daemon, or the device /dev/xen/xenbus [default: the
    /// first of them that answers].
    #[arg(long, value_name = "PATH", requires = "xen", conflicts_with_all = ELSEWHERE)]
    pub xen_store: Option<PathBuf>,
}

impl Default for XenArgs {
    fn default() -> Self {
        Self {
            xen: false,
            xen_name: NAME.into(),
            xen_data: XenData::default(),
            xen_records: RECORDS.into(),
            xen_store: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_back() {
        for data in XenData::ALL {
            assert_eq!(data.name().parse(), Ok(data));
        }
        assert!("fast".parse::<XenData>().unwrap_err().contains("copy, map"));
    }
}
