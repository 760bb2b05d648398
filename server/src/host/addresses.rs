//! Where hosts of NBD servers are. The helper is confined from its beginning and cannot ask a resolver, so
//! those that disks are at from the start are looked up before, and later by a process that can
//! (`addresses/resolver.rs`): each time when their servers are connected to anew.

mod resolver;

use super::wire::{ReceiveError, receive, send};
use crate::sandbox::{Account, acting_as};
use anyhow::{Context, anyhow, bail};
use resolver::{Answer, Question};
use ringway_control::config::Sandbox;
use ringway_nbd_client::Target;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// Addresses of hosts.
#[derive(Debug)]
pub(super) struct Addresses {
    /// By the numbers that the resolver knows them by.
    hosts: Mutex<Vec<Host>>,
    /// An answer has come, or none will.
    came: Condvar,
    /// To the resolver, if there are names.
    line: Option<OwnedFd>,
    /// A disk is there from the start that takes more than a socket of this host.
    network: bool,
}

/// A name with a port, and what is known of it.
#[derive(Debug)]
struct Host {
    name: String,
    port: u16,
    /// As they were told last.
    addresses: Vec<SocketAddr>,
    lookup: Lookup,
    /// Why the last one came to nothing, as far as it was told.
    trouble: Option<String>,
}

/// What the resolver does about a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lookup {
    Idle,
    UnderWay,
    /// The process is there no more.
    Gone,
}

impl Addresses {
    /// Looks up the hosts of all that are named, with the rights of the account if that is to be `acted_for` already, and
    /// starts who does it later. One of an export that `is_known` may be found later. There must be no other thread.
    ///
    /// # Errors
    /// What the resolver says, or the host to a process.
    pub(super) fn look_up(
        exports: &[Target],
        is_known: impl Fn(&Target) -> bool,
        mode: Sandbox,
        (account, acted_for): (Option<&Account>, bool),
    ) -> anyhow::Result<Self> {
        let mut named = Vec::<Target>::new();
        for export in exports.iter().filter(|export| export.host().is_some()) {
            if named.iter().all(|other| other.host() != export.host()) {
                named.push(export.clone());
            }
        }
        let account_now = account.filter(|_| acted_for);
        let found = together(&named, |export| acting_as(account_now, || export.look_up()));
        let mut hosts = Vec::new();
        for (export, found) in named.iter().zip(found) {
            let Some((name, port)) = export.host() else { continue };
            let addresses = match found?? {
                Err(_) if is_known(export) => Ok(Vec::new()),
                found => found,
            };
            let addresses = addresses.with_context(|| {
                format!(
                    "{export}: cannot look up the host '{name}'. Give its IP address, or have the name \
                     known"
                )
            })?;
            let (name, lookup, trouble) = (name.to_owned(), Lookup::Idle, None);
            hosts.push(Host { name, port, addresses, lookup, trouble });
        }
        let line = (!named.is_empty()).then(|| resolver::fork(mode, named, account)).transpose()?;
        let network = exports.iter().any(|export| !export.is_local());
        Ok(Self { hosts: Mutex::new(hosts), came: Condvar::new(), line, network })
    }

    /// True if the helper needs what is for networks and for TLS.
    pub(super) fn network(&self) -> bool {
        self.network
    }

