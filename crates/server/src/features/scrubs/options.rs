//! `[[scrub]]`: which pools are verified, and how often.

use std::path::PathBuf;

use fathom_control::Nanoseconds;
use fathom_options::{Check, Key, Problems, Section};
use serde::Deserialize;

use crate::configuration::{Extent, FeatureSection, Placed};

/// The intervals that a rule can have.
const EVERY_MIN: Nanoseconds = Nanoseconds(1_000_000_000);
const EVERY_MAX: Nanoseconds = Nanoseconds(366 * 86_400_000_000_000);

/// Verifies a pool in use at regular intervals.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScrubRule {
    /// The pool.
    pub store: PathBuf,
    /// The time from the beginning of one to that of the next.
    pub every: Nanoseconds,
}

impl Section for ScrubRule {
    const KEYS: &'static [Key] = &[
        Key::new("store", "", "required: the pool"),
        Key::new(
            "every",
            "",
            "required: the time from the beginning of one to that of the next, from `\"1s\"` to a year, \
             for example `\"30d\"`",
        ),
    ];

    fn check(&self, check: &mut Check<'_>) {
        if self.store.as_os_str().is_empty() {
            check.problem("store", "a table [[scrub]] has no pool", "add `store = \"…\"`");
        }
        if !(EVERY_MIN.0..=EVERY_MAX.0).contains(&self.every.0) {
            let message = "a scrub needs an interval from a second to a year";
            check.problem("every", message, "add, for example, `every = \"30d\"`");
        }
    }
}

impl FeatureSection for ScrubRule {
    const NAME: &'static str = "scrub";
    const IS_LIST: bool = true;

    fn check_all(rules: &[Placed<Self>], _extent: Extent, problems: &mut Problems) {
        for (index, Placed { definition, origins }) in rules.iter().enumerate() {
            let is_same = |other: &Placed<Self>| other.definition.store == definition.store;
            if rules[..index].iter().any(is_same) {
                let message =
                    format!("there are two tables [[scrub]] for {}", definition.store.display());
                problems.add(origins.of("store"), message, "remove one of them");
            }
        }
    }
}
