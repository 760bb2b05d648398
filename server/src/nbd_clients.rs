//! Where NBD clients come in.

use super::host::{Host, SocketFile};
use anyhow::{Context, anyhow, bail};
use ringway_control::config::{Location, NbdAddress, NbdPlace, Place, Plan};
use ringway_disk::Disk;
use ringway_nbd::{Export, Listener, Portal, Reservation, Server, Tls};
use ringway_vhost_user::Access;
use rustix::net::sockopt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// The addresses at which a daemon serves NBD clients. Several disks may be at one of them.
#[derive(Default)]
pub(crate) struct Portals {
    tls: Option<Tls>,
    insecure: bool,
    known: Mutex<KnownPlaces>,
}

#[derive(Default)]
struct KnownPlaces {
    /// Ports that were opened before the sandbox: the address that was asked for, and the one that it is. They stay
    /// open, as they cannot be opened again: who comes while no disk is there waits for one.
    ports: Vec<(SocketAddr, SocketAddr, TcpListener)>,
    open: Vec<(NbdAddress, Option<Location>, Weak<Shared>)>,
}

impl KnownPlaces {
    fn find(&self, said: &NbdAddress, host: &Host) -> Option<Arc<Shared>> {
        let place = location(said, host);
        let is_there = |(address, at, _): &&(NbdAddress, Option<Location>, _)| match (at, &place) {
            (Some(at), Some(place)) => at.is_same_place(place),
            _ => address == said,
        };
        self.open.iter().find(is_there).and_then(|(.., shared)| shared.upgrade())
    }
}

/// Where a Unix socket is, whatever it is called.
fn location(address: &NbdAddress, host: &Host) -> Option<Location> {
    match address {
        NbdAddress::Unix(path) => Some(host.locate(path)),
        NbdAddress::Tcp(_) => None,
    }
}

/// An address with clients of several disks.
struct Shared {
    portal: Arc<Portal>,
    /// With the port that it has got.
    address: NbdAddress,
    access: Access,
    _file: Option<SocketFile>,
}

impl Portals {
    /// Reads certificates, and has the ports of these disks. Before the sandbox: neither can be had in
    /// it.
    ///
    /// # Errors
    /// What is wrong with a file, or with an address.
    pub(crate) fn open(plan: &Plan) -> anyhow::Result<Self> {
        let security = &plan.nbd;
        let tls = match (&security.tls_cert, &security.tls_key) {
            (Some(cert), Some(key)) => {
                let tls = Tls::load(cert, key, security.tls_ca.as_deref());
                Some(tls.with_context(|| plan.origins.lead(&["tls-cert"]) + "TLS")?)
            }
            _ => None,
        };
        let mut ports: Vec<(SocketAddr, SocketAddr, TcpListener)> = Vec::new();
        for disk in &plan.disks {
            let Place::Nbd(NbdPlace { address: NbdAddress::Tcp(address), .. }) = &disk.place else {
                continue;
            };
            if ports.iter().all(|(known, ..)| known != address) {
                let bound = bind(*address)
                    .map_err(|error| anyhow!("{}{}", disk.lead(), refused(*address, &error)))?;
                ports.push((*address, bound.local_addr()?, bound));
            }
        }
        let known = Mutex::new(KnownPlaces { ports, open: Vec::new() });
        Ok(Self { tls, insecure: security.insecure, known })
    }

