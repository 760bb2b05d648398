//! Reads the configuration file again (SIGHUP, `ctl reload`): disks that are new in it are added, those
//! that are gone from it removed, and limits and error policies changed that it changes. What cannot
//! change while the daemon runs is logged, and left.
//!
//! First all of the file is judged, then disks are added that are in nobody's way; if one of them
//! cannot be, those before it go again and nothing has changed. Only then are others removed.

use super::configured::{Configured, Said, differences, socket};
use super::departure::Departure;
use super::disks::{AnyDisk, Disks};
use super::limits::Change;
use super::served::{Served, lock};
use anyhow::{Context, anyhow};
use ringway_control::config::{DiskSpec, LimitArgs, Location, NbdSecurity, Plan, parse};
use ringway_control::protocol::{FailedOf, Happened, LeftOf, Reloaded};
use ringway_disk::ErrorPolicy;
use ringway_terminal::reasons::in_full;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, TryLockError};

/// Words that change what a guest may ask for.
const LIMITS: [&str; 2] = ["limits", "limit-group"];
/// Words that change what becomes of requests that the disk fails.
const POLICIES: [&str; 4] = ["on-read-error", "on-write-error", "on-enospc", "hold-timeout"];

/// What is to be done.
#[derive(Default)]
struct Changes {
    add: Vec<DiskSpec>,
    remove: Vec<AnyDisk>,
    /// Those whose limits are others now.
    limit: Vec<(AnyDisk, DiskSpec)>,
    /// Those whose failed requests are treated in another way now.
    policies: Vec<(Arc<Served>, ErrorPolicy)>,
    /// Groups whose limits are others now, or that are new.
    groups: Vec<(String, LimitArgs)>,
    /// Groups that it names no more.
    groups_gone: Vec<String>,
    unchanged: usize,
    left: Vec<LeftOf>,
    /// The words of these, by the disk's socket if they are a disk's: what runs says otherwise than the file.
    stays: Vec<(Option<PathBuf>, Vec<String>)>,
}

/// Reads the file again and does what it says.
///
/// # Errors
/// What is wrong; nothing has changed then.
pub(crate) fn reload(disks: &Disks) -> anyhow::Result<Reloaded> {
    let outcome = disks.configured.as_ref().map_or_else(
        || Err(anyhow!("there is no file to read again: this daemon was started without --config")),
        |configured| carry_out(disks, configured),
    );
    match &outcome {
        Ok(done) => {
            tell(done);
            disks.events.tell(None, Happened::Reloaded(done.clone()));
        }
        Err(error) => {
            let why = in_full(error);
            tracing::error!("the configuration was not read again, nothing has changed: {why}");
            disks.events.tell(None, Happened::ReloadFailed { why });
        }
    }
    outcome
}

fn tell(done: &Reloaded) {
    for LeftOf { image, words } in &done.left {
        let words = words.join(", ");
        tracing::warn!(disk = image, "does not change until the daemon is restarted: {words}");
    }
    for FailedOf { image, why } in &done.failed {
        tracing::error!(disk = image, "cannot be changed: {why}");
    }
    for name in &done.policies {
        tracing::info!(disk = name, "its failed requests are treated in another way now");
    }
    tracing::info!(
        added = done.added.len(),
        removed = done.removed.len(),
        limited = done.limited.len(),
        policies = done.policies.len(),
        unchanged = done.unchanged,
        "the configuration was read again"
    );
}

fn carry_out(disks: &Disks, configured: &Configured) -> anyhow::Result<Reloaded> {
    let mut said = match configured.said.try_lock() {
        Ok(said) => said,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return Err(anyhow!("it is being read already")),
    };
    let path = &configured.path;
    let text = disks.host.configuration().with_context(|| path.display().to_string())?;
    let locate = |path: &Path| disks.host.locate(path);
    let mut plan = parse(&text, path, locate).map_err(anyhow::Error::msg)?;
    plan.check_security(&plan.nbd).map_err(anyhow::Error::msg)?;
    // Options of the command line may allow more addresses: those are judged when they are used.
    let security = NbdSecurity { insecure: true, ..NbdSecurity::default() };
    plan.check_nbd(&security).map_err(anyhow::Error::msg)?;
    // As the file says it, before names are replaced.
    let now = Said::of(&plan);
    plan.resolve_groups(|name| configured.group(name)).map_err(anyhow::Error::msg)?;
    let mut changes = compare(disks, &said, &now, plan);
    let stays = std::mem::take(&mut changes.stays);
    let done = apply(disks, changes)?;
    let before = std::mem::replace(&mut *said, now);
    said.keep(before, &stays);
    Ok(done)
}

