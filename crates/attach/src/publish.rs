//! What the daemon sees of a pager: its figures, in the header of each table of leases.
//!
//! They are stored when the pager has looked around, when its limit changes, when it ends, and each
//! second while it works; never for a fault. A pager that sleeps is not woken for them: at the
//! latest, it looks around after ten seconds.

use std::time::{Duration, Instant};

use fathom_guest_memory::{EvictionHold, PagerFigures, PagerLeases, PagerPhase, published_now_ns};

use crate::counts::PagerStatus;
use crate::look;

/// How often figures are stored while a pager works.
const INTERVAL: Duration = Duration::from_secs(1);

/// What was stored last.
#[derive(Debug, Default)]
pub(crate) struct Publisher {
    at: Option<Instant>,
    /// Why no page leaves, and since when.
    hold: EvictionHold,
    held_since_ns: u64,
}

impl Publisher {
    /// Stores the figures of a pager in `tables`.
    pub fn publish(&mut self, tables: &[PagerLeases], status: &PagerStatus) {
        self.at = Some(Instant::now());
        let now_ns = published_now_ns();
        let hold = hold(status);
        if self.hold != hold || self.held_since_ns == 0 {
            (self.hold, self.held_since_ns) = (hold, now_ns);
        }
        let figures = PagerFigures {
            published_ns: now_ns,
            hold,
            held_since_ns: self.held_since_ns,
            ..figures(status)
        };
        for table in tables {
            table.publish(&figures);
        }
    }

    /// The same, if it was not done in the last second.
    pub fn publish_if_due(&mut self, tables: &[PagerLeases], status: &PagerStatus) {
        if self.at.is_none_or(|at| at.elapsed() >= INTERVAL) {
            self.publish(tables, status);
        }
    }
}

/// Why no page leaves. The text stays with the pager: `fathom pager list` shows it.
fn hold(status: &PagerStatus) -> EvictionHold {
    let eviction = &status.eviction;
    match eviction.obstacle.as_str() {
        _ if !eviction.retreat.is_empty() => EvictionHold::Retreat,
        "" => EvictionHold::None,
        look::LOOKED_AT => EvictionHold::Looking,
        _ => EvictionHold::Obstacle,
    }
}

fn figures(status: &PagerStatus) -> PagerFigures {
    let PagerStatus { counts, eviction, .. } = status;
    PagerFigures {
        process: status.pager,
        phase: match status.state.as_str() {
            "attached" => PagerPhase::Attached,
            "detaching" => PagerPhase::Detaching,
            "detached" => PagerPhase::Detached,
            "orphaned" => PagerPhase::Orphaned,
            _ => PagerPhase::Unknown,
        },
        limit_bytes: eviction.limit_bytes,
        resident_bytes: eviction.resident_bytes,
        away_bytes: eviction.away_bytes,
        filled_bytes: eviction.filled_bytes,
        store_bytes: eviction.store_bytes,
        file_bytes: eviction.file_bytes,
        evicted: eviction.evicted,
        brought: eviction.brought,
        wanted: eviction.wanted,
        existing: eviction.existing,
        damaged: eviction.damaged,
        overwritten: eviction.overwritten,
        faults: counts.faults,
        away_faults: eviction.fault_ns.count(),
        fault_sum_ns: eviction.fault_sum_ns,
        fault_p99_ns: eviction.fault_ns.percentile(99.0),
        ..PagerFigures::default()
    }
}

#[cfg(test)]
mod tests {
    use fathom_guest_memory::{MemoryFile, TableOwner};

    use super::*;

    #[test]
    fn the_daemon_reads_what_a_pager_has_said_and_since_when_no_page_leaves() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["a", "b"].map(|name| {
            let file = std::fs::File::create(folder.path().join(name)).unwrap();
            MemoryFile::of(&file).unwrap()
        });
        let owner = TableOwner { process: 4, start_ticks: 5, namespace: 6 };
        let start = |file| PagerLeases::start(folder.path(), file, 4, owner).unwrap();
        let tables = files.map(start);
        let read = |at: usize| PagerFigures::read(folder.path(), &files[at..=at]).unwrap();
        let mut status = PagerStatus { pager: 9, state: "attached".into(), ..Default::default() };
        status.counts.faults = 7;
        let eviction = &mut status.eviction;
        (eviction.limit_bytes, eviction.resident_bytes, eviction.away_bytes) = (1, 2, 3);
        (eviction.filled_bytes, eviction.store_bytes, eviction.evicted) = (4, 5, 6);
        (eviction.brought, eviction.wanted, eviction.existing, eviction.damaged) = (7, 8, 9, 10);
        eviction.overwritten = 11;
        eviction.fault_ns.record(1000, 99);
        eviction.fault_ns.record(1_000_000, 1);
        eviction.fault_sum_ns = 1_099_000;
        let mut publisher = Publisher::default();
        publisher.publish_if_due(&tables, &status);
        let (found_owner, found) = read(0);
        assert_eq!((found_owner, read(1)), (owner, (owner, found)));
        assert_eq!((found.process, found.phase), (9, PagerPhase::Attached));
        assert_eq!((found.limit_bytes, found.resident_bytes, found.away_bytes), (1, 2, 3));
        assert_eq!((found.filled_bytes, found.store_bytes, found.evicted), (4, 5, 6));
        assert_eq!((found.brought, found.wanted, found.existing, found.damaged), (7, 8, 9, 10));
        assert_eq!((found.overwritten, found.file_bytes), (11, 0));
        assert_eq!((found.faults, found.away_faults, found.fault_sum_ns), (7, 100, 1_099_000));
        assert!((1000..1100).contains(&found.fault_p99_ns), "{found:?}");
        assert_eq!((found.hold, found.held_since_ns), (EvictionHold::None, found.published_ns));

        // Not again within a second, unless there is a reason.
        status.eviction.away_bytes = 0;
        publisher.publish_if_due(&tables, &status);
        assert_eq!(read(0).1, found);
        let mut holds = Vec::new();
        for (obstacle, retreat) in
            [("", ""), ("x", ""), (look::LOOKED_AT, ""), ("x", "y"), ("", "z"), ("", "")]
        {
            obstacle.clone_into(&mut status.eviction.obstacle);
            retreat.clone_into(&mut status.eviction.retreat);
            publisher.publish(&tables, &status);
            let (_, now) = read(0);
            assert!(now.published_ns >= now.held_since_ns);
            holds.push((now.hold, now.held_since_ns));
        }
        let kinds: Vec<_> = holds.iter().map(|(hold, _)| format!("{hold:?}")).collect();
        assert_eq!(kinds, ["None", "Obstacle", "Looking", "Retreat", "Retreat", "None"]);
        assert_eq!(holds[0].1, found.held_since_ns, "it has not changed");
        assert_eq!(holds[3].1, holds[4].1, "another reason for the same");
        assert!(holds[5].1 > holds[0].1);
        for (state, phase) in [
            ("detaching", PagerPhase::Detaching),
            ("detached", PagerPhase::Detached),
            ("orphaned", PagerPhase::Orphaned),
            ("ended", PagerPhase::Unknown),
        ] {
            state.clone_into(&mut status.state);
            publisher.publish(&tables, &status);
            assert_eq!((read(1).1.phase, read(1).1.away_bytes), (phase, 0));
        }
    }
}
