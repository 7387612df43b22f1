//! Sizes and times in human notation.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number of bytes. In JSON and TOML it is an integer, or a text such as `"10G"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// A duration in nanoseconds. In JSON and TOML it is a text with a unit, such as `"5ms"`, or 0:
/// whoever writes a number without a unit rarely means nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanoseconds(pub u64);

/// Why a text is not a size or not a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitError(String);

impl fmt::Display for UnitError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for UnitError {}

/// A number with its noun: `1 disk`, `2 disks`. For nouns whose plural ends in an `s`.
pub fn count<N: Copy + fmt::Display + PartialEq + From<u8>>(number: N, noun: &str) -> String {
    let plural = if number == N::from(1) { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// Reads a size: digits, an optional fraction, and an optional unit. Units are powers of 1024 (`K`,
/// `M`, `G`, `T`, `P`, each also as `KiB`…). Without a unit, the number counts bytes.
///
/// # Errors
/// When the text is not a size, or the size exceeds 64 bits.
pub fn parse_bytes(text: &str) -> Result<u64, UnitError> {
    let (number, unit) = split(text);
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "ki" | "kib" => 1 << 10,
        "m" | "mi" | "mib" => 1 << 20,
        "g" | "gi" | "gib" => 1 << 30,
        "t" | "ti" | "tib" => 1 << 40,
        "p" | "pi" | "pib" => 1_u64 << 50,
        _ => return Err(wrong(text, "size", "512, 64K, 1.5G or 2TiB")),
    };
    scale(number, factor).ok_or_else(|| wrong(text, "size", "512, 64K, 1.5G or 2TiB"))
}

/// Reads a duration: digits, an optional fraction, and a unit: `ns`, `us`, `µs`, `ms`, `s`, `min`,
/// `h` or `d`, or the word for which it stands.
///
/// # Errors
/// When the text is not a duration, or the duration exceeds 64 bits of nanoseconds.
pub fn parse_nanoseconds(text: &str) -> Result<u64, UnitError> {
    let (number, unit) = split(text);
    let factor = match unit.to_lowercase().as_str() {
        "ns" | "nanosecond" | "nanoseconds" => 1,
        "us" | "µs" | "μs" | "microsecond" | "microseconds" => 1_000,
        "ms" | "millisecond" | "milliseconds" => 1_000_000,
        "s" | "sec" | "second" | "seconds" => 1_000_000_000,
        "min" | "m" | "minute" | "minutes" => 60_000_000_000,
        "h" | "hour" | "hours" => 3_600_000_000_000,
        "d" | "day" | "days" => 24 * 3_600_000_000_000,
        "" if number.bytes().all(|byte| byte == b'0') => 1,
        _ => return Err(wrong(text, "time", EXAMPLES)),
    };
    scale(number, factor).ok_or_else(|| wrong(text, "time", EXAMPLES))
}

/// Times as they are written.
const EXAMPLES: &str = "250us, 5ms, 1.5s, 10min or 1h";

fn wrong(text: &str, what: &str, examples: &str) -> UnitError {
    let shown: String = text.chars().take(40).collect();
    UnitError(format!("{shown:?} is not a {what}: write it like {examples}"))
}

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    (&text[..end], text[end..].trim_start())
}

/// `number` times `factor`, exact but for a fraction of one, which is cut off.
fn scale(number: &str, factor: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || number.ends_with('.') || fraction.len() > 18 {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let mut total = u128::from(whole) * u128::from(factor);
    if !fraction.is_empty() {
        let digits: u64 = fraction.parse().ok()?;
        total += u128::from(digits) * u128::from(factor) / 10_u128.pow(fraction.len() as u32);
    }
    u64::try_from(total).ok()
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl Serialize for Nanoseconds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.exact())
    }
}

impl Nanoseconds {
    /// The exact time in the largest unit of which it is a multiple, as [`parse_nanoseconds`] reads
    /// it.
    pub fn exact(self) -> String {
        const UNITS: [(u64, &str); 6] = [
            (3_600_000_000_000, "h"),
            (60_000_000_000, "min"),
            (1_000_000_000, "s"),
            (1_000_000, "ms"),
            (1_000, "us"),
            (1, "ns"),
        ];
        let fits = |unit: &&(u64, &str)| self.0 != 0 && self.0 % unit.0 == 0;
        match UNITS.iter().find(fits) {
            Some((factor, unit)) => format!("{}{unit}", self.0 / factor),
            None => "0".into(),
        }
    }
}

macro_rules! unit {
    ($name:ident, $parse:ident, needs_unit: $needs_unit:literal, $what:literal) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Written;

                impl serde::de::Visitor<'_> for Written {
                    type Value = $name;

                    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                        formatter.write_str($what)
                    }

                    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<$name, E> {
                        if $needs_unit && number != 0 {
                            return Err(E::custom(format!(
                                "{number} is a number without a unit: write it like {EXAMPLES}"
                            )));
                        }
                        Ok($name(number))
                    }

                    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<$name, E> {
                        let found = serde::de::Unexpected::Signed(number);
                        let number =
                            u64::try_from(number).map_err(|_| E::invalid_value(found, &self))?;
                        self.visit_u64(number)
                    }

                    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<$name, E> {
                        $parse(text).map($name).map_err(E::custom)
                    }
                }

                deserializer.deserialize_any(Written)
            }
        }

        impl std::str::FromStr for $name {
            type Err = UnitError;

            fn from_str(text: &str) -> Result<Self, UnitError> {
                $parse(text).map(Self)
            }
        }
    };
}