    /// The line to the resolver, which the helper has to keep.
    pub(super) fn line(&self) -> Option<RawFd> {
        self.line.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Listens to the resolver, on a thread.
    ///
    /// # Errors
    /// What the host says to a thread.
    pub(super) fn listen(self: &Arc<Self>) -> std::io::Result<()> {
        if self.line.is_some() {
            let all = Arc::clone(self);
            std::thread::Builder::new().name("addresses".into()).spawn(move || all.hear())?;
        }
        Ok(())
    }

    fn hear(&self) {
        let Some(line) = &self.line else { return };
        loop {
            let Answer { host, found } = match receive(line) {
                Ok((answer, _)) => answer,
                Err(ReceiveError::Message(_)) => continue,
                Err(ReceiveError::Ended | ReceiveError::Host(_)) => break,
            };
            if let Some(host) = self.lock().get_mut(host) {
                host.lookup = Lookup::Idle;
                host.take(found);
            }
            self.came.notify_all();
        }
        self.lock().iter_mut().for_each(|host| host.lookup = Lookup::Gone);
        self.came.notify_all();
    }

    /// Whether the export may be connected to.
    ///
    /// # Errors
    /// That it may not, as the helper could not.
    pub(super) fn admit(&self, export: &Target) -> anyhow::Result<()> {
        if !self.network && !export.is_local() {
            bail!(
                "{export}: this daemon has given up networks and TLS for its sandbox, as no disk needed \
                 them when it started: have such a disk there from the start"
            );
        }
        let Some((name, port)) = export.host() else { return Ok(()) };
        if !self.lock().iter().any(|host| host.is(name, port)) {
            bail!(
                "{export}: the host '{name}' was not looked up when this daemon started, and cannot be in \
                 its sandbox: give its IP address, or have the disk there from the start"
            );
        }
        Ok(())
    }

    /// The same export, of a host that does not have to be looked up any more. With `again` it is looked up
    /// now, for as long as the export's server may take to accept; then what was known before has to do.
    pub(super) fn place(&self, export: &Target, again: bool) -> Target {
        let Some((name, port)) = export.host() else { return export.clone() };
        let mut hosts = self.lock();
        let Some(at) = hosts.iter().position(|host| host.is(name, port)) else {
            return export.clone();
        };
        if again {
            hosts = self.look_up_again(hosts, at, export.connect_timeout());
        }
        export.at(&hosts[at].addresses)
    }

    fn look_up_again<'a>(
        &self,
        mut hosts: MutexGuard<'a, Vec<Host>>,
        at: usize,
        limit: Duration,
    ) -> MutexGuard<'a, Vec<Host>> {
        let end = Instant::now() + limit;
        let Some(line) = &self.line else { return hosts };
        if hosts[at].lookup == Lookup::Idle {
            // Two at a time would tell no more. Nobody reads slowly at the other end.
            let asked = send(line, &Question(at), None);
            hosts[at].lookup = if asked.is_ok() { Lookup::UnderWay } else { Lookup::Gone };
        }
        while hosts[at].lookup == Lookup::UnderWay {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let seconds = limit.as_secs_f32();
                hosts[at].is_troubled(format!("the resolver has not answered for {seconds} s"));
                return hosts;
            }
            hosts = self.came.wait_timeout(hosts, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if hosts[at].lookup == Lookup::Gone {
            hosts[at].is_troubled("the process that looks up hosts has ended".to_owned());
        }
        hosts
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Host>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Does it for all of these at a time: a resolver whose server is dead takes its time for each. No thread of it is left.
fn together<T: Sync, R: Send>(list: &[T], act: impl Fn(&T) -> R + Sync) -> Vec<anyhow::Result<R>> {
    let act = &act;
    std::thread::scope(|scope| {
        let start = |one| std::thread::Builder::new().spawn_scoped(scope, move || act(one));
        let threads: Vec<_> = list.iter().map(start).collect();
        let end = |thread: std::io::Result<ScopedJoinHandle<'_, R>>| {
            thread?.join().map_err(|_| anyhow!("looking it up panicked"))
        };
        threads.into_iter().map(end).collect()
    })
}

impl Host {
    fn is(&self, name: &str, port: u16) -> bool {
        self.name == name && self.port == port
    }

