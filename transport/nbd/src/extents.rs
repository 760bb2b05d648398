//! What is allocated of a disk, for block status. Asks the file system, which may take its time: not
//! for workers.

use crate::handshake::Replies;
use crate::protocol::{BASE_ALLOCATION_ID, state};
use ringway_core::ByteRange;
use ringway_disk::Disk;
use ringway_image::{Image, Place};
use rustix::fs::{FileType, SeekFrom, fstat, seek};
use rustix::io::Errno;
use std::fs::File;

/// Extents in one answer. A client asks again for what comes after them.
pub(crate) const EXTENTS_MAX: usize = 1024;

/// The longest answer, in bytes.
pub(crate) const ANSWER_MAX: usize = 8 + 16 * EXTENTS_MAX;

/// Tables of an image that one answer may have loaded.
const LOADS_MAX: u32 = 64;

/// Parts of an image that are looked at for one answer.
const STEPS_MAX: u32 = 16384;

/// A question, with the memory for its answer.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) cookie: u64,
    pub(crate) range: ByteRange,
    /// One extent only.
    pub(crate) one: bool,
    pub(crate) memory: Vec<u8>,
}

/// The answer, as it goes to the client.
#[derive(Debug)]
pub(crate) struct Extents {
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) payload: Vec<u8>,
}

/// Where it is known what is allocated of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tells {
    /// Nowhere: all of it counts as data.
    Nothing,
    /// In its file, which has holes.
    File,
    /// In the tables of its image, and in the files that they name.
    Image,
}

impl Tells {
    pub(crate) fn of(disk: &Disk) -> Self {
        let is_file = || {
            let stat = fstat(&*disk.file());
            stat.is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::RegularFile)
        };
        match disk.image() {
            Some(_) => Self::Image,
            None if disk.is_real() && is_file() => Self::File,
            None => Self::Nothing,
        }
    }
}

/// Extents as they are found: neighbours of one kind are one.
struct List {
    extents: Vec<(u64, u32)>,
    at: u64,
    most: usize,
}

impl List {
    /// False once there is no room for another one.
    fn add(&mut self, end: u64, flags: u32) -> bool {
        let (len, is_full) = (end - self.at, self.extents.len() == self.most);
        match self.extents.last_mut() {
            Some((last, same)) if *same == flags => *last += len,
            _ if is_full => return false,
            _ => self.extents.push((len, flags)),
        }
        self.at = end;
        true
    }
}

impl Question {
    /// Finds out, as far as `tells` knows. At least the first extent is told; a client asks again for
    /// what was not.
    pub(crate) fn answer(self, disk: &Disk, tells: Tells, replies: Replies) -> Extents {
        let Self { cookie, range, one, memory: mut payload } = self;
        let most = if one { 1 } else { EXTENTS_MAX };
        let mut list = List { extents: Vec::with_capacity(most), at: range.offset(), most };
        match (tells, disk.image()) {
            (Tells::File, _) => of_file(&disk.file(), range.end(), &mut list),
            (Tells::Image, Some(image)) => of_image(&image, range.end(), &mut list),
            _ => {}
        }
        if list.extents.is_empty() {
            list.add(range.end(), 0);
        }
        let extended = replies == Replies::Extended;
        payload.clear();
        payload.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
        if extended {
            let count = u32::try_from(list.extents.len()).unwrap_or(0);
            payload.extend_from_slice(&count.to_be_bytes());
        }
        for (len, flags) in list.extents {
            if extended {
                payload.extend_from_slice(&len.to_be_bytes());
                payload.extend_from_slice(&u64::from(flags).to_be_bytes());
                continue;
            }
            // A compact answer has 32 bits for a length; the client asks again for the rest.
            let len_said = u32::try_from(len).unwrap_or(!511);
            payload.extend_from_slice(&len_said.to_be_bytes());
            payload.extend_from_slice(&flags.to_be_bytes());
            if u64::from(len_said) < len {
                break;
            }
        }
        Extents { cookie, offset: range.offset(), payload }
    }
}

const HOLE: u32 = state::HOLE | state::ZERO;

fn of_file(file: &File, end: u64, list: &mut List) {
    while list.at < end {
        let (next, flags) = extent(file, list.at, end);
        if !list.add(next, flags) {
            break;
        }
    }
}

/// The extent of a file that begins at `at`: where it ends, and what it is. Holes end at multiples of
/// 512, as requests do; what is allocated of such a piece counts for all of it.
fn extent(file: &File, at: u64, end: u64) -> (u64, u32) {
    match seek(file, SeekFrom::Data(at)) {
        Ok(data) if data & !511 > at => ((data & !511).min(end), HOLE),
        // Nothing but a hole up to the file's end, which may be before the disk's.
        Err(Errno::NXIO) => (end, HOLE),
        Ok(_) => match seek(file, SeekFrom::Hole(at)) {
            Ok(start) if start > at => (start.next_multiple_of(512).min(end), 0),
            _ => (end, 0),
        },
        Err(_) => (end, 0),
    }
}

/// What an image's tables say, and where they name a file, what that says. As far as it takes no more
/// than [`LOADS_MAX`] and [`STEPS_MAX`]: a disk may have more clusters than anybody can wait for.
fn of_image(image: &Image, end: u64, list: &mut List) {
    let Ok(mut locator) = image.locator() else { return };
    for _ in 0..STEPS_MAX {
        let left = end.checked_sub(list.at).filter(|left| *left > 0);
        let Some(range) = left.and_then(|left| ByteRange::new(list.at, left)) else { break };
        // What is wrong with the tables a read will tell.
        let Ok(place) = locator.place(range) else { break };
        let from = list.at;
        let goes_on = match place {
            Place::Zero { len } => list.add(from + len, HOLE),
            Place::Ask { len } => list.add(from + len, 0),
            Place::Direct { file, offset, len } => {
                let file = &image.files()[usize::from(file)];
                let (next, flags) = extent(file, offset, offset + len);
                list.add(from + (next - offset), flags)
            }
        };
        if !goes_on || locator.loads() >= LOADS_MAX {
            break;
        }
    }
}
