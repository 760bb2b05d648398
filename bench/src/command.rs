//! One call of `ringway bench`: its targets in turn, progress, reports.

use crate::load::{AccessArgs, Load};
use crate::measured::Measured;
use crate::options::BenchArgs;
use crate::options::Special;
use crate::outcome::Outcome;
use crate::runner::{self, Progress};
use crate::target::Target;
use crate::verifier::WrongData;
use crate::{html, origins, summary};
use anyhow::{Context, Error, Result, bail};
use clap::Command;
use clap::error::ErrorKind;
use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use ringway_control::log::LogArgs;
use ringway_control::log::LogLevel;
use ringway_terminal::logging;
use ringway_terminal::output;
use std::cell::Cell;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// CPU time that was not to be had, in percent of all CPUs, above which a round says more of others than of its
/// targets.
const DISTURBED: f64 = 5.0;

/// Carries out `ringway bench`. Options that do not go together end the process as wrong ones of
/// `command` do.
///
/// # Errors
/// A target that cannot be opened, a request that failed, data that is wrong.
pub fn run(args: BenchArgs, log: &LogArgs, command: &mut Command) -> Result<ExitCode> {
    // The back-end in this process has little to tell.
    logging::start(log, None, Some(LogLevel::Warn));
    let signal = Arc::new(AtomicUsize::new(0));
    let asked = Arc::new(AtomicBool::new(false));
    for number in ringway_terminal::signals::that_end() {
        let as_usize = usize::try_from(number)?;
        // The first one asks, the second one does not.
        signal_hook::flag::register_conditional_shutdown(number, 128 + number, asked.clone())?;
        signal_hook::flag::register(number, asked.clone())?;
        signal_hook::flag::register_usize(number, Arc::clone(&signal), as_usize)?;
    }
    if let Some(Special::Origins(origins)) = &args.special {
        origins::run(origins, log, &signal)?;
    } else if let Some(target) = &args.target {
        match measure_and_tell(target, &args, log, &signal, command) {
            Err(error) if error.is::<WrongData>() => {
                ringway_terminal::logging::complain(&error);
                return Ok(ExitCode::from(3));
            }
            done => done?,
        }
    }
    Ok(match signal.load(Relaxed) {
        0 => ExitCode::SUCCESS,
        number => ExitCode::from(u8::try_from(128 + number).unwrap_or(1)),
    })
}

