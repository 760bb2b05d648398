//! Limits of disks and of groups of them: who has which, and how they change.

use super::disks::{AnyDisk, Disks};
use super::isolate::{CHANGE_MAX, Isolated};
use super::served::{Served, lock};
use anyhow::{anyhow, bail};
use ringway_control::config::{LimitArgs, LimitGroup, check_limit_group, limit_words};
use ringway_control::protocol::{Kind, LimitGroupFacts, Problem};
use ringway_throttle::{Member, Rates, RatesError, Throttle};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// The groups of a daemon, by their names. Whoever holds them is the only one who changes limits.
pub(crate) struct LimitGroups(Mutex<BTreeMap<String, Group>>);

struct Group {
    limits: LimitArgs,
    throttle: Arc<Throttle>,
}

impl Group {
    fn new(limits: LimitArgs) -> anyhow::Result<Self> {
        let rates = limits.rates().map_err(anyhow::Error::msg)?;
        Ok(Self { limits, throttle: Arc::new(Throttle::new(&rates)?) })
    }
}

/// The limits of one disk.
#[derive(Default)]
pub(crate) struct DiskLimits {
    /// Its own.
    pub(crate) own: LimitArgs,
    member: Option<Arc<Member>>,
    /// The name of its group.
    pub(crate) group: Option<String>,
}

/// What is to change about the limits of a disk.
pub(crate) struct Change<'a> {
    /// What is not said stays.
    pub(crate) limits: &'a LimitArgs,
    /// All that was said before is lifted first.
    pub(crate) lift: bool,
    /// Another group, or `none`.
    pub(crate) group: Option<&'a str>,
}

impl Change<'_> {
    /// Nothing is to change.
    pub(crate) fn is_none(&self) -> bool {
        self.limits.is_silent() && !self.lift && self.group.is_none()
    }

    fn of(&self, before: &LimitArgs) -> LimitArgs {
        if self.lift { *self.limits } else { self.limits.or(before) }
    }
}

fn alone(rates: &Rates) -> Result<Option<Arc<Member>>, RatesError> {
    (!rates.is_unlimited()).then(|| Member::alone(rates)).transpose()
}

impl LimitGroups {
    /// As a file names them.
    ///
    /// # Errors
    /// Limits that cannot be.
    pub(crate) fn new(groups: &[LimitGroup]) -> anyhow::Result<Self> {
        let one = |group: &LimitGroup| Ok((group.name.clone(), Group::new(group.limits)?));
        let groups: anyhow::Result<_> = groups.iter().map(one).collect();
        Ok(Self(Mutex::new(groups?)))
    }

    fn find<'a>(
        groups: &'a MutexGuard<'_, BTreeMap<String, Group>>,
        name: &str,
    ) -> anyhow::Result<&'a Group> {
        check_limit_group(name, groups.keys().map(String::as_str)).map_err(anyhow::Error::msg)?;
        groups.get(name).ok_or_else(|| anyhow!("there is no limit group '{name}'"))
    }

    /// The limits of a disk that is new. They hold once it is listed and [`LimitGroups::settle`] was
    /// called.
    ///
    /// # Errors
    /// That there is no such group, or limits that cannot be.
    pub(crate) fn of_new(
        &self,
        own: &LimitArgs,
        group: Option<&str>,
    ) -> anyhow::Result<DiskLimits> {
        let member = alone(&own.rates().map_err(anyhow::Error::msg)?)?;
        let limits = DiskLimits { own: *own, member, group: group.map(str::to_owned) };
        members(&lock(&self.0), &limits)?;
        Ok(limits)
    }

    /// Gives a disk its limits before it is served. Its group may have changed a moment ago.
    ///
    /// # Errors
    /// As [`LimitGroups::of_new`].
    pub(crate) fn settle(&self, served: &Served) -> anyhow::Result<()> {
        let groups = lock(&self.0);
        let members = members(&groups, &lock(&served.limits))?;
        served.export.disk().set_limits(members);
        Ok(())
    }

    /// True if there is such a group.
    pub(crate) fn has(&self, name: &str) -> bool {
        lock(&self.0).contains_key(name)
    }
}

/// What the queues of a disk need of its limits.
fn members(
    groups: &MutexGuard<'_, BTreeMap<String, Group>>,
    limits: &DiskLimits,
) -> anyhow::Result<Vec<Arc<Member>>> {
    let group = limits.group.as_deref().map(|name| LimitGroups::find(groups, name)).transpose()?;
    let shared = group.map(|group| Member::of_group(&group.throttle));
    Ok(limits.member.iter().cloned().chain(shared).collect())
}

/// As the log has it.
fn words(limits: &LimitArgs) -> String {
    match limit_words(&limits.numbers()) {
        words if words.is_empty() => "none".into(),
        words => words,
    }
}

impl Disks {
    /// Changes the limits of a disk that this process serves. Its requests that wait look again at
    /// once.
    ///
    /// # Errors
    /// Limits that cannot be, or that there is no such group; nothing was changed then.
    pub(crate) fn limit(&self, served: &Served, change: &Change<'_>) -> anyhow::Result<()> {
        if change.is_none() {
            return Ok(());
        }
        let groups = lock(&self.limit_groups.0);
        let mut limits = lock(&served.limits);
        let own = change.of(&limits.own);
        let same = own == limits.own;
        let group = match change.group {
            None => limits.group.clone(),
            Some("none") => None,
            Some(name) => Some(name.to_owned()),
        };
        // What was taken of limits that stay is not forgotten.
        let member = match same {
            true => limits.member.clone(),
            false => alone(&own.rates().map_err(anyhow::Error::msg)?)?,
        };
        let new = DiskLimits { own, member, group };
        let members = members(&groups, &new)?;
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
        if change.group.is_some_and(|group| group != "none") {
            return Err(Problem::new(Kind::Failed, apart_has_no_group(&disk.image())));
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
        let mut groups = lock(&self.limit_groups.0);
        let before = match create {
            true if groups.contains_key(name) => {
                bail!("there is a limit group '{name}' already: leave --create out to change it")
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
            let its = lock(&served.limits);
            if its.group.as_deref() == Some(name) {
                let members = members(&groups, &its)?;
                drop(its);
                served.export.set_limits(members);
            }
        }
        tracing::info!(limit_group = name, limits = words(&limits), "limits changed");
        Ok(limits)
    }

    /// The groups, for who asks.
    pub(crate) fn limit_group_facts(&self) -> Vec<LimitGroupFacts> {
        let of: Vec<_> =
            self.list().iter().map(|s| (s.id, lock(&s.limits).group.clone())).collect();
        let groups = lock(&self.limit_groups.0);
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

/// Why a disk with a process of its own shares limits with no other.
pub(crate) fn apart_has_no_group(image: &str) -> String {
    format!(
        "{image}: a disk with a process of its own shares no limits with others: give it limits of its \
         own, or leave isolate out"
    )
}

/// The disk's own limits and its group, wherever it is served.
pub(crate) fn of(disk: &AnyDisk) -> (BTreeMap<String, u64>, Option<String>) {
    match disk {
        AnyDisk::Here(served) => {
            let limits = lock(&served.limits);
            (limits.own.numbers(), limits.group.clone())
        }
        AnyDisk::Apart(disk) => (disk.facts(None).limits, None),
    }
}
