//! Limits of a disk or a group: the same words in options, in files, and on the control socket.

use super::seconds::any_seconds;
use crate::size::Size;
use clap::Args;
use ringway_throttle::{LimitKind, Rate, Rates};
use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::num::IntErrorKind;
use std::str::FromStr;

/// A number of requests, or `none`: no limit, where there was or would be one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount(Option<u64>);

/// As [`Amount`], of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(Option<u64>);

/// As [`Amount`], of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length(Option<u64>);

impl FromStr for Amount {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        if word == "none" {
            return Ok(Self(None));
        }
        let unit = word.chars().last().and_then(|unit| match unit.to_ascii_lowercase() {
            'k' => Some(1_000),
            'm' => Some(1_000_000),
            _ => None,
        });
        let digits = unit.map_or(word, |_| &word[..word.len() - 1]);
        match digits.parse::<u64>() {
            Ok(number) => {
                let number = number.checked_mul(unit.unwrap_or(1));
                number.map(|number| Self(Some(number))).ok_or(format!("'{word}' is too large"))
            }
            Err(error) if *error.kind() == IntErrorKind::PosOverflow => {
                Err(format!("'{word}' is too large"))
            }
            Err(_) => {
                Err(format!("'{word}' is neither a number of requests (500, 10k, 1M), nor none"))
            }
        }
    }
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        if word == "none" {
            return Ok(Self(None));
        }
        let Size(bytes) = word.parse().map_err(|error| format!("{error}, or none"))?;
        Ok(Self(Some(bytes)))
    }
}

impl FromStr for Length {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        if word == "none" {
            return Ok(Self(None));
        }
        any_seconds(word).map(|seconds| Self(Some(seconds)))
    }
}

/// A number, or a word that is parsed.
struct NumberOrWord<T>(fn(Option<u64>) -> T);

impl<T: FromStr<Err = String>> Visitor<'_> for NumberOrWord<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, or \"none\"")
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<T, E> {
        word.parse().map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        Ok(self.0(Some(number)))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        let negative = |_| E::custom(format!("{number} is negative"));
        Ok(self.0(Some(u64::try_from(number).map_err(negative)?)))
    }
}

/// As JSON and TOML have it: a number, or `"none"`.
macro_rules! as_number_or_none {
    ($name:ident) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(NumberOrWord($name))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                match self.0 {
                    Some(number) => to.serialize_u64(number),
                    None => to.serialize_str("none"),
                }
            }
        }
    };
}

#[cfg(feature = "schema")]
macro_rules! schema_of {
    ($name:ident, $what:literal) => {
        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({
                    "description": $what, "type": ["integer", "string"], "minimum": 1
                })
            }
        }
    };
}

#[cfg(feature = "schema")]
schema_of!(Amount, "A number, with k or M (thousands and millions) if need be, or none: no limit.");
#[cfg(feature = "schema")]
schema_of!(Length, "Whole seconds, or a time such as \"30s\", \"2m\" or \"1h\"; or none.");
#[cfg(feature = "schema")]
schema_of!(Bytes, "Bytes, or a number with K, M, G or T (powers of 1024); or none: no limit.");

as_number_or_none!(Amount);
as_number_or_none!(Length);
as_number_or_none!(Bytes);

