//! Another size for an open disk.
//!
//! The capacity is one atomic that [`Disk::authorise`] reads. Whoever makes a disk smaller lowers it
//! first, waits until nothing beyond the new end is in flight, and only then cuts the file.

use crate::disk::Disk;
use crate::open::unlock_image;
use crate::storage::Size;
use ringway_core::SECTOR_BYTES;
use ringway_core::host;
use ringway_core::sync_turn::sync_patiently;
use ringway_image::Image;
use std::io;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

/// Why a disk cannot have another size: what is wrong, what to do.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// No size that a disk can have.
    #[error("{bytes} bytes: the size of this disk must be a positive multiple of {unit} bytes")]
    Size {
        /// What was asked for.
        bytes: u64,
        /// What it should be a multiple of, in bytes.
        unit: u64,
    },
    /// More than the file that holds it can have.
    #[error(
        "{bytes} bytes: the file system of its image takes no file as long as that. Choose a smaller size"
    )]
    TooLarge {
        /// What was asked for.
        bytes: u64,
    },
    /// A block device is as large as its host makes it.
    #[error(
        "it is a block device of {bytes} bytes, and only the host can change that. Resize the \
         device, then ask again without a size"
    )]
    Device {
        /// Its size in bytes.
        bytes: u64,
    },
    /// The file was opened for reading.
    #[error(
        "it is served read-only, so its file is not changed. Resize the file, then ask again \
         without a size"
    )]
    ReadOnly,
    /// Its data would have to be thrown away cluster by cluster.
    #[error(
        "its image is qcow2, which only grows while it is served. Stop serving it, then use `ringway \
         resize --shrink`"
    )]
    Image,
    /// It has one size as long as it is served, for this reason.
    #[error("{0}")]
    Fixed(&'static str),
    /// There is nothing to look at.
    #[error("no file holds this disk: say how large it should be")]
    NoFile,
    /// What the host says.
    #[error("cannot {what}: {source}")]
    Host {
        /// What was attempted.
        what: &'static str,
        /// What the host says.
        source: io::Error,
    },
}

