//! Power cuts: of what an image's file was asked and had not been synced, any part may be lost, torn or
//! overtaken. The image is whole whatever is left, and what was flushed is there.
//!
//! A history is recorded once and cut at many places. `RINGWAY_POWER_CUTS=100000` makes so many cuts,
//! `RINGWAY_SEED` repeats a run, and a history that went wrong is printed with its own seed.

use crate::disk::{Change, TestDisk};
use crate::flatten::pull;
use crate::matrix::random_changes;
use crate::qemu;
use crate::record::{Event, Record};
use ringway_core::Op;
use ringway_image::{
    CheckOptions, Findings, Format, Header, Layer, LayerFormat, NewImage, Reader, Shape, check,
    repair_leaks,
};
use ringway_testkit::Rng;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) const SECTOR: usize = 512;
/// Cuts of each history.
pub(crate) const CUTS: u64 = 40;
/// One of so many cuts is judged by `qemu-img check`, too.
pub(crate) const QEMU: u64 = 8;

/// What a disk may do that none may: a test that notices nothing would be none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    None,
    /// Syncs do nothing.
    Sync,
}

/// What a sector of the guest's disk was, from which change on.
pub(crate) type Versions = BTreeMap<usize, Vec<(u64, Vec<u8>)>>;

/// What happened to an image.
struct History {
    folder: tempfile::TempDir,
    path: PathBuf,
    /// The file before the first event.
    before: Vec<u8>,
    events: Vec<Event>,
    /// What the disk held before, and everything that was written.
    base: Vec<u8>,
    versions: Versions,
    /// Changes by which the disk became larger, and its bytes from then on.
    grown: Vec<(u64, usize)>,
    /// So much of the disk was copied from its base; `None`: its header names none.
    pulled: Option<u64>,
}

/// Notes: a change begins (its number twice), a guest's flush has ended (its number twice, and one).
pub(crate) fn begins(number: u64) -> u64 {
    2 * number
}

pub(crate) fn flushed(number: u64) -> u64 {
    2 * number + 1
}

