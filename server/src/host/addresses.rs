//! Where hosts of NBD servers are. The helper is confined from its beginning and cannot ask a resolver, so
//! those that disks are at from the start are looked up before.

use anyhow::{Context, bail};
use ringway_nbd_client::Target;
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Addresses of hosts, by their names and ports.
#[derive(Debug, Default)]
pub(super) struct Addresses(BTreeMap<(String, u16), Vec<SocketAddr>>);

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
        Ok(Self(known))
    }

    /// The same export, of a host that does not have to be looked up any more.
    ///
    /// # Errors
    /// That it would have to be.
    pub(super) fn place(&self, export: &Target) -> anyhow::Result<Target> {
        let Some((host, port)) = export.host() else { return Ok(export.clone()) };
        match self.0.get(&(host.to_owned(), port)) {
            Some(addresses) => Ok(export.at(addresses)),
            None => bail!(
                "{export}: the host '{host}' was not looked up when this daemon started, and cannot be in \
                 its sandbox: give its IP address, or have the disk there from the start"
            ),
        }
    }
}
