//! One writer: the exclusive lock of the image, which the cluster keeps.
//!
//! Who lives keeps it, whoever that is. Who is dead loses it, and is blocklisted at that: what it had sent and
//! the cluster had not yet done is never done, so that it cannot come after what its successor writes.

use crate::error::{RbdError, os};
use crate::image::Opened;
use crate::library::{LOCK_EXCLUSIVE, Watcher};
use crate::owner::{KEY, Myself};
use crate::within::within;
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long one question may take.
const STEP: Duration = Duration::from_secs(30);
/// How often the lock is looked at while somebody else has it.
const POLL_EVERY: Duration = Duration::from_millis(200);
/// The most owners and watchers that are asked for.
const MANY: usize = 64;

/// Who has the exclusive lock of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The address of the client.
    pub address: String,
    /// The cluster has heard of it within the last half minute.
    pub lives: bool,
}

/// What one look has come to.
enum Turn {
    Ours,
    /// Somebody else was faster, or has just let go.
    Again,
    /// Of somebody dead, from whom it was taken.
    Broken(String),
    /// Of somebody who lives.
    Theirs(String),
}

/// Takes the lock; waits for somebody who has it and lives for as long as `wait`.
///
/// # Errors
/// [`RbdError::InUse`], and what the cluster says.
pub(crate) fn take(
    image: &Arc<Opened>,
    disk: &str,
    myself: &Myself,
    wait: Option<Duration>,
) -> Result<(), RbdError> {
    let begun = Instant::now();
    loop {
        let (image, myself) = (Arc::clone(image), myself.clone());
        match within("to take the lock", STEP, move || turn(&image, &myself))?? {
            Turn::Ours => return Ok(()),
            Turn::Broken(owner) => tracing::warn!(
                disk,
                "{owner} had the lock of the image and is dead: its lock is broken, and nothing that it \
                 had sent is done any more (it is on the cluster's blocklist)"
            ),
            Turn::Theirs(owner) if begun.elapsed() >= wait.unwrap_or_default() => {
                return Err(RbdError::InUse(owner));
            }
            Turn::Again if begun.elapsed() >= wait.unwrap_or_default() + STEP => {
                return Err(RbdError::Silent { step: "to take the lock", seconds: STEP.as_secs() });
            }
            // Nobody unparks this thread.
            Turn::Theirs(_) | Turn::Again => std::thread::park_timeout(POLL_EVERY),
        }
    }
}

/// Who has the lock now, also for those who have opened the image for reading: the library does not
/// tell them whose the managed lock is, but all locks.
pub(crate) fn holder(image: &Opened) -> Result<Option<Holder>, RbdError> {
    let Some(address) = locker(image)? else { return Ok(None) };
    let lives = is_watching(image, &address)?;
    Ok(Some(Holder { address, lives }))
}

fn turn(image: &Opened, myself: &Myself) -> Result<Turn, RbdError> {
    let Some(owner) = owner(image)? else {
        // SAFETY: the image is open.
        let rc = unsafe { (image.library.rbd_lock_acquire)(image.image, LOCK_EXCLUSIVE) };
        return match rc.saturating_neg() {
            libc::EROFS | libc::EBUSY | libc::EAGAIN => Ok(Turn::Again),
            _ => {
                RbdError::check(rc, "take the exclusive lock of the image")?;
                note(image, myself)?;
                Ok(Turn::Ours)
            }
        };
    };
    let known = noted(image).is_some_and(|note| myself.knows_dead(&note, &owner));
    if !known && is_watching(image, &owner)? {
        return Ok(Turn::Theirs(owner));
    }
    let name = CString::new(owner.as_str()).unwrap_or_default();
    // SAFETY: the image is open, the name ends with a zero.
    let rc = unsafe { (image.library.rbd_lock_break)(image.image, LOCK_EXCLUSIVE, name.as_ptr()) };
    match rc.saturating_neg() {
        // Another one by now, or none.
        libc::EBUSY | libc::ENOENT | libc::EAGAIN => return Ok(Turn::Again),
        libc::EPERM | libc::EACCES => {
            let what = "break the lock of a dead process, which takes mon 'profile rbd'";
            return Err(RbdError::Ceph { what, source: os(rc) });
        }
        _ => RbdError::check(rc, "break the lock of a dead process")?,
    }
    Ok(Turn::Broken(owner))
}

