//! Limits of disks and of groups of them: who has which, and how they change.

use anyhow::anyhow;
use ringway_control::config::{LimitArgs, LimitGroup, check_limit_group, limit_words};
use ringway_throttle::{Member, Rates, RatesError, Throttle};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The groups of a daemon, by their names. Whoever holds them is the only one who changes limits.
pub(crate) struct LimitGroups(Mutex<BTreeMap<String, Group>>);

/// Limits that disks share.
pub(crate) struct Group {
    pub(crate) limits: LimitArgs,
    throttle: Arc<Throttle>,
}

impl Group {
    pub(crate) fn new(limits: LimitArgs) -> anyhow::Result<Self> {
        let rates = limits.rates().map_err(anyhow::Error::msg)?;
        Ok(Self { limits, throttle: Arc::new(Throttle::new(&rates)?) })
    }
}

/// The limits of one disk.
#[derive(Default)]
pub(crate) struct DiskLimits {
    /// Its own.
    pub(crate) own: LimitArgs,
    pub(crate) member: Option<Arc<Member>>,
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

    pub(crate) fn of(&self, before: &LimitArgs) -> LimitArgs {
        if self.lift { *self.limits } else { self.limits.or(before) }
    }
}

/// What a disk alone needs of its limits.
pub(crate) fn alone(rates: &Rates) -> Result<Option<Arc<Member>>, RatesError> {
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

    /// A group by its name.
    pub(crate) fn find<'a>(
        groups: &'a MutexGuard<'_, BTreeMap<String, Group>>,
        name: &str,
    ) -> anyhow::Result<&'a Group> {
        check_limit_group(name, groups.keys().map(String::as_str)).map_err(anyhow::Error::msg)?;
        groups.get(name).ok_or_else(|| anyhow!("there is no limit group '{name}'"))
    }

    /// The limits of a disk that is new. They hold once it is listed and `Disks::settle_limits` was
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
        members(&self.lock(), &limits)?;
        Ok(limits)
    }

    /// Whoever holds them is the only one who changes limits.
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Group>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if there is such a group.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }
}

/// What the queues of a disk need of its limits.
pub(crate) fn members(
    groups: &MutexGuard<'_, BTreeMap<String, Group>>,
    limits: &DiskLimits,
) -> anyhow::Result<Vec<Arc<Member>>> {
    let group = limits.group.as_deref().map(|name| LimitGroups::find(groups, name)).transpose()?;
    let shared = group.map(|group| Member::of_group(&group.throttle));
    Ok(limits.member.iter().cloned().chain(shared).collect())
}

/// As the log has it.
pub(crate) fn words(limits: &LimitArgs) -> String {
    match limit_words(&limits.numbers()) {
        words if words.is_empty() => "none".into(),
        words => words,
    }
}

/// Why a disk with a process of its own shares limits with no other.
pub(crate) fn apart_has_no_group(image: &str) -> String {
    format!(
        "{image}: a disk with a process of its own shares no limits with others: give it limits of its \
         own, or leave isolate out"
    )
}
