//! All kinds of storage that one process can open and another one serve.

use super::local::Locals;
use super::nbd::Exports;
use super::nvme::Namespaces;
use super::{Driver, Parcel, Storage};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The table.
static DRIVERS: [&dyn Driver; 3] = [&Locals, &Namespaces, &Exports];

/// Why a storage cannot be taken over: what is wrong.
#[derive(Debug, thiserror::Error)]
pub enum NotAdopted {
    /// There is none of this kind in the table.
    #[error("this build knows no storage of the kind '{0}'")]
    Kind(String),
    /// Not what one of its kind has to say.
    #[error("what is said of a storage of the kind '{0}' is none of that")]
    Parcel(&'static str),
}

/// What a disk is that people call so: the same for all names that lead to one disk without a server being asked.
/// `locate` says where a path leads.
#[must_use]
pub fn identity_of(name: &str, locate: &dyn Fn(&Path) -> PathBuf) -> String {
    let identity = DRIVERS.iter().find_map(|driver| driver.identity(name, locate));
    identity.unwrap_or_else(|| name.to_owned())
}

/// Takes over what another process has opened. `name` and `file` are those of the disk.
///
/// # Errors
/// [`NotAdopted`].
pub fn take_over(
    parcel: Parcel,
    name: &str,
    file: &Arc<File>,
) -> Result<Arc<dyn Storage>, NotAdopted> {
    let Some(driver) = DRIVERS.iter().find(|driver| driver.kind() == parcel.kind) else {
        return Err(NotAdopted::Kind(parcel.kind));
    };
    driver.adopt(parcel, name, file).ok_or(NotAdopted::Parcel(driver.kind()))
}
