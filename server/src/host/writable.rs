//! Files that disks are based on, opened for writing: the daemon's side, with a helper or without.

use super::Host;
use super::client::{Client, OUT_OF_TURN};
use super::protocol::{HelperAnswer, HelperRequest};
use anyhow::bail;
use ringway_disk::{LockedBase, reopen_for_writing};
use ringway_image::Layer;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file that a disk is based on, and how its name is looked up.
pub(crate) struct NamedBase {
    layer: Layer,
    base: Option<PathBuf>,
    helper: Option<Arc<Client>>,
}

impl NamedBase {
    /// Opens it for writing: refuses it if it is `base`, or if its name leads elsewhere by now.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn open(&self) -> anyhow::Result<File> {
        let (file, name, base) = (&self.layer.file, &self.layer.name, self.base.as_deref());
        let Some(helper) = &self.helper else {
            return Ok(reopen_for_writing(file, Some(name), base)?);
        };
        let request =
            HelperRequest::Writable { name: (&**name).into(), base: base.map(Into::into) };
        match helper.ask_deferred(&request, Some(file.as_fd()))? {
            (HelperAnswer::Writable, Some(writable)) => Ok(writable.into()),
            _ => bail!(OUT_OF_TURN),
        }
    }
}

impl Host {
    /// Opens for writing what a disk is based on, and locks it, unless it is `base`, which the owner has
    /// said to be one. The name can be looked up again.
    ///
    /// # Errors
    /// Why it is not ours to write; nothing has changed then.
    pub(crate) fn locked_base(
        &self,
        layer: Layer,
        base: Option<&Path>,
    ) -> anyhow::Result<(LockedBase, NamedBase)> {
        let file = Arc::clone(&layer.file);
        let named = NamedBase { layer, base: base.map(Into::into), helper: self.helper.clone() };
        Ok((LockedBase::new(file, named.open()?, &self.bases)?, named))
    }
}
