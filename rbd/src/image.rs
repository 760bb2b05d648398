//! An image that is open.

use crate::error::RbdError;
use crate::library::{Handle, Library};
use crate::target::Target;
use std::fs::File;
use std::sync::Arc;

/// An image that is open. Dropping it closes it, which waits for the cluster, and gives its lock back.
#[derive(Debug)]
pub struct Image {
    pub(crate) opened: Opened,
    target: Target,
    /// An eventfd that nobody writes: it stands for the image where a file is asked for.
    file: Arc<File>,
    read_only: bool,
}

/// What the library has open.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) library: &'static Library,
    pub(crate) cluster: Handle,
    pub(crate) io: Handle,
    pub(crate) image: Handle,
}

// SAFETY: functions of librados and librbd may be called by any thread, several at a time.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Image {
    pub(crate) fn new(
        opened: Opened,
        target: Target,
        read_only: bool,
    ) -> Result<Arc<Self>, RbdError> {
        use rustix::event::{EventfdFlags, eventfd};
        let file = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let file = Arc::new(File::from(file.map_err(std::io::Error::from)?));
        Ok(Arc::new(Self { opened, target, file, read_only }))
    }

    /// What stands for it where a file is asked for: nothing can be read from it.
    #[must_use]
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Its name.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// True if it is open for reading only, and not locked.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Its size by now, in bytes. May wait for the cluster.
    ///
    /// # Errors
    /// What the cluster says.
    pub fn bytes(&self) -> Result<u64, RbdError> {
        self.opened.bytes()
    }
}

impl Opened {
    pub(crate) fn bytes(&self) -> Result<u64, RbdError> {
        let mut bytes = 0;
        // SAFETY: the image is open; the size is written to where it says.
        let rc = unsafe { (self.library.rbd_get_size)(self.image, &raw mut bytes) };
        RbdError::check(rc, "learn the size of the image").map(|()| bytes)
    }

    pub(crate) fn features(&self) -> Result<u64, RbdError> {
        let mut features = 0;
        // SAFETY: as above.
        let rc = unsafe { (self.library.rbd_get_features)(self.image, &raw mut features) };
        RbdError::check(rc, "learn the features of the image").map(|()| features)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: each was made and is used by nobody any more; null ones were not made.
        unsafe {
            if !self.image.is_null() {
                (self.library.rbd_close)(self.image);
            }
            if !self.io.is_null() {
                (self.library.rados_ioctx_destroy)(self.io);
            }
            if !self.cluster.is_null() {
                (self.library.rados_shutdown)(self.cluster);
            }
        }
    }
}
