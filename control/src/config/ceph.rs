//! Disks of Ceph clusters: how to get to them, and what they need.

use super::source::source;
use super::{DiskArgs, DiskSpec};
use clap::{Args, ValueHint};
use ringway_disk::Source;
use std::path::{Path, PathBuf};

/// How tools get to the Ceph cluster of an image that they are told to use.
#[derive(Clone, Debug, Default, Args)]
pub struct CephArgs {
    /// The configuration of the Ceph cluster of rbd:POOL/IMAGE [default: where Ceph looks for it,
    /// /etc/ceph/ceph.conf].
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Ceph")]
    pub ceph_conf: Option<PathBuf>,
    /// The user of that cluster, whose key is in a keyring that the configuration names [default: admin].
    #[arg(long, value_name = "USER", help_heading = "Ceph")]
    pub ceph_user: Option<String>,
}

impl CephArgs {
    /// The same source, and how to get to its cluster.
    pub fn on_the_way_to(&self, source: &Source) -> Source {
        let mut source = source.clone();
        if let Source::Rbd { access, .. } = &mut source {
            (access.conf, access.user) = (self.ceph_conf.clone(), self.ceph_user.clone());
        }
        source
    }

    /// Refuses options that mean nothing, as no image of a cluster is named.
    pub fn check<'a>(&self, sources: impl IntoIterator<Item = &'a Source>) -> Result<(), String> {
        let said = self.ceph_conf.is_some() || self.ceph_user.is_some();
        if said && !sources.into_iter().any(|source| matches!(source, Source::Rbd { .. })) {
            return Err(ONLY_FOR_CLUSTERS.into());
        }
        Ok(())
    }
}

const ONLY_FOR_CLUSTERS: &str =
    "ceph-conf and ceph-user are for images of a Ceph cluster: rbd:POOL/IMAGE";

impl DiskSpec {
    /// Whether it has a process of its own, where that was said. An image of a Ceph cluster always has one, as
    /// the library that speaks with the cluster needs other rights than anybody else.
    pub fn own_process(&self) -> Option<bool> {
        if self.is_of_cluster() { Some(true) } else { self.isolate }
    }

    /// True if it is an image of a Ceph cluster.
    pub fn is_of_cluster(&self) -> bool {
        matches!(self.source, Source::Rbd { .. })
    }
}

impl DiskArgs {
    /// What the image's word names, and how to get to the cluster that has it.
    pub(super) fn source_with_access(&self, image: &Path) -> Result<Source, String> {
        let mut source = source(image)?;
        match &mut source {
            Source::Rbd { access, .. } => {
                (access.conf, access.user) = (self.ceph_conf.clone(), self.ceph_user.clone());
            }
            _ if self.ceph_conf.is_some() || self.ceph_user.is_some() => {
                return Err(ONLY_FOR_CLUSTERS.into());
            }
            _ => {}
        }
        Ok(source)
    }
}
