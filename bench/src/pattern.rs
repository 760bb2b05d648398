//! What is asked for next: kind, place and length (hot).

use crate::backend::Ask;
use crate::round::{Round, VisitOrder};
use fastrand::Rng;
use ringway_control::size::Size;
use std::ops::Range;
use std::str::FromStr;

/// Reads or writes, in order or anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Rw {
    /// In order.
    Read,
    /// In order.
    Write,
    /// Anywhere.
    Randread,
    /// Anywhere.
    Randwrite,
    /// Both, in order.
    #[value(name = "rw", alias = "readwrite")]
    Mixed,
    /// Both, anywhere.
    Randrw,
}

impl Rw {
    /// The word on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Randread => "randread",
            Self::Randwrite => "randwrite",
            Self::Mixed => "rw",
            Self::Randrw => "randrw",
        }
    }

    /// Whether any request is a write.
    pub const fn writes(self) -> bool {
        !matches!(self, Self::Read | Self::Randread)
    }

    pub(crate) const fn is_mixed(self) -> bool {
        matches!(self, Self::Mixed | Self::Randrw)
    }

    pub(crate) const fn is_random(self) -> bool {
        matches!(self, Self::Randread | Self::Randwrite | Self::Randrw)
    }
}

/// Lengths of requests, each with the percentile up to which it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(Vec<(u64, u32)>);

/// fio's "Emulation of Storage Server Access Pattern" (IOmeter).
const IOMETER: &str = "512/10:1k/5:2k/5:4k/60:8k/2:16k/4:32k/4:64k/10";

/// The longest request: 1 GiB keeps lengths in 32 bits, and results in 31.
pub(crate) const LEN_MAX: u32 = 1 << 30;

impl Sizes {
    /// All requests of one length.
    pub fn one(len: u32) -> Self {
        Self(vec![(100, len)])
    }

    /// The shortest, in bytes.
    pub(crate) fn least(&self) -> u32 {
        self.0.iter().map(|&(_, len)| len).min().unwrap_or(512)
    }

    /// The longest, in bytes.
    pub fn most(&self) -> u32 {
        self.0.iter().map(|&(_, len)| len).max().unwrap_or(512)
    }

    /// True if each is a multiple of the smallest.
    pub(crate) fn are_multiples(&self) -> bool {
        self.0.iter().all(|(_, len)| len % self.least() == 0)
    }

    /// `4 KiB`, or the list as it is written.
    pub(crate) fn describe(&self) -> String {
        if let [(_, len)] = self.0[..] {
            return Size(len.into()).to_string();
        }
        let mut below = 0;
        let part = |&(up_to, len): &(u64, u32)| {
            let percent = up_to - std::mem::replace(&mut below, up_to);
            format!(
                "{}/{percent}",
                Size(len.into()).to_string().replace(" bytes", "").replace([' ', 'i', 'B'], "")
            )
        };
        self.0.iter().map(part).collect::<Vec<_>>().join(":")
    }
}

/// A length in bytes that a request may have.
pub(crate) fn request_len(word: &str) -> Result<u32, String> {
    let Size(bytes) = word.parse::<Size>().map_err(|error| error.to_string())?;
    match u32::try_from(bytes) {
        Ok(len) if len != 0 && len % 512 == 0 && len <= LEN_MAX => Ok(len),
        _ => Err(format!("a request has a multiple of 512 bytes, up to 1 GiB, not {bytes}")),
    }
}

impl FromStr for Sizes {
    type Err = String;

    /// `4k/60:64k/40`; percentages left out share what is missing to 100. Or `iometer`.
    fn from_str(text: &str) -> Result<Self, String> {
        let text = if text == "iometer" { IOMETER } else { text };
        let mut parts = Vec::new();
        for part in text.split(':') {
            let (len, percent) = part.split_once('/').unwrap_or((part, ""));
            let percent = match percent {
                "" => None,
                number => {
                    Some(number.parse::<u64>().ok().filter(|p| *p <= 100).ok_or_else(|| {
                        format!("'{part}': {number} is no percentage; write 4k/60:64k/40")
                    })?)
                }
            };
            parts.push((request_len(len)?, percent));
        }
        let given: u64 = parts.iter().filter_map(|(_, percent)| *percent).sum();
        let open = parts.iter().filter(|(_, percent)| percent.is_none()).count() as u64;
        if given > 100 || (open == 0 && given != 100) || (given == 100 && open > 0) {
            return Err(format!("'{text}': the percentages add up to {given}, not to 100"));
        }
        let (mut up_to, mut left, mut open) = (0, 100 - given, open);
        let parts = parts.into_iter().map(|(len, percent)| {
            up_to += percent.unwrap_or_else(|| {
                let share = left / open;
                (left, open) = (left - share, open - 1);
                share
            });
            (up_to, len)
        });
        Ok(Self(parts.collect()))
    }
}

