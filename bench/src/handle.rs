//! How a job gets its backend, whatever the type of that is.

use crate::backend::Backend;
use crate::job::{self, JobSetup};
use crate::trace::learn;
use crate::verifier::{Judged, Left};
use anyhow::Result;
use std::ops::Range;

/// Makes the backend of one job, on the thread of that job.
pub(crate) type Handle = Box<dyn FnOnce() -> Result<Box<dyn AnyBackend>> + Send>;

/// A backend of any type. What is hot is compiled for each type; a virtual call is paid once a job.
pub(crate) trait AnyBackend {
    /// What earlier runs have left in a part of a region.
    ///
    /// # Errors
    /// As of [`learn`].
    fn learn(
        &mut self,
        seed: u64,
        region: &Range<u64>,
        part: &Range<u64>,
        block: u32,
    ) -> Result<Vec<Left>>;

    /// Does a job.
    ///
    /// # Errors
    /// As of [`job::run`].
    fn run(self: Box<Self>, setup: JobSetup<'_>) -> Result<Judged>;
}

impl<B: Backend> AnyBackend for B {
    fn learn(
        &mut self,
        seed: u64,
        region: &Range<u64>,
        part: &Range<u64>,
        block: u32,
    ) -> Result<Vec<Left>> {
        learn(self, seed, region, part, block)
    }

    fn run(self: Box<Self>, setup: JobSetup<'_>) -> Result<Judged> {
        job::run(*self, setup)
    }
}

/// A handle from what makes a backend.
pub(crate) fn handle<B: Backend + 'static>(
    make: impl FnOnce() -> Result<B> + Send + 'static,
) -> Handle {
    Box::new(move || Ok(Box::new(make()?)))
}
