//! How much a read counts for the choice of blocks with copies.

use std::ops::Range;

use fathom_insight::{DatabasePart, Insight, Kind};

/// The runs of reads that are followed.
const RUNS: usize = 8;
/// A run of more bytes is a pass over much data, for example that of a backup. Its blocks are not
/// read again soon.
const PASS_MIN: u64 = 1 << 20;

/// Reads that continue each other.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    start: u64,
    end: u64,
}

/// The latest runs of reads of a queue, the last one first.
#[derive(Debug, Default)]
pub(super) struct Runs([Run; RUNS]);

impl Runs {
    /// The weight of a read of `range`: 0 for parts of a pass and of logs, and more than 1 for what
    /// further reads depend on.
    pub(super) fn weigh(&mut self, range: &Range<u64>, insight: &Insight) -> u32 {
        if self.follow(range) > PASS_MIN {
            return 0;
        }
        match (insight.facts.kind, insight.facts.database.part) {
            (Kind::Journal, _) | (_, DatabasePart::Log) => 0,
            (Kind::Metadata | Kind::Directory, _) | (_, DatabasePart::Index) => 4,
            (_, DatabasePart::Table) => 2,
            _ => 1,
        }
    }

    /// The bytes of the run that `range` continues or begins.
    fn follow(&mut self, range: &Range<u64>) -> u64 {
        let found = self.0.iter().position(|run| run.end == range.start && run.end > 0);
        let start = found.map_or(range.start, |at| self.0[at].start);
        // The one that was continued, or the oldest one, makes room.
        self.0[..=found.unwrap_or(RUNS - 1)].rotate_right(1);
        self.0[0] = Run { start, end: range.end };
        range.end - start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_does_not_count_beside_other_reads() {
        let (mut runs, insight) = (Runs::default(), Insight::default());
        let mut counted = 0;
        for number in 0..1000_u64 {
            let start = (1 << 30) + number * 8192;
            counted += runs.weigh(&(start..start + 8192), &insight);
            let other = number * 7919 % 1000 * (1 << 16);
            assert_eq!(runs.weigh(&(other..other + 8192), &insight), 1);
        }
        assert_eq!(counted, 128);
    }

    #[test]
    fn what_further_reads_depend_on_counts_more() {
        let mut runs = Runs::default();
        let mut weigh = |kind, part| {
            let mut insight = Insight::default();
            (insight.facts.kind, insight.facts.database.part) = (kind, part);
            runs.weigh(&(8192..12288), &insight)
        };
        let none = DatabasePart::None;
        assert_eq!(
            [Kind::Metadata, Kind::Data, Kind::Journal].map(|kind| weigh(kind, none)),
            [4, 1, 0]
        );
        let parts = [DatabasePart::Index, DatabasePart::Table, DatabasePart::Log];
        assert_eq!(parts.map(|part| weigh(Kind::Data, part)), [4, 2, 0]);
    }
}
