//! Files that disks are based on, opened for writing: the daemon's side, with a helper or without.

use super::Host;
use super::client::OUT_OF_TURN;
use super::protocol::{HelperAnswer, HelperRequest};
use anyhow::bail;
use ringway_disk::{LockedBase, reopen_for_writing};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

impl Host {
    /// Opens for writing what a disk is based on, and locks it, unless it is `base`, which the owner has
    /// said to be one.
    ///
    /// # Errors
    /// Why it is not ours to write; nothing has changed then.
    pub(crate) fn locked_base(
        &self,
        file: Arc<File>,
        base: Option<&Path>,
    ) -> anyhow::Result<LockedBase> {
        let writable = match &self.helper {
            None => reopen_for_writing(&file, base)?,
            Some(helper) => {
                let request = HelperRequest::Writable { base: base.map(Into::into) };
                let (HelperAnswer::Writable, Some(writable)) =
                    helper.ask_deferred(&request, Some(file.as_fd()))?
                else {
                    bail!(OUT_OF_TURN);
                };
                writable.into()
            }
        };
        Ok(LockedBase::new(file, writable, &self.bases)?)
    }
}
