//! Reads the configuration file again (SIGHUP, `ctl reload`): disks that are new in it are added, those
//! that are gone from it removed, and limits and error policies changed that it changes. What cannot
//! change while the daemon runs is logged, and left.
//!
//! First all of the file is judged, then disks are added that are in nobody's way; if one of them
//! cannot be, those before it go again and nothing has changed. Only then are others removed.

use super::configured::{Configured, DiskWords, Said, differences, spelled_place};
use super::disks::{AnyDisk, Disks};
use super::limits;
use super::served::lock;
use anyhow::{Context, anyhow};
use ringway_control::config::{Claim, DiskSpec, LimitArgs, NbdSecurity, Plan, parse};
use ringway_control::protocol::{FailedOf, Happened, LeftOf, Reloaded};
use ringway_terminal::reasons::in_full;
use std::path::Path;
use std::sync::TryLockError;

/// Words that change what a guest may ask for.
const LIMITS: [&str; 2] = ["limits", "limit-group"];
/// Words that change what becomes of requests that the disk fails.
const POLICIES: [&str; 4] = ["on-read-error", "on-write-error", "on-enospc", "hold-timeout"];

/// What is to be done.
#[derive(Default)]
struct Changes {
    add: Vec<DiskSpec>,
    /// Those that the file names no more.
    remove: Vec<AnyDisk>,
    /// Those that it names, with what they have not taken over yet.
    stay: Vec<Change>,
    /// Groups whose limits are others now, or that are new.
    groups: Vec<(String, LimitArgs)>,
    /// Groups that it names no more.
    groups_gone: Vec<String>,
    unchanged: usize,
    left: Vec<LeftOf>,
}

/// What changes of a disk that stays.
struct Change {
    disk: AnyDisk,
    spec: DiskSpec,
    limits: bool,
    policies: bool,
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
    plan.resolve_groups(|name| configured.group(name)).map_err(anyhow::Error::msg)?;
    let now = Said::of(&plan);
    let changes = compare(disks, &said, &now, plan)?;
    apply(disks, changes, &mut said)
}

fn compare(disks: &Disks, before: &Said, now: &Said, plan: Plan) -> anyhow::Result<Changes> {
    let locate = |path: &Path| disks.host.locate(path);
    let mut changes = Changes::default();
    let mut daemon = differences(&before.daemon, &now.daemon, locate);
    if before.xen != now.xen {
        daemon.push("xen".into());
    }
    if !daemon.is_empty() {
        changes.left.push(LeftOf { image: None, words: daemon });
    }
    compare_groups(before, now, &mut changes);
    let all = disks.all().into_iter();
    let mut served: Vec<_> = all.map(|disk| (disk.claim(&disks.host), disk)).collect();
    let (mut found, mut others) = (Vec::new(), Vec::new());
    // What Xen's toolstack attaches has no place in the file.
    for spec in plan.disks.into_iter().filter(|spec| spelled_place(spec).is_some()) {
        let claim = spec.claim(locate);
        match served.iter().position(|(its, _)| its.is_same_place(&claim)) {
            Some(at) => found.push((served.swap_remove(at), spec, claim)),
            None => others.push((spec, claim)),
        }
    }
    for (spec, claim) in others {
        // The same words lead elsewhere by now, as its folder was a link: the disk is where it was.
        let is_spelled_so = |(_, disk): &(Claim, AnyDisk)| {
            let words = lock(disk.words());
            words.in_file && words.place == spelled_place(&spec)
        };
        match served.iter().position(is_spelled_so) {
            Some(at) => found.push((served.swap_remove(at), spec, claim)),
            None => {
                claim.check_folder().map_err(anyhow::Error::msg)?;
                changes.add.push(spec);
            }
        }
    }
    for ((its, disk), spec, claim) in found {
        let mut differ =
            differences(&lock(disk.words()).words, &DiskWords::of(&spec, true).words, locate);
        differ.retain(|word| match word.as_str() {
            "socket" | "nbd" | "export" => !its.is_same_place(&claim),
            "image" => !its.is_same_image(&claim),
            _ => true,
        });
        changes.compare_disk(differ, disk, spec);
    }
    let goes = |disk: &AnyDisk| lock(disk.words()).in_file && !disk.is_leaving();
    changes.remove = served.into_iter().map(|(_, disk)| disk).filter(goes).collect();
    Ok(changes)
}

