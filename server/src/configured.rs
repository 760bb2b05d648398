//! What the configuration file said when it was read last.

use anyhow::bail;
use ringway_control::config::{DiskSpec, LimitArgs, Place, Plan, XenPlan};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The words of a table, by name.
pub(crate) type Words = Map<String, Value>;

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

/// What a file says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Said {
    /// Of the daemon as a whole.
    pub(crate) daemon: Words,
    /// Of each disk, by its socket.
    pub(crate) disks: BTreeMap<PathBuf, Words>,
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
        daemon.insert("log_format".into(), json!(plan.log_format));
        daemon.insert("log_level".into(), json!(plan.log_level));
        let disks = plan.disks.iter().filter_map(|disk| Some((socket(disk)?, words(&disk.words))));
        let groups = plan.limit_groups.iter().map(|group| (group.name.clone(), group.limits));
        let xen = plan.xen.as_ref().map(XenPlan::said);
        Self { daemon, disks: disks.collect(), limit_groups: groups.collect(), xen }
    }
}

impl Said {
    /// Has these words be as they were, of the daemon or of a disk, which have not taken them over: the next file is
    /// compared with what runs.
    pub(crate) fn keep(&mut self, before: Self, stays: &[(Option<PathBuf>, Vec<String>)]) {
        for (disk, names) in stays {
            let (now, was) = match disk {
                None => (Some(&mut self.daemon), Some(&before.daemon)),
                Some(path) => (self.disks.get_mut(path), before.disks.get(path)),
            };
            let (Some(now), Some(was)) = (now, was) else { continue };
            for name in names {
                let is = |key: &&String| key.replace('_', "-") == *name;
                let Some(key) = was.keys().chain(now.keys()).find(is).cloned() else { continue };
                match was.get(&key) {
                    Some(value) => now.insert(key, value.clone()),
                    None => now.remove(&key),
                };
            }
        }
        let xen = |(disk, names): &(Option<PathBuf>, Vec<String>)| {
            disk.is_none() && names.iter().any(|name| name == "xen")
        };
        if stays.iter().any(xen) {
            self.xen = before.xen;
        }
    }
}

/// Where a disk of a file is served: what is its alone.
pub(crate) fn socket(disk: &DiskSpec) -> Option<PathBuf> {
    match &disk.place {
        Place::Nbd(place) => Some(place.key()),
        _ => disk.words.socket.clone(),
    }
}

fn words(of: &impl Serialize) -> Words {
    match serde_json::to_value(of) {
        Ok(Value::Object(words)) => words,
        _ => Words::new(),
    }
}

/// The names of the words that differ.
pub(crate) fn differences(before: &Words, now: &Words) -> Vec<String> {
    let names = before.keys().chain(now.keys().filter(|name| !before.contains_key(*name)));
    let differ = |name: &&String| before.get(*name) != now.get(*name);
    names.filter(differ).map(|name| name.replace('_', "-")).collect()
}
