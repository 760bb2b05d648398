//! Times in whole seconds: `30`, `30s`, `2m`, `1h` on the command line, in files and in requests, where
//! a number is seconds, too.

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use std::fmt;
use std::num::{IntErrorKind, NonZeroU32};
use std::time::Duration;

/// The longest time after which a request may be called overdue: a day, in seconds.
const OVERDUE_MAX: u32 = 86_400;

pub(super) fn seconds(seconds: NonZeroU32) -> Duration {
    Duration::from_secs(seconds.get().into())
}

/// What a word says, in seconds.
pub(super) fn any_seconds(word: &str) -> Result<u64, String> {
    let units = [('s', 1), ('m', 60), ('h', 3600)];
    let unit = |(unit, factor)| Some((word.strip_suffix(unit)?, factor));
    let (number, factor) = units.into_iter().find_map(unit).unwrap_or((word, 1));
    let too_large = || format!("'{word}' is too large");
    match number.parse::<u64>() {
        Ok(number) => number.checked_mul(factor).ok_or_else(too_large),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Err(too_large()),
        Err(_) => Err(format!(
            "'{word}' is not a time in whole seconds: give 30 or 30s, 2m (minutes) or 1h (hours)"
        )),
    }
}

pub(super) fn whole_seconds(word: &str) -> Result<u32, String> {
    u32::try_from(any_seconds(word)?).map_err(|_| format!("'{word}' is too large"))
}

pub(super) fn some_seconds(word: &str) -> Result<NonZeroU32, String> {
    some(whole_seconds(word)?)
}

fn some(seconds: u32) -> Result<NonZeroU32, String> {
    NonZeroU32::new(seconds)
        .ok_or_else(|| "it must be at least 1; leave it out for ever".to_owned())
}

pub(super) fn overdue(word: &str) -> Result<u32, String> {
    let seconds = whole_seconds(word)?;
    match seconds <= OVERDUE_MAX {
        true => Ok(seconds),
        false => Err(format!("it must be at most {OVERDUE_MAX}, a day; 0 for no watchdog")),
    }
}

/// A number of seconds, or a word as above.
pub(super) struct Seconds(u32);

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Time;
        impl Visitor<'_> for Time {
            type Value = Seconds;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of seconds, or a time such as \"30s\" or \"2m\"")
            }

            fn visit_str<E: Error>(self, word: &str) -> Result<Seconds, E> {
                whole_seconds(word).map(Seconds).map_err(E::custom)
            }

            fn visit_u64<E: Error>(self, seconds: u64) -> Result<Seconds, E> {
                let too_large = |_| E::custom(format!("'{seconds}' is too large"));
                u32::try_from(seconds).map(Seconds).map_err(too_large)
            }

            fn visit_i64<E: Error>(self, seconds: i64) -> Result<Seconds, E> {
                let negative = |_| E::custom(format!("{seconds} is negative"));
                self.visit_u64(u64::try_from(seconds).map_err(negative)?)
            }
        }
        from.deserialize_any(Time)
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Seconds {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Seconds".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "Whole seconds, or a time such as \"30s\", \"2m\" or \"1h\".",
            "type": ["integer", "string"],
            "minimum": 0,
        })
    }
}

pub(super) fn seconds_in_file<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    Ok(Option::<Seconds>::deserialize(from)?.map(|seconds| seconds.0))
}

pub(super) fn some_seconds_in_file<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<NonZeroU32>, D::Error> {
    seconds_in_file(from)?.map(some).transpose().map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units_or_are_seconds() {
        for (word, seconds) in [("30", 30), ("30s", 30), ("2m", 120), ("1h", 3600), ("0", 0)] {
            assert_eq!(whole_seconds(word), Ok(seconds), "{word}");
        }
        for word in ["", "s", "1.5", "100ms", "1d", "-1", "1 m", "soon"] {
            let error = whole_seconds(word).unwrap_err();
            assert!(error.contains("is not a time in whole seconds: give 30"), "{error}");
        }
        for word in ["4294967296", "1193047h", "99999999999999999999", "9999999999999999999h"] {
            assert_eq!(whole_seconds(word).unwrap_err(), format!("'{word}' is too large"));
        }
        assert_eq!(some_seconds("2m").map(seconds), Ok(Duration::from_secs(120)));
        assert!(some_seconds("0m").unwrap_err().contains("at least 1"));
        assert_eq!(overdue("24h"), Ok(86_400));
        assert!(overdue("25h").unwrap_err().contains("at most 86400"));
    }

    #[test]
    fn files_have_numbers_or_the_same_words() {
        #[derive(Debug, serde::Deserialize)]
        struct File {
            #[serde(default, deserialize_with = "seconds_in_file")]
            wait: Option<u32>,
            #[serde(default, deserialize_with = "some_seconds_in_file")]
            hold: Option<NonZeroU32>,
        }
        let file: File = toml::from_str("wait = 7\nhold = \"2m\"\n").unwrap();
        assert_eq!((file.wait, file.hold.map(NonZeroU32::get)), (Some(7), Some(120)));
        let file: File = toml::from_str("").unwrap();
        assert_eq!((file.wait, file.hold), (None, None));
        for (text, what) in [
            ("wait = -1", "-1 is negative"),
            ("wait = 4294967296", "is too large"),
            ("wait = 1.5", "expected a number of seconds"),
            ("wait = \"soon\"", "'soon' is not a time"),
            ("hold = 0", "it must be at least 1"),
            ("hold = \"0s\"", "it must be at least 1"),
        ] {
            let error = toml::from_str::<File>(text).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