impl History {
    fn record(rng: &mut Rng) -> Self {
        let folder =
            tempfile::tempdir_in(if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "." });
        let folder = folder.unwrap();
        let path = folder.path().join("image.qcow2");
        let cluster_bits = rng.pick(&[9, 9, 12, 12, 16]);
        let bytes = rng.pick(&[65536, 300 * SECTOR, 1 << 20]);
        // As with direct I/O, in half of them: clusters are written by several threads then.
        let unit = rng.pick(&[1, 512]);
        let backed = rng.below(2) == 0;
        let journalled = rng.below(2) == 0;
        let mut base = vec![0; bytes];
        if backed {
            base.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / SECTOR) as u8 | 1);
            // Longer than the disk is at first: what is behind its end is not to be seen when it grows.
            let longer = [&base[..], &vec![0xbb; 3 * bytes / 2][..]].concat();
            std::fs::write(folder.path().join("base.raw"), longer).unwrap();
        }
        let name = Path::new("base.raw");
        let backing = backed.then_some((name, Format::Raw));
        let new = NewImage { virtual_size: bytes as u64, cluster_bits, backing };
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        new.write(&file).unwrap();
        let mut model = base.clone();
        if rng.below(3) == 0 {
            // A life before, so that there is something to be freed and used again.
            let mut disk = TestDisk::open_in_units(&path, false, unit);
            (0..6).for_each(|_| disk.change(&mut random_changes(rng, &mut model)));
            base.clone_from(&model);
        }
        let before = std::fs::read(&path).unwrap();
        let record = Record::of(&file);
        let mut history = Self {
            folder,
            path,
            before,
            events: Vec::new(),
            base,
            versions: Versions::new(),
            grown: Vec::new(),
            pulled: backed.then_some(0),
        };
        // The host forgets it with the power cut.
        let journal = history.path.with_file_name("journal");
        let mut disk = match journalled {
            true => TestDisk::open_with_journal(&history.path, unit, &journal).0,
            false => TestDisk::open_in_units(&history.path, false, unit),
        };
        for number in 1..=10 + rng.below(30) {
            history.change(rng, &record, &mut disk, &mut model, number);
            if rng.below(3) == 0 {
                // As the engines do for a guest.
                disk.flush();
                record.note(flushed(number));
            }
        }
        if rng.below(2) == 0 {
            // The end of a life, too.
            drop(disk);
        }
        history.events = record.take();
        history
    }

    fn change(
        &mut self,
        rng: &mut Rng,
        record: &Record,
        disk: &mut TestDisk,
        model: &mut Vec<u8>,
        number: u64,
    ) {
        record.note(begins(number));
        if rng.below(10) == 0 && model.len() < 4 << 20 {
            let bytes = model.len() + (1 + rng.below(3000) as usize) * SECTOR;
            disk.image.grow(bytes as u64).unwrap();
            model.resize(bytes, 0);
            self.grown.push((number, bytes));
            return;
        }
        if let (Some(at), 0) = (&mut self.pulled, rng.below(4)) {
            // The disk holds what it did.
            if *at == disk.image.size() || pull(rng, disk, at) {
                disk.image.detach().unwrap();
                self.pulled = None;
            }
            return;
        }
        if rng.below(5) > 0 {
            let mut changes = random_changes(rng, model);
            for change in &changes {
                let sector = usize::try_from(change.at).unwrap() / SECTOR;
                self.push(number, sector, &change.bytes);
            }
            disk.change(&mut changes);
            return;
        }
        let sectors = (model.len() / SECTOR) as u64;
        let first = rng.below(sectors);
        let count = 1 + rng.below((sectors - first).min(600));
        let (at, len) = (first as usize * SECTOR, count as usize * SECTOR);
        let zeroes = vec![0; len];
        disk.change(&mut [Change { op: Op::Discard, at: at as u64, bytes: zeroes.clone() }]);
        // What the disk makes of it is its own choice, at any time: zeroes, or nothing. Over a base
        // without a word for zeroes, the base's.
        self.push(number, at / SECTOR, &zeroes);
        let old = model[at..at + len].to_vec();
        self.push(number, at / SECTOR, &old);
        let found = disk.read(at as u64, len);
        self.push(number, at / SECTOR, &found);
        model[at..at + len].copy_from_slice(&found);
    }

    fn push(&mut self, number: u64, first: usize, bytes: &[u8]) {
        push(&mut self.versions, number, first, bytes);
    }

    /// Everything that was flushed is there, and nothing that nobody has written.
    fn compare(&self, found: &[u8], count: usize) -> Result<(), String> {
        let (begun, durable) = reached(self.events[..count].iter());
        // A change begins when the one before it was answered.
        let bytes = |most: u64| {
            let grown = self.grown.iter().rev().find(|(number, _)| *number <= most);
            grown.map_or(self.base.len(), |(_, bytes)| *bytes)
        };
        if ![bytes(begun.saturating_sub(1)), bytes(begun)].contains(&found.len()) {
            return Err(format!(
                "it has {} bytes in change {begun} of {:?}",
                found.len(),
                self.grown
            ));
        }
        compare(&self.base, &self.versions, found, (begun, durable))
    }

    fn judge(
        &self,
        rng: &mut Rng,
        count: usize,
        lie: Lie,
        tally: &mut Tally,
    ) -> Result<(), String> {
        let events: Vec<_> = self.events[..count].iter().collect();
        let bytes = after_cut(rng, &self.before, &events, lie);
        let path = self.folder.path().join("cut.qcow2");
        std::fs::write(&path, &bytes).unwrap();
        let found = checked(&path)?;
        tally.cuts += 1;
        tally.leaks += u64::from(found.leaks > 0);
        if rng.below(QEMU) == 0 && tally.qemu.is_some() && lie == Lie::None {
            qemu::check(&path, true);
            *tally.qemu.get_or_insert(0) += 1;
        }
        self.compare(&content(&path), count)?;
        if rng.below(8) > 0 || lie != Lie::None {
            return Ok(());
        }
        // It goes on from there, and leaks can be given back.
        let mut model = content(&path);
        let mut disk = TestDisk::open(&path, false);
        (0..4).for_each(|_| disk.change(&mut random_changes(rng, &mut model)));
        drop(disk);
        checked(&path)?;
        repaired(&path)?;
        tally.repaired += 1;
        if content(&path) != model {
            return Err("what was written after the cut is not there".into());
        }
        Ok(())
    }
}

