//! Guarantees: what a volume is guaranteed is there, whatever others write.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Backend, ErrorKind};
use fathom_sim::{
    Harness, HarnessOptions, ModelDisk, OneRequest, SimBackend, SimOptions, Workload,
    WorkloadOptions, each_seed,
};
use fathom_store::{BLOCK, Pool, PoolError, PoolOptions, PoolRefusal, Rules, check};

mod support;

use support::storm::{Kind, Storm, StormOptions};
use support::{blank_of, content, disk, fast, options};

const DEVICE: u64 = 6 << 20;
const LEAF: u64 = 2 << 20;
const LIMIT: Duration = Duration::from_secs(9);
/// The size of a volume with a guarantee, which crosses the end of a leaf.
const SIZE: u64 = LEAF + (64 << 10);
const FIRST: u64 = LEAF - (448 << 10);
const GUARANTEE: u64 = 512 << 10;

fn open(device: &Arc<SimBackend>, rules: Rules) -> Pool {
    let options = PoolOptions { rules, walk_pause_ns: 0, ..options() };
    Pool::open(Arc::clone(device) as Arc<dyn Backend>, options).expect("a sound pool")
}

fn reopened(image: Vec<u8>, rules: Rules) -> (Arc<SimBackend>, Pool) {
    let device = Arc::new(SimBackend::with_image(fast(image.len() as u64), 0, image));
    let pool = open(&device, rules);
    (device, pool)
}

fn queue(pool: &Pool, name: &str) -> OneRequest {
    OneRequest::open(&disk(pool.volume(name).unwrap()))
}

fn is_refused(done: &Result<(), PoolError>, refusal: PoolRefusal) -> bool {
    matches!(done, Err(PoolError::Refused(found)) if *found == refusal)
}

/// Contents that are all different.
struct Writer {
    random: fastrand::Rng,
    made: u64,
}

impl Writer {
    fn new(seed: u64) -> Self {
        Self { random: fastrand::Rng::with_seed(seed), made: 0 }
    }

    fn bytes(&mut self, blocks: u64) -> Vec<u8> {
        let mut bytes = vec![0; (blocks * BLOCK) as usize];
        for block in bytes.chunks_mut(BLOCK as usize) {
            self.made += 1;
            block[..8].copy_from_slice(&self.made.to_le_bytes());
            block[8..16].copy_from_slice(&self.random.u64(..).to_le_bytes());
        }
        bytes
    }

    /// Writes to a volume until it has no more space. Returns the blocks that were written.
    fn fill(&mut self, queue: &mut OneRequest, size: u64) -> u64 {
        let mut written = 0;
        for first in (0..size / BLOCK).step_by(8) {
            let count = self.random.u64(1..=8);
            match queue.write(first * BLOCK, &self.bytes(count)) {
                Ok(()) => written += count,
                Err(ErrorKind::NoSpace) => return written,
                Err(kind) => panic!("{kind:?}"),
            }
        }
        panic!("the pool is not full after {written} blocks");
    }

    /// Writes each block of the guaranteed part of a volume, in any order. Returns the blocks for
    /// which there was no space.
    fn write_all(&mut self, queue: &mut OneRequest, content: &mut [u8]) -> u64 {
        let mut blocks: Vec<u64> = (FIRST / BLOCK..(FIRST + GUARANTEE) / BLOCK).collect();
        self.random.shuffle(&mut blocks);
        let mut refused = 0;
        for block in blocks {
            let bytes = self.bytes(1);
            match queue.write(block * BLOCK, &bytes) {
                Ok(()) => {
                    content[(block * BLOCK) as usize..][..bytes.len()].copy_from_slice(&bytes);
                }
                Err(kind) => {
                    assert_eq!(kind, ErrorKind::NoSpace);
                    refused += 1;
                }
            }
        }
        refused
    }
}

fn check_image(image: Vec<u8>) {
    let device = SimBackend::with_image(fast(image.len() as u64), 0, image);
    let report = check(&(Arc::new(device) as Arc<dyn Backend>), true, |_| {}).expect("a pool");
    assert_eq!(report.problems, Vec::<String>::new());
}