    /// Listens, unless another disk is there already.
    fn at(&self, said: &NbdAddress, access: Access, host: &Host) -> anyhow::Result<Arc<Shared>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.open.retain(|(.., shared)| shared.strong_count() > 0);
        if let Some(shared) = known.find(said, host) {
            if matches!(said, NbdAddress::Unix(_)) && shared.access != access {
                bail!("{said}: its disks ask for different socket-modes or socket-groups");
            }
            return Ok(shared);
        }
        let (listener, address, file) = match said {
            NbdAddress::Unix(path) => {
                let (listener, file) = host.listen(path, false, access)?;
                // A client may be gone again before it is accepted.
                listener.set_nonblocking(true)?;
                (Listener::Unix(listener), NbdAddress::Unix(file.path().into()), Some(file))
            }
            NbdAddress::Tcp(wanted) => {
                let port = known.ports.iter().find(|(asked, ..)| asked == wanted);
                let Some((_, address, listener)) = port else {
                    bail!(
                        "{said}: no port can be opened while the daemon runs: use one at which it \
                         serves a disk, or a Unix socket"
                    );
                };
                (Listener::Tcp(listener.try_clone()?), NbdAddress::Tcp(*address), None)
            }
        };
        let is_port = matches!(address, NbdAddress::Tcp(_));
        let portal = match &self.tls {
            Some(tls) => Portal::new(listener).with_tls(tls.clone(), is_port),
            None => Portal::new(listener),
        };
        if address.is_public() && self.tls.is_none() {
            if !self.insecure {
                bail!("{address}: other hosts could connect there, and there is no TLS");
            }
            tracing::warn!(
                "NBD at {address} without encryption: whoever can reach this address can read and \
                 write the disk"
            );
        }
        let shared = Shared { portal: Arc::new(portal), address, access, _file: file };
        let shared = Arc::new(shared);
        // Now that the socket is there.
        known.open.push((said.clone(), location(said, host), Arc::downgrade(&shared)));
        Ok(shared)
    }

    /// What clients of these disks connect to, once all are there.
    pub(crate) fn uris(&self, places: &[NbdPlace], host: &Host) -> Vec<String> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let uri = |place: &NbdPlace| {
            let shared = known.find(&place.address, host)?;
            Some(shared.uri(&place.export))
        };
        places.iter().filter_map(uri).collect()
    }
}

impl Shared {
    fn uri(&self, export: &str) -> String {
        let needs_tls = self.portal.needs_tls();
        match &self.address {
            // Clients have working folders of their own.
            NbdAddress::Unix(path) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                NbdAddress::Unix(path).uri(export, needs_tls)
            }
            tcp => tcp.uri(export, needs_tls),
        }
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    // Connections inherit both: an answer does not wait for more to be sent with it, and a client that
    // has vanished is noticed within a minute: until then it keeps its place, and what it has left unread may be
    // carried out when its cable is mended.
    sockopt::set_tcp_nodelay(&listener, true)?;
    sockopt::set_socket_keepalive(&listener, true)?;
    sockopt::set_tcp_keepidle(&listener, Duration::from_secs(30))?;
    sockopt::set_tcp_keepintvl(&listener, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(&listener, 3)?;
    // Keeping alive is not asked while something sent has not arrived.
    sockopt::set_tcp_user_timeout(&listener, 60_000)?;
    Ok(listener)
}

/// Why nobody can listen there, and what to do.
fn refused(address: SocketAddr, error: &io::Error) -> anyhow::Error {
    let what_to_do = match error.kind() {
        io::ErrorKind::AddrInUse => ": another process listens there. Choose another port",
        io::ErrorKind::AddrNotAvailable => ": this host has no such address",
        io::ErrorKind::PermissionDenied => {
            ": ports below 1024 are for root. Choose a higher one, or start the daemon as root"
        }
        _ => "",
    };
    anyhow!("NBD at {address}: {error}{what_to_do}")
}

/// Where the clients of a disk come in.
pub(crate) struct NbdClients {
    // Before the address, which may go with it.
    reservation: Reservation,
    place: PathBuf,
    _shared: Arc<Shared>,
}

impl NbdClients {
    /// Listens.
    ///
    /// # Errors
    /// What is wrong with the place.
    pub(crate) fn listen(
        place: &NbdPlace,
        access: Access,
        (portals, host): (&Portals, &Host),
    ) -> anyhow::Result<Self> {
        let shared = portals.at(&place.address, access, host)?;
        let reservation = shared.portal.reserve(&place.export);
        let reservation = reservation.with_context(|| format!("NBD at {}", shared.address))?;
        let place = shared.uri(&place.export).into();
        Ok(Self { reservation, place, _shared: shared })
    }

    /// So many clients can choose the disk from now on: whoever accepts them may be another disk's thread.
    pub(crate) fn open(&self, disk: &Arc<Disk>, clients: u16) {
        self.reservation.open(disk, clients.into());
    }

    /// Where that is: a URI.
    pub(crate) fn place(&self) -> &Path {
        &self.place
    }

    /// Serves clients until `stop` is readable.
    ///
    /// # Errors
    /// What the host says, or that a worker has failed.
    pub(crate) fn serve(&self, export: &Export, stop: BorrowedFd<'_>) -> io::Result<()> {
        Server::new(export).serve(&self.reservation, stop)
    }
}