/// What may pass: the words of QEMU's throttle groups.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Args, serde::Deserialize, serde::Serialize,
)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Requests a second, in the long run.
    #[arg(long, value_name = "N")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<Amount>,
    /// Requests a second while a burst lasts.
    #[arg(long, value_name = "N", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_max: Option<Amount>,
    /// How long a burst of requests may last [default: 1s].
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_max_length: Option<Length>,
    /// Reads a second, in the long run.
    #[arg(long, value_name = "N")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_read: Option<Amount>,
    /// Reads a second while a burst lasts.
    #[arg(long, value_name = "N", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_read_max: Option<Amount>,
    /// How long a burst of reads may last [default: 1s].
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_read_max_length: Option<Length>,
    /// Writes, discards and write-zeroes a second, in the long run.
    #[arg(long, value_name = "N")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_write: Option<Amount>,
    /// Writes a second while a burst lasts.
    #[arg(long, value_name = "N", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_write_max: Option<Amount>,
    /// How long a burst of writes may last [default: 1s].
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_write_max_length: Option<Length>,
    /// Bytes a second, in the long run.
    #[arg(long, value_name = "SIZE")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps: Option<Bytes>,
    /// Bytes a second while a burst lasts.
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps_max: Option<Bytes>,
    /// How long a burst of bytes may last [default: 1s].
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps_max_length: Option<Length>,
    /// Bytes read a second, in the long run.
    #[arg(long, value_name = "SIZE")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps_read: Option<Bytes>,
    /// Bytes read a second while a burst lasts.
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps_read_max: Option<Bytes>,
    /// How long a burst of bytes read may last [default: 1s].
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps_read_max_length: Option<Length>,
    /// Bytes written, discarded or zeroed a second, in the long run.
    #[arg(long, value_name = "SIZE")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps_write: Option<Bytes>,
    /// Bytes written a second while a burst lasts.
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps_write_max: Option<Bytes>,
    /// How long a burst of bytes written may last [default: 1s].
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bps_write_max_length: Option<Length>,
    /// A request of more bytes counts as several, for limits of requests.
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_size: Option<Bytes>,
}

/// A group of disks that share limits, as a file names it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitGroup {
    /// How disks name it.
    pub name: String,
    /// What all of them may have together.
    #[serde(deserialize_with = "super::disk::limits_of_all")]
    pub limits: LimitArgs,
}

impl LimitArgs {
    /// `self`, and where it says nothing `other`.
    #[must_use]
    pub fn or(self, other: &Self) -> Self {
        Self {
            iops: self.iops.or(other.iops),
            iops_max: self.iops_max.or(other.iops_max),
            iops_max_length: self.iops_max_length.or(other.iops_max_length),
            iops_read: self.iops_read.or(other.iops_read),
            iops_read_max: self.iops_read_max.or(other.iops_read_max),
            iops_read_max_length: self.iops_read_max_length.or(other.iops_read_max_length),
            iops_write: self.iops_write.or(other.iops_write),
            iops_write_max: self.iops_write_max.or(other.iops_write_max),
            iops_write_max_length: self.iops_write_max_length.or(other.iops_write_max_length),
            bps: self.bps.or(other.bps),
            bps_max: self.bps_max.or(other.bps_max),
            bps_max_length: self.bps_max_length.or(other.bps_max_length),
            bps_read: self.bps_read.or(other.bps_read),
            bps_read_max: self.bps_read_max.or(other.bps_read_max),
            bps_read_max_length: self.bps_read_max_length.or(other.bps_read_max_length),
            bps_write: self.bps_write.or(other.bps_write),
            bps_write_max: self.bps_write_max.or(other.bps_write_max),
            bps_write_max_length: self.bps_write_max_length.or(other.bps_write_max_length),
            iops_size: self.iops_size.or(other.iops_size),
        }
    }

    /// What is to be counted, and how much of it may pass.
    ///
    /// # Errors
    /// Limits that cannot be.
    pub fn rates(&self) -> Result<Rates, String> {
        macro_rules! all {
            ($($number:expr),*) => { [$($number.and_then(|number| number.0)),*] };
        }
        let each = [
            (LimitKind::Iops, all!(self.iops, self.iops_max, self.iops_max_length)),
            (
                LimitKind::IopsRead,
                all!(self.iops_read, self.iops_read_max, self.iops_read_max_length),
            ),
            (
                LimitKind::IopsWrite,
                all!(self.iops_write, self.iops_write_max, self.iops_write_max_length),
            ),
            (LimitKind::Bps, all!(self.bps, self.bps_max, self.bps_max_length)),
            (LimitKind::BpsRead, all!(self.bps_read, self.bps_read_max, self.bps_read_max_length)),
            (
                LimitKind::BpsWrite,
                all!(self.bps_write, self.bps_write_max, self.bps_write_max_length),
            ),
        ];
        let mut rates = Rates::default();
        rates.iops_size = self.iops_size.and_then(|size| size.0);
        for (kind, [avg, max, max_length]) in each {
            rates[kind] = Rate { avg, max, max_length };
        }
        rates.check().map_err(|error| error.to_string())?;
        Ok(rates)
    }