fn compare(disks: &Disks, before: &Said, now: &Said, plan: Plan) -> Changes {
    let mut changes = Changes::default();
    let mut daemon = differences(&before.daemon, &now.daemon);
    if before.xen != now.xen {
        daemon.push("xen".into());
    }
    if !daemon.is_empty() {
        changes.stays.push((None, daemon.clone()));
        changes.left.push(LeftOf { image: None, words: daemon });
    }
    compare_groups(before, now, &mut changes);
    let mut serving: BTreeMap<PathBuf, AnyDisk> = BTreeMap::new();
    for path in before.disks.keys().chain(now.disks.keys()) {
        if let Some(disk) = disks.at(&disks.host.locate(path)) {
            serving.insert(path.clone(), disk);
        }
    }
    for spec in plan.disks {
        let Some(path) = socket(&spec) else { continue };
        match (before.disks.get(&path), serving.contains_key(&path)) {
            // Added by ctl add, and written into the file since.
            (None, true) => changes.unchanged += 1,
            (_, false) => changes.add.push(spec),
            (Some(before), true) => {
                if let Some(disk) = serving.remove(&path) {
                    let differ = differences(before, &now.disks[&path]);
                    changes.compare_disk(differ, disk, spec, path);
                }
            }
        }
    }
    let gone = before.disks.keys().filter(|path| !now.disks.contains_key(*path));
    changes.remove = gone.filter_map(|path| serving.remove(path)).collect();
    // An image that is made stays: those come last.
    changes.add.sort_by_key(|spec| spec.create_bytes.is_some() || spec.base.is_some());
    changes
}

impl Changes {
    /// A disk of which the file says these words in another way.
    fn compare_disk(
        &mut self,
        differ: Vec<String>,
        disk: AnyDisk,
        spec: DiskSpec,
        socket: PathBuf,
    ) {
        if differ.is_empty() {
            self.unchanged += 1;
            return;
        }
        let (limits, words): (Vec<_>, Vec<_>) =
            differ.into_iter().partition(|word| LIMITS.contains(&word.as_str()));
        let (policies, mut words): (Vec<_>, Vec<_>) =
            words.into_iter().partition(|word| POLICIES.contains(&word.as_str()));
        match &disk {
            AnyDisk::Here(served) if !policies.is_empty() => {
                self.policies.push((Arc::clone(served), spec.errors));
            }
            // Its process was told when it was started.
            AnyDisk::Apart(_) => words.extend(policies),
            AnyDisk::Here(_) => {}
        }
        if !words.is_empty() {
            self.stays.push((Some(socket), words.clone()));
            self.left.push(LeftOf { image: Some(disk.image()), words });
        }
        if !limits.is_empty() {
            self.limit.push((disk, spec));
        }
    }
}

fn compare_groups(before: &Said, now: &Said, changes: &mut Changes) {
    let differ = now.limit_groups.iter();
    let differ = differ.filter(|(name, limits)| before.limit_groups.get(*name) != Some(limits));
    changes.groups = differ.map(|(name, limits)| (name.clone(), *limits)).collect();
    let gone = before.limit_groups.keys().filter(|name| !now.limit_groups.contains_key(*name));
    changes.groups_gone = gone.cloned().collect();
}

