//! Where hosts of NBD servers are. The helper is confined from its beginning and cannot ask a resolver, so
//! those that disks are at from the start are looked up before.

use anyhow::{Context, bail};
use ringway_nbd_client::Target;
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Addresses of hosts.
#[derive(Debug)]
pub(super) struct Addresses {
    /// By names and ports.
    known: BTreeMap<(String, u16), Vec<SocketAddr>>,
    /// A disk is there from the start that takes more than a socket of this host.
    network: bool,
}

impl Addresses {
    /// Looks up the hosts of all that are named.
    ///
    /// # Errors
    /// What the resolver says.
    pub(super) fn look_up(exports: &[Target]) -> anyhow::Result<Self> {
        let mut known = BTreeMap::new();
        for export in exports {
            let Some((host, port)) = export.host() else { continue };
            let addresses = export.look_up();
            let addresses = addresses.with_context(|| {
                format!(
                    "{export}: cannot look up the host '{host}'. Give its IP address, or have the name \
                     known"
                )
            })?;
            known.insert((host.to_owned(), port), addresses);
        }
        Ok(Self { known, network: exports.iter().any(|export| !export.is_local()) })
    }

    /// True if the helper needs what is for networks and for TLS.
    pub(super) fn network(&self) -> bool {
        self.network
    }

    /// The same export, of a host that does not have to be looked up any more.
    ///
    /// # Errors
    /// That it would have to be.
    pub(super) fn place(&self, export: &Target) -> anyhow::Result<Target> {
        if !self.network && !export.is_local() {
            bail!(
                "{export}: this daemon has given up networks and TLS for its sandbox, as no disk needed \
                 them when it started: have such a disk there from the start"
            );
        }
        let Some((host, port)) = export.host() else { return Ok(export.clone()) };
        match self.known.get(&(host.to_owned(), port)) {
            Some(addresses) => Ok(export.at(addresses)),
            None => bail!(
                "{export}: the host '{host}' was not looked up when this daemon started, and cannot be in \
                 its sandbox: give its IP address, or have the disk there from the start"
            ),
        }
    }
}