impl Changes {
    /// A disk of which the file says these words in another way.
    fn compare_disk(&mut self, differ: Vec<String>, disk: AnyDisk, spec: DiskSpec) {
        let is_among = |words: &[&str]| differ.iter().any(|word| words.contains(&word.as_str()));
        let is_apart = matches!(disk, AnyDisk::Apart(_));
        // The process of a disk was told when it was started.
        let (limits, policies) = (is_among(&LIMITS), is_among(&POLICIES) && !is_apart);
        let unchanged = differ.is_empty();
        let stays = |word: &String| {
            let word = word.as_str();
            !LIMITS.contains(&word) && (is_apart || !POLICIES.contains(&word))
        };
        let words: Vec<_> = differ.into_iter().filter(stays).collect();
        self.unchanged += usize::from(unchanged);
        if !words.is_empty() {
            self.left.push(LeftOf { image: Some(disk.image()), words });
        }
        self.stay.push(Change { disk, spec, limits, policies });
    }
}

fn compare_groups(before: &Said, now: &Said, changes: &mut Changes) {
    let differ = now.limit_groups.iter();
    let differ = differ.filter(|(name, limits)| before.limit_groups.get(*name) != Some(limits));
    changes.groups = differ.map(|(name, limits)| (name.clone(), *limits)).collect();
    let gone = before.limit_groups.keys().filter(|name| !now.limit_groups.contains_key(*name));
    changes.groups_gone = gone.cloned().collect();
}

fn apply(disks: &Disks, changes: Changes, said: &mut Said) -> anyhow::Result<Reloaded> {
    let Changes { add, remove, stay, groups, groups_gone, unchanged, left } = changes;
    let mut done = Reloaded { unchanged, left, ..Reloaded::default() };
    let (known, new): (Vec<_>, Vec<_>) =
        groups.into_iter().partition(|(name, _)| disks.limit_groups.has(name));
    // One that takes what another one leaves has to wait for that.
    let claims: Vec<_> = remove.iter().map(|disk| disk.claim(&disks.host)).collect();
    let waits = |spec: &DiskSpec| {
        let claim = spec.claim(|path| disks.host.locate(path));
        claims.iter().any(|other| claim.check_apart(other).is_err())
    };
    let (later, first): (Vec<_>, Vec<_>) = add.into_iter().partition(waits);
    // Up to here, and if this fails, nothing has changed.
    let added = make_groups(disks, &new).and_then(|()| {
        let added = add_all(disks, first);
        added.inspect_err(|_| forget_groups(disks, &new))
    })?;
    for (name, limits) in new {
        done.limited.push(format!("limit-group {name}"));
        said.limit_groups.insert(name, limits);
    }
    done.added.extend(added);
    for disk in remove {
        // Its image goes on at another place: an ephemeral clone stays.
        let claim = disk.claim(&disks.host);
        let moves =
            |spec: &DiskSpec| spec.claim(|path| disks.host.locate(path)).is_same_image(&claim);
        let (image, removed) = (disk.image(), !later.iter().any(moves));
        match disks.take(disk, removed) {
            Ok(_) => done.removed.push(image),
            Err(error) => done.failed.push(FailedOf { image, why: in_full(&error) }),
        }
    }
    for spec in later {
        let image = image(&spec);
        match add_all(disks, vec![spec]) {
            Ok(_) => done.added.push(image),
            Err(error) => done.failed.push(FailedOf { image, why: in_full(&error) }),
        }
    }
    for (name, limits) in known {
        let words = format!("limit-group {name}");
        match disks.limit_group(&name, &all(&limits, None), false) {
            Ok(_) => {
                done.limited.push(words);
                said.limit_groups.insert(name, limits);
            }
            Err(error) => done.failed.push(FailedOf { image: words, why: in_full(&error) }),
        }
    }
    stay.into_iter().for_each(|change| change.apply(disks, &mut done));
    for name in groups_gone {
        let words = format!("limit-group {name}");
        match disks.remove_limit_group(&name) {
            Ok(()) => done.removed.push(words),
            // It may have been removed by hand.
            Err(_) if !disks.limit_groups.has(&name) => {}
            // Or a disk was put into it.
            Err(error) => {
                done.failed.push(FailedOf { image: words, why: in_full(&error) });
                continue;
            }
        }
        said.limit_groups.remove(&name);
    }
    Ok(done)
}