/// The address of who has the lock.
fn owner(image: &Opened) -> Result<Option<String>, RbdError> {
    let (mut mode, mut owners, mut count): (c_int, _, _) =
        (0, [ptr::null_mut::<c_char>(); MANY], MANY);
    // SAFETY: at most so many names are written, and how many they are.
    let rc = unsafe {
        let list = owners.as_mut_ptr();
        (image.library.rbd_lock_get_owners)(image.image, &raw mut mode, list, &raw mut count)
    };
    if rc == -libc::ENOENT {
        return Ok(None);
    }
    RbdError::check(rc, "learn who has the lock of the image")?;
    // SAFETY: those that were written are texts with their ends.
    let name = |text: &*mut c_char| unsafe { CStr::from_ptr(*text) }.to_string_lossy().into_owned();
    let first = owners[..count.min(MANY)].first().map(name);
    // SAFETY: as many as were written.
    unsafe { (image.library.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count.min(MANY)) };
    Ok(first)
}

/// The address of the first client that has a lock.
fn locker(image: &Opened) -> Result<Option<String>, RbdError> {
    const ROOM: usize = 16 << 10;
    let mut exclusive: c_int = 0;
    // Tag, clients, cookies and addresses, each text with a zero at its end.
    let mut texts: [_; 4] = std::array::from_fn(|_| vec![0u8; ROOM]);
    let mut lens = [ROOM; 4];
    let at: [*mut c_char; 4] = std::array::from_fn(|n| texts[n].as_mut_ptr().cast());
    let len: [*mut usize; 4] = std::array::from_fn(|n| &raw mut lens[n]);
    // SAFETY: the image is open; at most so many bytes of each are written.
    let rc = unsafe {
        (image.library.rbd_list_lockers)(
            image.image,
            &raw mut exclusive,
            at[0],
            len[0],
            at[1],
            len[1],
            at[2],
            len[2],
            at[3],
            len[3],
        )
    };
    RbdError::check(c_int::try_from(rc).unwrap_or(1), "learn who has a lock of the image")?;
    let address = CStr::from_bytes_until_nul(&texts[3]).ok().filter(|_| rc > 0);
    Ok(address.map(|address| address.to_string_lossy().into_owned()))
}

/// Whether the cluster still hears of the client at an address: those who have the image open watch it, and
/// are forgotten when they say nothing for half a minute.
fn is_watching(image: &Opened, owner: &str) -> Result<bool, RbdError> {
    let mut watchers: Vec<Watcher> = Vec::with_capacity(MANY);
    let mut count = MANY;
    // SAFETY: at most so many are written, and how many they are.
    let rc = unsafe {
        (image.library.rbd_watchers_list)(image.image, watchers.as_mut_ptr(), &raw mut count)
    };
    if rc == -libc::ERANGE {
        return Ok(true);
    }
    RbdError::check(rc, "learn who has the image open")?;
    // SAFETY: so many were written.
    unsafe { watchers.set_len(count.min(MANY)) };
    // The number behind the slash is the client's own, however the address before it is written.
    let number = |address: &str| address.rsplit('/').next().unwrap_or_default().to_owned();
    // SAFETY: texts with their ends, which live until the clean-up.
    let address = |w: &Watcher| unsafe { CStr::from_ptr(w.addr) }.to_string_lossy().into_owned();
    let wanted = number(owner);
    // A list without even us is none to build on.
    let watches = watchers.is_empty() || watchers.iter().any(|w| number(&address(w)) == wanted);
    // SAFETY: as many as were written.
    unsafe { (image.library.rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), watchers.len()) };
    Ok(watches)
}

/// Notes who has the lock now, for a successor on this host.
fn note(image: &Opened, myself: &Myself) -> Result<(), RbdError> {
    let Some(owner) = owner(image)? else { return Ok(()) };
    let note = CString::new(myself.note(&owner)).unwrap_or_default();
    // SAFETY: the image is open, both texts end with a zero.
    let rc = unsafe { (image.library.rbd_metadata_set)(image.image, KEY.as_ptr(), note.as_ptr()) };
    RbdError::check(rc, "note who has the lock of the image")
}

/// What was noted last.
fn noted(image: &Opened) -> Option<String> {
    let (mut value, mut len) = (vec![0u8; 1024], 1024);
    // SAFETY: at most so many bytes are written, a zero at the end included.
    let rc = unsafe {
        let buffer = value.as_mut_ptr().cast();
        (image.library.rbd_metadata_get)(image.image, KEY.as_ptr(), buffer, &raw mut len)
    };
    let text = CStr::from_bytes_until_nul(&value).ok().filter(|_| rc >= 0)?;
    Some(text.to_string_lossy().into_owned())
}
