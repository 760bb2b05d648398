//! What becomes of requests that the disk fails: reported to the guest, or held until the disk has
//! been mended.

use crate::choices::{UnknownWord, choose};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What becomes of a request that the disk fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The guest is told.
    #[default]
    Report,
    /// It waits, its guest waits for it, and it is tried again.
    Hold,
}

impl OnError {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Report, Self::Hold];

    /// The word used on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::Hold => "hold",
        }
    }
}

impl FromStr for OnError {
    type Err = UnknownWord;
    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        choose(word, &Self::ALL, Self::name)
    }
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What becomes of requests that a disk fails. A sync that fails is always reported: what it has lost is lost,
/// and a later one that succeeds would hide it. A flush that finds no place for what tables of an image have to say of
/// earlier writes is what these would have been.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// Reads.
    pub on_read: OnError,
    /// Writes, discards and write-zeroes that fail for any reason but the next one.
    pub on_write: OnError,
    /// The same, for want of space (ENOSPC, EDQUOT). `None`: hold if the image is sparse.
    pub on_enospc: Option<OnError>,
    /// For how long a request is held before the guest is told after all; `None`: for ever. Whole
    /// seconds, at most `u32::MAX`.
    pub hold_timeout: Option<Duration>,
}

impl ErrorPolicy {
    /// As one word: two bits for each kind, and the seconds in the upper half (0 is for ever).
    pub(crate) fn to_bits(self) -> u64 {
        let bit = |on: OnError| u64::from(on == OnError::Hold);
        let enospc = self.on_enospc.map_or(0, |on| 1 + bit(on));
        let seconds = self.hold_timeout.map_or(0, |time| time.as_secs().clamp(1, u32::MAX.into()));
        bit(self.on_read) | bit(self.on_write) << 2 | enospc << 4 | seconds << 32
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        let on = |bit: u64| if bit == 1 { OnError::Hold } else { OnError::Report };
        let enospc = bits >> 4 & 3;
        let seconds = bits >> 32;
        Self {
            on_read: on(bits & 3),
            on_write: on(bits >> 2 & 3),
            on_enospc: (enospc > 0).then(|| on(enospc - 1)),
            hold_timeout: (seconds > 0).then(|| Duration::from_secs(seconds)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_one_word() {
        let timeouts = [None, Some(Duration::from_secs(1)), Some(Duration::from_secs(1 << 31))];
        for on_read in OnError::ALL {
            for on_write in OnError::ALL {
                for on_enospc in [None, Some(OnError::Report), Some(OnError::Hold)] {
                    for hold_timeout in timeouts {
                        let policy = ErrorPolicy { on_read, on_write, on_enospc, hold_timeout };
                        assert_eq!(ErrorPolicy::from_bits(policy.to_bits()), policy);
                    }
                }
            }
        }
        assert_eq!("hold".parse::<OnError>().unwrap(), OnError::Hold);
        assert!("stop".parse::<OnError>().unwrap_err().to_string().contains("report, hold"));
    }
}