unit!(Bytes, parse_bytes, needs_unit: false, "a size");
unit!(Nanoseconds, parse_nanoseconds, needs_unit: true, "a time");

impl fmt::Display for Bytes {
    /// Writes the largest unit that gives at least 1, for example `10 GiB`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
        let mut unit = 0;
        while unit + 1 < UNITS.len() && self.0 >> (10 * (unit + 1)) > 0 {
            unit += 1;
        }
        let value = self.0 as f64 / (1_u64 << (10 * unit)) as f64;
        let text = if value.fract() < 0.05 || value >= 100.0 {
            format!("{value:.0} {}", UNITS[unit])
        } else {
            format!("{value:.1} {}", UNITS[unit])
        };
        formatter.pad(&text)
    }
}

impl fmt::Display for Nanoseconds {
    /// Writes the largest unit that gives at least 1, for example `1.5 ms`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (divisor, unit) = match self.0 {
            0..1_000 => (1, "ns"),
            1_000..1_000_000 => (1_000, "µs"),
            1_000_000..1_000_000_000 => (1_000_000, "ms"),
            _ => (1_000_000_000, "s"),
        };
        let value = self.0 as f64 / f64::from(divisor);
        let text = if value >= 100.0 || divisor == 1 {
            format!("{value:.0} {unit}")
        } else {
            format!("{value:.1} {unit}")
        };
        formatter.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_has_no_plural() {
        assert_eq!(count(0_u64, "queue"), "0 queues");
        assert_eq!(count(1_usize, "queue"), "1 queue");
        assert_eq!(count(2_u16, "NBD client"), "2 NBD clients");
    }

    #[test]
    fn sizes_and_times_are_read_in_human_notation() {
        assert_eq!(parse_bytes("512"), Ok(512));
        assert_eq!(parse_bytes("10G"), Ok(10 << 30));
        assert_eq!(parse_bytes("1.5 GiB"), Ok(3 << 29));
        assert_eq!(parse_bytes("64k"), Ok(65536));
        assert_eq!(parse_nanoseconds("5ms"), Ok(5_000_000));
        assert_eq!(parse_nanoseconds("0.5us"), Ok(500));
        assert_eq!(parse_nanoseconds("0"), Ok(0));
        for text in ["", "G", "-1", "1e9", "10GB", "1.", ".5", "99999999999P", "1 0"] {
            assert!(parse_bytes(text).is_err(), "{text:?}");
        }
        let hour = 3_600_000_000_000;
        for text in ["1h", "1H", "60min", "1 hour", "60 minutes", "3600s", "3600 seconds"] {
            assert_eq!(parse_nanoseconds(text), Ok(hour), "{text:?}");
        }
        assert_eq!(parse_nanoseconds("1.5d"), Ok(36 * hour));
        for text in ["", "5", "ms", "5 weeks", "1..2s", "300000d"] {
            assert!(parse_nanoseconds(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn units_are_shown_short() {
        assert_eq!(Bytes(10 << 30).to_string(), "10 GiB");
        assert_eq!(Bytes(1536).to_string(), "1.5 KiB");
        assert_eq!(Bytes(511).to_string(), "511 B");
        assert_eq!(Nanoseconds(1_500_000).to_string(), "1.5 ms");
        assert_eq!(Nanoseconds(0).to_string(), "0 ns");
        assert_eq!(Nanoseconds(123_000).to_string(), "123 µs");
    }

    #[test]
    fn json_accepts_both_forms_and_has_numbers() {
        assert_eq!(serde_json::from_str::<Bytes>("\"4K\"").unwrap(), Bytes(4096));
        assert_eq!(serde_json::from_str::<Bytes>("4096").unwrap(), Bytes(4096));
        assert_eq!(serde_json::to_string(&Bytes(5)).unwrap(), "5");
        assert!(serde_json::from_str::<Bytes>("-1").is_err());
        assert!(serde_json::from_str::<Bytes>("true").is_err());
    }

    #[test]
    fn a_time_has_a_unit() {
        let hour = 3_600_000_000_000;
        for (time, text) in [
            (0, "0"),
            (5, "5ns"),
            (1_500, "1500ns"),
            (250_000, "250us"),
            (1_500_000_000, "1500ms"),
            (90 * 60_000_000_000, "90min"),
            (36 * hour, "36h"),
        ] {
            let written = serde_json::to_string(&Nanoseconds(time)).unwrap();
            assert_eq!(written, format!("\"{text}\""));
            assert_eq!(serde_json::from_str::<Nanoseconds>(&written).unwrap(), Nanoseconds(time));
        }
        assert_eq!(serde_json::from_str::<Nanoseconds>("0").unwrap(), Nanoseconds(0));
        for text in ["5", "-5", "300000000", "1.5", "true"] {
            assert!(serde_json::from_str::<Nanoseconds>(text).is_err(), "{text}");
        }
        let error = serde_json::from_str::<Nanoseconds>("5").unwrap_err().to_string();
        assert!(error.contains("5 is a number without a unit: write it like 250us"), "{error}");
    }
}
