//! A pool whose record has no room for more volumes and snapshots refuses them, and goes on.

use std::time::Duration;

use fathom_store::{Pool, PoolError, PoolRefusal};

mod support;

use support::{blank, reopen};

const LIMIT: Duration = Duration::from_secs(5);
/// The volumes of a snapshot command.
const VOLUMES: usize = 64;

fn is_too_many(done: &Result<(), PoolError>) -> bool {
    matches!(done, Err(PoolError::Refused(PoolRefusal::TooMany)))
}

/// A name as long as names may be.
fn long(what: &str, number: usize) -> String {
    format!("{what}{number:0>width$}", width = 128 - what.len())
}

fn is_sound(pool: &Pool) -> bool {
    pool.save(LIMIT).is_ok() && pool.damage().is_none()
}

#[test]
fn more_snapshots_than_the_record_has_room_for_are_refused() {
    let pool = reopen(&blank());
    let names: Vec<String> = (0..VOLUMES).map(|number| long("v", number)).collect();
    for name in &names {
        pool.create_volume(name, 1 << 16).unwrap();
    }
    let volumes: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut taken = 0;
    let refused = loop {
        match pool.take_snapshot(&volumes, &long("s", taken), 1) {
            Ok(()) => taken += 1,
            refused => break refused,
        }
        assert!(is_sound(&pool), "after {taken} snapshots: {:?}", pool.damage());
    };
    assert!(is_too_many(&refused) && taken > 2, "{taken}: {refused:?}");
    // Single ones, and reasons, until there is no room for these either.
    let mut number = taken;
    while pool.take_snapshot(&volumes[..1], &long("s", number), 1).is_ok() {
        number += 1;
    }
    let reason = "r".repeat(128);
    let holds = names.iter().map(|name| pool.hold_snapshot(name, &long("s", 0), &reason));
    let holds: Vec<_> = holds.collect();
    assert!(holds.iter().any(is_too_many), "{holds:?}");
    assert!(is_too_many(&pool.create_volume("w", 1 << 16)) && is_sound(&pool));
    assert!(is_too_many(&pool.clone_snapshot(volumes[0], &long("s", 1), "w")));
    // What makes room goes on.
    pool.delete_snapshot(volumes[0], &long("s", 1)).unwrap();
    pool.delete_snapshot(volumes[1], &long("s", 1)).unwrap();
    pool.create_volume("w", 1 << 16).unwrap();
    assert!(is_sound(&pool));
}