    /// What the resolver says. One that knows no address any more is not believed: the host may be back where
    /// it was before its name is.
    fn take(&mut self, found: Result<Vec<SocketAddr>, String>) {
        match found {
            Ok(found) if found.is_empty() => self.is_troubled("it has no address".to_owned()),
            Ok(found) => {
                self.trouble = None;
                if found != self.addresses {
                    let before = in_words(&std::mem::replace(&mut self.addresses, found));
                    let now = in_words(&self.addresses);
                    tracing::info!("the host '{}' is at {now} now (before: {before})", self.name);
                }
            }
            Err(why) => self.is_troubled(why),
        }
    }

    /// Tells that it could not be looked up, once for each reason.
    fn is_troubled(&mut self, why: String) {
        if self.trouble.as_ref() != Some(&why) {
            let then = match &self.addresses[..] {
                [] => "It was never found by this daemon".to_owned(),
                known => format!("It is tried at {}, as before", in_words(known)),
            };
            tracing::warn!("cannot look up the host '{}' again: {why}. {then}", self.name);
            self.trouble = Some(why);
        }
    }
}

fn in_words(addresses: &[SocketAddr]) -> String {
    addresses.iter().map(|at| at.ip().to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::forked;
    use super::*;
    use crate::heard::heard;

    /// Hosts with one that was at an address, and the resolver's end of the line.
    fn known(at: SocketAddr) -> (Arc<Addresses>, OwnedFd) {
        let (ours, its) = forked::line().unwrap();
        let host = Host {
            name: "some.host".into(),
            port: 99,
            addresses: vec![at],
            lookup: Lookup::Idle,
            trouble: None,
        };
        let hosts = Mutex::new(vec![host]);
        (Arc::new(Addresses { hosts, came: Condvar::new(), line: Some(ours), network: true }), its)
    }

    /// Each look-up is over once the other one has begun.
    #[test]
    fn e75_hosts_are_looked_up_beside_each_other() {
        let lines = [0, 1].map(|_| {
            let (begun, has_begun) = std::sync::mpsc::sync_channel(1);
            (begun, Mutex::new(has_begun))
        });
        let met = |at: &usize| {
            lines[1 - at].0.send(()).unwrap();
            let both = lines[*at].1.lock().unwrap();
            both.recv_timeout(Duration::from_secs(30)).is_ok()
        };
        let met: Vec<_> = together(&[0, 1], met).into_iter().map(Result::unwrap).collect();
        assert_eq!(met, [true, true]);
    }

    #[test]
    fn f13_a_resolver_that_has_ended_leaves_a_host_where_it_was() {
        let at: SocketAddr = "10.0.0.1:99".parse().unwrap();
        let (all, its) = known(at);
        all.listen().unwrap();
        drop(its);
        let target: Target = "nbd://some.host:99/".parse().unwrap();
        let lines = heard(|| {
            for _ in 0..3 {
                assert_eq!(all.place(&target, true).look_up().unwrap(), [at]);
            }
        });
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("looks up hosts has ended"), "{lines:?}");
    }

    #[test]
    fn f13_an_answer_that_comes_late_counts_for_the_next_attempt() {
        let (was, is): (SocketAddr, SocketAddr) =
            ("10.0.0.1:99".parse().unwrap(), "10.0.0.2:99".parse().unwrap());
        let (all, its) = known(was);
        let target: Target = "nbd://some.host:99/".parse().unwrap();
        let hasty = target.with_connect_timeout(Duration::from_millis(50));
        for _ in 0..2 {
            assert_eq!(all.place(&hasty, true).look_up().unwrap(), [was]);
        }
        // It was asked once.
        let (Question(host), _) = receive::<Question>(&its).unwrap();
        send(&its, &Answer { host, found: Ok(vec![is]) }, None).unwrap();
        send(&its, &Answer { host, found: Ok(Vec::new()) }, None).unwrap();
        drop(its);
        all.hear();
        assert_eq!(all.place(&hasty, true).look_up().unwrap(), [is]);
        assert_eq!(all.place(&hasty, false).look_up().unwrap(), [is]);
    }
}
