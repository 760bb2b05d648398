//! `[xen]`: the disks that a Xen host's toolstack attaches, and what is special to some of them.

use super::counts::queues_in_file;
use super::disk::word_in_file;
use super::seconds::{seconds_in_file, some_seconds_in_file};
use super::{Choice, DiskArgs, Format, LimitArgs, XenArgs, XenData, is_unreal};
use crate::size::Size;
use ringway_disk::{CacheMode, EngineKind, OnError, SchedulerMode};
use serde::Deserialize;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::Spanned;

/// A table with words of its own, and those of a disk that mean something to Xen's guests.
macro_rules! table {
    ($(#[$about:meta])* $name:ident { $($own:tt)* }) => {
        $(#[$about])*
        #[derive(Debug, Deserialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        pub(super) struct $name {
            $($own)*
            size: Option<Size>,
            format: Option<Format>,
            #[serde(default)]
            read_only: bool,
            block_size: Option<u32>,
            #[serde(default, deserialize_with = "seconds_in_file")]
            lock_wait: Option<u32>,
            #[serde(default, deserialize_with = "queues_in_file")]
            queues: Option<u16>,
            #[serde(default, deserialize_with = "word_in_file")]
            engine: Option<Choice<EngineKind>>,
            #[serde(default, deserialize_with = "word_in_file")]
            cache: Option<CacheMode>,
            #[serde(default, deserialize_with = "word_in_file")]
            path: Option<SchedulerMode>,
            #[serde(default, deserialize_with = "word_in_file")]
            on_read_error: Option<OnError>,
            #[serde(default, deserialize_with = "word_in_file")]
            on_write_error: Option<OnError>,
            #[serde(default, deserialize_with = "word_in_file")]
            on_enospc: Option<OnError>,
            #[serde(default, deserialize_with = "some_seconds_in_file")]
            hold_timeout: Option<NonZeroU32>,
            #[serde(default)]
            limits: LimitArgs,
            limit_group: Option<String>,
        }

        impl $name {
            fn words(&self) -> DiskArgs {
                DiskArgs {
                    size: self.size,
                    format: self.format,
                    read_only: self.read_only,
                    block_size: self.block_size,
                    lock_wait: self.lock_wait,
                    queues: self.queues,
                    engine: self.engine,
                    cache: self.cache,
                    path: self.path,
                    on_read_error: self.on_read_error,
                    on_write_error: self.on_write_error,
                    on_enospc: self.on_enospc,
                    hold_timeout: self.hold_timeout,
                    limits: self.limits,
                    limit_group: self.limit_group.clone(),
                    ..DiskArgs::default()
                }
            }
        }
    };
}

table! {
    /// `[xen]`, as it is written.
    XenTable {
        name: Option<String>,
        #[serde(default, deserialize_with = "word_in_file")]
        data: Option<XenData>,
        records: Option<PathBuf>,
        store: Option<PathBuf>,
        #[serde(default)]
        disk: Vec<Spanned<XenDiskTable>>,
    }
}

table! {
    /// `[[xen.disk]]`, as it is written.
    XenDiskTable {
        guest: Option<String>,
        #[serde(default, deserialize_with = "word_in_file")]
        vdev: Option<Vdev>,
        image: Option<PathBuf>,
    }
}

/// Which disks are meant, and what is special to them.
#[derive(Clone, Debug)]
pub struct XenDisk {
    /// Where this was said: `xen.toml, line 3`.
    pub origin: String,
    guest: Option<String>,
    vdev: Option<Vdev>,
    image: Option<PathBuf>,
    /// Its options; those of `[xen]` fill the gaps.
    pub words: DiskArgs,
}

/// A disk that the toolstack attaches.
#[derive(Clone, Copy, Debug)]
pub struct Attached<'a> {
    /// The name of the guest.
    pub guest: &'a str,
    /// The number of the virtual device.
    pub device: u32,
}

