//! What is to be limited, and to what.

use std::ops::{Index, IndexMut};

/// The highest rate, burst, and size of a bucket: those of QEMU.
pub const RATE_MAX: u64 = 1_000_000_000_000_000;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// All requests.
    Iops,
    /// Reads.
    IopsRead,
    /// Writes, discards and write-zeroes.
    IopsWrite,
    /// All bytes.
    Bps,
    /// Bytes read.
    BpsRead,
    /// Bytes written, discarded or zeroed.
    BpsWrite,
}

impl LimitKind {
    /// All of them, in their order.
    pub const ALL: [Self; 6] =
        [Self::Iops, Self::IopsRead, Self::IopsWrite, Self::Bps, Self::BpsRead, Self::BpsWrite];

    /// Its word in options and configuration files.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Iops => "iops",
            Self::IopsRead => "iops-read",
            Self::IopsWrite => "iops-write",
            Self::Bps => "bps",
            Self::BpsRead => "bps-read",
            Self::BpsWrite => "bps-write",
        }
    }

    /// It counts requests, not bytes.
    #[must_use]
    pub const fn counts_requests(self) -> bool {
        matches!(self, Self::Iops | Self::IopsRead | Self::IopsWrite)
    }
}

/// One limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// Per second, in the long run.
    pub avg: Option<u64>,
    /// Per second, for as long as a burst may last.
    pub max: Option<u64>,
    /// How many seconds a burst may last, if not one.
    pub max_length: Option<u64>,
}

/// All limits of a disk or a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    rates: [Rate; 6],
    /// A request of more bytes than this counts as several.
    pub iops_size: Option<u64>,
}

impl Index<LimitKind> for Rates {
    type Output = Rate;

    fn index(&self, kind: LimitKind) -> &Rate {
        &self.rates[kind as usize]
    }
}

impl IndexMut<LimitKind> for Rates {
    fn index_mut(&mut self, kind: LimitKind) -> &mut Rate {
        &mut self.rates[kind as usize]
    }
}

/// A limit that cannot be: what is wrong, what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RatesError {
    /// Nothing would ever pass.
    #[error("{0} = 0: nothing would ever pass. For no limit leave it out, or say none")]
    Zero(String),
    /// A burst that takes no time.
    #[error("{0} = 0: a burst takes a second at least. Leave it out for one second")]
    NoTime(String),
    /// More than there is room for.
    #[error("{0} = {1}: the highest is {RATE_MAX} (10^15)")]
    TooHigh(String, u64),
    /// There is nothing it could belong to.
    #[error("{0} needs {1}: say {1}, or leave {0} out. If {0} holds already, say {0} none as well")]
    Alone(String, String),
    /// A burst that is slower than the rate.
    #[error(
        "{word}-max = {max} is below {word} = {avg}: a burst is as fast as the rate at least. Change \
         {word}-max as well (none: no bursts)"
    )]
    BurstBelowRate {
        /// What is counted.
        word: &'static str,
        /// Of a burst.
        max: u64,
        /// In the long run.
        avg: u64,
    },
    /// The bucket has no room for it.
    #[error(
        "{word}-max = {max} for {word}-max-length = {length} seconds is more than {RATE_MAX} (10^15) \
         in all: give a lower or a shorter burst"
    )]
    BurstTooLong {
        /// What is counted.
        word: &'static str,
        /// Of a burst.
        max: u64,
        /// In seconds.
        length: u64,
    },
}

impl Rates {
    /// True if nothing is limited.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        self.rates.iter().all(|rate| rate.avg.is_none())
    }

    /// Judges them.
    ///
    /// # Errors
    /// The first that cannot be.
    pub fn check(&self) -> Result<(), RatesError> {
        LimitKind::ALL.into_iter().try_for_each(|kind| check(kind.word(), self[kind]))?;
        let Some(size) = self.iops_size else { return Ok(()) };
        in_range("iops-size", size)?;
        let requests = LimitKind::ALL.into_iter().filter(|kind| kind.counts_requests());
        if requests.map(|kind| self[kind]).all(|rate| rate.avg.is_none()) {
            let one = "a limit of iops, iops-read or iops-write";
            return Err(RatesError::Alone("iops-size".into(), one.into()));
        }
        Ok(())
    }
}

fn check(word: &'static str, rate: Rate) -> Result<(), RatesError> {
    let (burst, length) = (format!("{word}-max"), format!("{word}-max-length"));
    rate.avg.map_or(Ok(()), |avg| in_range(word, avg))?;
    rate.max.map_or(Ok(()), |max| in_range(&burst, max))?;
    if rate.max_length == Some(0) {
        return Err(RatesError::NoTime(length));
    }
    rate.max_length.map_or(Ok(()), |seconds| in_range(&length, seconds))?;
    match rate {
        Rate { avg: None, max: Some(_), .. } => Err(RatesError::Alone(burst, word.into())),
        Rate { max: None, max_length: Some(_), .. } => Err(RatesError::Alone(length, burst)),
        Rate { avg: Some(avg), max: Some(max), .. } if max < avg => {
            Err(RatesError::BurstBelowRate { word, max, avg })
        }
        Rate { max: Some(max), max_length: Some(length), .. }
            if max.checked_mul(length).is_none_or(|all| all > RATE_MAX) =>
        {
            Err(RatesError::BurstTooLong { word, max, length })
        }
        _ => Ok(()),
    }
}

fn in_range(word: &str, number: u64) -> Result<(), RatesError> {
    match number {
        0 => Err(RatesError::Zero(word.into())),
        1..=RATE_MAX => Ok(()),
        _ => Err(RatesError::TooHigh(word.into(), number)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(kind: LimitKind, avg: u64, max: u64, length: u64) -> Rates {
        let some = |number: u64| (number != u64::MAX).then_some(number);
        let mut rates = Rates::default();
        rates[kind] = Rate { avg: some(avg), max: some(max), max_length: some(length) };
        rates
    }

    #[test]
    fn impossible_limits_are_told() {
        const NONE: u64 = u64::MAX;
        for (avg, max, length, what) in [
            (0, NONE, NONE, "bps-read = 0: nothing would ever pass"),
            (1, 0, NONE, "bps-read-max = 0"),
            (1, 1, 0, "bps-read-max-length = 0"),
            (RATE_MAX + 1, NONE, NONE, "the highest is 1000000000000000"),
            (NONE, 5, NONE, "bps-read-max needs bps-read"),
            (5, NONE, 5, "bps-read-max-length needs bps-read-max"),
            (100, 99, NONE, "bps-read-max = 99 is below bps-read = 100"),
            (1, RATE_MAX, 2, "in all: give a lower or a shorter burst"),
            (1, RATE_MAX, RATE_MAX, "in all: give a lower or a shorter burst"),
        ] {
            let error =
                rates(LimitKind::BpsRead, avg, max, length).check().unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        for (avg, max, length) in [
            (1, NONE, NONE),
            (RATE_MAX, RATE_MAX, 1),
            (100, 100, NONE),
            (1, 1_000_000, 1_000_000_000),
        ] {
            assert_eq!(rates(LimitKind::Iops, avg, max, length).check(), Ok(()));
        }
        let mut sized = rates(LimitKind::Bps, 1, NONE, NONE);
        sized.iops_size = Some(4096);
        assert!(sized.check().unwrap_err().to_string().starts_with("iops-size needs a limit of"));
        sized[LimitKind::IopsWrite].avg = Some(1);
        assert_eq!(sized.check(), Ok(()));
        sized.iops_size = Some(0);
        assert_eq!(sized.check(), Err(RatesError::Zero("iops-size".into())));
    }
}