/// A file after a cut behind these events.
pub(crate) fn after_cut(rng: &mut Rng, before: &[u8], events: &[&Event], lie: Lie) -> Vec<u8> {
    let synced = match lie {
        Lie::Sync => 0,
        Lie::None => events.iter().rposition(|event| **event == Event::Sync).unwrap_or(0),
    };
    let mut file = before.to_vec();
    events[..synced].iter().for_each(|event| apply(&mut file, event, &mut |_| true));
    // All of it, nothing, whole calls, or each sector by itself.
    let how = rng.below(8);
    for event in &events[synced..] {
        let whole = match how {
            0 => true,
            1 => false,
            _ => rng.below(2) == 0,
        };
        // Of calls that change the size, that arrives or it does not.
        let each = how >= 4;
        let mut torn = |_| if each { rng.below(2) == 0 } else { whole };
        match event {
            Event::Write { at, bytes } if !whole => {
                // Behind the end there is no place without its size.
                let end = file.len() as u64;
                let within = usize::try_from(end.saturating_sub(*at)).unwrap().min(bytes.len());
                let event = Event::Write { at: *at, bytes: bytes[..within].to_vec() };
                apply(&mut file, &event, &mut torn);
            }
            Event::Size(_) if !whole => {}
            event => apply(&mut file, event, &mut torn),
        }
    }
    file
}

/// Which change began last before a cut, and which was flushed.
pub(crate) fn reached<'a>(events: impl Iterator<Item = &'a Event>) -> (u64, u64) {
    let (mut begun, mut durable) = (0, 0);
    for event in events {
        if let Event::Note(note) = event {
            match note % 2 {
                0 => begun = note / 2,
                _ => durable = note / 2,
            }
        }
    }
    (begun, durable)
}

/// A change has put these bytes there.
pub(crate) fn push(versions: &mut Versions, number: u64, first: usize, bytes: &[u8]) {
    for (sector, bytes) in (first..).zip(bytes.chunks(SECTOR)) {
        versions.entry(sector).or_default().push((number, bytes.to_vec()));
    }
}

/// Everything that was flushed is there, and nothing that nobody has written, if of all changes so many
/// were begun and flushed.
pub(crate) fn compare(
    before: &[u8],
    versions: &Versions,
    found: &[u8],
    (begun, durable): (u64, u64),
) -> Result<(), String> {
    for (sector, found) in found.chunks(SECTOR).enumerate() {
        let before = before.get(sector * SECTOR..(sector + 1) * SECTOR).unwrap_or(&[0; SECTOR]);
        let all = versions.get(&sector).map_or(&[][..], |all| all);
        let upto = all.iter().map(|(number, _)| *number).filter(|number| *number <= durable);
        let last = upto.max().unwrap_or(0);
        let fits =
            |(number, bytes): &(u64, Vec<u8>)| (last..=begun).contains(number) && bytes == found;
        if !(all.iter().any(fits) || (last == 0 && found == before)) {
            return Err(format!(
                "sector {sector} holds {:x?}, which is none of what it was from change {last} \
                 (flushed: {durable}) to change {begun}",
                &found[..8]
            ));
        }
    }
    Ok(())
}

fn apply(file: &mut Vec<u8>, event: &Event, survives: &mut dyn FnMut(usize) -> bool) {
    let number = |value: u64| usize::try_from(value).unwrap();
    match event {
        Event::Sync | Event::Note(_) => {}
        Event::Size(bytes) => file.resize(number(*bytes), 0),
        Event::Write { at, bytes } => {
            let end = number(*at) + bytes.len();
            if file.len() < end {
                file.resize(end, 0);
            }
            sectors(number(*at), end, survives, &mut |range| {
                let from = range.start - number(*at);
                file[range.clone()].copy_from_slice(&bytes[from..from + range.len()]);
            });
        }
        Event::Punch { at, len } => {
            let end = number(at + len).min(file.len());
            sectors(number(*at), end, survives, &mut |range| file[range].fill(0));
        }
    }
}

/// Calls `change` with each part of a range that lies in one sector and survives.
fn sectors(
    mut at: usize,
    end: usize,
    survives: &mut dyn FnMut(usize) -> bool,
    change: &mut dyn FnMut(std::ops::Range<usize>),
) {
    while at < end {
        let next = ((at / SECTOR + 1) * SECTOR).min(end);
        if survives(at / SECTOR) {
            change(at..next);
        }
        at = next;
    }
}

