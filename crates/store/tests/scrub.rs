//! The verification of a pool in use.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fathom_block::{Backend, Clock};
use fathom_reactor::Reactor;
use fathom_sim::{
    Harness, HarnessOptions, ModelDisk, OneRequest, SimBackend, SimOptions, Workload,
    WorkloadOptions, each_seed,
};
use fathom_store::{
    DamageKind, FoundDamage, Pool, PoolError, PoolOptions, Rules, ScrubOptions, ScrubReport,
    ScrubState,
};

mod support;

use support::storm::{Kind, Storm, StormOptions};
use support::{DEVICE, blank, disk, fast, options};

const ALL: ScrubOptions = ScrubOptions { maps_only: false, pause: 0 };

const KINDS: [Kind; 8] = [
    Kind::Mixed,
    Kind::Walks,
    Kind::Tight,
    Kind::Equal,
    Kind::Cold,
    Kind::Apart,
    Kind::Drops,
    Kind::ApartEqual,
];

/// A storm in which the pool is verified all the time. Returns how many scrubs have ended.
fn storm(seed: u64, rules: Rules) -> u64 {
    let kind = KINDS[seed as usize % KINDS.len()];
    let rules = Rules { walk_step: 1 + seed as usize % 3, ..rules };
    let options = StormOptions { scrubs: true, ..StormOptions::new(kind, rules) };
    let mut storm = Storm::new(options, seed);
    storm.run();
    storm.counts.scrubs
}

#[test]
fn nothing_is_found_to_be_damaged_that_is_not() {
    let (mut scrubs, mut cases) = (0, 0);
    each_seed(8, |seed| {
        scrubs += storm(seed, Rules::default());
        cases += 1;
    });
    println!("{scrubs} scrubs in {cases} cases");
    assert!(cases < 8 || scrubs > 2 * cases, "{scrubs} scrubs in {cases} cases");
}

/// A scrub looks at the device, and then nobody looks after it for a long time, while the blocks of
/// a small device are overwritten again and again. Returns whether it finds damage.
fn slow_scrub(seed: u64, rules: Rules) -> bool {
    let size = 512 << 10;
    let sim = SimOptions { rounds_max: 6, ..SimOptions::new(DEVICE) };
    let device = Arc::new(SimBackend::with_image(sim, seed, blank()));
    let options = PoolOptions { rules, ..options() };
    let pool = Pool::open(device as Arc<dyn Backend>, options).unwrap();
    pool.create_volume("a", size).unwrap();
    let own = disk(pool.volume("a").unwrap());
    let harness_options = HarnessOptions { queues: 1, depth: 8, simulated: true };
    let mut harness = Harness::new(&own, &harness_options, seed);
    *harness.model_mut() = ModelDisk::new(size);
    harness.allow_errors();
    let mut workload = WorkloadOptions::new(size);
    (workload.alignment, workload.weights) = (4096, [0, 1, 0, 0, 0, 0, 0]);
    let mut workload = Workload::new(workload, seed);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut churn = |steps: usize| {
        for _ in 0..steps {
            if harness.step() < 8 {
                harness.submit(0, &workload.next().unwrap());
            }
        }
    };
    churn(300);
    let attendant = disk(pool.attendant());
    let mut reactor = Reactor::new(64).unwrap();
    let mut stack = attendant.open_queue(&mut reactor, Clock::System).unwrap();
    for _ in 0..3 {
        let (number, is_new) = pool.begin_scrub(ALL, None);
        assert!(is_new);
        for round in 0.. {
            stack.advance(&mut reactor);
            churn(if random.u8(..4) == 0 { 500 } else { random.usize(..4) });
            let report = pool.scrub().unwrap();
            assert_eq!(report.number, number);
            if report.is_damaged() || report.mended_pages > 0 {
                return true;
            }
            if report.state != ScrubState::Running {
                break;
            }
            assert!(round < 100_000, "{report:?}");
        }
    }
    false
}

#[test]
fn what_a_scrub_reads_is_not_used_again_meanwhile() {
    let is_any = |rules: Rules, cases| (0..cases).any(|seed| slow_scrub(seed, rules));
    each_seed(6, |seed| assert!(!slow_scrub(seed, Rules::default())));
    assert!(is_any(Rules { protects_scrubbed: false, ..Rules::default() }, 30));
}

