//! Why an image is not to be had.

use std::io;

/// Why an image is not to be had: what is wrong, what to do.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// The library is not installed.
    #[error(
        "librbd is not on this host ({0}): install the package librbd1 (Debian, Ubuntu, Fedora and its \
         kin call it so)"
    )]
    NoLibrary(String),
    /// The library lacks a function.
    #[error("librbd on this host is too old, it has no {0}: Ceph 15 (Octopus) or newer is needed")]
    Old(&'static str),
    /// The configuration file is not to be read.
    #[error("{file}: cannot read the configuration of the cluster: {source}. {hint}")]
    Configuration {
        /// Which.
        file: String,
        /// What the library says.
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// No connection to the cluster.
    #[error("cannot connect to the Ceph cluster as {user}: {why}")]
    Connect {
        /// As whom.
        user: String,
        /// The reason, and what to do.
        why: String,
    },
    /// Nothing was heard of the cluster for too long.
    #[error(
        "the Ceph cluster does not answer: {step} took more than {seconds} s. `ceph -s` tells how it is"
    )]
    Silent {
        /// What was waited for.
        step: &'static str,
        /// How long.
        seconds: u64,
    },
    /// There is no such pool.
    #[error("the cluster has no pool '{0}'")]
    NoPool(String),
    /// There is no such image, or snapshot.
    #[error("the pool '{pool}' has no {what}")]
    NoImage {
        /// The pool.
        pool: String,
        /// What it does not have.
        what: String,
    },
    /// The user may not.
    #[error(
        "{user} has no right to {what}. `ceph auth caps {user} mon 'profile rbd' osd 'profile rbd \
         pool=POOL'` gives it"
    )]
    Permission {
        /// Who.
        user: String,
        /// What it was about to do.
        what: &'static str,
    },
    /// Its writers cannot be kept apart.
    #[error(
        "the image has no exclusive lock, so nothing keeps two writers apart: `rbd feature enable IMAGE \
         exclusive-lock`, or serve it --read-only"
    )]
    NoExclusiveLock,
    /// Somebody else writes it.
    #[error(
        "it is in use by {0}, which has its exclusive lock and lives. One image can be written by one \
         only; `rbd lock ls` and `rbd status` tell more"
    )]
    InUse(String),
    /// The cache of the library is switched on by the image or its pool.
    #[error(
        "the image, or its pool, switches on {0}, which would lose writes with this process: `rbd config \
         image remove IMAGE {0}`, or `rbd config pool remove POOL {0}`"
    )]
    Cached(&'static str),
    /// Anything else the cluster says.
    #[error("cannot {what}: {source}")]
    Ceph {
        /// What was attempted.
        what: &'static str,
        /// What it says.
        source: io::Error,
    },
    /// What the host says.
    #[error(transparent)]
    Host(#[from] io::Error),
}

impl RbdError {
    /// What a function of the library has answered, below zero if it is an error.
    pub(crate) fn check(rc: libc::c_int, what: &'static str) -> Result<(), Self> {
        if rc < 0 { Err(Self::Ceph { what, source: os(rc) }) } else { Ok(()) }
    }
}

/// The error of a negative answer.
pub(crate) fn os(rc: libc::c_int) -> io::Error {
    io::Error::from_raw_os_error(rc.saturating_neg())
}
