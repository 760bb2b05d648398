//! An image becomes independent of those it is based on, part by part, while it is served.
//!
//! ```text
//! pull … pull     what it lacks is copied into it; a kill leaves an overlay with more clusters
//! detach          its header names no backing file: from then on it is one file
//! give_back       it is opened anew, without what it was based on
//! ```
//!
//! The image's thread copies, between two batches of what guests ask for. So a copy and a first write to
//! the same cluster come one after the other, and the first of them is what the other finds.

use crate::ahead::{Ahead, FOR_A_JOB, Ranges};
use crate::ask::Pulled;
use crate::image::Image;
use crate::map::Map;
use crate::writer::needs_to_pull;
use ringway_core::ByteRange;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

impl Image {
    /// Copies what the image lacks from those it is based on, from `at` on (bytes of the disk, as
    /// [`Pulled::next`] or 0), until some `most` bytes were read. Zeroes are not copied.
    ///
    /// # Errors
    /// What the host says, `ENOSPC` among it. What was copied before stays, and nothing else has changed.
    pub fn pull(&self, at: u64, most: u64) -> io::Result<Pulled> {
        self.pull_while(&|| true, at, most)
    }

    /// As [`Image::pull`]. A server that is away is waited for as long as it `goes_on`, which is asked now and then.
    ///
    /// # Errors
    /// As [`Image::pull`]; `Interrupted` if it does not go on.
    pub fn pull_while(&self, goes_on: &dyn Fn() -> bool, at: u64, most: u64) -> io::Result<Pulled> {
        let range = ByteRange::new(at, most).ok_or(io::ErrorKind::InvalidInput)?;
        let fetched = self.fetch(FOR_A_JOB, goes_on, move |map| needs_to_pull(map, range))?;
        let pulled = self.in_thread(move |work| {
            let (writer, map) = work.writer()?;
            writer.pull(map, range)
        });
        fetched.iter().for_each(|ahead| ahead.forget(&[FOR_A_JOB]));
        pulled?
    }

    /// What is on no file of this host is waited for here, and not by the image's thread: what `needs` says, for
    /// `number`.
    pub(crate) fn fetch(
        &self,
        number: u64,
        goes_on: &dyn Fn() -> bool,
        needs: impl FnOnce(&mut Map) -> io::Result<Ranges> + Send + 'static,
    ) -> io::Result<Option<Arc<Ahead>>> {
        let needs = self.in_thread(move |work| {
            let (_, map) = work.writer()?;
            let Some((_, ahead)) = map.layers.ahead.clone() else { return Ok(None) };
            io::Result::Ok(Some((ahead, needs(map)?)))
        })??;
        let Some((ahead, ranges)) = needs else { return Ok(None) };
        ahead.fetch_while(number, goes_on, ranges)?;
        Ok(Some(ahead))
    }

    /// Its header names no backing file any more, durably. All of the disk has to be pulled: what the image
    /// lacks reads as zeroes for whoever opens it from now on.
    ///
    /// # Errors
    /// What the host says; the header may say either then.
    pub fn detach(&self) -> io::Result<()> {
        self.may_detach()?;
        self.is_detached.store(true, SeqCst);
        self.in_thread(|work| {
            let (writer, map) = work.writer()?;
            writer.detach(map)
        })?
    }

    /// True once [`Image::detach`] was asked for: whoever opens it by its header may find it alone.
    #[must_use]
    pub fn is_detached(&self) -> bool {
        self.is_detached.load(SeqCst)
    }

    /// Whether [`Image::detach`] can be.
    ///
    /// # Errors
    /// What is in the way.
    pub fn may_detach(&self) -> io::Result<()> {
        self.in_thread(|work| {
            let (writer, map) = work.writer()?;
            writer.may_detach(map)
        })?
    }

    /// Gives back all clusters that it had taken ahead, so that the file can be opened anew. Nothing may be
    /// in flight. It can be used on as long as nobody else writes the file.
    ///
    /// # Errors
    /// What the host says; some of them leak then.
    pub fn give_back(&self) -> io::Result<()> {
        self.in_thread(|work| work.give_back())?
    }
}
