//! Each rule by which nothing is lost, taken away: then something is lost.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fathom_store::Rules;

mod support;

use support::storm::{Kind, Storm, StormOptions};

/// The seed of a storm in which something is lost; `None` if there is none.
fn fails(kind: Kind, rules: Rules, seeds: u64) -> Option<u64> {
    (0..seeds).find(|seed| {
        let rules = Rules { walk_step: 1 + *seed as usize % 3, ..rules };
        let run = || Storm::new(StormOptions::new(kind, rules), *seed).run();
        catch_unwind(AssertUnwindSafe(run)).is_err()
    })
}

#[test]
fn without_one_of_the_rules_something_is_lost() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let all = Rules::default();
    let without: [(&str, Kind, Rules); 16] = [
        ("compares_contents", Kind::Mixed, Rules { compares_contents: false, ..all }),
        ("goes_on_behind_gaps", Kind::Mixed, Rules { goes_on_behind_gaps: false, ..all }),
        ("is_serial", Kind::Mixed, Rules { is_serial: false, ..all }),
        ("waits_for_checkpoint", Kind::Tight, Rules { waits_for_checkpoint: false, ..all }),
        ("waits_for_reads", Kind::Tight, Rules { waits_for_reads: false, ..all }),
        ("snapshot_names_batches", Kind::Mixed, Rules { snapshot_names_batches: false, ..all }),
        ("names_failed", Kind::Mixed, Rules { names_failed: false, ..all }),
        ("applies_at_once", Kind::Cold, Rules { applies_at_once: false, ..all }),
        ("record_names_batches", Kind::Mixed, Rules { record_names_batches: false, ..all }),
        ("overwrites_later", Kind::Cold, Rules { overwrites_later: false, ..all }),
        ("marks_new", Kind::Mixed, Rules { marks_new: false, ..all }),
        ("walks_copied", Kind::Walks, Rules { walks_copied: false, ..all }),
        (
            "walks_between_checkpoints",
            Kind::Mixed,
            Rules { walks_between_checkpoints: false, ..all },
        ),
        ("raises_floor", Kind::Mixed, Rules { raises_floor: false, ..all }),
        ("copies_stale", Kind::Mixed, Rules { copies_stale: false, ..all }),
        ("keeps_removed", Kind::Mixed, Rules { keeps_removed: false, ..all }),
    ];
    let seeds = std::env::var("RULES_SEEDS").map_or(40, |text| text.parse().unwrap());
    let only = std::env::var("RULES_ONLY").unwrap_or_default();
    let mut harmless = Vec::new();
    for (name, kind, rules) in without.into_iter().filter(|(name, ..)| name.contains(&only)) {
        let start = std::time::Instant::now();
        match fails(kind, rules, seeds) {
            Some(seed) => eprintln!("{name} {seed} {:?}", start.elapsed()),
            None => harmless.push(name),
        }
    }
    std::panic::set_hook(hook);
    assert_eq!(harmless, Vec::<&str>::new());
}
