//! Images that are not whole: a daemon has more of them than they have.

use anyhow::bail;
pub(crate) use ringway_image::NOT_WHOLE as ADVICE;
use ringway_image::{Chain, Header, printable};
use std::path::Path;

/// Refuses a chain of which that is true.
///
/// # Errors
/// Which image it is, and what to do.
pub(crate) fn nothing_waits(chain: &Chain) -> anyhow::Result<()> {
    chain.files.iter().try_for_each(|image| nothing_waits_for(&image.name, image.header.as_ref()))
}

/// As [`nothing_waits`], for one image.
///
/// # Errors
/// As there.
pub(crate) fn nothing_waits_for(name: &Path, header: Option<&Header>) -> anyhow::Result<()> {
    if header.is_some_and(Header::waits_for_journal) {
        bail!("{}: {ADVICE}", printable(name));
    }
    Ok(())
}
