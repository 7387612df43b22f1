//! The second copies of pages of maps: what is damaged in one is read from the other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Backend, ErrorKind};
use fathom_sim::{OneRequest, SimBackend, each_seed};
use fathom_store::{
    ChangeCursor, Pool, PoolOptions, Rules, ScrubOptions, ScrubReport, ScrubState, check,
};

mod support;

use support::pairs::{damage, pairs};
use support::storm::{Kind, Storm, StormOptions};
use support::{blank_of, content, disk, fast, options};

const DEVICE: u64 = 8 << 20;
const LEAF: u64 = 2 << 20;
const SIZE: u64 = 3 * LEAF;
const LIMIT: Duration = Duration::from_secs(9);
/// The blocks of a segment.
const SEGMENT: u64 = 16;

type Contents = BTreeMap<String, Vec<u8>>;

fn open(device: &Arc<SimBackend>, rules: Rules) -> Pool {
    let options = PoolOptions { rules, walk_pause_ns: 0, cached_pages: 1, ..options() };
    Pool::open(Arc::clone(device) as Arc<dyn Backend>, options).expect("a sound pool")
}

fn reopened(image: &[u8], rules: Rules) -> (Arc<SimBackend>, Pool) {
    let device = Arc::new(SimBackend::with_image(fast(image.len() as u64), 0, image.to_vec()));
    let pool = open(&device, rules);
    (device, pool)
}

/// A pool with volumes and snapshots, after its last checkpoint.
fn prepared(seed: u64, rules: Rules) -> (Vec<u8>, Contents) {
    let (device, pool) = reopened(&blank_of(DEVICE), rules);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut contents = Contents::new();
    for name in ["a", "b"] {
        pool.create_volume(name, SIZE).unwrap();
        contents.insert(name.into(), vec![0; SIZE as usize]);
    }
    for round in 0..3 {
        for name in ["a", "b"] {
            let mut queue = OneRequest::open(&disk(pool.volume(name).unwrap()));
            for _ in 0..20 {
                let offset = random.u64(0..SIZE / 4096) * 4096;
                let mut bytes = vec![0; 4096];
                random.fill(&mut bytes);
                queue.write(offset, &bytes).unwrap();
                let content = contents.get_mut(name).unwrap();
                content[offset as usize..][..4096].copy_from_slice(&bytes);
            }
        }
        if round < 2 {
            let snapshot = format!("s{round}");
            pool.take_snapshot(&["a", "b"], &snapshot, 1).unwrap();
            for name in ["a", "b"] {
                contents.insert(format!("{name}@{snapshot}"), contents[name].clone());
            }
        }
    }
    pool.save(LIMIT).unwrap();
    assert_eq!(pool.damage(), None);
    drop(pool);
    (device.image(), contents)
}

fn backend(pool: &Pool, name: &str) -> Arc<dyn Backend> {
    match name.split_once('@') {
        Some((volume, snapshot)) => pool.snapshot(volume, snapshot).unwrap(),
        None => pool.volume(name).unwrap(),
    }
}

fn problems(image: Vec<u8>) -> Vec<String> {
    let device = SimBackend::with_image(fast(image.len() as u64), 0, image);
    check(&(Arc::new(device) as Arc<dyn Backend>), true, |_| {}).unwrap().problems
}

fn scrubbed(pool: &Pool) -> ScrubReport {
    assert!(pool.begin_scrub(ScrubOptions { maps_only: false, pause: 0 }, None).1);
    let mut queue = OneRequest::open(&disk(pool.attendant()));
    while pool.scrub().unwrap().state == ScrubState::Running {
        let _ = queue.flush();
    }
    let report = pool.scrub().unwrap();
    assert_eq!(report.state, ScrubState::Complete);
    report
}

/// Damages one of the two copies of each page. Returns how many there are.
fn damage_halves(image: &mut [u8], random: &mut fastrand::Rng) -> u64 {
    let pairs = pairs(image);
    for (block, copy) in &pairs {
        damage(image, if random.bool() { *block } else { *copy });
    }
    pairs.len() as u64
}

#[test]
fn copies_are_apart_and_the_same() {
    let (image, _) = prepared(1, Rules::default());
    let pairs = pairs(&image);
    assert!(pairs.len() > 20, "{}", pairs.len());
    for (block, copy) in pairs {
        assert!((block / SEGMENT).abs_diff(copy / SEGMENT) >= 2, "{block} {copy}");
    }
    assert_eq!(problems(image), Vec::<String>::new());
}

