//! Where the parts of a disk are, for who asks at leisure: block status, not requests.

use crate::ask::{Ask, Room};
use crate::client::ImageClient;
use crate::image::Image;
use crate::table::Place;
use ringway_core::host::wait_for;
use ringway_core::{ByteRange, Op};
use std::io;

/// Clusters that are looked at together.
const WINDOW: u64 = 8192;

/// Looks parts of an image up, and waits for the image's thread where its tables are not loaded.
///
/// # Example
///
/// ```no_run
/// # fn locate(image: &ringway_image::Image) -> std::io::Result<()> {
/// let mut locator = image.locator()?;
/// let range = ringway_core::ByteRange::new(0, 1 << 30).ok_or(std::io::ErrorKind::InvalidInput)?;
/// println!("{:?}", locator.place(range)?);
/// # Ok(())
/// # }
/// ```
pub struct Locator<'a> {
    image: &'a Image,
    client: ImageClient,
    loads: u32,
}

impl Image {
    /// To be dropped soon: while it is there, but not used, clusters that are free stay unused.
    /// Starts the image's thread, if it is the first to need it.
    ///
    /// # Errors
    /// What the host says to another descriptor.
    pub fn locator(&self) -> io::Result<Locator<'_>> {
        Ok(Locator { image: self, client: self.client(1)?, loads: 0 })
    }
}

impl Locator<'_> {
    /// Where the beginning of `range` is, which lies within the disk and is not empty. [`Place::Ask`]
    /// is data that is compressed, or in pieces. The same may go on behind the end of the answer.
    ///
    /// # Errors
    /// That the image's thread has ended, or what is wrong with the tables.
    pub fn place(&mut self, range: ByteRange) -> io::Result<Place> {
        let most = range.len().min(WINDOW * self.image.cluster());
        let range = ByteRange::new(range.offset(), most).unwrap_or(range);
        let found = self.image.place(range, false);
        if !matches!(found, Place::Ask { .. }) {
            return Ok(found);
        }
        self.load(range)?;
        Ok(match self.image.place(range, false) {
            // Of what is behind it nothing may be known yet.
            Place::Ask { len } => {
                let cluster = self.image.cluster();
                Place::Ask { len: len.min(cluster - range.offset() % cluster) }
            }
            found => found,
        })
    }

    /// How often the image's thread was asked.
    #[must_use]
    pub fn loads(&self) -> u32 {
        self.loads
    }

    fn load(&mut self, range: ByteRange) -> io::Result<()> {
        self.loads += 1;
        let gone = |_| io::Error::other("the thread of the image has ended");
        let memory = std::ptr::null();
        let ask = Ask { tag: 0, op: Op::Read, range, memory, skip: 0, room: Room::Freed };
        // SAFETY: there is no memory.
        unsafe { self.client.ask(ask) }.map_err(gone)?;
        loop {
            if let Some(answer) = self.client.take().map_err(gone)? {
                return match answer.result {
                    0.. => Ok(()),
                    errno => Err(io::Error::from_raw_os_error(
                        i32::try_from(-errno).unwrap_or(libc::EIO),
                    )),
                };
            }
            wait_for(self.client.bell())?;
        }
    }
}