impl Change {
    /// The disk has what the file says of it from then on, but for what is `left` or has failed: the next file is
    /// compared with what holds.
    fn apply(self, disks: &Disks, done: &mut Reloaded) {
        let Self { disk, spec, limits, policies } = self;
        let now = DiskWords::of(&spec, true);
        lock(disk.words()).in_file = true;
        if limits {
            let group = spec.words.limit_group.as_deref();
            let change = all(&spec.words.limits, Some(group));
            let changed = match &disk {
                AnyDisk::Here(served) => disks.limit(served, &change),
                AnyDisk::Apart(disk) => {
                    let limited = disks.limit_apart(disk, &change);
                    limited.map(drop).map_err(|error| anyhow!(error.message))
                }
            };
            match changed {
                Ok(()) => {
                    lock(disk.words()).adopt(&LIMITS, &now.words);
                    done.limited.push(disk.image());
                }
                Err(error) => {
                    done.failed.push(FailedOf { image: disk.image(), why: in_full(&error) });
                }
            }
        }
        if let (true, AnyDisk::Here(served)) = (policies, &disk) {
            served.export.disk().set_error_policy(spec.errors);
            lock(&served.words).adopt(&POLICIES, &now.words);
            done.policies.push(served.name().to_owned());
        }
    }
}

/// Makes all of these groups, which limit nobody yet, or none.
fn make_groups(disks: &Disks, new: &[(String, LimitArgs)]) -> anyhow::Result<()> {
    for (at, (name, limits)) in new.iter().enumerate() {
        let made = disks.limit_group(name, &all(limits, None), true);
        made.inspect_err(|_| forget_groups(disks, &new[..at]))?;
    }
    Ok(())
}

fn forget_groups(disks: &Disks, new: &[(String, LimitArgs)]) {
    new.iter().for_each(|(name, _)| disks.limit_groups.forget(name));
}

/// Adds all of them, or none: their images.
fn add_all(disks: &Disks, specs: Vec<DiskSpec>) -> anyhow::Result<Vec<String>> {
    let (mut additions, mut images) = (Vec::new(), Vec::new());
    for spec in specs {
        let origin = spec.origin.clone();
        images.push(image(&spec));
        match disks.open_to_add(spec) {
            Ok(addition) => additions.push(addition),
            Err(error) => {
                disks.abandon(additions);
                return Err(error.context(origin));
            }
        }
    }
    let added = disks.serve_all(additions)?;
    added.iter().for_each(|disk| lock(disk.words()).in_file = true);
    Ok(images)
}

/// These limits and no others.
fn all<'a>(limits: &'a LimitArgs, group: Option<Option<&'a str>>) -> limits::Change<'a> {
    limits::Change { limits, lift: true, group }
}

fn image(spec: &DiskSpec) -> String {
    let image = spec.words.image.as_deref();
    image.map(|image| image.display().to_string()).unwrap_or_default()
}
