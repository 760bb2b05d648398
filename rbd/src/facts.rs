//! What an image is, for those who ask and do not use it.

use crate::error::RbdError;
use crate::image::{Image, Opened};
use crate::library::ImageInfo;
use crate::lock::{self, Holder};

/// `RBD_FEATURE_*` of rbd/features.h, by their bits, in the words of `rbd`.
const FEATURES: [&str; 11] = [
    "layering",
    "striping",
    "exclusive-lock",
    "object-map",
    "fast-diff",
    "deep-flatten",
    "journaling",
    "data-pool",
    "operations",
    "migrating",
    "non-primary",
];

/// What the cluster says of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The size of each of the objects that it consists of, in bytes.
    pub object_bytes: u64,
    /// What it can, in the words of `rbd`; `bit N` for what is not known here.
    pub features: Vec<String>,
    /// Who has its exclusive lock.
    pub holder: Option<Holder>,
}

impl Image {
    /// What the cluster says of it. May wait for the cluster.
    ///
    /// # Errors
    /// What the cluster says.
    pub fn facts(&self) -> Result<Facts, RbdError> {
        let features = self.opened.features()?;
        let names = (0..u64::BITS).filter(|bit| features & (1 << bit) != 0).map(|bit| {
            let name = FEATURES.get(bit as usize);
            name.map_or_else(|| format!("bit {bit}"), |name| (*name).to_owned())
        });
        Ok(Facts {
            object_bytes: self.opened.object_bytes()?,
            features: names.collect(),
            holder: lock::holder(&self.opened)?,
        })
    }

    /// Whether it could be opened for writing now, though it is open for reading only.
    ///
    /// # Errors
    /// Why not; what the cluster says.
    pub fn may_be_written(&self) -> Result<(), RbdError> {
        self.opened.check_writable()?;
        match lock::holder(&self.opened)? {
            Some(holder) if holder.lives => Err(RbdError::InUse(holder.address)),
            _ => Ok(()),
        }
    }
}

impl Opened {
    fn object_bytes(&self) -> Result<u64, RbdError> {
        let mut info = ImageInfo::default();
        // SAFETY: the image is open; the structure is as large as it is said to be.
        let rc =
            unsafe { (self.library.rbd_stat)(self.image, &raw mut info, size_of::<ImageInfo>()) };
        RbdError::check(rc, "learn what the image consists of").map(|()| info.object_bytes)
    }
}
