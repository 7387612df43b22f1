//! The part of a cache that a disk keeps however busy the other disks of the cache are.

use std::collections::BTreeMap;
use std::fmt;

use fathom_failure::Failure;
use fathom_options::{Bytes, parse_bytes};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::open::CacheError;
use super::volume::CacheVolume;

/// A share of a cache. In JSON and TOML it is a size such as `"2G"`, a number of bytes, or a
/// percentage of the cache such as `"25%"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheShare {
    /// A number of bytes.
    Bytes(u64),
    /// A percentage of the cache, at most 100.
    Percent(u8),
}

impl Default for CacheShare {
    fn default() -> Self {
        Self::Bytes(0)
    }
}

impl CacheShare {
    /// The share of a cache of `size` bytes, in bytes.
    pub fn of(self, size: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => {
                u64::try_from(u128::from(size) * u128::from(percent) / 100).unwrap_or(size)
            }
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let Some(number) = text.trim().strip_suffix('%') else {
            return parse_bytes(text).map(Self::Bytes).map_err(|error| error.to_string());
        };
        match number.trim().parse() {
            Ok(percent @ 0..=100) => Ok(Self::Percent(percent)),
            _ => Err(format!(
                "{:?} is not a percentage: write a whole number from 0% to 100%",
                text.chars().take(40).collect::<String>()
            )),
        }
    }
}

impl fmt::Display for CacheShare {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(formatter, "{bytes}"),
            Self::Percent(percent) => write!(formatter, "{percent}%"),
        }
    }
}

impl Serialize for CacheShare {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bytes(bytes) => Bytes(*bytes).serialize(serializer),
            Self::Percent(_) => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for CacheShare {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = CacheShare;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a size such as \"2G\", or a percentage such as \"25%\"")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<CacheShare, E> {
                Ok(CacheShare::Bytes(bytes))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<CacheShare, E> {
                u64::try_from(bytes).map(CacheShare::Bytes).map_err(E::custom)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<CacheShare, E> {
                CacheShare::parse(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// The slots of the shares of all disks but one.
fn shares_of_others(shares: &BTreeMap<u16, u64>, disk: u16) -> u64 {
    shares.iter().filter(|(other, _)| **other != disk).map(|(_, slots)| slots).sum()
}

impl CacheVolume {
    /// Guarantees slots to a disk: while it has no more blocks than these, it loses none for a
    /// block of another disk. Each shard has its part of the slots. 0 ends the guarantee.
    ///
    /// # Errors
    /// If the shares of all disks would exceed the cache, or too many disks have a share. The share
    /// is then as before.
    pub(super) fn set_share(&self, disk: u16, slots: u64) -> Result<(), CacheError> {
        let mut shares = self.shares.lock();
        self.check_slots(shares_of_others(&shares, disk), slots)?;
        let total = u64::from(self.slots()).max(1);
        for number in 0..self.shards.len() {
            let mut shard = self.shard(number);
            let part = u64::from(shard.slots()) * slots / total;
            // Each shard knows the same disks.
            if !shard.set_share(disk, part as u32) {
                let shares_max = fathom_cache::SHARES_MAX;
                let message = format!(
                    "{shares_max} disks of the cache have or had a share, which is the most"
                );
                let remedy = "give this disk a cache with another `name`, or no `share`";
                return Err(CacheError::Disk(Failure::new(message).advise(remedy)));
            }
        }
        if slots == 0 {
            shares.remove(&disk);
        } else {
            shares.insert(disk, slots);
        }
        Ok(())
    }

    /// Checks that so many slots are left beside those of the shares of other disks.
    fn check_slots(&self, others: u64, slots: u64) -> Result<(), CacheError> {
        let available = self.slots_to_share();
        if slots <= available.saturating_sub(others) {
            return Ok(());
        }
        let block_size = u64::from(self.format.block_size);
        let message = format!(
            "the shares of the cache's disks would be {} bytes, and the cache has {} bytes for them",
            others.saturating_add(slots).saturating_mul(block_size),
            available * block_size
        );
        let remedy = "lower `share` of this disk or of another one, or make the cache larger";
        Err(CacheError::Disk(Failure::new(message).advise(remedy)))
    }

    /// Checks that the disk `name`, which may use the cache already, can have a share of so many
    /// slots.
    ///
    /// # Errors
    /// If the shares of all disks would exceed the cache.
    pub(super) fn check_share(&self, name: &str, slots: u64) -> Result<(), CacheError> {
        // No disk has the number 0.
        let number = self.disk_named(name).map_or(0, |disk| disk.number);
        self.check_slots(shares_of_others(&self.shares.lock(), number), slots)
    }

    /// Whether a disk can have a share of so many slots.
    pub(super) fn can_share(&self, disk: u16, slots: u64) -> bool {
        self.check_slots(shares_of_others(&self.shares.lock(), disk), slots).is_ok()
    }

    /// The slots that can belong to shares.
    fn slots_to_share(&self) -> u64 {
        let slots = u64::from(self.slots());
        // A shard of a volume keeps some slots free.
        if self.is_kept { slots - slots / 32 } else { slots }
    }

    /// The share of a disk, in slots.
    pub(super) fn share_of(&self, disk: u16) -> u64 {
        self.shares.lock().get(&disk).copied().unwrap_or(0)
    }

    /// The number of blocks of a disk that has had a share.
    pub(super) fn blocks_of(&self, disk: u16) -> Option<u64> {
        let counts = (0..self.shards.len()).map(|number| self.shard(number).blocks_of(disk));
        counts.map(|count| count.map(u64::from)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_size_or_a_percentage() {
        let read = |text: &str| serde_json::from_str::<CacheShare>(text);
        let sizes = [
            ("\"2G\"", CacheShare::Bytes(2 << 30), 2 << 30),
            ("4096", CacheShare::Bytes(4096), 4096),
            ("\"25%\"", CacheShare::Percent(25), 250),
            ("\" 100 %\"", CacheShare::Percent(100), 1000),
        ];
        for (text, expected, bytes) in sizes {
            let share = read(text).unwrap();
            assert_eq!((share, share.of(1000)), (expected, bytes), "{text}");
            let again = serde_json::to_string(&share).unwrap();
            assert_eq!(read(&again).unwrap(), share, "{again}");
        }
        for text in ["\"101%\"", "\"-1%\"", "\"1.5%\"", "\"%\"", "-1", "\"x\"", "true", "1.5"] {
            assert!(read(text).is_err(), "{text}");
        }
        assert_eq!(CacheShare::Percent(100).of(u64::MAX), u64::MAX);
    }
}