fn apply(disks: &Disks, changes: Changes) -> anyhow::Result<Reloaded> {
    let Changes { add, remove, limit, policies, groups, groups_gone, unchanged, left, .. } =
        changes;
    let mut done = Reloaded { unchanged, left, ..Reloaded::default() };
    // Groups that are new limit nobody yet.
    let (known, new): (Vec<_>, Vec<_>) =
        groups.into_iter().partition(|(name, _)| disks.limit_groups.has(name));
    for (name, limits) in &new {
        disks.limit_group(name, &all(limits, None), true)?;
        done.limited.push(format!("limit-group {name}"));
    }
    // One that takes what another one leaves has to wait for that.
    let waits = |spec: &DiskSpec| {
        let claim = spec.claim(|path| disks.host.locate(path));
        remove.iter().any(|disk| claim.check_apart(&disk.claim(&disks.host)).is_err())
    };
    let (later, first): (Vec<_>, Vec<_>) = add.into_iter().partition(waits);
    done.added = add_all(disks, first).inspect_err(|_| {
        new.iter().for_each(|(name, _)| disks.limit_groups.forget(name));
    })?;
    for disk in remove {
        let image = disk.image();
        match disks.remove_any(disk) {
            Ok(_) => done.removed.push(image),
            Err(error) => done.failed.push(FailedOf { image, why: in_full(&error) }),
        }
    }
    for spec in later {
        let image = image(&spec);
        match disks.add(spec) {
            Ok(_) => done.added.push(image),
            Err(error) => done.failed.push(FailedOf { image, why: in_full(&error) }),
        }
    }
    change_limits(disks, known, limit, &mut done);
    for name in groups_gone {
        let words = format!("limit-group {name}");
        match disks.remove_limit_group(&name) {
            Ok(()) => done.removed.push(words),
            // It may have been removed by hand.
            Err(_) if !disks.limit_groups.has(&name) => {}
            // Or a disk was put into it.
            Err(error) => done.failed.push(FailedOf { image: words, why: in_full(&error) }),
        }
    }
    for (served, policy) in policies {
        served.export.disk().set_error_policy(policy);
        done.policies.push(served.name().to_owned());
    }
    Ok(done)
}

/// Adds all of them, or none: their images.
fn add_all(disks: &Disks, specs: Vec<DiskSpec>) -> anyhow::Result<Vec<String>> {
    let (mut added, mut images) = (Vec::new(), Vec::new());
    for spec in specs {
        let (origin, image) = (spec.origin.clone(), image(&spec));
        match disks.add(spec) {
            Ok(disk) => {
                added.push(disk);
                images.push(image);
            }
            Err(error) => {
                // Best effort: nobody has had the time to use them.
                added.into_iter().for_each(|disk| drop(disks.take_back(disk)));
                return Err(error.context(origin));
            }
        }
    }
    Ok(images)
}

/// These limits and no others.
fn all<'a>(limits: &'a LimitArgs, group: Option<&'a str>) -> Change<'a> {
    Change { limits, lift: true, group }
}

fn change_limits(
    disks: &Disks,
    groups: Vec<(String, LimitArgs)>,
    limit: Vec<(AnyDisk, DiskSpec)>,
    done: &mut Reloaded,
) {
    let groups = groups.into_iter().map(|(name, limits)| {
        let changed = disks.limit_group(&name, &all(&limits, None), false).map(drop);
        (format!("limit-group {name}"), changed)
    });
    let limit = limit.into_iter().map(|(disk, spec)| {
        let group = spec.words.limit_group.as_deref();
        let change = all(&spec.words.limits, Some(group.unwrap_or("none")));
        let changed = match &disk {
            AnyDisk::Here(served) => disks.limit(served, &change),
            AnyDisk::Apart(disk) => {
                disks.limit_apart(disk, &change).map(drop).map_err(|error| anyhow!(error.message))
            }
        };
        (disk.image(), changed)
    });
    for (image, changed) in groups.chain(limit) {
        match changed {
            Ok(()) => done.limited.push(image),
            Err(error) => done.failed.push(FailedOf { image, why: in_full(&error) }),
        }
    }
}

fn image(spec: &DiskSpec) -> String {
    let image = spec.words.image.as_deref();
    image.map(|image| image.display().to_string()).unwrap_or_default()
}

impl Disks {
    /// The disk that is served at this place.
    fn at(&self, place: &Location) -> Option<AnyDisk> {
        let here = self.list().into_iter().filter(|served| lock(&served.claim).is_at(place));
        let apart = self.isolated().into_iter().filter(|disk| disk.claim(&self.host).is_at(place));
        here.map(AnyDisk::Here).chain(apart.map(AnyDisk::Apart)).next()
    }

    /// Serves a disk no more that was just added; its image stays.
    fn take_back(&self, disk: AnyDisk) -> anyhow::Result<Departure> {
        match disk {
            AnyDisk::Here(served) => {
                served.end_clone(false);
                self.remove(served)
            }
            AnyDisk::Apart(disk) => self.take_isolated(&disk, false),
        }
    }

    fn remove_any(&self, disk: AnyDisk) -> anyhow::Result<Departure> {
        match disk {
            AnyDisk::Here(served) => self.remove(served),
            AnyDisk::Apart(disk) => self.remove_isolated(&disk),
        }
    }
}
