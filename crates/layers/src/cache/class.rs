//! The class of a request, by which the cache tells blocks apart.

use fathom_cache::{
    CLASS_INDEX, CLASS_JOURNAL, CLASS_LOG, CLASS_NAMED, CLASS_SWAP, CLASS_TABLE, CLASS_UNKNOWN,
};
use fathom_insight::{DatabasePart, Insight, Kind};

/// The class of a request with this insight.
pub(super) fn class(insight: &Insight) -> u8 {
    match (insight.facts.kind, insight.facts.database.part, insight.class) {
        (Kind::Journal, _, _) => CLASS_JOURNAL,
        (Kind::Swap, _, _) => CLASS_SWAP,
        (_, DatabasePart::Table, _) => CLASS_TABLE,
        (_, DatabasePart::Index, _) => CLASS_INDEX,
        (_, DatabasePart::Log, _) => CLASS_LOG,
        (_, _, Some(class)) => class.0.min(CLASS_NAMED - 1),
        (_, _, None) => CLASS_UNKNOWN,
    }
}