/// The leaf of a map describes so many bytes.
const LEAF: u64 = 2 << 20;
/// The blocks of the volume that do not change: some before the end of a leaf and behind it.
const STATIC: u64 = 24;
const FIRST: u64 = LEAF / 4096 - STATIC / 2;

fn unique(block: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    fastrand::Rng::with_seed(0x5eed ^ block).fill(&mut bytes);
    bytes
}

/// Damages blocks with such a content on the device.
fn damage(device: &SimBackend, contents: &[Vec<u8>]) {
    let mut image = device.image();
    for content in contents {
        let mut found = false;
        for at in (0..image.len()).step_by(4096) {
            if image[at..at + 4096] == content[..] {
                image[at + 99] ^= 1;
                found = true;
            }
        }
        assert!(found, "the block is on the device");
    }
    device.replace(&image);
}

/// The blocks that a report names.
fn named(report: &ScrubReport) -> BTreeSet<u64> {
    let blocks = |damage: &FoundDamage| {
        assert_eq!(damage.kind, DamageKind::Content);
        damage.offset / 4096..(damage.offset + damage.length) / 4096
    };
    report.damages.iter().flat_map(blocks).collect()
}

/// Blocks that do not change are damaged, and everything else changes while the pool is scrubbed.
/// Returns the damaged blocks, and those that were found.
fn lived_through(seed: u64, rules: Rules) -> (BTreeSet<u64>, BTreeSet<u64>) {
    let sim = SimOptions { rounds_max: 3, ..SimOptions::new(4 << 20) };
    let image = support::blank_of(4 << 20);
    let device = Arc::new(SimBackend::with_image(sim, seed, image));
    let rules = Rules { walk_step: 2, dirty_pages_min: 64, ..rules };
    let options = PoolOptions { rules, walk_pause_ns: 0, idle_ns: u64::MAX, ..options() };
    let pool = Pool::open(Arc::clone(&device) as Arc<dyn Backend>, options).unwrap();
    let mut random = fastrand::Rng::with_seed(seed);
    // The volume that is visited first gives numbers of pages to the other one.
    pool.create_volume("first", 2 * LEAF).unwrap();
    pool.create_volume("a", 2 * LEAF).unwrap();
    let backend = pool.volume("a").unwrap();
    let mut queue = OneRequest::open(&disk(Arc::clone(&backend)));
    for block in FIRST..FIRST + STATIC {
        queue.write(block * 4096, &unique(block)).unwrap();
    }
    queue.flush().unwrap();
    drop(queue);
    let damaged: BTreeSet<u64> = (0..4).map(|_| random.u64(FIRST..FIRST + STATIC)).collect();
    damage(&device, &damaged.iter().map(|block| unique(*block)).collect::<Vec<_>>());
    let mut harnesses = [pool.volume("first").unwrap(), backend].map(|volume| {
        let options = HarnessOptions { queues: 2, depth: 6, simulated: true };
        let mut harness = Harness::new(&disk(volume), &options, seed);
        *harness.model_mut() = ModelDisk::new(2 * LEAF);
        harness
    });
    let mut workload = WorkloadOptions::new(48 << 10);
    (workload.alignment, workload.length_max) = (4096, 16 << 10);
    workload.weights = [0, 30, 2, 6, 3, 0, 1];
    let mut workload = Workload::new(workload, seed);
    let mut snapshots: BTreeMap<String, u64> = BTreeMap::new();
    let (mut made, mut changes) = (0, (0, 0));
    let mut found = BTreeSet::new();
    for _ in 0..3 {
        let pause = random.u32(..20);
        let (number, _) = pool.begin_scrub(ScrubOptions { maps_only: false, pause }, None);
        for round in 0.. {
            let report = pool.scrub().unwrap();
            assert_eq!(report.number, number);
            if report.state != ScrubState::Running {
                assert_eq!(report.state, ScrubState::Complete);
                assert_eq!(named(&report).len() as u64, report.damaged_blocks);
                found = named(&report);
                break;
            }
            assert!(round < 100_000, "{report:?}");
            let harness = &mut harnesses[random.usize(..2)];
            if harness.step() < 6 {
                let mut action = workload.next().unwrap();
                // At the ends of both leaves that have blocks that do not change.
                let start = if random.bool() { 0 } else { LEAF + (256 << 10) };
                action.offset += if action.length > 0 { start } else { 0 };
                harness.submit(random.usize(..2), &action);
            }
            let checkpoints = pool.status().counts.checkpoints;
            changes = if changes.0 == checkpoints { changes } else { (checkpoints, 0) };
            if changes.1 < 1 && random.u8(..6) == 0 {
                changes.1 += 1;
                if snapshots.len() < 2 {
                    made += 1;
                    let name = format!("s{made}");
                    match pool.take_snapshot(&["first", "a"], &name, 1) {
                        Ok(()) => drop(snapshots.insert(name, made)),
                        Err(error) => assert!(matches!(error, PoolError::Full), "{error}"),
                    }
                } else {
                    let name =
                        random.choice(snapshots.keys().cloned().collect::<Vec<_>>()).unwrap();
                    for volume in ["first", "a"] {
                        match pool.delete_snapshot(volume, &name) {
                            Ok(()) | Err(PoolError::Refused(_)) => {}
                            Err(error) => assert!(matches!(error, PoolError::Full), "{error}"),
                        }
                    }
                    snapshots.remove(&name);
                }
            }
        }
        if found != damaged {
            break;
        }
    }
    (damaged, found)
}