/// A volume with a guarantee writes when another one has filled the pool. Returns how often it
/// found no space.
fn fill_and_write(seed: u64, rules: Rules) -> u64 {
    let (device, pool) = reopened(blank_of(DEVICE), rules);
    let mut writer = Writer::new(seed);
    pool.create_volume("kept", SIZE).unwrap();
    pool.create_volume("other", 64 << 20).unwrap();
    pool.set_guarantee("kept", GUARANTEE).unwrap();
    let mut expected = vec![0; SIZE as usize];
    let mut refused = 0;
    let mut kept = queue(&pool, "kept");
    let mut other = queue(&pool, "other");
    if seed % 2 == 0 {
        kept.write(FIRST, &writer.bytes(8)).unwrap();
    }
    let filled = writer.fill(&mut other, 64 << 20);
    assert!(filled > 300, "{filled}");
    for _ in 0..3 {
        refused += writer.write_all(&mut kept, &mut expected);
        // The other one goes on trying.
        let _ = other.write(0, &writer.bytes(4));
    }
    drop((kept, other));
    if seed % 3 == 0 {
        pool.save(LIMIT).unwrap();
    }
    drop(pool);
    check_image(device.image());
    let (_device, pool) = reopened(device.image(), rules);
    let mut kept = queue(&pool, "kept");
    for _ in 0..2 {
        refused += writer.write_all(&mut kept, &mut expected);
    }
    drop(kept);
    if refused == 0 {
        assert!(content(pool.volume("kept").unwrap()) == expected);
    }
    refused
}

#[test]
fn what_is_guaranteed_is_there_when_others_have_filled_the_pool() {
    each_seed(8, |seed| assert_eq!(fill_and_write(seed, Rules::default()), 0));
    assert!(fill_and_write(1, Rules { keeps_guarantees: false, ..Rules::default() }) > 0);
}

#[test]
fn changes_that_would_break_a_guarantee_are_refused() {
    let (_device, pool) = reopened(blank_of(DEVICE), Rules::default());
    let mut writer = Writer::new(7);
    for name in ["kept", "late"] {
        pool.create_volume(name, SIZE).unwrap();
    }
    pool.create_volume("other", 64 << 20).unwrap();
    assert!(is_refused(&pool.set_guarantee("kept", SIZE + 1), PoolRefusal::BadGuarantee));
    assert!(is_refused(&pool.set_guarantee("none", 1), PoolRefusal::NoVolume));
    pool.set_guarantee("kept", GUARANTEE).unwrap();
    assert!(pool.status().guaranteed_bytes >= GUARANTEE);
    let mut kept = queue(&pool, "kept");
    let mut other = queue(&pool, "other");
    let filled = writer.fill(&mut other, 64 << 20);
    let mut expected = vec![0; SIZE as usize];
    assert_eq!(writer.write_all(&mut kept, &mut expected), 0);
    assert!(pool.status().guaranteed_bytes < GUARANTEE / 2);
    // Its blocks would stay, and be written a second time.
    assert!(is_refused(&pool.take_snapshot(&["kept"], "s", 1), PoolRefusal::Guaranteed));
    assert!(is_refused(&pool.take_snapshot(&["late", "kept"], "s", 1), PoolRefusal::Guaranteed));
    assert!(is_refused(&pool.set_guarantee("late", GUARANTEE), PoolRefusal::Guaranteed));
    pool.take_snapshot(&["late"], "s", 1).unwrap();
    assert_eq!(writer.write_all(&mut kept, &mut expected), 0);
    // Discards always work, and free space.
    other.write_zeroes(0, filled / 2 * BLOCK * 2).unwrap();
    kept.flush().unwrap();
    other.flush().unwrap();
    pool.take_snapshot(&["kept"], "s", 1).unwrap();
    writer.fill(&mut other, 64 << 20);
    assert_eq!(writer.write_all(&mut kept, &mut expected), 0);
    // Without the guarantee, the rest is for all.
    writer.fill(&mut other, 64 << 20);
    pool.set_guarantee("kept", 0).unwrap();
    assert_eq!(pool.status().guaranteed_bytes, 0);
    other.write(0, &writer.bytes(8)).unwrap();
}

#[test]
fn what_a_volume_had_before_its_guarantee_does_not_count() {
    let (device, pool) = reopened(blank_of(DEVICE), Rules::default());
    let mut writer = Writer::new(3);
    let mut expected = vec![0; SIZE as usize];
    pool.create_volume("kept", SIZE).unwrap();
    pool.create_volume("other", 64 << 20).unwrap();
    let mut kept = queue(&pool, "kept");
    assert_eq!(writer.write_all(&mut kept, &mut expected), 0);
    pool.set_guarantee("kept", GUARANTEE).unwrap();
    // Equal blocks of another volume refer to the old ones, and not to the new ones.
    let mut other = queue(&pool, "other");
    for range in [FIRST..FIRST + GUARANTEE, FIRST..FIRST + GUARANTEE] {
        other.write(range.start, &expected[range.start as usize..range.end as usize]).unwrap();
        assert_eq!(writer.write_all(&mut kept, &mut expected), 0);
    }
    writer.fill(&mut other, 64 << 20);
    for _ in 0..2 {
        assert_eq!(writer.write_all(&mut kept, &mut expected), 0);
    }
    drop((kept, other, pool));
    check_image(device.image());
}

