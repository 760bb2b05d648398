//! The memory table of a connection: SET_MEM_TABLE, ADD_MEM_REG, REM_MEM_REG.

use super::message::Message;
use ringway_core::mem::{GuestMap, MapError, Mapping, MappingError, Quota, Region};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Memory slots offered with GET_MAX_MEM_SLOTS; as many as Linux's own vhost.
pub(super) const SLOTS_MAX: usize = 509;

/// Why memory was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryError {
    #[error(
        "guest memory at {guest:#x}: {source}. The front-end must share all guest memory \
             (QEMU: memory-backend-memfd,share=on)"
    )]
    Mapping { guest: u64, source: MappingError },
    #[error("guest memory at {guest:#x}: {source}")]
    Quota { guest: u64, source: MappingError },
    #[error("{0}")]
    Map(#[from] MapError),
    #[error("all {SLOTS_MAX} memory slots are taken")]
    Full,
    #[error("there is no region at {0:#x} to be removed")]
    NoSuchRegion(u64),
}

/// A region as the messages describe it: four u64 from `offset` in the payload.
struct Described {
    guest: u64,
    len: u64,
    user: u64,
    file_offset: u64,
}

fn described(message: &Message, offset: usize) -> Described {
    Described {
        guest: message.u64(offset),
        len: message.u64(offset + 8),
        user: message.u64(offset + 16),
        file_offset: message.u64(offset + 24),
    }
}

fn map(about: &Described, fd: OwnedFd, quota: &Arc<Quota>) -> Result<Region, MemoryError> {
    let mapping = Mapping::of_peer(quota, &File::from(fd), about.file_offset, about.len)
        .map_err(|source| refused(about.guest, source))?;
    Ok(Region { guest: about.guest, user: about.user, len: about.len, mapping: Arc::new(mapping) })
}

fn refused(guest: u64, source: MappingError) -> MemoryError {
    match source {
        MappingError::Quota { .. } => MemoryError::Quota { guest, source },
        _ => MemoryError::Mapping { guest, source },
    }
}

/// The map that a SET_MEM_TABLE message describes.
pub(super) fn table(message: &mut Message, quota: &Arc<Quota>) -> Result<GuestMap, MemoryError> {
    let fds = std::mem::take(&mut message.fds);
    let regions = fds
        .into_iter()
        .enumerate()
        .map(|(i, fd)| map(&described(message, 8 + 32 * i), fd, quota))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(GuestMap::new(regions)?)
}

/// `old` with the region that an ADD_MEM_REG message describes.
pub(super) fn with_region(
    old: &GuestMap,
    message: &mut Message,
    quota: &Arc<Quota>,
) -> Result<GuestMap, MemoryError> {
    if old.regions().len() >= SLOTS_MAX {
        return Err(MemoryError::Full);
    }
    let about = described(message, 8);
    let Some(fd) = message.take_fd() else { return Err(MemoryError::NoSuchRegion(about.guest)) };
    let mut regions = old.regions().to_vec();
    regions.push(map(&about, fd, quota)?);
    Ok(GuestMap::new(regions)?)
}

/// `old` without the region that a REM_MEM_REG message names.
pub(super) fn without_region(old: &GuestMap, message: &Message) -> Result<GuestMap, MemoryError> {
    let about = described(message, 8);
    let same = |r: &Region| r.guest == about.guest && r.len == about.len && r.user == about.user;
    let mut regions = old.regions().to_vec();
    let Some(at) = regions.iter().position(same) else {
        return Err(MemoryError::NoSuchRegion(about.guest));
    };
    regions.remove(at);
    Ok(GuestMap::new(regions)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever shares no memory is told how to. Whoever has too much already has no use for that.
    #[test]
    fn what_is_too_much_is_told_apart_from_what_cannot_be_shared() {
        let said = |source| refused(0x1000, source).to_string();
        let much = said(MappingError::Quota { asked: 8, have: 4, room: 2 });
        assert!(much.contains("0x1000") && !much.contains("share=on"), "{much}");
        let wrong = said(MappingError::Host(std::io::Error::from_raw_os_error(libc::EACCES)));
        assert!(wrong.contains("0x1000") && wrong.contains("share=on"), "{wrong}");
    }
}
