//! What is judged of a split virtqueue's memory at the start.

use super::SplitMemory;
use crate::virtqueue::layout::{LayoutError, SplitAddresses, check_size};

impl SplitMemory {
    /// # Safety
    /// The addresses name mapped memory of the lengths that `size` asks for, for as long as the
    /// returned value or a copy of it is in use.
    pub(in crate::virtqueue) unsafe fn new(
        size: u16,
        at: SplitAddresses,
    ) -> Result<Self, LayoutError> {
        check_size(u32::from(size))?;
        for (name, address, align) in
            [("descriptor", at.desc, 16), ("available", at.avail, 2), ("used", at.used, 4)]
        {
            if (address as usize) % align != 0 {
                return Err(LayoutError::Unaligned(name, align));
            }
        }
        // The casts keep the alignment just checked.
        #[allow(clippy::cast_ptr_alignment)]
        let (desc, avail) = (at.desc.cast(), at.avail.cast());
        Ok(Self { desc, avail, used: at.used, size })
    }
}
