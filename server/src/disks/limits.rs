//! Limits of the disks of a daemon, changed while they are served.

use super::super::isolate::{CHANGE_MAX, Isolated};
use super::super::limits::{
    Change, DiskLimits, Group, LimitGroups, alone, apart_has_no_group, members, words,
};
use super::super::served::{Served, lock};
use super::{AnyDisk, Disks};
use anyhow::bail;
use ringway_control::config::LimitArgs;
use ringway_control::protocol::{LimitGroupFacts, Problem, ProblemKind};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Groups that there can be before `ctl` makes no more of them.
const GROUPS_MAX: usize = 1000;

/// Bytes of the name of one that `ctl` makes.
const NAME_MAX: usize = 255;

impl Disks {
    /// Gives a disk its limits before it is served. Its group may have changed a moment ago.
    ///
    /// # Errors
    /// As [`super::super::limits::LimitGroups::of_new`].
    pub(super) fn settle_limits(&self, served: &Served) -> anyhow::Result<()> {
        let groups = self.limit_groups.lock();
        let members = members(&groups, &mut lock(&served.limits))?;
        served.export.disk().set_limits(members);
        Ok(())
    }

    /// Changes the limits of a disk that this process serves. Its requests that wait look again at
    /// once.
    ///
    /// # Errors
    /// Limits that cannot be, or that there is no such group; nothing was changed then.
    pub(crate) fn limit(&self, served: &Served, change: &Change<'_>) -> anyhow::Result<()> {
        if change.is_none() {
            return Ok(());
        }
        let groups = self.limit_groups.lock();
        let mut limits = lock(&served.limits);
        let own = change.of(&limits.own);
        let same = own == limits.own;
        let group = match change.group {
            None => limits.group.clone(),
            Some(group) => group.map(str::to_owned),
        };
        // What was taken of limits that stay is not forgotten.
        let member = match same {
            true => limits.member.clone(),
            false => alone(&own.rates().map_err(anyhow::Error::msg)?)?,
        };
        let mut new = DiskLimits { own, member, group, shared: limits.shared.clone() };
        let members = members(&groups, &mut new)?;
        *limits = new;
        let (own, group) = (words(&limits.own), limits.group.clone());
        drop(limits);
        served.export.set_limits(members);
        let disk = served.export.disk().name();
        tracing::info!(disk, limits = own, limit_group = group, "limits changed");
        Ok(())
    }

    /// As [`Disks::limit`], of a disk with a process of its own. What it answers.
    ///
    /// # Errors
    /// That it cannot have a group, and as its process says.
    pub(crate) fn limit_apart(
        &self,
        disk: &Isolated,
        change: &Change<'_>,
    ) -> Result<Value, Problem> {
        if change.group.flatten().is_some() {
            return Err(Problem::new(ProblemKind::Failed, apart_has_no_group(&disk.image())));
        }
        // It knows no other.
        let (limits, lift) = (change.limits, change.lift);
        let line = json!({"command": "limit", "disk": 0, "limits": limits, "lift": lift});
        let mut said = disk.ask(line).wait(CHANGE_MAX)?;
        if let Ok(limits) = serde_json::from_value(said["limits"].clone()) {
            disk.set_limits(limits);
        }
        said["id"] = disk.id.into();
        Ok(said)
    }

    /// Changes the limits of a group, for all of its disks; makes it if it is to be new.
    ///
    /// # Errors
    /// That there is no such group, or is one already; limits that cannot be. Nothing was changed then.
    pub(crate) fn limit_group(
        &self,
        name: &str,
        change: &Change<'_>,
        create: bool,
    ) -> anyhow::Result<LimitArgs> {
        let mut groups = self.limit_groups.lock();
        let before = match create {
            true if groups.contains_key(name) => {
                bail!("there is a limit group '{name}' already: leave --create out to change it")
            }
            true if name.is_empty() || name.len() > NAME_MAX => {
                bail!(
                    "the name of a limit group has 1 to {NAME_MAX} bytes, this one {}",
                    name.len()
                )
            }
            true if groups.len() >= GROUPS_MAX => {
                bail!(
                    "there are {GROUPS_MAX} limit groups, which is the most there can be: use one of \
                     them, or start the daemon anew"
                )
            }
            true => LimitArgs::default(),
            false => LimitGroups::find(&groups, name)?.limits,
        };
        let limits = change.of(&before);
        if change.is_none() && !create {
            return Ok(limits);
        }
        groups.insert(name.to_owned(), Group::new(limits)?);
        for served in self.list() {
            let mut its = lock(&served.limits);
            if its.group.as_deref() == Some(name) {
                let members = members(&groups, &mut its)?;
                drop(its);
                served.export.set_limits(members);
            }
        }
        tracing::info!(limit_group = name, limits = words(&limits), "limits changed");
        Ok(limits)
    }

    /// Takes a group away that nobody shares any more.
    ///
    /// # Errors
    /// That there is no such group, or who is in it. Nothing has changed then.
    pub(crate) fn remove_limit_group(&self, name: &str) -> anyhow::Result<()> {
        let mut groups = self.limit_groups.lock();
        LimitGroups::find(&groups, name)?;
        let is_in = |served: &&Arc<Served>| lock(&served.limits).group.as_deref() == Some(name);
        let list = self.list();
        let members: Vec<_> = list.iter().filter(is_in).map(|served| served.name()).collect();
        if !members.is_empty() {
            bail!(
                "the limit group '{name}' is shared by {}: give that another one, or none, first",
                members.join(", ")
            );
        }
        if self.xen.as_ref().is_some_and(|plan| plan.limit_groups().any(|group| group == name)) {
            bail!("disks of Xen guests that are still to come have the limit group '{name}'");
        }
        groups.remove(name);
        tracing::info!(limit_group = name, "limit group removed");
        Ok(())
    }

    /// The groups, for who asks.
    pub(crate) fn limit_group_facts(&self) -> Vec<LimitGroupFacts> {
        let of: Vec<_> =
            self.list().iter().map(|s| (s.id, lock(&s.limits).group.clone())).collect();
        let groups = self.limit_groups.lock();
        let facts = |(name, group): (&String, &Group)| LimitGroupFacts {
            name: name.clone(),
            limits: group.limits.numbers(),
            disks: of
                .iter()
                .filter(|(_, of)| of.as_ref() == Some(name))
                .map(|(id, _)| *id)
                .collect(),
        };
        groups.iter().map(facts).collect()
    }
}

/// The disk's own limits and its group, wherever it is served.
pub(crate) fn limits_of(disk: &AnyDisk) -> (BTreeMap<String, u64>, Option<String>) {
    match disk {
        AnyDisk::Here(served) => {
            let limits = lock(&served.limits);
            (limits.own.numbers(), limits.group.clone())
        }
        AnyDisk::Apart(disk) => (disk.facts(None).limits, None),
    }
}
