//! What a queue needs of the hypervisor: granted pages and one event channel.
//!
//! [`Domain`](crate::Domain) is the real thing, for one queue of a front-end. Tests put pages of their own behind
//! the same trait.

use std::io;
use std::os::fd::RawFd;

/// Bytes of a granted page, whatever the page size of the host.
pub const PAGE: usize = 4096;

/// Which way bytes are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the guest's page to our memory.
    FromGuest,
    /// From our memory to the guest's page.
    ToGuest,
}

/// One piece of a page to copy.
#[derive(Clone, Copy, Debug)]
pub struct GrantCopy {
    /// Which way.
    pub direction: Direction,
    /// The grant of the guest's page.
    pub grant: u32,
    /// Where in that page, in bytes; `offset + len` is at most [`PAGE`].
    pub offset: u16,
    /// How many bytes.
    pub len: u16,
    /// Our memory.
    pub local: *mut u8,
    /// Filled in: whether it was copied.
    pub done: bool,
}

/// A mapping of granted pages that can be undone.
pub trait GrantMapping: Send {
    /// The first byte.
    fn base(&self) -> *mut u8;
}

/// Granted pages and an event channel of one queue.
///
/// ```text
/// host.copy(&mut copies)?           // one system call; `done` tells for each piece
/// let pages = host.map(&[5, 6], Access::Read)?;   // all or nothing; unmapped when dropped
/// host.notify()?                    // ring the guest's bell
/// host.hush()                       // take what rang here, so that it can ring again
/// ```
pub trait Host: Send + 'static {
    /// Pages that are mapped until this is dropped.
    type Mapped: GrantMapping;

    /// Copies all pieces, in one system call. A piece that cannot be copied costs only itself.
    ///
    /// # Errors
    /// That none was copied.
    ///
    /// # Safety
    /// The local memory of each piece is valid for its direction, and nobody else uses it.
    unsafe fn copy(&mut self, copies: &mut [GrantCopy]) -> io::Result<()>;

    /// Maps pages one after the other, without a gap; `writable` if the disk will write to them.
    ///
    /// # Errors
    /// That one of them cannot be mapped, or what else the host says; nothing is mapped then.
    fn map(&mut self, grants: &[u32], writable: bool) -> io::Result<Self::Mapped>;

    /// Rings the guest's bell.
    ///
    /// # Errors
    /// What the host says; the guest may have gone.
    fn notify(&mut self) -> io::Result<()>;

    /// Readable once the guest has rung.
    fn doorbell(&self) -> RawFd;

    /// Takes what rang, so that the guest can ring again.
    fn hush(&mut self);
}