impl Disk {
    /// The present size in bytes.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Relaxed)
    }

    /// The size in bytes that asking for `to` leads to: that very size, or without one the size that
    /// the file or block device has by now. Changes nothing.
    ///
    /// # Errors
    /// [`ResizeError`].
    pub fn next_size(&self, to: Option<u64>) -> Result<u64, ResizeError> {
        if let Size::Fixed(why) = self.nature.size {
            return Err(ResizeError::Fixed(why));
        }
        let is_asked = self.nature.size == Size::Asked;
        let bytes = match to {
            Some(bytes) if self.is_image() && bytes < self.capacity() => {
                return Err(ResizeError::Image);
            }
            Some(bytes) => bytes,
            // Its header says it, which nobody else changes.
            None if self.is_image() => self.capacity(),
            None if is_asked => self.file_bytes()?,
            None => return Err(ResizeError::NoFile),
        };
        self.judge_size(bytes)?;
        let follows = is_asked && !self.nature.has_length && !self.is_image();
        if follows && to.is_some() {
            let device = self.file_bytes()?;
            if device != bytes {
                return Err(ResizeError::Device { bytes: device });
            }
        } else if to.is_some() && self.geometry.read_only {
            return Err(ResizeError::ReadOnly);
        }
        Ok(bytes)
    }

    /// Refuses a size that no such disk can have.
    pub(crate) fn judge_size(&self, bytes: u64) -> Result<(), ResizeError> {
        let unit = u64::from(self.alignment.offset.max(self.geometry.logical_block));
        let unit = unit.max(SECTOR_BYTES);
        // Offsets of files are signed.
        if i64::try_from(bytes).is_err() {
            return Err(ResizeError::TooLarge { bytes });
        }
        match bytes > 0 && bytes % unit == 0 {
            true => Ok(()),
            false => Err(ResizeError::Size { bytes, unit }),
        }
    }

    /// From now on requests may go up to `bytes`, which [`Disk::next_size`] has allowed. The file
    /// must hold as much.
    pub fn set_capacity(&self, bytes: u64) {
        self.store_capacity(bytes);
        // What was added may be a hole.
        self.find_holes();
    }

    /// Makes a regular file, or a simulation's memory, `bytes` long; a longer file gets a hole. An image
    /// with a map becomes larger, durably. Does nothing to others.
    ///
    /// # Errors
    /// [`ResizeError::Host`] and [`ResizeError::TooLarge`], with the file as it was.
    pub fn set_file_bytes(&self, bytes: u64) -> Result<(), ResizeError> {
        if let Some(image) = self.image() {
            let host = |source| ResizeError::Host { what: "make its image larger", source };
            image.grow(bytes).inspect_err(|_| self.note_loss()).map_err(host)?;
            if self.was_paused() {
                // Whoever copies it now is not to find that something of it is elsewhere.
                let left = self.leave_journal();
                left.unwrap_or_else(|error| {
                    tracing::warn!(disk = self.name(), "its journal: {error}")
                });
            }
            return Ok(());
        }
        if self.has_forgotten_image() {
            let source = io::Error::other("its tables are not known at present: ask again");
            return Err(ResizeError::Host { what: "make its image larger", source });
        }
        if !self.nature.has_length {
            return Ok(());
        }
        self.file().set_len(bytes).map_err(|source| match source.raw_os_error() {
            Some(libc::EFBIG) => ResizeError::TooLarge { bytes },
            _ => ResizeError::Host { what: "change the size of its file", source },
        })
    }

    /// Has entries of its image's tables be in the file, though not durably, that wait for a flush.
    fn write_entries(&self) -> io::Result<()> {
        self.with_image(Image::write_deferred)
    }

    /// Has all that was answered be in its file, though not durably, and nothing in that say that some of it may
    /// be elsewhere: for whoever copies it. Nothing may be in flight.
    ///
    /// # Errors
    /// What the host says.
    pub fn leave_journal(&self) -> io::Result<()> {
        self.with_image(Image::leave_journal)
    }

    /// As [`Disk::leave_journal`], for who serves it no more: clusters that are not used are given back, too, and nothing
    /// of the image is changed afterwards.
    ///
    /// # Errors
    /// What the host says, also that a sync of the image's thread has failed before: later flushes fail then.
    pub fn leave_image(&self) -> io::Result<()> {
        self.with_image(|image| {
            image.give_back()?;
            image.leave_journal()?;
            if image.has_failed() { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
        })
    }

    pub(crate) fn with_image(&self, act: impl FnOnce(&Image) -> io::Result<()>) -> io::Result<()> {
        let Some(image) = self.image() else { return Ok(()) };
        act(&image).inspect_err(|_| self.note_loss())
    }

    /// To be said when something has failed that the thread of its image was asked for: that may have heard of lost data,
    /// which the host tells nobody else.
    pub fn note_loss(&self) {
        if self.image().is_some_and(|image| image.has_failed()) {
            self.flush_has_failed();
        }
    }

    /// Makes durable what was written and completed, as a guest's flush does.
    ///
    /// # Errors
    /// What the host says; or that an earlier flush has failed, after which only opening the disk
    /// anew helps.
    pub fn sync(&self) -> io::Result<()> {
        self.sync_by(None::<(_, fn() -> _)>)
    }

    /// As [`Disk::sync`]. Where only engines can flush, `flush` has them do it ([`Disk::has_no_sync`]), and
    /// [`Disk::flush_has_failed`] is called where one fails, before it returns. It waits for flushes of guests that are
    /// under way, for `limit` at most.
    ///
    /// # Errors
    /// As there, what `flush` returns, and that the limit is over.
    pub fn sync_with(
        &self,
        limit: Duration,
        flush: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        self.sync_by(Some((limit, flush)))
    }

    fn sync_by(
        &self,
        engines: Option<(Duration, impl FnOnce() -> io::Result<()>)>,
    ) -> io::Result<()> {
        let has_failed = || {
            let failed = self.flush_failed.load(SeqCst);
            failed.then(|| io::Error::other("an earlier flush failed: serve the disk anew"))
        };
        if let Some(error) = has_failed() {
            return Err(error);
        }
        if self.geometry.read_only {
            return Ok(());
        }
        if self.has_no_sync() {
            let Some((limit, flush)) = engines else { return Ok(()) };
            // A server tells one flush alone of what it has lost: two at a time, and the other is answered.
            self.turn.by_others(limit, flush)?;
            return has_failed().map_or(Ok(()), Err);
        }
        if !self.is_real() {
            return Ok(());
        }
        self.write_entries()?;
        // The one that it has waited for may have failed.
        let sync = || has_failed().map_or_else(|| self.sync_files(), Err);
        self.turn.by_thread(sync).unwrap_or_else(|| {
            // Somebody else's sync began after the entries were there. The image's thread tells nobody else.
            self.note_loss();
            has_failed().map_or(Ok(()), Err)
        })
    }

    /// A sync of its files, by the thread that has the turn.
    fn sync_files(&self) -> io::Result<()> {
        let image = self.image();
        // The host tells a lost write-back once: the queues must learn of it.
        self.set_flushing(true);
        let data_file = image.as_ref().and_then(|image| image.data_file());
        let data = data_file.map_or(Ok(()), |(_, file)| sync_patiently(|| file.sync_data()));
        let flushed = || match self.storage.beside() {
            Some(beside) => sync_patiently(|| beside.sync_data()),
            None => sync_patiently(|| self.file().sync_data()),
        };
        let synced = data.and_then(|()| flushed()).and_then(|()| match image {
            // The host has told its thread of what is lost, and nobody else.
            Some(image) if image.has_failed() => {
                Err(io::Error::other("an earlier sync of its image failed: serve the disk anew"))
            }
            _ => Ok(()),
        });
        let synced = synced.inspect_err(|_| self.flush_has_failed());
        self.set_flushing(false);
        synced
    }

    /// Forgets what the host's page cache holds of the file, as far as nobody has changed it here:
    /// others may have written since it was read.
    pub fn forget_cached(&self) {
        host::forget(&self.file());
    }

    /// Lets others have the file at once, though the kernel may keep it open for a moment. Only for
    /// a disk that has nothing in flight.
    pub fn unlock(&self) {
        unlock_image(&self.file());
        if let Some(beside) = self.storage.beside() {
            unlock_image(beside);
        }
    }

    /// True if it is no raw image.
    fn is_image(&self) -> bool {
        let active = self.active();
        active.image.is_some() || active.unmapped.is_some()
    }

    fn file_bytes(&self) -> Result<u64, ResizeError> {
        let bytes = self.storage.bytes(&self.file());
        bytes.map_err(|source| ResizeError::Host { what: "learn its size", source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheMode, OpenOptions, Source, open};
    use ringway_core::{ByteRange, Op, Request, Status};
    use ringway_testkit::{Need, skip};

    fn options(path: &std::path::Path) -> OpenOptions {
        let mut options = OpenOptions::new(Source::Path(path.into()));
        options.cache = Some(CacheMode::Writeback);
        options
    }

    #[test]
    fn a_disk_is_as_large_as_it_was_told_last() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 8192]).unwrap();
        let disk = open(&options(&path)).unwrap();
        let mut request = Request::with_capacity(0);
        request.range = ByteRange::new(8192, 512).unwrap();
        for op in [Op::Read, Op::Write, Op::WriteZeroes] {
            request.op = op;
            assert_eq!(disk.authorise(&request), Err(Status::IoError));
        }
        assert_eq!(disk.next_size(Some(16384)).unwrap(), 16384);
        assert_eq!(disk.capacity(), 8192, "asking changes nothing");
        disk.set_file_bytes(16384).unwrap();
        disk.set_capacity(16384);
        assert_eq!((disk.authorise(&request), disk.geometry().capacity), (Ok(()), 16384));
        assert_eq!(path.metadata().unwrap().len(), 16384);
        // Somebody else has changed the file.
        std::fs::File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
        assert_eq!(disk.next_size(None).unwrap(), 4096);
        assert!(disk.sync().is_ok());
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 8192]).unwrap();
        let mut options = options(&path);
        options.block_size = Some(4096);
        let disk = open(&options).unwrap();
        for bytes in [0, 512, 4097] {
            let error = disk.next_size(Some(bytes)).unwrap_err();
            assert!(matches!(error, ResizeError::Size { unit: 4096, .. }), "{error}");
        }
        drop(disk);
        options.read_only = true;
        let disk = open(&options).unwrap();
        assert!(matches!(disk.next_size(Some(4096)), Err(ResizeError::ReadOnly)));
        assert_eq!(disk.next_size(None).unwrap(), 8192);
        let null = OpenOptions::new(Source::Null { bytes: 1 << 20, latency_us: 0 });
        let null = open(&null).unwrap();
        assert!(matches!(null.next_size(None), Err(ResizeError::NoFile)));
        assert_eq!(null.next_size(Some(1 << 40)).unwrap(), 1 << 40);
        null.set_file_bytes(1 << 40).unwrap();
    }

    /// A loop device over a file; it goes when the test ends.
    struct Loop(String);

    impl Loop {
        fn over(path: &std::path::Path) -> Option<Self> {
            match losetup(&["--find", "--show", path.to_str().unwrap()]) {
                Ok(name) => Some(Self(name.trim().to_owned())),
                Err(why) => {
                    skip(Need::LoopDevice, why);
                    None
                }
            }
        }
    }

    impl Drop for Loop {
        fn drop(&mut self) {
            let _ = losetup(&["--detach", &self.0]);
        }
    }

    fn losetup(args: &[&str]) -> Result<String, String> {
        let output = std::process::Command::new("losetup").args(args).output();
        let output = output.map_err(|error| error.to_string())?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    #[test]
    fn a_block_device_is_as_large_as_its_host_makes_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let Some(device) = Loop::over(&path) else { return };
        let disk = open(&options(std::path::Path::new(&device.0))).unwrap();
        assert_eq!(disk.next_size(None).unwrap(), 1 << 20);
        let error = disk.next_size(Some(2 << 20)).unwrap_err();
        assert!(matches!(error, ResizeError::Device { bytes } if bytes == 1 << 20), "{error}");
        file.set_len(2 << 20).unwrap();
        losetup(&["--set-capacity", &device.0]).unwrap();
        assert_eq!(disk.next_size(None).unwrap(), 2 << 20);
        assert_eq!(disk.next_size(Some(2 << 20)).unwrap(), 2 << 20);
        disk.set_file_bytes(2 << 20).unwrap();
        assert_eq!(disk.capacity(), 1 << 20, "not before it is told");
        drop(disk);
    }
}