    /// Each word with its number; those that limit nothing are left out.
    #[must_use]
    pub fn numbers(&self) -> BTreeMap<String, u64> {
        let all = serde_json::to_value(self).unwrap_or_default();
        let number =
            |(word, number): (&String, &serde_json::Value)| Some((word.clone(), number.as_u64()?));
        all.as_object().map(|all| all.iter().filter_map(number).collect()).unwrap_or_default()
    }

    /// True if nothing is said.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        *self == Self::default()
    }
}

/// Limits as people read them: `iops 500, bps 10 MiB`; empty if there are none.
#[must_use]
pub fn limit_words(numbers: &BTreeMap<String, u64>) -> String {
    let mut words = Vec::new();
    for kind in LimitKind::ALL {
        let word = kind.word();
        let amount = |number: u64| match kind.counts_requests() {
            true => number.to_string(),
            false => Size(number).to_string(),
        };
        let Some(&avg) = numbers.get(word) else { continue };
        let mut text = format!("{word} {}", amount(avg));
        if let Some(&max) = numbers.get(&format!("{word}-max")) {
            let seconds = numbers.get(&format!("{word}-max-length")).copied().unwrap_or(1);
            text += &format!(" (max {} for {seconds} s)", amount(max));
        }
        words.push(text);
    }
    if let Some(&size) = numbers.get("iops-size") {
        words.push(format!("iops-size {}", Size(size)));
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> Result<LimitArgs, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_said_is_read_and_shown() {
        let all = args(
            "iops = 500\niops-max = \"1000\"\niops-max-length = \"2m\"\niops-size = \"64K\"\n\
             bps-write = \"10M\"\nbps-read = \"none\"\n",
        );
        let all = all.unwrap();
        let rates = all.rates().unwrap();
        let burst = Rate { avg: Some(500), max: Some(1000), max_length: Some(120) };
        assert_eq!((rates[LimitKind::Iops], rates.iops_size), (burst, Some(65536)));
        assert_eq!(rates[LimitKind::BpsWrite].avg, Some(10 << 20));
        assert_eq!(rates[LimitKind::BpsRead], Rate::default());
        assert_eq!(
            limit_words(&all.numbers()),
            "iops 500 (max 1000 for 120 s), bps-write 10 MiB, iops-size 64 KiB"
        );
        let again: LimitArgs = serde_json::from_str(&serde_json::to_string(&all).unwrap()).unwrap();
        assert_eq!(again, all);
        assert_eq!(limit_words(&LimitArgs::default().numbers()), "");
    }

    #[test]
    fn what_is_said_later_counts_and_none_lifts() {
        let before = args("iops = 500\niops-max = 1000\nbps = 4096\n").unwrap();
        let change = args("iops = 600\niops-max = \"none\"\n").unwrap();
        let after = change.or(&before);
        assert_eq!(limit_words(&after.numbers()), "iops 600, bps 4 KiB");
        assert!(after.rates().is_ok());
        assert_eq!(limit_words(&args("iops = \"10k\"").unwrap().numbers()), "iops 10000");
        let error = args("iops = 2000\n").unwrap().or(&before).rates().unwrap_err();
        assert!(error.contains("iops-max = 1000 is below iops = 2000"), "{error}");
    }

    #[test]
    fn what_is_no_amount_is_refused() {
        for (text, what) in [
            ("iops = -1", "-1 is negative"),
            ("iops = \"many\"", "'many' is neither a number of requests (500, 10k, 1M), nor none"),
            ("iops = \"10G\"", "'10G' is neither a number of requests"),
            ("iops = \"99999999999999999M\"", "is too large"),
            ("iops = \"99999999999999999999\"", "is too large"),
            ("iops-max-length = \"1.5\"", "'1.5' is not a time in whole seconds"),
            ("bps = \"10X\"", "'10X' is not a size"),
            ("iops = 1.5", "expected a number, or \"none\""),
            ("iosp = 1", "unknown field `iosp`"),
        ] {
            let error = args(text).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }
}