impl XenDisk {
    /// True if `disk` is meant; `is_image` tells whether a path leads to its image.
    pub fn fits(&self, disk: Attached<'_>, is_image: impl FnOnce(&Path) -> bool) -> bool {
        self.guest.as_ref().is_none_or(|guest| guest == disk.guest)
            && self.vdev.is_none_or(|vdev| vdev.0 == disk.device)
            && self.image.as_deref().is_none_or(is_image)
    }

    /// True if whatever fits `other` fits this.
    fn covers(&self, other: &Self) -> bool {
        self.guest.as_ref().is_none_or(|guest| other.guest.as_ref() == Some(guest))
            && self.vdev.is_none_or(|vdev| other.vdev == Some(vdev))
            && self.image.as_ref().is_none_or(|image| other.image.as_ref() == Some(image))
    }
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

impl XenPlan {
    /// All that it says, wherever it says it: two that say the same have equal ones.
    pub fn said(&self) -> String {
        let of = |disk: &XenDisk| {
            let XenDisk { origin: _, guest, vdev, image, words } = disk;
            format!("{guest:?} {vdev:?} {image:?} {words:?}\n")
        };
        let disks: String = self.disks.iter().map(of).collect();
        format!("{:?} {:?}\n{disks}", self.args, self.disk)
    }

    /// The groups that its disks share limits with.
    pub fn limit_groups(&self) -> impl Iterator<Item = &str> {
        let special = self.disks.iter().map(|disk| &disk.words);
        std::iter::once(&self.disk).chain(special).filter_map(|words| words.limit_group.as_deref())
    }

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

/// The plan that `[xen]` describes. `at` says where an offset is; relative paths start at `folder`.
///
/// # Errors
/// The message, with the place.
pub(super) fn plan(
    table: XenTable,
    folder: &Path,
    at: impl Fn(usize) -> String,
) -> Result<XenPlan, String> {
    let disk = table.words();
    disk.limits.rates().map_err(|error| format!("{}: {error}", at(0)))?;
    let mut disks: Vec<XenDisk> = Vec::new();
    for table in table.disk {
        let origin = at(table.span().start);
        let new = one(table.into_inner(), folder, &origin).map_err(|e| format!("{origin}: {e}"))?;
        if let Some(wider) = disks.iter().find(|earlier| earlier.covers(&new)) {
            return Err(format!(
                "{origin}: no disk ever gets to this [[xen.disk]]: the first that fits counts, and \
                 the one at {} fits all of its disks. Put this one before it",
                wider.origin
            ));
        }
        disks.push(new);
    }
    let mut args = XenArgs { xen: true, ..XenArgs::default() };
    if let Some(name) = table.name {
        args.xen_name = name;
    }
    args.xen_data = table.data.unwrap_or(args.xen_data);
    if let Some(records) = table.records {
        args.xen_records = folder.join(records);
    }
    args.xen_store = table.store.map(|store| folder.join(store));
    Ok(XenPlan { args, disk, disks })
}

fn one(table: XenDiskTable, folder: &Path, origin: &str) -> Result<XenDisk, String> {
    let words = table.words();
    words.limits.rates()?;
    let XenDiskTable { guest, vdev, image, .. } = table;
    if guest.is_none() && vdev.is_none() && image.is_none() {
        return Err(
            "it does not say which disks are meant. Add guest = \"NAME\", vdev = \"xvda\" \
                    or image = \"/path\", or put its words under [xen], for all of them"
                .into(),
        );
    }
    if guest.as_deref() == Some("") {
        return Err("guest = \"\": no guest has an empty name".into());
    }
    if let Some(image) = image.as_deref().filter(|image| is_unreal(image)) {
        return Err(format!("image {}: the toolstack attaches files and devices", image.display()));
    }
    let image = image.map(|image| folder.join(image));
    Ok(XenDisk { origin: origin.into(), guest, vdev, image, words })
}

/// The number of a virtual device, by any of its names: `xvda`, `sda1`, `d0p1`, `51712`.
///
/// Source: xen-vbd-interface(7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Vdev(u32);

impl FromStr for Vdev {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        number(word).map(Self).ok_or_else(|| {
            format!(
                "'{word}' is no virtual device: give what the guest's configuration has, such \
                     as xvda"
            )
        })
    }
}

/// The most disks that a number of 28 bits has room for, with 256 partitions each.
const DISKS_MAX: u32 = 1 << 20;

fn number(word: &str) -> Option<u32> {
    if word.starts_with(|first: char| first.is_ascii_digit()) {
        return match word.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16).ok(),
            None => word.parse().ok(),
        };
    }
    if let Some(rest) = word.strip_prefix("xvd") {
        let (disk, part) = letters(rest)?;
        return xvd(disk, part);
    }
    if let Some(rest) = word.strip_prefix("sd") {
        let (disk, part) = letters(rest)?;
        return (disk < 16 && part < 16).then_some((8 << 8) | (disk << 4) | part);
    }
    if let Some(rest) = word.strip_prefix("hd") {
        let (disk, part) = letters(rest)?;
        let major = if disk < 2 { 3 } else { 22 };
        return (disk < 4 && part < 64).then_some((major << 8) | ((disk & 1) << 6) | part);
    }
    let (disk, part) = word.strip_prefix('d')?.split_once('p').unwrap_or((&word[1..], "0"));
    xvd(decimal(disk)?, decimal(part)?)
}

