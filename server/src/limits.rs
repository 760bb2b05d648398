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
    /// Its part in that. What it owes there outlives other changes.
    pub(crate) shared: Option<Arc<Member>>,
}

/// What is to change about the limits of a disk.
pub(crate) struct Change<'a> {
    /// What is not said stays.
    pub(crate) limits: &'a LimitArgs,
    /// All that was said before is lifted first.
    pub(crate) lift: bool,
    /// Another group, or no group.
    pub(crate) group: Option<Option<&'a str>>,
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
        let group = group.map(str::to_owned);
        let mut limits = DiskLimits { own: *own, member, group, shared: None };
        members(&self.lock(), &mut limits)?;
        Ok(limits)
    }

    /// Whoever holds them is the only one who changes limits.
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Group>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A group that no disk has joined is no more.
    pub(crate) fn forget(&self, name: &str) {
        self.lock().remove(name);
    }

    /// True if there is such a group.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }
}

/// What the queues of a disk need of its limits. It joins its group if it is not in it yet.
pub(crate) fn members(
    groups: &MutexGuard<'_, BTreeMap<String, Group>>,
    limits: &mut DiskLimits,
) -> anyhow::Result<Vec<Arc<Member>>> {
    let group = limits.group.as_deref().map(|name| LimitGroups::find(groups, name)).transpose()?;
    let before = limits.shared.take();
    limits.shared = group.map(|group| {
        let same = before.filter(|member| member.is_of(&group.throttle));
        same.unwrap_or_else(|| Member::of_group(&group.throttle))
    });
    Ok(limits.member.iter().chain(&limits.shared).cloned().collect())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Another limit of its own is no way for a disk to be rid of what it owes to its group.
    #[test]
    fn a24_a_disk_keeps_its_part_in_a_group_until_that_changes() {
        let one = |iops: u64| {
            Group::new(serde_json::from_value(serde_json::json!({ "iops": iops })).unwrap())
                .unwrap()
        };
        let groups =
            Mutex::new(BTreeMap::from([("g".to_owned(), one(5)), ("h".to_owned(), one(5))]));
        let mut limits = DiskLimits { group: Some("g".into()), ..DiskLimits::default() };
        let part = |limits: &mut DiskLimits| members(&groups.lock().unwrap(), limits).unwrap();
        let first = part(&mut limits);
        let mut rates = Rates::default();
        rates[ringway_throttle::LimitKind::Bps].avg = Some(1);
        limits.member = alone(&rates).unwrap();
        let second = part(&mut limits);
        assert!(second.len() == 2 && Arc::ptr_eq(&first[0], &second[1]));
        groups.lock().unwrap().insert("g".into(), one(6));
        let third = part(&mut limits);
        assert!(!Arc::ptr_eq(&first[0], &third[1]), "a group that changes begins anew");
        limits.group = Some("h".into());
        assert!(!Arc::ptr_eq(&part(&mut limits)[1], &third[1]));
        limits.group = None;
        assert!(part(&mut limits).len() == 1 && limits.shared.is_none());
    }
}