/// Makes requests for one job, the same ones for the same seed.
#[derive(Debug)]
pub(crate) struct Pattern {
    rw: Rw,
    /// Percent of reads if there are both.
    reads: u64,
    sizes: Sizes,
    region: Range<u64>,
    /// Places are multiples of this, from the region's start.
    align: u64,
    /// Where the next one in order goes.
    next: u64,
    /// Where writes go, and reads in order, if each block is to be met once.
    round: Option<Round>,
    random: Rng,
}

impl Pattern {
    /// Requests within `region`, which holds the longest one; in order, they begin at `first`.
    pub(crate) fn new(
        rw: Rw,
        reads: u64,
        sizes: Sizes,
        region: Range<u64>,
        first: u64,
        seed: u64,
    ) -> Self {
        let align = sizes.least().into();
        let next = region.start + (first - region.start) / align * align;
        Self { rw, reads, sizes, region, align, next, round: None, random: Rng::with_seed(seed) }
    }

    /// Has writes, or reads in order, go through all of the region before they go anywhere twice. The
    /// last request of a stretch may be shorter than asked for.
    pub(crate) fn in_rounds(self, order: VisitOrder) -> Self {
        Self { round: Some(Round::new(order)), ..self }
    }

    /// How far writes came.
    pub(crate) fn round(&self) -> Option<&Round> {
        self.round.as_ref()
    }

    /// First byte of the region.
    pub(crate) fn start(&self) -> u64 {
        self.region.start
    }

    #[inline]
    pub(crate) fn next(&mut self) -> Ask {
        let len = match self.sizes.0[..] {
            [(_, len)] => len,
            ref mix => {
                let dice = self.random.u64(..100);
                mix.iter().find(|(up_to, _)| dice < *up_to).map_or(512, |&(_, len)| len)
            }
        };
        let write = match self.rw {
            Rw::Read | Rw::Randread => false,
            Rw::Write | Rw::Randwrite => true,
            Rw::Mixed | Rw::Randrw => self.random.u64(..100) >= self.reads,
        };
        if let Some(round) = &mut self.round {
            if write || self.rw == Rw::Read {
                let (offset, len) = round.next(len);
                return Ask { write, offset, len };
            }
        }
        Ask { write, offset: self.place(len.into()), len }
    }

    /// Another place for a request that cannot go where it should.
    #[inline]
    pub(crate) fn place(&mut self, len: u64) -> u64 {
        if self.rw.is_random() {
            let room = self.region.end - self.region.start - len;
            return self.region.start + self.random.u64(..=room / self.align) * self.align;
        }
        if self.next + len > self.region.end {
            self.next = self.region.start;
        }
        let offset = self.next;
        self.next += len;
        offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_add_up_to_the_whole() {
        let sizes: Sizes = "4k/60:64k/40".parse().unwrap();
        assert_eq!(
            (sizes.0.clone(), sizes.least(), sizes.most()),
            (vec![(60, 4096), (100, 65536)], 4096, 65536)
        );
        assert_eq!(sizes.describe(), "4K/60:64K/40");
        assert_eq!(
            "512:4k/50:1k".parse::<Sizes>().unwrap().0,
            [(25, 512), (75, 4096), (100, 1024)]
        );
        assert_eq!("iometer".parse::<Sizes>().unwrap().most(), 65536);
        for (text, wanted) in [
            ("4k/60:64k/50", "add up to 110"),
            ("4k/60", "add up to 60"),
            ("4k/100:8k", "add up to 100"),
            ("4k/x", "no percentage"),
            ("100", "multiple of 512"),
            ("0", "multiple of 512"),
            ("2G", "up to 1 GiB"),
            ("", "is not a size"),
        ] {
            let error = text.parse::<Sizes>().unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn requests_stay_within_their_region() {
        for rw in [Rw::Read, Rw::Randwrite, Rw::Mixed, Rw::Randrw] {
            let sizes: Sizes = "512/50:8k/50".parse().unwrap();
            let mut pattern = Pattern::new(rw, 70, sizes, 4096..40_960, 20_000, 7);
            let (mut reads, mut lowest, mut highest) = (0, u64::MAX, 0);
            for _ in 0..10_000 {
                let ask = pattern.next();
                let end = ask.offset + u64::from(ask.len);
                assert!(ask.offset >= 4096 && end <= 40_960 && ask.offset % 512 == 0, "{ask:?}");
                (lowest, highest) = (lowest.min(ask.offset), highest.max(end));
                reads += u32::from(!ask.write);
            }
            assert_eq!((lowest, highest), (4096, 40_960), "{rw:?} reaches all of it");
            match rw {
                Rw::Read => assert_eq!(reads, 10_000),
                Rw::Randwrite => assert_eq!(reads, 0),
                _ => assert!((6700..7300).contains(&reads), "{reads} of 10,000 read"),
            }
        }
    }

    #[test]
    fn the_same_seed_asks_for_the_same() {
        let make = |seed| {
            let mut pattern = Pattern::new(Rw::Randrw, 50, Sizes::one(4096), 0..1 << 30, 0, seed);
            (0..100).map(|_| pattern.next()).collect::<Vec<_>>()
        };
        assert_eq!(make(1), make(1));
        assert_ne!(make(1), make(2));
    }
}