fn xvd(disk: u32, part: u32) -> Option<u32> {
    if disk < 16 && part < 16 {
        return Some((202 << 8) | (disk << 4) | part);
    }
    (disk < DISKS_MAX && part < 256).then_some((1 << 28) | (disk << 8) | part)
}

/// `a1`: the first disk, the first partition. `aa` comes after `z`.
fn letters(word: &str) -> Option<(u32, u32)> {
    let end = word.find(|letter: char| !letter.is_ascii_lowercase()).unwrap_or(word.len());
    let (disk, part) = word.split_at(end);
    let disk = disk.bytes().try_fold(0u32, |disk, letter| {
        let disk = disk.checked_mul(26)?.checked_add(u32::from(letter - b'a') + 1)?;
        (disk <= DISKS_MAX).then_some(disk)
    })?;
    let part = if part.is_empty() { 0 } else { decimal(part)? };
    Some((disk.checked_sub(1)?, part))
}

fn decimal(word: &str) -> Option<u32> {
    word.bytes().all(|byte| byte.is_ascii_digit()).then(|| word.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::super::{Location, file::parse};
    use super::*;

    fn plan(text: &str) -> XenPlan {
        let plan = parse(text, Path::new("/conf/xen.toml"), Location::of).unwrap();
        assert!(plan.disks.is_empty());
        plan.xen.unwrap()
    }

    /// The options of a disk, as they come out.
    fn words(plan: &XenPlan, guest: &str, device: u32, image: &str) -> DiskArgs {
        plan.words(Attached { guest, device }, |path| path == Path::new(image)).0
    }

    #[test]
    fn devices_have_the_numbers_of_their_names() {
        for (word, wanted) in [
            ("xvda", 51712),
            ("xvda1", 51713),
            ("xvdb", 51728),
            ("xvdp15", 51967),
            ("xvdq", 268_439_552),
            ("xvdaa", 268_442_112),
            ("d0", 51712),
            ("d0p1", 51713),
            ("d16", 268_439_552),
            ("sda", 2048),
            ("sdb2", 2066),
            ("hda", 768),
            ("hdb1", 833),
            ("hdc", 5632),
            ("51712", 51712),
            ("0xca00", 51712),
        ] {
            assert_eq!(word.parse(), Ok(Vdev(wanted)), "{word}");
        }
        for word in [
            "",
            "xvd",
            "xvd1",
            "/dev/xvda",
            "vda",
            "sdq",
            "hde",
            "xvda256",
            "d",
            "dp1",
            "d0p",
            "xvdA",
            "xvda-1",
            "-1",
            "0x",
            "xvdzzzzzzzz",
            "sda+1",
            "4294967296",
        ] {
            let error = word.parse::<Vdev>().unwrap_err();
            assert!(error.contains("is no virtual device"), "{word}");
        }
    }

    #[test]
    fn the_first_table_that_fits_counts_and_the_rest_is_for_all() {
        let plan = plan(
            r#"
            [xen]
            name = "vbd"
            data = "copy"
            records = "records"
            store = "/dev/xen/xenbus"
            queues = 2
            cache = "writeback"

            [[xen.disk]]
            guest = "db"
            vdev = "xvdb"
            engine = "threads"
            cache = "writethrough"

            [[xen.disk]]
            image = "/srv/base.img"
            read-only = true

            [[xen.disk]]
            guest = "db"
            queues = 8
            path = "request"
            "#,
        );
        assert_eq!(plan.folder(), "backend/vbd");
        assert_eq!(plan.args.xen_data, XenData::Copy);
        assert_eq!(plan.args.xen_records, Path::new("/conf/records"));
        assert_eq!(plan.args.xen_store.as_deref(), Some(Path::new("/dev/xen/xenbus")));
        let log = words(&plan, "db", 51728, "/srv/log.img");
        assert_eq!(log.engine, Some(Choice::Is(EngineKind::Threads)));
        assert_eq!((log.cache, log.queues), (Some(CacheMode::Writethrough), Some(2)));
        let data = words(&plan, "db", 51712, "/srv/data.img");
        assert_eq!((data.queues, data.path), (Some(8), Some(SchedulerMode::Request)));
        assert_eq!(
            (data.cache, data.engine, data.read_only),
            (Some(CacheMode::Writeback), None, false)
        );
        let base = words(&plan, "db", 51712, "/srv/base.img");
        assert_eq!((base.read_only, base.queues), (true, Some(2)));
        let other = words(&plan, "web", 51728, "/srv/web.img");
        assert_eq!((other.queues, other.path, other.engine), (Some(2), None, None));
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        for (text, line, what) in [
            ("[xen]\nqueue = 3\n", "line 2", "unknown field `queue`"),
            ("[xen]\nserial = 'a'\n", "line 2", "unknown field `serial`"),
            ("[xen]\nsocket = 'a'\n", "line 2", "unknown field `socket`"),
            ("[xen]\ndata = 'carried'\n", "line 2", "'carried'"),
            ("[xen]\nqueues = 0\n", "line 2", "1 to 256 queues"),
            ("[[xen.disk]]\nqueues = 2\n", "line 1", "which disks are meant"),
            ("[[xen.disk]]\nguest = ''\n", "line 1", "empty name"),
            ("[[xen.disk]]\nvdev = '/dev/xvda'\n", "line 2", "is no virtual device"),
            ("[[xen.disk]]\nimage = 'null:1G'\n", "line 1", "files and devices"),
            ("[[xen.disk]]\nvdev = 'xvda'\nqueue-size = 4\n", "line 3", "unknown field"),
            (
                "[[xen.disk]]\nguest = 'a'\n[[xen.disk]]\nguest = 'a'\nvdev = 'xvda'\n",
                "line 3",
                "no disk ever gets to",
            ),
            (
                "[[xen.disk]]\nvdev = 'd0'\n[[xen.disk]]\nvdev = 'xvda'\n",
                "line 3",
                "the one at conf/x.toml, line 1",
            ),
            (
                "[xen]\n[[disk]]\nimage = 'a'\nsocket = 's'\n",
                "line 2",
                "serves what the toolstack attaches",
            ),
        ] {
            let error = parse(text, Path::new("conf/x.toml"), Location::of).unwrap_err();
            assert!(error.contains(line) && error.contains(what), "{text}\n{error}");
        }
    }
}