#[test]
fn what_is_damaged_in_one_copy_is_read_from_the_other_and_written_anew() {
    each_seed(8, |seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut image, contents) = prepared(seed, Rules::default());
        let count = damage_halves(&mut image, &mut random);
        assert!(count > 20 && !problems(image.clone()).is_empty());
        let (device, pool) = reopened(&image, Rules::default());
        for (name, expected) in &contents {
            assert!(content(backend(&pool, name)) == *expected, "{name} differs");
        }
        let number =
            |name: &str| pool.snapshots().into_iter().find(|found| found.name == name).unwrap().id;
        let difference = pool.difference(Some(number("s0")), number("s1")).unwrap();
        let mut cursor = ChangeCursor::open(&difference, 0).unwrap();
        while !cursor.is_done() {
            cursor.step(&mut Vec::new()).unwrap();
        }
        drop(difference);
        // What a walk meets, too.
        pool.delete_snapshot("b", "s0").unwrap();
        let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
        while pool.status().counts.walks == 0 {
            queue.read(0, 512).unwrap();
            assert_eq!(pool.damage(), None);
        }
        queue.write(0, &[7; 4096]).unwrap();
        drop(queue);
        assert!(pool.status().counts.mended_pages > 10, "{:?}", pool.status().counts);
        // The rest is found by a scrub.
        let report = scrubbed(&pool);
        assert!(!report.is_damaged(), "{report:?}");
        pool.save(LIMIT).unwrap();
        assert_eq!((scrubbed(&pool).mended_pages, pool.damage()), (0, None));
        drop(pool);
        assert_eq!(problems(device.image()), Vec::<String>::new());
    });
}

#[test]
fn a_scrub_finds_each_damaged_copy() {
    each_seed(4, |seed| {
        let (mut image, _) = prepared(seed, Rules::default());
        let count = damage_halves(&mut image, &mut fastrand::Rng::with_seed(seed));
        let (device, pool) = reopened(&image, Rules::default());
        let report = scrubbed(&pool);
        // Some were met when the pool was opened, or belong to no map any more.
        let mended = report.mended_pages.max(pool.status().counts.mended_pages);
        assert!(
            !report.is_damaged() && mended > 10 && mended <= count + 8,
            "{report:?} of {count}"
        );
        pool.save(LIMIT).unwrap();
        drop(pool);
        assert_eq!(problems(device.image()), Vec::<String>::new());
    });
}

#[test]
fn what_is_damaged_in_both_copies_is_confined() {
    each_seed(8, |seed| {
        let (image, contents) = prepared(seed, Rules::default());
        let mut random = fastrand::Rng::with_seed(seed);
        let (block, copy) = random.choice(pairs(&image)).unwrap();
        let mut damaged = image.clone();
        damage(&mut damaged, block);
        damage(&mut damaged, copy);
        let found = problems(damaged.clone());
        let (_device, pool) = reopened(&damaged, Rules::default());
        let mut failed = 0;
        for (name, expected) in &contents {
            let mut queue = OneRequest::open(&disk(backend(&pool, name)));
            for at in (0..SIZE).step_by(LEAF as usize / 4) {
                match queue.read(at, LEAF / 4) {
                    Ok(read) => assert!(read == expected[at as usize..][..read.len()]),
                    Err(kind) => {
                        assert_eq!(kind, ErrorKind::Io);
                        failed += 1;
                    }
                }
            }
        }
        // It may be of a set, or of no map any more.
        assert!(failed == 0 || !found.is_empty() && pool.damage().is_some());
        let report = scrubbed(&pool);
        assert_eq!(report.is_damaged(), !found.is_empty(), "{report:?} {found:?}");
    });
    // Without second copies, what is damaged is lost.
    let rules = Rules { copies_pages: false, ..Rules::default() };
    assert!(pairs(&prepared(1, rules).0).is_empty());
}

/// What is wrong after a walk that has met all pages.
fn walked(rules: Rules) -> Vec<String> {
    let (image, _) = prepared(3, Rules::default());
    let (device, pool) = reopened(&image, rules);
    pool.delete_snapshot("b", "s0").unwrap();
    let mut queue = OneRequest::open(&disk(pool.attendant()));
    while pool.status().counts.walks == 0 {
        let _ = queue.flush();
    }
    drop(queue);
    pool.save(LIMIT).unwrap();
    problems(device.image())
}

#[test]
fn a_walk_does_not_free_second_copies() {
    assert_eq!(walked(Rules::default()), Vec::<String>::new());
    let rules = Rules { marks_copies: false, ..Rules::default() };
    assert!(walked(rules).iter().any(|problem| problem.contains("is not its own")));
}

fn storm(seed: u64, kind: Kind, rules: Rules) -> Storm {
    let rules = Rules { walk_step: 1 + seed as usize % 3, ..rules };
    let crashes_recoveries = seed % 4 == 0;
    let steps = if crashes_recoveries { 80 } else { 150 };
    let options =
        StormOptions { damages: true, crashes_recoveries, steps, ..StormOptions::new(kind, rules) };
    let mut storm = Storm::new(options, seed);
    storm.run();
    storm
}

#[test]
fn nothing_is_lost_when_one_copy_of_each_page_is_damaged_with_each_power_loss() {
    let kinds = [Kind::Mixed, Kind::Cold, Kind::Walks, Kind::Equal, Kind::Drops, Kind::Apart];
    let (mut damaged, mut cases) = (0, 0);
    each_seed(6, |seed| {
        let storm = storm(seed, kinds[seed as usize % kinds.len()], Rules::default());
        (damaged, cases) = (damaged + storm.counts.damaged, cases + 1);
    });
    println!("{damaged} in {cases} cases");
    assert!(cases < 6 || damaged > 10 * cases, "{damaged} in {cases} cases");
}
