//! The end of a job: what is in flight comes back, what was written is read once more.

use super::{Counted, Lane, NAP_NS, News};
use crate::bench::ledger::Ledger;
use crate::bench::port::Port;
use anyhow::{Result, bail};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// How long requests may take to come back at the end.
const PATIENCE: Duration = Duration::from_secs(30);

impl<P: Port> Lane<'_, P> {
    /// Waits for what is in flight. It is counted only if all requests are to be counted.
    pub(super) fn drain(&mut self) -> Result<()> {
        let counts = self.job.budget.is_some();
        if !counts {
            self.close();
        }
        let deadline = Instant::now() + PATIENCE;
        while self.in_flight > 0 {
            if self.reap()? == 0 {
                if Instant::now() > deadline {
                    bail!(
                        "{} requests were not answered within {} s",
                        self.in_flight,
                        PATIENCE.as_secs()
                    );
                }
                self.port.wait(Duration::from_nanos(NAP_NS))?;
            }
        }
        if counts {
            if !self.job.timed {
                self.last_done = self.job.schedule.now();
            }
            self.close();
        }
        Ok(())
    }

    /// Counts no more.
    fn close(&mut self) {
        self.send();
        self.job.schedule.begin_ns = u64::MAX;
    }

    pub(super) fn hand_over(&mut self) {
        let effort = self.port.counted().zip(self.base).map(|(now, base)| now.since(&base));
        // A job without a budget ends with the schedule.
        let ended_ns = self.job.budget.map(|_| self.last_done);
        let _ = self.job.news.send(News::Counted(Counted { ended_ns, effort }));
    }

    /// Reads what was written once more, untimed, and judges it.
    pub(super) fn read_back(mut self) -> Result<u64> {
        let Some(ledger) = &self.job.ledger else { return Ok(0) };
        ledger.all_settled()?;
        let most = self.asks.iter().map(|ask| ask.len).max().unwrap_or(0);
        let mut from = self.job.pattern.start();
        loop {
            while let (Some(slot), Some(ledger)) = (self.free.last().copied(), &mut self.job.ledger)
            {
                let Some(ask) = ledger.written(from, most) else { break };
                from = ask.offset + u64::from(ask.len);
                ledger.take(&ask);
                self.free.pop();
                self.start(slot, ask, 0)?;
            }
            self.fresh.clear();
            self.port.submit()?;
            if self.in_flight == 0 || self.job.stop.load(Relaxed) {
                break;
            }
            if self.reap()? == 0 {
                self.port.wait(Duration::from_nanos(NAP_NS))?;
            }
        }
        Ok(self.job.ledger.as_ref().map_or(0, Ledger::sectors))
    }
}