fn open(path: &Path) -> Result<(File, Header, u64), String> {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let bytes = file.metadata().unwrap().len();
    let header = Header::read(&file, bytes).unwrap();
    let header = header.and_then(|header| header.may_write().map(|()| header));
    Ok((file, header.map_err(|refused| refused.to_string())?, bytes))
}

/// No error; leaks may be.
pub(crate) fn checked(path: &Path) -> Result<Findings, String> {
    let (file, header, bytes) = open(path)?;
    let options = CheckOptions { range: 1 << 16, ..CheckOptions::default() };
    let found =
        check(&file, &header, bytes, options).unwrap().map_err(|error| error.to_string())?;
    let first = found.problems.iter().take(3);
    if found.errors == 0 { Ok(found) } else { Err(format!("{:?}, …", first.collect::<Vec<_>>())) }
}

pub(crate) fn repaired(path: &Path) -> Result<(), String> {
    let (file, header, bytes) = open(path)?;
    let options = CheckOptions { range: 1 << 16, ..CheckOptions::default() };
    repair_leaks(&file, &header, bytes, options).unwrap().map_err(|error| error.to_string())?;
    let found = checked(path)?;
    if found.leaks == 0 { Ok(()) } else { Err(format!("{} leaks after the repair", found.leaks)) }
}

/// All that a disk holds.
pub(crate) fn content(path: &Path) -> Vec<u8> {
    let (file, header, file_bytes) = open(path).unwrap();
    let backed = header.backing.is_some();
    let format = LayerFormat::Qcow2 { shape: Shape::from(&header), data: None };
    let mut layers = vec![Layer { file: Arc::new(file), file_bytes, format, name: path.into() }];
    if backed {
        let name = path.with_file_name("base.raw");
        let file = Arc::new(File::open(&name).unwrap());
        let file_bytes = file.metadata().unwrap().len();
        layers.push(Layer { file, file_bytes, format: LayerFormat::Raw, name });
    }
    let mut reader = Reader::open(layers).unwrap();
    let mut bytes = vec![0; usize::try_from(reader.size()).unwrap()];
    reader.read(0, &mut bytes).unwrap();
    bytes
}

#[derive(Debug, Default)]
struct Tally {
    histories: u64,
    cuts: u64,
    /// Cuts after which there were leaks.
    leaks: u64,
    /// Cuts that `qemu-img check` has judged, if it is here.
    qemu: Option<u64>,
    /// Cuts after which the image was written again, and repaired.
    repaired: u64,
}

/// Histories and cuts until there are so many; the first thing that is wrong.
fn campaign(rng: &mut Rng, cuts: u64, lie: Lie, tally: &mut Tally) -> Result<(), String> {
    while tally.cuts < cuts {
        let seed = rng.next_u64();
        let mut rng = Rng::new(seed);
        let history = History::record(&mut rng);
        tally.histories += 1;
        for _ in 0..CUTS.min(cuts - tally.cuts) {
            let count = usize::try_from(rng.below(history.events.len() as u64 + 1)).unwrap();
            let judged = history.judge(&mut rng, count, lie, tally);
            judged.map_err(|wrong| format!("history {seed}, cut behind event {count}: {wrong}"))?;
        }
        if tally.histories % 100 == 0 {
            println!("{tally:?}");
        }
    }
    Ok(())
}

#[test]
fn c20_a_power_cut_at_any_moment_leaves_an_image_that_is_whole() {
    let cuts = std::env::var("RINGWAY_POWER_CUTS").map_or(480, |cuts| cuts.parse().unwrap());
    let mut rng = Rng::for_test("a_power_cut_at_any_moment");
    let mut tally = Tally { qemu: qemu::is_here().then_some(0), ..Tally::default() };
    let result = campaign(&mut rng, cuts, Lie::None, &mut tally);
    println!("{tally:?}");
    result.unwrap();
    assert!(tally.cuts == cuts && tally.repaired > 0, "{tally:?}");
}

#[test]
fn c20_a_disk_that_forgets_what_was_synced_is_noticed() {
    let mut rng = Rng::new(20);
    let mut tally = Tally::default();
    let wrong = campaign(&mut rng, 2000, Lie::Sync, &mut tally).unwrap_err();
    println!("after {} cuts: {wrong}", tally.cuts);
}