/// Discards a leaf that is not in memory. Then the fresh blocks are counted again.
#[test]
fn blocks_that_are_dropped_unread_are_counted_anew() {
    let (device, pool) = reopened(blank_of(DEVICE), Rules::default());
    let mut writer = Writer::new(5);
    pool.create_volume("kept", SIZE).unwrap();
    pool.set_guarantee("kept", GUARANTEE).unwrap();
    let before = pool.status().guaranteed_bytes;
    let mut kept = queue(&pool, "kept");
    writer.write_all(&mut kept, &mut vec![0; SIZE as usize]);
    let full = pool.status().guaranteed_bytes;
    drop(kept);
    pool.save(LIMIT).unwrap();
    drop(pool);
    let (device, pool) = reopened(device.image(), Rules::default());
    assert_eq!(pool.status().guaranteed_bytes, full);
    let mut kept = queue(&pool, "kept");
    kept.write_zeroes(0, LEAF).unwrap();
    for _ in 0..9 {
        kept.flush().unwrap();
    }
    // The blocks of the second leaf are still there.
    let counted = pool.status().guaranteed_bytes;
    assert!(full < counted && counted < before, "{full} {counted} {before}");
    kept.write_zeroes(LEAF, SIZE - LEAF).unwrap();
    assert_eq!(pool.status().guaranteed_bytes, before);
    drop((kept, pool));
    check_image(device.image());
    let (_device, pool) = reopened(device.image(), Rules::default());
    let mut kept = queue(&pool, "kept");
    for _ in 0..9 {
        kept.flush().unwrap();
    }
    assert_eq!(pool.status().guaranteed_bytes, before);
}

/// Two volumes are written to at the same time, until the pool is full for one of them. Returns how
/// many writes of that one have failed.
fn race(seed: u64) -> u64 {
    let sim = SimOptions { rounds_max: 4, ..SimOptions::new(DEVICE) };
    let device = Arc::new(SimBackend::with_image(sim, seed, blank_of(DEVICE)));
    let pool = open(&device, Rules::default());
    let mut harnesses = ["kept", "other"].map(|name| {
        let size = if name == "kept" { GUARANTEE } else { 16 << 20 };
        pool.create_volume(name, size).unwrap();
        if name == "kept" {
            pool.set_guarantee(name, size).unwrap();
        }
        let options = HarnessOptions { queues: 2, depth: 8, simulated: true };
        let mut harness = Harness::new(&disk(pool.volume(name).unwrap()), &options, seed);
        *harness.model_mut() = ModelDisk::new(size);
        let mut workload = WorkloadOptions::new(size);
        (workload.alignment, workload.length_max) = (4096, 16 << 10);
        workload.weights = [0, 40, 2, 1, 1, 0, 1];
        if name == "other" {
            // Without discards, so that the pool becomes full.
            workload.weights = [0, 1, 0, 0, 0, 0, 0];
            harness.allow_errors();
        }
        (harness, Workload::new(workload, seed))
    });
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..8000 {
        let (harness, workload) = &mut harnesses[random.usize(..2)];
        if harness.step() < 8 {
            harness.submit(random.usize(..2), &workload.next().unwrap());
        }
    }
    let [(kept, _), (other, _)] = &harnesses;
    assert_eq!(kept.statistics().failed, 0);
    other.statistics().failed
}

#[test]
fn a_volume_that_fills_the_pool_takes_nothing_of_a_guarantee_meanwhile() {
    each_seed(6, |seed| assert!(race(seed) > 10));
}

/// A few volumes with guarantees and some without, by seed: writes, discards, snapshots,
/// roll-backs, clones, deletions, changes of sizes and names, and power losses. No write within a
/// guarantee is refused.
struct World {
    device: Arc<SimBackend>,
    pool: Pool,
    rules: Rules,
    writer: Writer,
    /// The content of each volume, its guarantee in blocks, and which of its blocks are its own.
    volumes: BTreeMap<String, (Vec<u8>, u64, Vec<bool>)>,
    snapshots: Vec<(String, String, Vec<u8>)>,
    refused: u64,
    full: u64,
    broken: u64,
    made: u64,
}

const SMALL: u64 = 512 << 10;

