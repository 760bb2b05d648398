//! What the process of a disk tells the daemon that has the disk.

use super::files::ServedFiles;
use super::lock;
use super::process::say;
use super::protocol::FromProcess;
use crate::connection::Connection;
use std::sync::{Arc, Mutex};

/// This end of the line.
pub(crate) struct Mouth(pub(super) Mutex<Arc<Connection>>);

impl Mouth {
    /// The daemon may have gone, which is heard at the other end of the line.
    pub(super) fn say(&self, message: &FromProcess) {
        let _ = say(&lock(&self.0), message);
    }

    /// The disk is about to be served from these files, or is from now on.
    pub(crate) fn files(&self, files: ServedFiles) {
        self.say(&FromProcess::Files(files));
    }
}
