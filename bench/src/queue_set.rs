//! Several queues for one job, which polls them in turn (hot).

use crate::backend::{Ask, Backend, Effort};
use anyhow::Result;
use std::time::Duration;

/// Queues with as many slots each. The slots of a job are numbered through, queue by queue.
pub struct QueueSet<B> {
    queues: Vec<B>,
    /// Of each slot of the job: its queue, and the slot there.
    places: Vec<(usize, u32)>,
    /// First slot of each queue.
    first: Vec<u32>,
    /// Queues with requests that were not shown.
    fresh: Vec<bool>,
    /// Requests in flight of each.
    in_flight: Vec<u32>,
    /// The queue to look at next.
    at: usize,
}

impl<B: Backend> QueueSet<B> {
    /// With `depth` slots of each queue.
    pub fn new(queues: Vec<B>, depth: u32) -> Self {
        let places = (0..queues.len()).flat_map(|queue| (0..depth).map(move |slot| (queue, slot)));
        let first = (0..).step_by(depth as usize).take(queues.len());
        Self {
            places: places.collect(),
            first: first.collect(),
            fresh: vec![false; queues.len()],
            in_flight: vec![0; queues.len()],
            at: 0,
            queues,
        }
    }
}

impl<B: Backend> Backend for QueueSet<B> {
    #[inline(always)]
    fn start(&mut self, slot: u32, ask: &Ask) -> Result<()> {
        let (queue, slot) = self.places[slot as usize];
        self.fresh[queue] = true;
        self.in_flight[queue] += 1;
        self.queues[queue].start(slot, ask)
    }

    #[inline(always)]
    fn submit(&mut self) -> Result<()> {
        for (queue, fresh) in self.queues.iter_mut().zip(&mut self.fresh) {
            if std::mem::take(fresh) {
                queue.submit()?;
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn pop(&mut self) -> Result<Option<(u32, bool)>> {
        for _ in 0..self.queues.len() {
            if let Some((slot, ok)) = self.queues[self.at].pop()? {
                self.in_flight[self.at] -= 1;
                return Ok(Some((self.first[self.at] + slot, ok)));
            }
            self.at = if self.at + 1 < self.queues.len() { self.at + 1 } else { 0 };
        }
        Ok(None)
    }

    /// Of the queue that was looked at last.
    #[cold]
    fn complaint(&self) -> String {
        self.queues[self.at].complaint()
    }

    /// Sleeps at the first queue that has requests in flight.
    fn wait(&mut self, timeout: Duration) -> Result<()> {
        let busy = self.in_flight.iter().position(|&count| count > 0).unwrap_or(self.at);
        self.queues[busy].wait(timeout)
    }

    fn check(&self) -> Result<()> {
        self.queues[self.at].check()
    }

    #[inline(always)]
    fn memory(&mut self, slot: u32) -> &mut [u8] {
        let (queue, slot) = self.places[slot as usize];
        self.queues[queue].memory(slot)
    }

    fn counted(&self) -> Option<Effort> {
        self.queues.iter().filter_map(Backend::counted).reduce(|mut sum, one| {
            sum.add(&one);
            sum
        })
    }
}