impl World {
    fn new(seed: u64, rules: Rules) -> Self {
        let (device, pool) = reopened(blank_of(DEVICE), rules);
        let writer = Writer::new(seed);
        let (volumes, snapshots) = (BTreeMap::new(), Vec::new());
        let (refused, full, broken, made) = (0, 0, 0, 0);
        let mut world =
            Self { device, pool, rules, writer, volumes, snapshots, refused, full, broken, made };
        for name in ["one", "two"] {
            world.create(name, SMALL);
            world.guarantee(name);
        }
        world.create("other", 4 << 20);
        world
    }

    fn create(&mut self, name: &str, size: u64) {
        self.pool.create_volume(name, size).unwrap();
        let own = vec![false; (size / BLOCK) as usize];
        self.volumes.insert(name.into(), (vec![0; size as usize], 0, own));
    }

    fn any(&mut self) -> String {
        self.writer.random.choice(self.volumes.keys().cloned().collect::<Vec<_>>()).unwrap()
    }

    fn guarantee(&mut self, name: &str) {
        let size = self.volumes[name].0.len() as u64 / BLOCK;
        let blocks = self.writer.random.u64(0..=size.min(SMALL / BLOCK));
        let done = self.pool.set_guarantee(name, blocks * BLOCK);
        let (_, guarantee, own) = self.volumes.get_mut(name).unwrap();
        match done {
            Ok(()) => {
                if *guarantee == 0 {
                    own.fill(false);
                }
                *guarantee = blocks;
            }
            Err(PoolError::Refused(PoolRefusal::Guaranteed)) => self.refused += 1,
            Err(error) => panic!("{error}"),
        }
    }

    fn write(&mut self) {
        let name = self.any();
        let mut queue = queue(&self.pool, &name);
        let size = self.volumes[&name].0.len() as u64 / BLOCK;
        let mut full = 0;
        for _ in 0..self.writer.random.u64(1..40) {
            let count = self.writer.random.u64(1..=8).min(size);
            let first = self.writer.random.u64(0..=size - count);
            let is_zero = self.writer.random.u8(..6) == 0;
            let bytes = self.writer.bytes(count);
            let (offset, length) = (first * BLOCK, count * BLOCK);
            let done = if is_zero {
                queue.write_zeroes(offset, length)
            } else {
                queue.write(offset, &bytes)
            };
            let (content, guarantee, own) = self.volumes.get_mut(&name).unwrap();
            let part = &mut content[offset as usize..][..length as usize];
            let blocks = &mut own[first as usize..][..count as usize];
            let old = blocks.to_vec();
            match done {
                Ok(()) if is_zero => {
                    part.fill(0);
                    blocks.fill(false);
                }
                Ok(()) => {
                    part.copy_from_slice(&bytes);
                    blocks.fill(true);
                }
                Err(ErrorKind::NoSpace) if !is_zero => {
                    blocks.fill(true);
                    let owned = own.iter().filter(|own| **own).count() as u64;
                    self.broken += u64::from(*guarantee > 0 && owned <= *guarantee);
                    own[first as usize..][..count as usize].copy_from_slice(&old);
                    // A part of it may have been written.
                    let found = queue.read(offset, length).unwrap();
                    let found = found.chunks(BLOCK as usize);
                    let new = bytes.chunks(BLOCK as usize);
                    for (at, (found, new)) in (first as usize..).zip(found.zip(new)) {
                        own[at] |= found == new;
                        content[at * BLOCK as usize..][..BLOCK as usize].copy_from_slice(found);
                    }
                    full += 1;
                }
                Err(kind) => panic!("{kind:?}"),
            }
        }
        queue.flush().unwrap();
        self.full += full;
    }

