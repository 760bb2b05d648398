//! Disks for engines of others ([`crate::CustomDisk`]).

use super::{Flush, KeptBy, Nature, Size, Storage};
use crate::choices::EngineKind;
use std::any::Any;

/// One whose owner's engine has the data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Custom;

impl Storage for Custom {
    fn nature(&self) -> Nature {
        Nature {
            engine: Some(EngineKind::Custom),
            flush: Flush::Engine,
            size: Size::Told,
            has_length: false,
            kept_by: KeptBy::Nothing,
            max_bytes: u32::MAX,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
