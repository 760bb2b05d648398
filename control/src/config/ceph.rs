//! Disks of Ceph clusters: how to get to them, and what they need.

use super::source::source;
use super::{DiskArgs, DiskSpec};
use ringway_disk::Source;
use std::path::Path;

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
                return Err(
                    "ceph-conf and ceph-user are for images of a Ceph cluster: rbd:POOL/IMAGE"
                        .into(),
                );
            }
            _ => {}
        }
        Ok(source)
    }
}
