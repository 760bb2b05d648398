//! Memory: pieces of it, the guest's map of it, and our own page-aligned pool.

mod iotlb;
mod map;
mod mapping;
mod pool;
mod quota;
mod segment;
mod sigbus;

pub use iotlb::{Access, HostRange, IOMMU_PAGE, Iotlb, Miss, Permission, Pieces, Translation};
pub use map::{GuestMap, MISSES_MAX, MapError, Region, Translator};
pub use mapping::{Mapping, MappingError};
pub use pool::{Pool, PoolPages};
pub use quota::{MAPPED_MAX, Quota};
pub use segment::{Segment, Segments};
pub use sigbus::{install as install_sigbus_handler, poison_epoch};

/// The size of a page on this host, in bytes.
#[must_use]
pub fn page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).expect("every Linux host has a page size")
}