fn measure_and_tell(
    target: &Target,
    args: &BenchArgs,
    log: &LogArgs,
    signal: &AtomicUsize,
    command: &mut Command,
) -> Result<()> {
    let show = &args.show;
    let load = Load::of(&args.load, &args.access, show.vs.is_some());
    let load = load.unwrap_or_else(|error| {
        command.error(ErrorKind::ValueValidation, format!("{error:#}")).exit()
    });
    // What cannot be written would be a pity to find out at the end.
    let page = show.html.as_deref().map(html::create).transpose()?;
    let mut all = Vec::new();
    for target in std::iter::once(target).chain(&show.vs) {
        all.push(Measured { name: target.to_string(), facts: String::new(), rounds: Vec::new() });
    }
    let rounds = if show.vs.is_some() { show.rounds } else { 1 };
    let targets: Vec<&Target> = std::iter::once(target).chain(&show.vs).collect();
    args.access
        .ceph
        .check(targets.iter().filter_map(|target| target.source()))
        .map_err(Error::msg)?;
    let bar = Bar::new(&load, rounds, targets.len(), log);
    let dropped = in_turn(rounds, |round| {
        all.iter_mut().for_each(|measured| measured.rounds.truncate(round));
        // There and back, so that a drift favours nobody.
        let mut order: Vec<usize> = (0..targets.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for at in order {
            if signal.load(Relaxed) != 0 && !all[at].rounds.is_empty() {
                continue;
            }
            let target = targets[at];
            bar.begin(target, round);
            let (facts, outcome) = one(target, &load, &args.access, signal, &bar)?;
            if outcome.done() == 0 && signal.load(Relaxed) == 0 {
                bail!("{target}: no request was completed in the time that was measured");
            }
            all[at].facts = facts;
            all[at].rounds.push(outcome);
        }
        if signal.load(Relaxed) != 0 {
            return Ok(0.0);
        }
        let last = all.iter().filter_map(|measured| measured.rounds.get(round));
        Ok(last.map(|outcome| outcome.host.disturbance()).fold(0.0, f64::max))
    })?;
    bar.end();
    if all.iter().flat_map(|measured| &measured.rounds).any(|round| round.done() == 0) {
        // A signal came first: there is nothing to say.
        return Ok(());
    }
    if dropped > 0 {
        tracing::warn!(
            "{dropped} rounds were dropped, and measured again: others had more than {DISTURBED} % of the CPUs"
        );
    }
    if show.json {
        let json = summary::json(&load, &all);
        output::print(&(serde_json::to_string_pretty(&json)? + "\n"))?;
    } else {
        output::print(&summary::text(&load, &all))?;
    }
    if let Some(path) = page {
        let text = html::report(&load, &all)?;
        html::write(path, &text)?;
        if !log.quiet && !show.json {
            output::print(&format!("report: {}\n", path.display()))?;
        }
    }
    Ok(())
}

/// Has each of `rounds` measured, and a disturbed one again in its place: `measure` returns the disturbance. How many were
/// dropped: none where there is one round only, and at most as many as were asked for, so that it ends on a host that is
/// always busy.
fn in_turn(rounds: u16, mut measure: impl FnMut(usize) -> Result<f64>) -> Result<u16> {
    let spare = if rounds > 1 { rounds } else { 0 };
    let (mut round, mut dropped) = (0, 0);
    while round < usize::from(rounds) {
        if measure(round)? > DISTURBED && dropped < spare {
            dropped += 1;
        } else {
            round += 1;
        }
    }
    Ok(dropped)
}

/// Opens a target, measures it, closes it.
fn one(
    target: &Target,
    load: &Load,
    access: &AccessArgs,
    signal: &AtomicUsize,
    bar: &Bar,
) -> Result<(String, Outcome)> {
    let mut opened = target.open(load, access)?;
    bar.set_budget(load.budget_of(&load.region(opened.capacity, opened.block)?));
    let facts = opened.facts.clone();
    let outcome = runner::run(&mut opened, load, signal, &mut || Ok(()), &mut |at| bar.tell(at));
    Ok((facts, outcome.with_context(|| target.to_string())?))
}

/// Progress on a terminal.
struct Bar {
    bar: ProgressBar,
    runtime: Option<f64>,
    budget: Cell<Option<u64>>,
    alternating: bool,
}

impl Bar {
    fn new(load: &Load, rounds: u16, targets: usize, log: &LogArgs) -> Self {
        let style = ProgressStyle::with_template("{prefix}  {bar:32.green/dim}  {msg}");
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("━╸━");
        let bar = if log.quiet { ProgressBar::hidden() } else { ProgressBar::new(1000) };
        Self {
            bar: bar.with_style(style),
            runtime: load.runtime.map(|time| time.as_secs_f64()),
            budget: Cell::new(None),
            alternating: targets > 1 || rounds > 1,
        }
    }

    /// Bytes to be done in all, once that is known.
    fn set_budget(&self, bytes: Option<u64>) {
        self.budget.set(bytes);
    }

    fn begin(&self, target: &Target, round: usize) {
        let round = if self.alternating { format!(" ({})", round + 1) } else { String::new() };
        self.bar.set_prefix(format!("{target}{round}"));
        self.bar.set_position(0);
    }

    fn tell(&self, at: Progress) {
        let part = match (self.runtime, self.budget.get()) {
            (Some(runtime), _) => at.seconds / runtime,
            (None, Some(budget)) => at.bytes as f64 / budget as f64,
            (None, None) => 0.0,
        };
        // A position on the bar, and a rate without its fraction.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let (position, iops) =
            ((part.clamp(0.0, 1.0) * 1000.0) as u64, (at.done as f64 / at.seconds) as u64);
        self.bar.set_position(position);
        let mb_s = at.bytes as f64 / at.seconds / 1e6;
        self.bar.set_message(format!("{} IOPS  {mb_s:.1} MB/s", HumanCount(iops)));
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disturbed_round_is_dropped_and_measured_again() {
        // The disturbance of each measurement, which of the rounds they are, and how many were dropped.
        for (rounds, disturbances, measured, dropped) in [
            (3, &[0.0, 5.0, 4.9][..], &[0, 1, 2][..], 0),
            (3, &[0.0, 5.1, 90.0, 1.0, 0.0], &[0, 1, 1, 1, 2], 2),
            (2, &[9.0, 0.0, 9.0, 0.0], &[0, 0, 1, 1], 2),
            // A host that is always busy.
            (2, &[50.0; 4], &[0, 0, 0, 1], 2),
            (1, &[50.0], &[0], 0),
        ] {
            let (mut asked, mut left) = (Vec::new(), disturbances.iter());
            let found = in_turn(rounds, |round| {
                asked.push(round);
                Ok(*left.next().expect("no more rounds than these"))
            });
            assert_eq!((&asked[..], found.unwrap()), (measured, dropped), "{disturbances:?}");
            assert_eq!(left.next(), None);
        }
        assert!(in_turn(3, |_| bail!("a target that is gone")).is_err());
    }
}
