//! What an image needs to be written: a lock, and no cache in between.

use crate::error::RbdError;
use crate::image::Opened;
use crate::library::{ConfigOption, FEATURE_EXCLUSIVE_LOCK};
use std::ffi::{CStr, c_int};

/// What an image or its pool may set for itself, and must not.
const CACHES: [(&str, &[&str]); 2] =
    [("rbd_cache", &["false", "0"]), ("rbd_persistent_cache_mode", &["disabled"])];

impl Opened {
    /// Refuses what would lose writes, or could have two writers.
    pub(crate) fn check_writable(&self) -> Result<(), RbdError> {
        if self.features()? & FEATURE_EXCLUSIVE_LOCK == 0 {
            return Err(RbdError::NoExclusiveLock);
        }
        self.refuse_caches()
    }

    /// Images and pools can have settings of their own, which come before ours.
    fn refuse_caches(&self) -> Result<(), RbdError> {
        let (library, image) = (self.library, self.image);
        let mut count: c_int = 1024;
        let mut options = Vec::with_capacity(1024);
        // SAFETY: at most `count` options are written, and how many they are.
        let rc =
            unsafe { (library.rbd_config_image_list)(image, options.as_mut_ptr(), &raw mut count) };
        RbdError::check(rc, "read the settings of the image")?;
        // SAFETY: so many were written.
        unsafe { options.set_len(usize::try_from(count).unwrap_or(0)) };
        // SAFETY: texts with their ends, which live until the clean-up.
        let word = |text| unsafe { CStr::from_ptr(text) }.to_string_lossy();
        let is_on = |option: &ConfigOption| {
            let here = CACHES.into_iter().find(|(name, _)| word(option.name) == *name);
            let value = word(option.value);
            here.filter(|(_, off)| !off.contains(&value.as_ref())).map(|(name, _)| name)
        };
        let cached = options.iter().find_map(is_on);
        // SAFETY: the list is as it was made.
        unsafe { (library.rbd_config_image_list_cleanup)(options.as_mut_ptr(), count) };
        cached.map_or(Ok(()), |name| Err(RbdError::Cached(name)))
    }
}