#[test]
fn what_lives_through_a_scrub_is_found_and_nothing_else() {
    each_seed(10, |seed| {
        let (damaged, found) = lived_through(seed, Rules::default());
        assert_eq!(found, damaged);
    });
}

#[test]
fn a_page_with_the_number_of_a_removed_one_is_visited() {
    let rules = Rules { forgets_scrubbed: false, ..Rules::default() };
    let misses = |seed| {
        let (damaged, found) = lived_through(seed, rules);
        damaged != found
    };
    assert!((0..15).any(misses));
}

fn reopened(image: Vec<u8>) -> (Arc<SimBackend>, Pool) {
    let device = Arc::new(SimBackend::with_image(fast(image.len() as u64), 0, image));
    let pool = Pool::open(Arc::clone(&device) as Arc<dyn Backend>, options()).unwrap();
    (device, pool)
}

/// A pool with a volume whose map has two leaves, and a snapshot of it.
fn prepared() -> Vec<u8> {
    let (device, pool) = reopened(blank());
    pool.create_volume("a", 2 * LEAF).unwrap();
    let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
    for block in FIRST..FIRST + STATIC {
        queue.write(block * 4096, &unique(block)).unwrap();
    }
    pool.take_snapshot(&["a"], "s", 1).unwrap();
    queue.write(FIRST * 4096, &unique(7)).unwrap();
    drop(queue);
    pool.save(std::time::Duration::from_secs(9)).unwrap();
    drop(pool);
    device.image()
}

/// Carries out a scrub to its end.
fn scrubbed(pool: &Pool, options: ScrubOptions) -> ScrubReport {
    assert!(pool.begin_scrub(options, None).1);
    let attendant = disk(pool.attendant());
    let mut queue = OneRequest::open(&attendant);
    while pool.scrub().unwrap().state == ScrubState::Running {
        let _ = queue.flush();
    }
    let report = pool.scrub().unwrap();
    assert_eq!(report.state, ScrubState::Complete);
    report
}

/// Damages the leaves of maps on the device: these have words of more than 40 bits, and are no
/// blocks of the volume.
fn damage_leaves(device: &SimBackend) {
    let mut image = device.image();
    let contents: BTreeSet<Vec<u8>> = (FIRST..FIRST + STATIC).chain([7]).map(unique).collect();
    // Behind the tables.
    for block in image.chunks_mut(4096).skip(80) {
        let is_leaf = block.chunks(8).any(|word| word[5] != 0 && word[4] & 0xf0 == 0x10);
        if is_leaf && !contents.contains(block) && !block.starts_with(b"FATHOM") {
            block[1000] ^= 1;
        }
    }
    device.replace(&image);
}

