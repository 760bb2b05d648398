//! Disks that nobody keeps: null, and simulations.

use super::{Flush, KeptBy, Nature, Size, Storage};
use crate::choices::EngineKind;
use std::any::Any;

/// One that `engine` makes up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unreal {
    pub(crate) engine: EngineKind,
}

impl Storage for Unreal {
    fn nature(&self) -> Nature {
        Nature {
            engine: Some(self.engine),
            flush: Flush::Nobody,
            size: Size::Told,
            // The memory of a simulation is a file; that of a null disk only stands for one.
            has_length: matches!(self.engine, EngineKind::Sim(_)),
            kept_by: KeptBy::Nothing,
            max_bytes: u32::MAX,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
