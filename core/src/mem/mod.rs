//! Memory: pieces of it, the guest's map of it, and our own page-aligned pool.

mod error;
mod gathered;
mod iotlb;
mod map;
mod mapping;
mod page;
mod pool;
mod quota;
mod sigbus;
mod translator;

pub use crate::request::{Segment, Segments};
pub use error::MappingError;
pub use gathered::Gathered;
pub use iotlb::{Access, HostRange, IOMMU_PAGE, Iotlb, Miss, Permission, Pieces, Translation};
pub use map::{GuestMap, MapError, Region};
pub use mapping::Mapping;
pub use page::page_size;
pub use pool::{Pool, PoolPages};
pub use quota::Quota;
pub use sigbus::{install as install_sigbus_handler, poison_epoch};
pub use translator::{MISSES_MAX, Translator};
