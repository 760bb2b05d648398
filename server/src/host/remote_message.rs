//! How an export is to be connected to, as the helper is told.

use anyhow::Context;
use ringway_nbd_client::{Connections, Target};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;

/// How an export is to be connected to.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct RemoteMessage {
    connections: (u16, bool),
    connect_timeout: Duration,
    /// A lost connection is made anew: there has to be one.
    again: bool,
    /// Nobody writes to it.
    only_reads: bool,
}

impl RemoteMessage {
    pub(super) fn of(target: &Target, again: bool) -> Self {
        let Connections { most, asked } = target.connections();
        let (connect_timeout, only_reads) = (target.connect_timeout(), target.only_reads());
        Self { connections: (most, asked), connect_timeout, again, only_reads }
    }

    pub(super) fn is_again(&self) -> bool {
        self.again
    }

    pub(super) fn apply(self, name: &Path) -> anyhow::Result<Target> {
        let target: Target = name.to_str().context("a name that is no text")?.parse()?;
        let (most, asked) = self.connections;
        let target = target.with_connections(Connections { most, asked });
        let target = target.with_connect_timeout(self.connect_timeout);
        Ok(if self.only_reads { target.to_be_read() } else { target })
    }
}
