//! `[[snapshots]]`: rules for snapshots.

use std::path::PathBuf;

use fathom_control::{Freeze, Nanoseconds};
use fathom_options::{Check, Key, Problems, Section};
use fathom_store::{SNAPSHOT_VOLUMES_MAX, is_name};
use serde::Deserialize;

use super::thinning::Keep;
use crate::configuration::{Extent, FeatureSection, Placed};

/// The longest name of a rule, in bytes: the time comes behind it.
const NAME_LENGTH_MAX: usize = 64;
/// The most snapshots of a volume that a rule keeps.
const KEPT_MAX: u64 = 1000;
/// The intervals that a rule can have.
const EVERY_MIN: Nanoseconds = Nanoseconds(1_000_000_000);
const EVERY_MAX: Nanoseconds = Nanoseconds(366 * 86_400_000_000_000);

/// Takes snapshots of volumes of a pool at regular instants, and deletes those that it does not
/// keep.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SnapshotRule {
    /// Its name, in the names of its snapshots.
    pub name: String,
    /// The pool.
    pub store: PathBuf,
    /// The volumes.
    pub volumes: Vec<String>,
    /// The interval.
    pub every: Nanoseconds,
    /// Whether the file systems of the volumes' guests are frozen meanwhile.
    pub freeze: Freeze,
    /// How many of the last snapshots are kept.
    pub keep_last: u32,
    /// Of how many hours the last snapshot is kept; and so on.
    pub keep_hourly: u32,
    pub keep_daily: u32,
    pub keep_weekly: u32,
    pub keep_monthly: u32,
    pub keep_yearly: u32,
}

impl Default for SnapshotRule {
    fn default() -> Self {
        Self {
            name: String::new(),
            store: PathBuf::new(),
            volumes: Vec::new(),
            every: Nanoseconds(0),
            freeze: Freeze::Off,
            keep_last: 0,
            keep_hourly: 0,
            keep_daily: 0,
            keep_weekly: 0,
            keep_monthly: 0,
            keep_yearly: 0,
        }
    }
}

impl Section for SnapshotRule {
    const KEYS: &'static [Key] = &[
        Key::new("name", "", "required: unique; the snapshots are called `auto.NAME.TIME`"),
        Key::new("store", "", "required: the pool of the volumes"),
        Key::new("volumes", "[]", "required: the volumes, which get snapshots of one instant"),
        Key::new(
            "every",
            "",
            "required: the interval, from `\"1s\"` to a year. With `\"1h\"`, a snapshot is taken at \
             each full hour (UTC)",
        ),
        Key::new(
            "freeze",
            "\"off\"",
            "freeze the file systems of the disks' guests meanwhile: `\"require\"`, or `\"try\"` to \
             take the snapshot even if a guest's agent does not answer. See \
             [store.md](store.md#frozen-file-systems)",
        ),
        Key::new("keep_last", "0", "how many of the last snapshots are kept"),
        Key::new(
            "keep_hourly",
            "0",
            "the last snapshot of an hour is kept, for so many hours that have any",
        ),
        Key::new("keep_daily", "0", "the same for days (UTC)"),
        Key::new("keep_weekly", "0", "the same for weeks, which begin on Monday"),
        Key::new("keep_monthly", "0", "the same for months"),
        Key::new("keep_yearly", "0", "the same for years"),
    ];

    fn check(&self, check: &mut Check<'_>) {
        if self.store.as_os_str().is_empty() {
            check.problem("store", "a rule has no pool", "add `store = \"…\"`");
        }
        if self.volumes.is_empty() || self.volumes.len() > SNAPSHOT_VOLUMES_MAX {
            let message = format!("a rule has 1 to {SNAPSHOT_VOLUMES_MAX} volumes");
            check.problem("volumes", message, "add a line like `volumes = [\"web\"]`");
        }
        let is_twice = |(index, volume): (usize, &String)| self.volumes[..index].contains(volume);
        if self.volumes.iter().enumerate().any(is_twice) {
            check.problem("volumes", "a volume is named twice", "name each volume once");
        }
        if !(EVERY_MIN.0..=EVERY_MAX.0).contains(&self.every.0) {
            let message = "a rule needs an interval from a second to a year";
            check.problem("every", message, "add, for example, `every = \"10min\"`");
        }
        let total = self.keep().total();
        if total == 0 || total > KEPT_MAX {
            check.problem(
                "keep_last",
                format!("a rule keeps 1 to {KEPT_MAX} snapshots of a volume, not {total}"),
                "add, for example, `keep_last = 6` and `keep_daily = 30`",
            );
        }
    }
}

impl SnapshotRule {
    /// How many snapshots are kept.
    pub(super) fn keep(&self) -> Keep {
        Keep {
            last: self.keep_last,
            hourly: self.keep_hourly,
            daily: self.keep_daily,
            weekly: self.keep_weekly,
            monthly: self.keep_monthly,
            yearly: self.keep_yearly,
        }
    }
}

impl FeatureSection for SnapshotRule {
    const NAME: &'static str = "snapshots";
    const IS_LIST: bool = true;

    fn check_all(rules: &[Placed<Self>], _extent: Extent, problems: &mut Problems) {
        for (index, Placed { definition, origins }) in rules.iter().enumerate() {
            let is_same = |other: &Placed<Self>| other.definition.name == definition.name;
            if !is_name(&definition.name) || definition.name.len() > NAME_LENGTH_MAX {
                let message = format!("{:?} is not the name of a rule", definition.name);
                let remedy = "use up to 64 letters, digits, and the characters . _ : + -";
                problems.add(origins.of("name"), message, remedy);
            } else if rules[..index].iter().any(is_same) {
                let message = format!("there are two rules {:?}", definition.name);
                problems.add(origins.of("name"), message, "give each a different name");
            }
        }
    }
}
