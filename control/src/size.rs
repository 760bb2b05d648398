//! Sizes as people write them: 512, 64K, 10G, 1GiB. Units are powers of 1024.

use parse_size::{ByteSuffix, Config, Error as SizeError};
use serde::de::{Deserialize, Deserializer, Error, Visitor};
use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Size(pub u64);

/// A word that is no size.
#[derive(Debug, thiserror::Error)]
pub enum NotASize {
    /// It has another form.
    #[error(
        "'{0}' is not a size: give a number with K, M, G or T (powers of 1024), such as 512, 64K or 10G"
    )]
    Form(String),
    /// It has the form of one.
    #[error("'{0}' is too large: sizes go up to {max} bytes", max = u64::MAX)]
    TooLarge(String),
}

impl FromStr for Size {
    type Err = NotASize;

    fn from_str(word: &str) -> Result<Self, NotASize> {
        Config::new()
            .with_binary()
            .with_byte_suffix(ByteSuffix::Allow)
            .parse_size(word)
            .map(Self)
            .map_err(|error| match error {
                SizeError::PosOverflow => NotASize::TooLarge(word.into()),
                _ => NotASize::Form(word.into()),
            })
    }
}

impl fmt::Display for Size {
    /// In the largest unit that loses nothing worth knowing: `10 GiB`, `1.5 TiB`, `100 bytes`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let Some((power, unit)) =
            (1..).zip(units).take_while(|(power, _)| self.0 >> (10 * power) != 0).last()
        else {
            return f.pad(&format!("{} bytes", self.0));
        };
        let number = format!("{:.2}", self.0 as f64 / f64::from(1024).powi(power));
        let number = number.trim_end_matches('0').trim_end_matches('.');
        f.pad(&format!("{number} {unit}"))
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Size {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "Bytes, or a number with K, M, G or T (powers of 1024).",
            "type": ["integer", "string"],
        })
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"10G\"")
            }

            fn visit_str<E: Error>(self, word: &str) -> Result<Size, E> {
                word.parse().map_err(E::custom)
            }

            fn visit_u64<E: Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size(bytes))
            }

            fn visit_i64<E: Error>(self, bytes: i64) -> Result<Size, E> {
                u64::try_from(bytes)
                    .map(Size)
                    .map_err(|_| E::custom(NotASize::Form(bytes.to_string())))
            }
        }
        deserializer.deserialize_any(Bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024_however_they_are_written() {
        for (word, bytes) in [
            ("512", 512),
            ("4K", 4096),
            ("4k", 4096),
            ("10G", 10 << 30),
            ("1GiB", 1 << 30),
            ("1GB", 1 << 30),
            ("1T", 1 << 40),
            ("1.5G", 3 << 29),
        ] {
            assert_eq!(word.parse::<Size>().unwrap(), Size(bytes), "{word}");
        }
        for word in ["", "10X", "G", "-1", "1 potato"] {
            assert!(word.parse::<Size>().unwrap_err().to_string().contains("is not a size"));
        }
        for word in ["99999999999999999999", "99999999T"] {
            assert!(word.parse::<Size>().unwrap_err().to_string().contains("is too large"));
        }
    }

    #[test]
    fn sizes_are_shown_short() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (512, "512 bytes"),
            (1 << 20, "1 MiB"),
            (3 << 29, "1.5 GiB"),
            (10 << 30, "10 GiB"),
            (1 << 40, "1 TiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }
}