    fn step(&mut self) {
        let name = self.any();
        match self.writer.random.u8(..24) {
            0..=11 => self.write(),
            12 | 13 => {
                self.made += 1;
                let snapshot = format!("s{}", self.made);
                match self.pool.take_snapshot(&[&name], &snapshot, 1) {
                    Ok(()) => {
                        let (content, _, own) = self.volumes.get_mut(&name).unwrap();
                        own.fill(false);
                        self.snapshots.push((name, snapshot, content.clone()));
                    }
                    Err(PoolError::Refused(PoolRefusal::Guaranteed)) => self.refused += 1,
                    Err(PoolError::Full) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            14..=16 if !self.snapshots.is_empty() => {
                let index = self.writer.random.usize(..self.snapshots.len());
                let (volume, snapshot, _) = self.snapshots.swap_remove(index);
                if self.volumes.contains_key(&volume) {
                    self.pool.delete_snapshot(&volume, &snapshot).unwrap();
                }
            }
            17 => {
                let found = self.snapshots.iter().find(|found| found.0 == name).cloned();
                let Some((_, snapshot, old)) = found else { return };
                if self.pool.roll_back(&name, &snapshot).is_ok() {
                    let (content, _, own) = self.volumes.get_mut(&name).unwrap();
                    *own = vec![false; old.len() / BLOCK as usize];
                    *content = old;
                }
            }
            18 if self.volumes.len() < 4 => {
                let Some((volume, snapshot, content)) = self.snapshots.first().cloned() else {
                    return;
                };
                self.made += 1;
                let clone = format!("c{}", self.made);
                if self.volumes.contains_key(&volume)
                    && self.pool.clone_snapshot(&volume, &snapshot, &clone).is_ok()
                {
                    let own = vec![false; content.len() / BLOCK as usize];
                    self.volumes.insert(clone, (content, 0, own));
                }
            }
            18 => {
                let clone = self.volumes.keys().find(|name| name.starts_with('c')).cloned();
                let Some(clone) = clone else { return };
                self.pool.delete_volume(&clone).unwrap();
                self.volumes.remove(&clone);
                self.snapshots.retain(|found| found.0 != clone);
            }
            19 | 20 => self.guarantee(&name),
            21 => {
                self.made += 1;
                let new = format!("{}{}", &name[..1], self.made);
                self.pool.rename_volume(&name, &new).unwrap();
                let volume = self.volumes.remove(&name).unwrap();
                self.volumes.insert(new.clone(), volume);
                for found in self.snapshots.iter_mut().filter(|found| found.0 == name) {
                    found.0.clone_from(&new);
                }
            }
            22 => {
                let (content, guarantee, own) = self.volumes.get_mut(&name).unwrap();
                let blocks = content.len() as u64 / BLOCK;
                let size = blocks.saturating_sub(self.writer.random.u64(0..9)).max(*guarantee + 1);
                if self.pool.volume(&name).unwrap().resize(size * BLOCK).is_ok() {
                    content.resize((size * BLOCK) as usize, 0);
                    own.resize(size as usize, false);
                }
            }
            _ => self.reopen(),
        }
    }

    /// The device loses its power.
    fn reopen(&mut self) {
        let image = self.device.image();
        check_image(image.clone());
        (self.device, self.pool) = reopened(image, self.rules);
        for (name, (expected, guarantee, _)) in &self.volumes {
            assert!(content(self.pool.volume(name).unwrap()) == *expected, "{name} differs");
            let found = self.pool.volumes().into_iter().find(|found| found.name == *name).unwrap();
            assert_eq!(found.guarantee, guarantee * BLOCK);
        }
        for (volume, name, expected) in &self.snapshots {
            assert!(content(self.pool.snapshot(volume, name).unwrap()) == *expected);
        }
    }
}

fn lived_through(seed: u64, rules: Rules) -> World {
    let mut world = World::new(seed, rules);
    for _ in 0..150 {
        world.step();
    }
    world.reopen();
    world
}

#[test]
fn no_write_within_a_guarantee_is_refused_whatever_happens() {
    let (mut refused, mut full, mut cases) = (0, 0, 0);
    each_seed(8, |seed| {
        let world = lived_through(seed, Rules::default());
        assert_eq!(world.broken, 0, "writes within a guarantee were refused");
        (refused, full, cases) = (refused + world.refused, full + world.full, cases + 1);
    });
    println!("{refused} refused, {full} full in {cases} cases");
    assert!(cases < 8 || refused > cases && full > cases, "{refused} {full} in {cases} cases");
    let rules = Rules { keeps_guarantees: false, ..Rules::default() };
    assert!((0..20).any(|seed| lived_through(seed, rules).broken > 0));
}

#[test]
fn what_counts_for_a_guarantee_is_the_same_after_each_power_loss() {
    let kinds = [Kind::Mixed, Kind::Cold, Kind::Drops, Kind::Equal, Kind::Apart, Kind::Walks];
    let (mut cases, mut count) = (0, 0);
    each_seed(6, |seed| {
        let kind = kinds[seed as usize % kinds.len()];
        let rules = Rules { walk_step: 1 + seed as usize % 3, ..Rules::default() };
        let options = StormOptions {
            guarantees: true,
            crashes_recoveries: seed % 5 == 0,
            steps: 120,
            sim: SimOptions { rounds_max: 4, ..SimOptions::new(support::storm::DEVICE) },
            ..StormOptions::new(kind, rules)
        };
        let mut storm = Storm::new(options, seed);
        storm.run();
        (cases, count) = (cases + u64::from(storm.counts.guarantees > 0), count + 1);
    });
    assert!(count < 6 || cases > 4, "guarantees in {cases} cases");
}
