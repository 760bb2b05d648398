//! Changes to the images of disks that are served.

use clap::Args;
use ringway_control::protocol::Snapshotted;
use serde_json::{Value, json};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// What `ringway ctl snapshot` is told.
#[derive(Debug, Args)]
pub(super) struct SnapshotOf {
    /// The disk: its image is qcow2.
    disk: String,
    /// What is to have the data of now: a name, or a path in the folder of the image. Nothing may have
    /// it.
    new: PathBuf,
}

impl SnapshotOf {
    /// The fields of the request. The daemon runs in another folder; a name alone is one beside the
    /// image.
    pub(super) fn request(self) -> io::Result<Value> {
        let Self { disk, new } = self;
        let bare = new.parent().is_some_and(|parent| parent.as_os_str().is_empty());
        // What has no last part is for the daemon to refuse.
        let named = new.file_name().is_some();
        let snapshot = if bare || !named { new } else { std::path::absolute(new)? };
        Ok(json!({ "disk": disk, "snapshot": snapshot }))
    }
}

/// The line for an answer.
pub(super) fn snapshotted(taken: &Snapshotted) -> String {
    let Snapshotted { image, snapshot, blackout_us, images, id: _ } = taken;
    let took = Duration::from_micros(*blackout_us);
    format!(
        "{image}: what was written so far is {} (read-only). The image goes on top of it, {images} images \
         together; no requests were taken for {took:.1?}\n",
        snapshot.display()
    )
}
