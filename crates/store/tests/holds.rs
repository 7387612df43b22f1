//! Snapshots that are held, by seed: nobody deletes them or their volumes, and a power loss at any
//! instant leaves each hold as it was before a change or as it is after it.

use std::collections::BTreeMap;
use std::sync::Arc;

use fathom_block::Backend;
use fathom_sim::{SimOptions, SimRecord, each_seed};
use fathom_store::{Pool, PoolError, PoolRefusal};

mod support;

use support::{DEVICE, blank, options, reopen};

/// The reasons of the snapshots of the volume, by name.
type Holds = BTreeMap<String, Option<String>>;

fn holds(pool: &Pool) -> Holds {
    let snapshots = pool.snapshots().into_iter();
    snapshots.map(|snapshot| (snapshot.name, snapshot.hold)).collect()
}

fn is_refused(done: &Result<(), PoolError>, expected: PoolRefusal) -> bool {
    matches!(done, Err(PoolError::Refused(refusal)) if *refusal == expected)
}

/// A step of a run. Returns the holds that the pool has to have after it.
fn step(pool: &Pool, random: &mut fastrand::Rng, made: u32) -> Holds {
    let mut expected = holds(pool);
    let names: Vec<String> = expected.keys().cloned().collect();
    let Some(name) = random.choice(names).filter(|_| random.u8(..4) > 0) else {
        let name = format!("s{made}");
        pool.take_snapshot(&["disk"], &name, 1).unwrap();
        expected.insert(name, None);
        return expected;
    };
    let is_held = expected[&name].is_some();
    match random.u8(..4) {
        0 if is_held => {
            pool.release_snapshot("disk", &name).unwrap();
            expected.insert(name, None);
        }
        0 => assert!(is_refused(&pool.release_snapshot("disk", &name), PoolRefusal::NotHeld)),
        1 => {
            let reason = format!("reason {made}");
            pool.hold_snapshot("disk", &name, &reason).unwrap();
            expected.insert(name, Some(reason));
        }
        2 if expected.values().any(Option::is_some) => {
            assert!(is_refused(&pool.delete_volume("disk"), PoolRefusal::Held));
        }
        _ if is_held => {
            assert!(is_refused(&pool.delete_snapshot("disk", &name), PoolRefusal::Held));
        }
        _ => {
            pool.delete_snapshot("disk", &name).unwrap();
            expected.remove(&name);
        }
    }
    expected
}

#[test]
fn held_snapshots_stay_and_holds_survive_power_losses() {
    let (mut crashes, mut held) = (0, 0);
    each_seed(40, |seed| {
        let record = SimRecord::new(seed, 0.3);
        let device = record.store(SimOptions::new(DEVICE), seed, blank());
        let pool = Pool::open(Arc::clone(&device) as Arc<dyn Backend>, options()).unwrap();
        pool.create_volume("disk", 1 << 16).unwrap();
        record.crashes();
        let mut random = fastrand::Rng::with_seed(seed);
        for made in 0..30 {
            let before = holds(&pool);
            let after = step(&pool, &mut random, made);
            assert_eq!(holds(&pool), after);
            for images in record.crashes() {
                let found = holds(&reopen(&images[0]));
                assert!(found == before || found == after, "{found:?}: {before:?} or {after:?}");
                crashes += 1;
            }
            assert_eq!(holds(&reopen(&record.crash()[0])), after, "the change is durable");
            if random.u8(..5) == 0 {
                pool.save(std::time::Duration::from_secs(1)).unwrap();
                assert_eq!(holds(&reopen(&record.crash()[0])), after, "the checkpoint has it");
                record.crashes();
            }
        }
        held += holds(&pool).values().flatten().count();
    });
    assert!(crashes > 100 && held > 20, "{crashes} {held}");
}

#[test]
fn a_hold_needs_a_snapshot_and_a_reason() {
    let pool = reopen(&blank());
    pool.create_volume("disk", 1 << 16).unwrap();
    assert!(is_refused(&pool.hold_snapshot("disk", "s", "x"), PoolRefusal::NoSnapshot));
    assert!(is_refused(&pool.hold_snapshot("d", "s", "x"), PoolRefusal::NoVolume));
    pool.take_snapshot(&["disk"], "s", 1).unwrap();
    for reason in ["", "a\nb", &"a".repeat(129)] {
        assert!(is_refused(&pool.hold_snapshot("disk", "s", reason), PoolRefusal::BadReason));
    }
    pool.hold_snapshot("disk", "s", &"a".repeat(128)).unwrap();
    assert!(is_refused(&pool.delete_volume("disk"), PoolRefusal::Held));
    pool.release_snapshot("disk", "s").unwrap();
    pool.delete_volume("disk").unwrap();
}
