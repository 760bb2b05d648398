//! The end of a job: what is in flight comes back, what was written is read once more.

use super::{Counted, Job, NAP_NS, News};
use crate::backend::{Ask, Backend};
use crate::content::SECTOR;
use crate::record::Record;
use crate::verifier::{Judged, Verifier, WrongData};
use anyhow::{Result, bail, ensure};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// How long requests may take to come back at the end.
const TIMEOUT: Duration = Duration::from_secs(30);

impl<P: Backend> Job<'_, P> {
    /// Waits for what is in flight. If it is the time that ends the job, it comes late: a target that
    /// stalled is seen in the latencies, though it did nothing in that time.
    pub(super) fn drain(&mut self) -> Result<()> {
        let counts = self.setup.budget.is_some();
        let (now, full) = (self.setup.schedule.now(), self.free.is_empty());
        if now <= self.setup.schedule.begin_ns {
            self.close();
        } else if !counts {
            // It may have been stopped.
            self.setup.schedule.end_ns = self.setup.schedule.end_ns.min(now);
        }
        let deadline = Instant::now() + TIMEOUT;
        while self.in_flight > 0 {
            if self.reap()? == 0 {
                if Instant::now() > deadline {
                    bail!(
                        "{} requests were not answered within {} s",
                        self.in_flight,
                        TIMEOUT.as_secs()
                    );
                }
                self.backend.wait(Duration::from_nanos(NAP_NS))?;
            }
        }
        if counts && !self.setup.timed {
            self.last_done = self.setup.schedule.now();
        }
        if !counts && full {
            self.count_unsent();
        }
        self.close();
        Ok(())
    }

    /// Counts what was due before the end and found all places taken. It would have waited until the target
    /// answered, at least. Without times, and where each request has its place, nothing is made up.
    fn count_unsent(&mut self) {
        let (begin_ns, end_ns) = (self.setup.schedule.begin_ns, self.setup.schedule.end_ns);
        if !self.setup.timed || self.setup.verifier.is_some() || begin_ns == u64::MAX {
            return;
        }
        while let Some(limit) = self.setup.limit.as_mut().filter(|limit| limit.due() < end_ns) {
            let due = limit.due();
            let ask = self.setup.pattern.next();
            limit.spend(ask.len);
            let waited = self.last_done.max(end_ns).saturating_sub(due);
            self.tick.sides[usize::from(ask.write)].count_unsent(waited);
        }
    }

    /// Counts no more.
    fn close(&mut self) {
        self.send();
        self.setup.schedule.begin_ns = u64::MAX;
    }

    pub(super) fn hand_over(&mut self) {
        let effort = self.backend.counted().zip(self.base).map(|(now, base)| now.since(&base));
        // A job without a budget ends with the schedule.
        let ended_ns = self.setup.budget.map(|_| self.last_done);
        let _ = self.setup.news.send(News::Counted(Counted { ended_ns, effort }));
    }

    /// Reads what was written once more, untimed, and judges it.
    pub(super) fn read_back(&mut self) -> Result<()> {
        let Some(verifier) = &self.setup.verifier else { return Ok(()) };
        verifier.all_settled()?;
        let most = self.asks.iter().map(|ask| ask.len).max().unwrap_or(0);
        let mut from = self.setup.pattern.start();
        loop {
            while let (Some(slot), Some(verifier)) =
                (self.free.last().copied(), &mut self.setup.verifier)
            {
                let Some(ask) = verifier.written(from, most) else { break };
                from = ask.offset + u64::from(ask.len);
                verifier.take(&ask);
                self.free.pop();
                self.start(slot, ask, 0)?;
            }
            self.fresh.clear();
            self.backend.submit()?;
            if self.in_flight == 0 || self.setup.stop.load(Relaxed) {
                break;
            }
            if self.reap()? == 0 {
                self.backend.wait(Duration::from_nanos(NAP_NS))?;
            }
        }
        // What was stopped comes back all the same: the slots are needed once more.
        while self.in_flight > 0 {
            if self.reap()? == 0 {
                self.backend.wait(Duration::from_nanos(NAP_NS))?;
            }
        }
        Ok(())
    }

    /// Says on the target how far it came, for those who read it later, and returns what was judged.
    pub(super) fn leave_record(mut self) -> Result<Judged> {
        let mut judged = self.setup.verifier.as_ref().map(Verifier::judged).unwrap_or_default();
        let Some((mut record, round)) = self.setup.record.take().zip(self.setup.pattern.round())
        else {
            return Ok(judged);
        };
        record.reached = round.reached(self.held.is_some());
        judged.covered = round.order().behind(record.reached);
        let part = record.part();
        judged.whole = part.end - part.start;
        if judged.covered == 0 {
            return Ok(judged);
        }
        let Some(verifier) = &self.setup.verifier else { return Ok(judged) };
        let unit = verifier.unit();
        for place in Record::places(&part) {
            // The rest of its block stays as it is.
            let offset = part.start + (place - part.start) / unit * unit;
            let ask = Ask { write: false, offset, len: u32::try_from(unit)? };
            carry_out(&mut self.backend, &ask)?;
            let at = usize::try_from(place - offset)?;
            let memory = self.backend.memory(0);
            record.fill(&mut memory[at..at + SECTOR]);
            let content = memory[..ask.len as usize].to_vec();
            carry_out(&mut self.backend, &Ask { write: true, ..ask })?;
            self.backend.memory(0)[..content.len()].fill(0);
            carry_out(&mut self.backend, &ask)?;
            if self.backend.memory(0)[..content.len()] != content {
                let wrong = format!(
                    "verify: wrong data: {unit} bytes at offset {offset} of the target do not hold \
                     what was written last"
                );
                return Err(WrongData(wrong).into());
            }
        }
        Ok(judged)
    }
}

/// Carries out one request in the first slot while nothing else is in flight.
///
/// # Errors
/// That it fails, or is not answered.
pub(crate) fn carry_out<P: Backend>(backend: &mut P, ask: &Ask) -> Result<()> {
    backend.start(0, ask)?;
    backend.submit()?;
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some((_, ok)) = backend.pop()? {
            let Ask { offset, len, .. } = ask;
            ensure!(ok, "{len} bytes at offset {offset}: {}", backend.complaint());
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "not answered within {} s", TIMEOUT.as_secs());
        backend.wait(Duration::from_nanos(NAP_NS))?;
    }
}
