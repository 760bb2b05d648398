//! Why a file cannot be measured, in words of measurements.

use anyhow::anyhow;
use ringway_disk::{ForeignFormat, OpenError};
use std::fs::File;
use std::path::Path;

/// What to say of an image that looks like no raw one.
pub(crate) fn foreign(path: &Path) -> Option<anyhow::Error> {
    let file = File::open(path).ok()?;
    let format = ForeignFormat::of(&file, file.metadata().ok()?.len()).ok()??;
    let say = match format {
        ForeignFormat::Qcow2 => {
            "--format qcow2, or --format raw if a guest has written what is there"
        }
        _ => "--format raw if its bytes are what you mean",
    };
    Some(anyhow!("{}: it looks like {}. Add {say}", path.display(), format.words()))
}

/// The same in words for a measurement.
pub(crate) fn in_words(error: OpenError) -> anyhow::Error {
    match error {
        OpenError::NoDirect { path, why } => {
            anyhow!("{}: O_DIRECT does not work here: {why}. Use --cached", path.display())
        }
        OpenError::InUse { path, holder, .. } => anyhow!(
            "{}: it is in use by {holder}. Measure its socket instead (vhost-user:SOCKET), or \
             stop the other one",
            path.display()
        ),
        OpenError::Permission { path, mode, .. } => {
            anyhow!("{}: no permission to open it for {mode}", path.display())
        }
        error => error.into(),
    }
}