#[test]
fn damaged_pages_of_maps_are_named_unless_memory_has_them() {
    let (device, pool) = reopened(prepared());
    let sound = scrubbed(&pool, ALL);
    assert_eq!((sound.volumes, sound.snapshots), (1, 1));
    assert_eq!((sound.blocks, sound.verified_blocks), (STATIC + 1, STATIC + 1));
    assert!(sound.map_pages >= 10 && !sound.is_damaged(), "{sound:?}");
    assert_eq!(scrubbed(&pool, ScrubOptions { maps_only: true, ..ALL }).verified_blocks, 0);
    damage_leaves(&device);
    let report = scrubbed(&pool, ALL);
    let parts: Vec<_> = report
        .damages
        .iter()
        .map(|it| (it.volume.as_deref(), it.snapshot.as_deref(), it.offset, it.length, it.kind))
        .collect();
    // The second leaf is that of both.
    assert_eq!(
        parts,
        [
            (Some("a"), None, 0, 2 * LEAF, DamageKind::Map),
            (Some("a"), Some("s"), 0, LEAF, DamageKind::Map),
        ]
    );
    assert_eq!((report.damaged_pages, report.damaged_blocks), (3, 0));

    let (device, pool) = reopened(prepared());
    let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
    let mut snapshot = OneRequest::open(&disk(pool.snapshot("a", "s").unwrap()));
    let mut read = || {
        let length = STATIC * 4096;
        let found = [&mut queue, &mut snapshot].map(|it| it.read(FIRST * 4096, length));
        found.map(Result::unwrap)
    };
    let before = read();
    damage_leaves(&device);
    let report = scrubbed(&pool, ALL);
    assert_eq!((report.mended_pages, report.is_damaged()), (3, false), "{report:?}");
    pool.save(std::time::Duration::from_secs(9)).unwrap();
    assert_eq!(scrubbed(&pool, ALL).mended_pages, 0);
    assert!(read() == before);
    drop((queue, snapshot, pool));
    let (_device, pool) = reopened(device.image());
    assert!(!scrubbed(&pool, ALL).is_damaged());
    assert!(
        support::content(pool.volume("a").unwrap())[(FIRST * 4096) as usize..]
            .starts_with(&before[0])
    );
}

#[test]
fn a_damaged_page_of_a_table_is_written_anew() {
    let (device, pool) = reopened(prepared());
    // The copies of the space map.
    let mut image = device.image();
    for copy in [66, 67] {
        image[copy * 4096 + 500] ^= 1;
    }
    device.replace(&image);
    let report = scrubbed(&pool, ALL);
    assert_eq!((report.mended_pages, report.is_damaged()), (1, false), "{report:?}");
    pool.save(std::time::Duration::from_secs(9)).unwrap();
    assert_eq!(scrubbed(&pool, ALL).mended_pages, 0);
    drop(pool);
    assert!(!scrubbed(&reopened(device.image()).1, ALL).is_damaged());
}

#[test]
fn a_scrub_goes_on_where_an_earlier_one_was_ended() {
    let (device, pool) = reopened(prepared());
    damage(&device, &[unique(FIRST + 1), unique(FIRST + 14)]);
    let all = scrubbed(&pool, ALL);
    assert_eq!(named(&all), BTreeSet::from([FIRST + 1, FIRST + 14]));
    for steps in 0..12 {
        let (number, _) = pool.begin_scrub(ALL, None);
        let mut queue = OneRequest::open(&disk(pool.attendant()));
        for _ in 0..steps {
            let _ = queue.flush();
        }
        pool.end_scrub(number);
        drop(queue);
        let earlier = pool.scrub().unwrap();
        assert_ne!(earlier.state, ScrubState::Running);
        let (_, pool) = reopened(device.image());
        pool.begin_scrub(ALL, Some(earlier.clone()));
        let mut queue = OneRequest::open(&disk(pool.attendant()));
        while pool.scrub().unwrap().state == ScrubState::Running {
            let _ = queue.flush();
        }
        let report = pool.scrub().unwrap();
        assert_eq!(named(&report), named(&all), "after {steps} steps");
        assert_eq!(report.state, ScrubState::Complete);
        // What snapshots share may be verified twice.
        assert!((2..=4).contains(&report.damaged_blocks), "{report:?}");
    }
}
