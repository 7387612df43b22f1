//! The class of a request, by which the cache tells blocks apart.

use fathom_cache::{
    CLASS_INDEX, CLASS_JOURNAL, CLASS_LOG, CLASS_NAMED, CLASS_SWAP, CLASS_TABLE, CLASS_UNKNOWN,
};
use fathom_insight::{DatabasePart, Insight, IoClass, Kind};

/// The class of a request with this insight.
pub(super) fn class(insight: &Insight) -> u8 {
    match (insight.facts.kind, insight.facts.database.part, insight.class) {
        (Kind::Journal, _, _) => CLASS_JOURNAL,
        (Kind::Swap, _, _) => CLASS_SWAP,
        (_, DatabasePart::Table, _) => CLASS_TABLE,
        (_, DatabasePart::Index, _) => CLASS_INDEX,
        (_, DatabasePart::Log, _) => CLASS_LOG,
        // That the content is unique says nothing of its next use.
        (_, _, Some(IoClass::UNIQUE) | None) => CLASS_UNKNOWN,
        (_, _, Some(class)) => class.0.min(CLASS_NAMED - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_of_a_database_comes_before_the_size_of_its_file() {
        let mut insight = Insight::default();
        assert_eq!(class(&insight), CLASS_UNKNOWN);
        insight.class = Some(IoClass(4));
        assert_eq!(class(&insight), 4);
        for (part, expected) in [
            (DatabasePart::Table, CLASS_TABLE),
            (DatabasePart::Index, CLASS_INDEX),
            (DatabasePart::Log, CLASS_LOG),
            (DatabasePart::Other, 4),
        ] {
            insight.facts.database.part = part;
            assert_eq!(class(&insight), expected, "{part:?}");
        }
        // The host's table of classes cannot give the number of a class that has a name.
        insight.class = Some(IoClass(31));
        assert_eq!(class(&insight), CLASS_NAMED - 1);
        insight.class = Some(IoClass::UNIQUE);
        assert_eq!(class(&insight), CLASS_UNKNOWN);
        insight.facts.kind = Kind::Journal;
        assert_eq!(class(&insight), CLASS_JOURNAL);
    }
}
