//! What was agreed upon with the servers of exports, kept in the state folder for a start while one of them is
//! away: that disk waits for its server by itself, and no other one waits with it. Nobody's data depend on it: when
//! the server is back, what it says is compared with this before it is used.

use super::facts_message;
use super::state::StateDir;
use super::state_name::StateName;
use ringway_disk::{Disk, OpenOptions, Source};
use ringway_nbd_client::{Known, Negotiated};
use rustix::fs::{Mode, OFlags, openat};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};

/// More than any of them has: names of 4096 bytes, twice, in escapes of JSON.
const BYTES_MAX: u64 = 64 << 10;

/// One of them, as it is written.
#[derive(Deserialize, Serialize)]
struct Record {
    /// What it is.
    name: String,
    #[serde(with = "facts_message::remote")]
    negotiated: Option<Negotiated>,
    /// What its server calls it.
    export: Option<String>,
    connections: u16,
}

/// What is known of an export, by what it is; nothing if it was never used with this folder.
pub(super) fn recall(dir: &StateDir, identity: &str) -> Option<Known> {
    let file = open(dir, identity, OFlags::RDONLY).ok()?;
    let mut bytes = Vec::new();
    file.take(BYTES_MAX).read_to_end(&mut bytes).ok()?;
    let record: Record = serde_json::from_slice(&bytes).ok()?;
    let Record { name: its, negotiated, export, connections } = record;
    let negotiated = negotiated.filter(|_| its == identity)?;
    Some(Known { negotiated, export, connections })
}

/// An export that is opened at a start may be away if it is known.
pub(super) fn may_be_away(options: &mut OpenOptions, identity: &str, dir: Option<&StateDir>) {
    if let Source::Nbd(target) = &mut options.source {
        *target = target.with_known(dir.and_then(|dir| recall(dir, identity)));
    }
}

/// Keeps what is known of a disk, if that is an export, whose server is there and of which nothing was asked yet.
pub(super) fn keep(disk: &Disk, identity: &str, dir: Option<&StateDir>) {
    let connected = disk.remote().and_then(|remote| remote.unused());
    let (Some(known), Some(dir)) = (connected.and_then(|connected| connected.known()), dir) else {
        return;
    };
    if recall(dir, identity).as_ref() == Some(&known) {
        return;
    }
    let record = Record {
        name: identity.to_owned(),
        negotiated: Some(known.negotiated),
        export: known.export,
        connections: known.connections,
    };
    let written = || -> std::io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
        // A part of it is none of JSON.
        open(dir, identity, flags)?.write_all(&serde_json::to_vec(&record)?)
    };
    if let Err(error) = written() {
        tracing::warn!(
            disk = disk.name(),
            "what its NBD server offers cannot be kept, so the next daemon does not start while that is away: {error}"
        );
    }
}

fn open(dir: &StateDir, identity: &str, flags: OFlags) -> std::io::Result<File> {
    let name = StateName::known_export(identity);
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(openat(dir.fd(), name.to_string(), flags, Mode::RUSR | Mode::WUSR)?))
}
