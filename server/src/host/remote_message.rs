//! How an export is to be connected to, as the helper is told, and what comes of it.

use anyhow::Context;
use ringway_nbd_client::{Connected, Connections, Negotiated, Target};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How an export is to be connected to.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct RemoteMessage {
    connections: (u16, bool),
    connect_timeout: Duration,
    /// A lost connection is made anew: there has to be one.
    again: bool,
}

impl RemoteMessage {
    pub(super) fn of(target: &Target, again: bool) -> Self {
        let Connections { most, asked } = target.connections();
        Self { connections: (most, asked), connect_timeout: target.connect_timeout(), again }
    }

    pub(super) fn is_again(&self) -> bool {
        self.again
    }

    pub(super) fn apply(self, name: &Path) -> anyhow::Result<Target> {
        let target: Target = name.to_str().context("a name that is no text")?.parse()?;
        let (most, asked) = self.connections;
        let target = target.with_connections(Connections { most, asked });
        Ok(target.with_connect_timeout(self.connect_timeout))
    }
}

/// Connections that the helper has made, or why there is none yet.
pub(super) fn connected(
    negotiated: Negotiated,
    (export, away): (Option<String>, Option<String>),
    first: &Arc<File>,
    others: Vec<OwnedFd>,
) -> Connected {
    let others = others.into_iter().map(|socket| Arc::new(File::from(socket))).collect();
    Connected { socket: Arc::clone(first), others, negotiated, export, away }
}
