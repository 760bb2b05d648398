//! What a file that is read again changes: judged as a whole, before anything is done.

use super::super::configured::{DiskWords, Said, differences, spelled_place};
use super::super::control::facts_apart;
use super::super::disks::{AnyDisk, Disks};
use super::super::served::lock;
use anyhow::{anyhow, bail};
use ringway_control::config::{Claim, DiskSpec, LimitArgs, Plan};
use ringway_control::protocol::{LeftOf, Reloaded, State};
use std::path::Path;

/// Words that change what a guest may ask for.
pub(super) const LIMITS: [&str; 2] = ["limits", "limit-group"];
/// Words that change what becomes of requests that the disk fails.
pub(super) const POLICIES: [&str; 4] =
    ["on-read-error", "on-write-error", "on-enospc", "hold-timeout"];

/// What is to be done.
#[derive(Default)]
pub(super) struct Changes {
    pub(super) add: Vec<DiskSpec>,
    /// Those that the file names no more.
    pub(super) remove: Vec<AnyDisk>,
    /// Those that it names, with what they have not taken over yet.
    pub(super) stay: Vec<Change>,
    /// Groups whose limits are others now, or that are new.
    pub(super) groups: Vec<(String, LimitArgs)>,
    /// Groups that it names no more.
    pub(super) groups_gone: Vec<String>,
    pub(super) unchanged: usize,
    pub(super) left: Vec<LeftOf>,
}

/// What changes of a disk that stays.
pub(super) struct Change {
    pub(super) disk: AnyDisk,
    pub(super) spec: DiskSpec,
    pub(super) limits: bool,
    pub(super) policies: bool,
}

/// Compares what is served with what the file says now.
///
/// # Errors
/// What is wrong with the file.
pub(super) fn compare(
    disks: &Disks,
    before: &Said,
    now: &Said,
    plan: Plan,
) -> anyhow::Result<Changes> {
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

fn is_paused(disk: &AnyDisk) -> bool {
    match disk {
        AnyDisk::Here(served) => served.export.is_paused(),
        AnyDisk::Apart(disk) => disk.is_paused() || facts_apart(disk).state == State::Paused,
    }
}

fn compare_groups(before: &Said, now: &Said, changes: &mut Changes) {
    let differ = now.limit_groups.iter();
    let differ = differ.filter(|(name, limits)| before.limit_groups.get(*name) != Some(limits));
    changes.groups = differ.map(|(name, limits)| (name.clone(), *limits)).collect();
    let gone = before.limit_groups.keys().filter(|name| !now.limit_groups.contains_key(*name));
    changes.groups_gone = gone.cloned().collect();
}

impl Changes {
    /// Disks that are added first, as they are in nobody's way, and those that take what a removed one leaves. The
    /// removed ones are parted as well: in nobody's way, and those that another one waits for.
    pub(super) fn part(&mut self, disks: &Disks) -> Parted {
        let locate = |path: &Path| disks.host.locate(path);
        let claims = |specs: &[DiskSpec]| specs.iter().map(|spec| spec.claim(locate)).collect();
        let takes = |one: &Claim, other: &Claim| one.check_apart(other).is_err();
        let leave: Vec<_> = self.remove.iter().map(|disk| disk.claim(&disks.host)).collect();
        let waits = |spec: &DiskSpec| {
            let claim = spec.claim(locate);
            leave.iter().any(|other| takes(&claim, other))
        };
        let (later, first): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.add).into_iter().partition(waits);
        let later_claims: Vec<Claim> = claims(&later);
        let (mut replaced, mut gone) = (Vec::new(), Vec::new());
        for (disk, claim) in std::mem::take(&mut self.remove).into_iter().zip(leave) {
            let moves = later_claims.iter().any(|later| later.is_same_image(&claim));
            let in_the_way = later_claims.iter().any(|later| takes(later, &claim));
            let deletes = disk.is_ephemeral() && !moves;
            let list = if in_the_way { &mut replaced } else { &mut gone };
            list.push(Removal { disk, deletes, for_good: !moves });
        }
        Parted { first, later, replaced, gone }
    }

    /// Refuses what could not be carried out as a whole.
    ///
    /// # Errors
    /// What is in its way.
    pub(super) fn check(&self, disks: &Disks, parted: &Parted) -> anyhow::Result<()> {
        for Removal { disk, deletes, .. } in &parted.replaced {
            let why = match *deletes {
                true => "whose clone would be deleted (ephemeral), and could not come back",
                false if lock(disk.words()).passed => {
                    "whose socket was passed to the daemon, and which could not come back to it"
                }
                false if is_paused(disk) => "which is paused, and would run again",
                false => continue,
            };
            bail!(
                "{}: another disk takes the place of this one, {why} if that failed: remove this one first, and read \
                 the file once more",
                disk.image()
            );
        }
        for disk in disks.list() {
            let is_it = |other: &AnyDisk| other.id() == disk.id;
            if parted.removals().any(|removal| is_it(&removal.disk)) {
                continue;
            }
            let changes = self.stay.iter().find(|change| change.limits && is_it(&change.disk));
            let group = match changes {
                Some(change) => change.spec.words.limit_group.clone(),
                None => lock(&disk.limits).group.clone(),
            };
            if let Some(group) = group.filter(|group| self.groups_gone.contains(group)) {
                return Err(anyhow!(
                    "the file does not name the limit group '{group}' any more, which {} shares: give that another \
                     one, or none, first (ringway ctl limit)",
                    disk.name()
                ));
            }
        }
        Ok(())
    }

    /// What is done if all of it succeeds.
    pub(super) fn planned(&self, disks: &Disks, parted: &Parted) -> Reloaded {
        let group = |name: &String| format!("limit-group {name}");
        let changed = |which: fn(&Change) -> bool| {
            self.stay.iter().filter(move |change| which(change)).map(|change| change.disk.image())
        };
        let groups = self.groups.iter().map(|(name, _)| group(name));
        let groups_gone = self.groups_gone.iter().filter(|name| disks.limit_groups.has(name));
        let images = |deletes: bool| {
            let all = parted.removals().filter(move |removal| removal.deletes || !deletes);
            all.map(|removal| removal.disk.image())
        };
        Reloaded {
            added: parted.first.iter().chain(&parted.later).map(image).collect(),
            removed: images(false).chain(groups_gone.map(group)).collect(),
            deleted: images(true).collect(),
            limited: groups.chain(changed(|change| change.limits)).collect(),
            policies: changed(|change| change.policies).collect(),
            unchanged: self.unchanged,
            left: self.left.clone(),
            ..Reloaded::default()
        }
    }
}

/// Disks in the order in which they come and go.
pub(super) struct Parted {
    pub(super) first: Vec<DiskSpec>,
    pub(super) later: Vec<DiskSpec>,
    pub(super) replaced: Vec<Removal>,
    pub(super) gone: Vec<Removal>,
}

impl Parted {
    /// All disks that go.
    pub(super) fn removals(&self) -> impl Iterator<Item = &Removal> {
        self.replaced.iter().chain(&self.gone)
    }
}

/// A disk that goes.
pub(super) struct Removal {
    pub(super) disk: AnyDisk,
    /// Its clone goes with it.
    pub(super) deletes: bool,
    /// No other disk has its image afterwards.
    pub(super) for_good: bool,
}

/// Its image, as the file names it.
pub(super) fn image(spec: &DiskSpec) -> String {
    let image = spec.words.image.as_deref();
    image.map(|image| image.display().to_string()).unwrap_or_default()
}
