//! From options to a device.

use crate::device::Device;
use crate::error::Error;
use crate::options::Options;
use std::os::unix::net::UnixStream;
use std::path::Path;

impl Options {
    /// Opens the device whose server listens at `path`.
    ///
    /// # Errors
    /// [`Error`] says what is wrong and what to do.
    pub fn connect(&self, path: impl AsRef<Path>) -> Result<Device, Error> {
        let path = path.as_ref();
        let stream = crate::vhost_user::connect(path, self.patience)?;
        Device::open(self, stream, Some(path.to_path_buf()))
    }

    /// Opens the device at the other end of a connected socket.
    ///
    /// # Errors
    /// [`Error`] says what is wrong and what to do.
    pub fn over(&self, stream: UnixStream) -> Result<Device, Error> {
        Device::open(self, stream, None)
    }
}
