//! What the configuration file said when it was read last.

use anyhow::bail;
use ringway_control::config::{DiskSpec, LimitArgs, Location, Place, Plan, XenPlan};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The words of a table, by name.
pub(crate) type Words = Map<String, Value>;

/// Words whose values are paths: two that lead to one place say the same.
const PATHS: [&str; 9] = [
    "backing-root",
    "base",
    "ceph-conf",
    "control",
    "socket",
    "state-dir",
    "tls-ca",
    "tls-cert",
    "tls-key",
];

/// The words that a disk is served by.
#[derive(Clone, Debug)]
pub(crate) struct DiskWords {
    pub(crate) words: Words,
    /// Where it is, as it was spelled.
    pub(crate) place: Option<PathBuf>,
    /// The configuration file has named it: if it does so no more, the disk is removed.
    pub(crate) in_file: bool,
    /// Its socket was passed to the daemon.
    pub(crate) passed: bool,
}

impl DiskWords {
    pub(crate) fn of(spec: &DiskSpec, in_file: bool) -> Self {
        let passed = matches!(spec.place, Place::Inherited { .. });
        Self { words: words(&spec.words), place: spelled_place(spec), in_file, passed }
    }

    /// These words say from now on what they say in `now`.
    pub(crate) fn adopt(&mut self, names: &[&str], now: &Words) {
        adopt(&mut self.words, names.iter().copied(), now);
    }
}

/// The configuration file of a daemon.
#[derive(Debug)]
pub(crate) struct Configured {
    /// As it was named.
    pub(crate) path: PathBuf,
    /// Groups that were looked up at the start, which cannot be done later.
    groups: BTreeMap<String, u32>,
    /// Held while it is read again.
    pub(crate) said: Mutex<Said>,
}

/// What a file says, as far as it was taken over; what it says of a disk is kept with the disk.
#[derive(Clone, Debug, Default)]
pub(crate) struct Said {
    /// Of the daemon as a whole.
    pub(crate) daemon: Words,
    /// Of groups that share limits, by name.
    pub(crate) limit_groups: BTreeMap<String, LimitArgs>,
    /// Of what a toolstack attaches.
    pub(crate) xen: Option<String>,
}

impl Configured {
    /// The file at `path` says what is in `plan`.
    pub(crate) fn new(path: &Path, plan: &Plan) -> Self {
        let said = Mutex::new(Said::of(plan));
        Self { path: path.into(), groups: BTreeMap::new(), said }
    }

    /// Notes the number of a group.
    pub(crate) fn know_group(&mut self, name: &str, number: u32) {
        self.groups.insert(name.to_owned(), number);
    }

    /// The number of a group, for a daemon that looks nothing up any more.
    ///
    /// # Errors
    /// That nobody knows it.
    pub(crate) fn group(&self, name: &str) -> anyhow::Result<u32> {
        match (name.parse(), self.groups.get(name)) {
            (Ok(number), _) | (Err(_), Some(&number)) => Ok(number),
            _ => bail!(
                "the group '{name}' cannot be looked up while the daemon runs: write its number, or \
                 start the daemon anew"
            ),
        }
    }
}

impl Said {
    pub(crate) fn of(plan: &Plan) -> Self {
        let mut daemon = words(&plan.daemon);
        // Their words stand beside the others in the file.
        for table in ["each", "access"] {
            let inner = daemon.remove(table).map(|inner| words(&inner)).unwrap_or_default();
            daemon.extend(inner);
        }
        daemon.extend(words(&plan.nbd));
        daemon.insert("log-format".into(), json!(plan.log_format));
        daemon.insert("log-level".into(), json!(plan.log_level));
        let groups = plan.limit_groups.iter().map(|group| (group.name.clone(), group.limits));
        let xen = plan.xen.as_ref().map(XenPlan::said);
        Self { daemon, limit_groups: groups.collect(), xen }
    }
}

/// Where a disk is served, as it was spelled.
pub(crate) fn spelled_place(disk: &DiskSpec) -> Option<PathBuf> {
    match &disk.place {
        Place::Nbd(place) => Some(place.key()),
        _ => disk.words.socket.clone(),
    }
}

fn adopt<'a>(words: &mut Words, names: impl Iterator<Item = &'a str>, now: &Words) {
    for name in names {
        match now.get(name) {
            Some(value) => words.insert(name.to_owned(), value.clone()),
            None => words.remove(name),
        };
    }
}

fn words(of: &impl Serialize) -> Words {
    match serde_json::to_value(of) {
        Ok(Value::Object(words)) => {
            words.into_iter().map(|(name, value)| (name.replace('_', "-"), value)).collect()
        }
        _ => Words::new(),
    }
}

/// The names of the words that differ; `locate` looks paths up.
pub(crate) fn differences(
    before: &Words,
    now: &Words,
    locate: impl Fn(&Path) -> Location,
) -> Vec<String> {
    let names = before.keys().chain(now.keys().filter(|name| !before.contains_key(*name)));
    let differ = |name: &&String| {
        let (before, now) = (before.get(*name), now.get(*name));
        let (Some(Value::String(one)), Some(Value::String(other))) = (before, now) else {
            return before != now;
        };
        let is_path = PATHS.contains(&name.as_str());
        one != other
            && !(is_path && locate(Path::new(one)).is_same_place(&locate(Path::new(other))))
    };
    names.filter(differ).cloned().collect()
}
