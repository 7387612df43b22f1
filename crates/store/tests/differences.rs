//! What differs between any two snapshots and volumes, by seed, against plain copies of their
//! contents, before and after reopening.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use fathom_block::Backend;
use fathom_sim::{OneRequest, SimBackend, SimOptions, each_seed, pattern};
use fathom_store::{BLOCK, ChangeCursor, ChangedExtent, Pool, PoolOptions, Rules, check};

mod support;

use support::{blank_of, content, disk, fast, options};

const DEVICE: u64 = 8 << 20;
const UNIT: usize = BLOCK as usize;
const LEAF: u64 = 2 << 20;
/// Volumes have a part of two leaves, and sizes that end within a block.
const SIZE_MAX: u64 = (2 << 20) + (128 << 10);

fn changes(pool: &Pool, base: Option<u32>, target: u32) -> Vec<ChangedExtent> {
    walk(&pool.difference(base, target).unwrap())
}

fn walk(difference: &Arc<dyn Backend>) -> Vec<ChangedExtent> {
    let mut cursor = ChangeCursor::open(difference, 0).unwrap();
    let mut changes = Vec::new();
    while !cursor.is_done() {
        cursor.step(&mut changes).unwrap();
    }
    changes
}

/// The content of `target` by a copy of the base and what has changed.
fn apply(mut copy: Vec<u8>, changes: &[ChangedExtent], target: &[u8]) -> Vec<u8> {
    copy.resize(target.len(), 0);
    for change in changes {
        let range = change.offset as usize..(change.offset + change.length) as usize;
        if change.is_hole {
            copy[range].fill(0);
        } else {
            copy[range.clone()].copy_from_slice(&target[range]);
        }
    }
    copy
}

/// A volume or a snapshot: its number, and the block of content that each of its blocks has.
#[derive(Clone)]
struct Root {
    name: (String, Option<String>),
    content: Vec<u8>,
}

struct World {
    device: Arc<SimBackend>,
    pool: Pool,
    random: fastrand::Rng,
    volumes: BTreeMap<String, Vec<u8>>,
    snapshots: BTreeMap<(String, String), Vec<u8>>,
    made: u64,
    rules: Rules,
    /// The sets that were united.
    united: u64,
}

fn open(device: &Arc<SimBackend>, rules: Rules) -> Pool {
    let options = PoolOptions { rules, walk_pause_ns: 0, ..options() };
    Pool::open(Arc::clone(device) as Arc<dyn Backend>, options).expect("a sound pool")
}

impl World {
    fn new(seed: u64, rules: Rules) -> Self {
        let sim = SimOptions { rounds_max: (seed % 3) as u32, ..SimOptions::new(DEVICE) };
        let device = Arc::new(SimBackend::with_image(sim, seed, blank_of(DEVICE)));
        let pool = open(&device, rules);
        pool.create_volume("v0", SIZE_MAX).unwrap();
        Self {
            device,
            pool,
            random: fastrand::Rng::with_seed(seed),
            volumes: BTreeMap::from([("v0".to_owned(), vec![0; SIZE_MAX as usize])]),
            snapshots: BTreeMap::new(),
            made: 0,
            rules,
            united: 0,
        }
    }

    fn volume(&mut self) -> String {
        self.random.choice(self.volumes.keys().cloned().collect::<Vec<_>>()).unwrap()
    }

    fn write(&mut self) {
        let name = self.volume();
        let mut queue = OneRequest::open(&disk(self.pool.volume(&name).unwrap()));
        for _ in 0..self.random.usize(1..4) {
            let content = self.volumes.get_mut(&name).unwrap();
            let is_whole = self.random.bool() && content.len() >= UNIT;
            let unit = if is_whole { UNIT } else { 512 };
            let count = content.len() / unit;
            let length = self.random.usize(1..=8.min(count)) * unit;
            let offset = self.random.usize(0..=count - length / unit) * unit;
            let mut bytes = vec![0; length];
            self.made += 1;
            match self.random.u8(..6) {
                0 => queue.write_zeroes(offset as u64, length as u64).unwrap(),
                1 => {
                    // Everything, or much of it, at once.
                    let length = content.len() - offset;
                    queue.write_zeroes(offset as u64, length as u64).unwrap();
                    bytes = vec![0; length];
                }
                _ => {
                    pattern(&mut bytes, self.made % 7);
                    queue.write(offset as u64, &bytes).unwrap();
                }
            }
            content[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
    }

    fn any_snapshot(&mut self) -> Option<(String, String)> {
        self.random.choice(self.snapshots.keys().cloned().collect::<Vec<_>>())
    }

    fn step(&mut self) {
        self.made += 1;
        let made = self.made;
        match self.random.u8(..20) {
            0..=3 if self.snapshots.len() < 6 => {
                let (volume, name) = (self.volume(), format!("s{made}"));
                self.pool.take_snapshot(&[&volume], &name, 1).unwrap();
                let content = self.volumes[&volume].clone();
                self.snapshots.insert((volume, name), content);
            }
            4 if self.volumes.len() < 3 => {
                let Some((volume, name)) = self.any_snapshot() else { return };
                let clone = format!("v{made}");
                self.pool.clone_snapshot(&volume, &name, &clone).unwrap();
                self.volumes.insert(clone, self.snapshots[&(volume, name)].clone());
            }
            5 => {
                let Some((volume, name)) = self.any_snapshot() else { return };
                self.pool.roll_back(&volume, &name).unwrap();
                let content = self.snapshots[&(volume.clone(), name)].clone();
                self.volumes.insert(volume, content);
            }
            6 => {
                let Some(key) = self.any_snapshot() else { return };
                self.pool.delete_snapshot(&key.0, &key.1).unwrap();
                self.snapshots.remove(&key);
            }
            7..=8 => {
                let volume = self.volume();
                let size = self.random.u64(1..=SIZE_MAX / 512) * 512;
                self.pool.volume(&volume).unwrap().resize(size).unwrap();
                self.volumes.get_mut(&volume).unwrap().resize(size as usize, 0);
            }
            9 => {
                let image = self.device.image();
                self.united += self.pool.status().counts.united_sets;
                self.device =
                    Arc::new(SimBackend::with_image(SimOptions::new(DEVICE), made, image));
                self.pool = open(&self.device, self.rules);
            }
            _ => self.write(),
        }
    }

    fn roots(&self) -> Vec<Root> {
        let volumes = self.volumes.iter();
        let volumes = volumes.map(|(name, content)| ((name.clone(), None), content.clone()));
        let snapshots = self.snapshots.iter().map(|((volume, name), content)| {
            ((volume.clone(), Some(name.clone())), content.clone())
        });
        volumes.chain(snapshots).map(|(name, content)| Root { name, content }).collect()
    }

    /// Compares all with each other in a pool.
    fn check(&self, pool: &Pool) {
        let number = |root: &Root| pool.number_of(&root.name.0, root.name.1.as_deref()).unwrap();
        for target in self.roots() {
            let all = changes(pool, None, number(&target));
            assert!(apply(Vec::new(), &all, &target.content) == target.content, "from nothing");
            assert!(all.iter().all(|change| !change.is_hole), "nothing had nothing");
            for base in self.roots() {
                let found = changes(pool, Some(number(&base)), number(&target));
                let copy = apply(base.content.clone(), &found, &target.content);
                assert!(copy == target.content, "{:?} to {:?}", base.name, target.name);
                if base.name == target.name {
                    assert_eq!(found, []);
                }
                Self::check_holes(&found, &target);
                // Without the holes of the target, too.
                let found = walk(&pool.changes(number(&base), number(&target)).unwrap());
                let copy = apply(base.content.clone(), &found, &target.content);
                assert!(copy == target.content, "{:?} to {:?}", base.name, target.name);
            }
        }
    }

    /// Changes are in order, and a changed hole is one.
    fn check_holes(found: &[ChangedExtent], target: &Root) {
        let mut end = 0;
        for change in found {
            assert!(change.offset >= end && change.length > 0);
            end = change.offset + change.length;
            let range = change.offset as usize..end as usize;
            let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
            let mut blocks = target.content[range].chunks(UNIT);
            assert_eq!(change.is_hole, blocks.all(is_zero), "{change:?} of {:?}", target.name);
        }
        assert!(end <= target.content.len() as u64);
    }
}

fn run(seed: u64, rules: Rules) -> u64 {
    let mut world = World::new(seed, rules);
    for step in 0..60 {
        world.step();
        if step % 15 == 14 {
            world.check(&world.pool);
            let image = world.device.image();
            let device = Arc::new(SimBackend::with_image(fast(DEVICE), 0, image));
            world.check(&open(&device, rules));
            let report = check(&(device as Arc<dyn Backend>), true, |_| {}).unwrap();
            assert_eq!(report.problems, Vec::<String>::new());
        }
    }
    for root in world.roots() {
        let found = match &root.name.1 {
            None => world.pool.volume(&root.name.0),
            Some(name) => world.pool.snapshot(&root.name.0, name),
        };
        assert!(content(found.unwrap()) == root.content, "{:?}", root.name);
    }
    world.united + world.pool.status().counts.united_sets
}

#[test]
fn what_differs_between_any_two_is_found() {
    let (mut united, mut cases) = (0, 0);
    each_seed(12, |seed| {
        united += run(seed, Rules::default());
        cases += 1;
    });
    assert!(cases < 12 || united > 10, "{united} sets of deleted snapshots were united");
}

#[test]
fn without_the_sets_a_change_is_missed() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let rules = Rules { notes_changes: false, ..Rules::default() };
    let found = catch_unwind(AssertUnwindSafe(|| run(0, rules)));
    std::panic::set_hook(hook);
    assert!(found.is_err());
}

/// The volume "wide" with a change in each of many of its leaves since the snapshot "a".
fn wide(device: &Arc<SimBackend>, leaves: u64) -> Pool {
    let pool = open(device, Rules::default());
    pool.create_volume("wide", leaves * LEAF).unwrap();
    let mut queue = OneRequest::open(&disk(pool.volume("wide").unwrap()));
    let write = |queue: &mut OneRequest, leaf: u64, content: u8| {
        queue.write(leaf * LEAF, &[content; UNIT]).unwrap();
    };
    (0..leaves).step_by(7).for_each(|leaf| write(&mut queue, leaf, 1));
    pool.take_snapshot(&["wide"], "a", 1).unwrap();
    (0..leaves).step_by(7).for_each(|leaf| write(&mut queue, leaf, 2));
    drop(queue);
    pool.save(Duration::from_secs(9)).unwrap();
    pool
}

#[test]
fn what_has_changed_is_known_without_the_maps() {
    const LEAVES: u64 = 700;
    let device = Arc::new(SimBackend::with_image(fast(DEVICE), 0, blank_of(DEVICE)));
    drop(wide(&device, LEAVES));
    let pool = open(&device, Rules::default());
    let number = |name| pool.number_of("wide", name).unwrap();
    let before = pool.status().counts.map_reads;
    let found = walk(&pool.changes(number(Some("a")), number(None)).unwrap());
    assert_eq!(found.len() as u64, LEAVES.div_ceil(7));
    // The path to each page of the set, of which one has the bits of 64 leaves.
    let reads = pool.status().counts.map_reads - before;
    assert!((1..LEAVES / 64 + 6).contains(&reads), "{reads} reads");
}

/// Without a page of a set, maps are compared, and writes go on.
#[test]
fn a_damaged_set_costs_time_and_nothing_else() {
    const LEAVES: u64 = 140;
    let device = Arc::new(SimBackend::with_image(fast(DEVICE), 0, blank_of(DEVICE)));
    drop(wide(&device, LEAVES));
    let image = device.image();
    // The bits of the first word: each seventh leaf has one, in every eighth word.
    let is_set = |block: &&usize| {
        let words = image[*block * UNIT..][..UNIT].chunks_exact(8).step_by(56).take(9);
        words.clone().all(|word| word == [1, 0, 0, 0, 0, 0, 0, 0])
    };
    let blocks: Vec<usize> = (0..image.len() / UNIT).collect();
    let sets: Vec<&usize> = blocks.iter().filter(is_set).collect();
    assert!(!sets.is_empty(), "no page of the set is there");
    let mut damaged = image.clone();
    for block in sets {
        damaged[*block * UNIT] ^= 4;
    }
    let device = Arc::new(SimBackend::with_image(fast(DEVICE), 0, damaged));
    let report = check(&(Arc::clone(&device) as Arc<dyn Backend>), true, |_| {}).unwrap();
    assert_eq!(report.problem_count, 1, "{report:?}");
    let pool = open(&device, Rules::default());
    let number = |name| pool.number_of("wide", name).unwrap();
    let since = || walk(&pool.changes(number(Some("a")), number(None)).unwrap());
    assert_eq!(since().len() as u64, LEAVES.div_ceil(7));
    let mut queue = OneRequest::open(&disk(pool.volume("wide").unwrap()));
    queue.write(3 * LEAF, &[7; UNIT]).unwrap();
    assert_eq!(queue.read(3 * LEAF, 1).unwrap(), [7]);
    drop(queue);
    assert_eq!(since().len() as u64, LEAVES.div_ceil(7) + 1);
    // The next snapshot begins a new set.
    pool.take_snapshot(&["wide"], "b", 1).unwrap();
    assert_eq!(walk(&pool.changes(number(Some("b")), number(None)).unwrap()), []);
}

#[test]
fn maps_that_do_not_fit_into_memory_are_compared() {
    let device = Arc::new(SimBackend::with_image(fast(DEVICE), 0, blank_of(DEVICE)));
    let pool = open(&device, Rules::default());
    pool.create_volume("wide", 700 * LEAF).unwrap();
    let write = |pool: &Pool, leaves: &[u64], byte: u8| {
        let mut queue = OneRequest::open(&disk(pool.volume("wide").unwrap()));
        for leaf in leaves {
            queue.write(leaf * LEAF, &[byte; UNIT]).unwrap();
        }
    };
    let leaves: Vec<u64> = (0..350).map(|leaf| leaf * 2).collect();
    write(&pool, &leaves, 1);
    pool.take_snapshot(&["wide"], "a", 1).unwrap();
    let changed: Vec<u64> = leaves.iter().copied().filter(|leaf| leaf % 3 == 0).collect();
    write(&pool, &changed, 2);
    pool.save(Duration::from_secs(1)).unwrap();
    drop(pool);
    let pool = open(&device, Rules::default());
    let before = pool.status().counts.map_reads;
    let number = |name| pool.number_of("wide", name).unwrap();
    let found = changes(&pool, Some(number(Some("a"))), number(None));
    let offsets: Vec<u64> = found.iter().map(|change| change.offset / LEAF).collect();
    assert_eq!(offsets, changed);
    assert!(found.iter().all(|change| change.length == BLOCK && !change.is_hole));
    // Two leaves for each change, and few pages above them.
    let reads = pool.status().counts.map_reads - before;
    assert!(reads < 2 * changed.len() as u64 + 40, "{reads} reads");
}

#[test]
fn a_missed_change_would_be_seen() {
    let mut world = World::new(1, Rules::default());
    (0..10).for_each(|_| world.write());
    world.pool.take_snapshot(&["v0"], "a", 1).unwrap();
    let base = world.volumes["v0"].clone();
    (0..10).for_each(|_| world.write());
    let number = |name| world.pool.number_of("v0", name).unwrap();
    let found = changes(&world.pool, Some(number(Some("a"))), number(None));
    let target = &world.volumes["v0"];
    assert!(apply(base.clone(), &found, target) == *target);
    let mut is_seen = false;
    for left_out in 0..found.len() {
        let mut fewer = found.clone();
        fewer.remove(left_out);
        is_seen |= apply(base.clone(), &fewer, target) != *target;
    }
    assert!(is_seen, "no change matters");
    // Nor does it find too much: a second comparison with the same has nothing.
    world.pool.take_snapshot(&["v0"], "b", 1).unwrap();
    let number = |name| world.pool.number_of("v0", name).unwrap();
    assert_eq!(changes(&world.pool, Some(number(Some("b"))), number(None)), []);
}

#[test]
fn what_is_compared_is_not_deleted_and_may_be_served() {
    let world = World::new(1, Rules::default());
    let pool = &world.pool;
    pool.take_snapshot(&["v0"], "a", 1).unwrap();
    pool.take_snapshot(&["v0"], "b", 1).unwrap();
    let number = |name| pool.number_of("v0", name).unwrap();
    let one = pool.difference(Some(number(Some("a"))), number(Some("b"))).unwrap();
    let two = pool.difference(Some(number(Some("a"))), number(None)).unwrap();
    let served = pool.snapshot("v0", "a").unwrap();
    assert!(pool.delete_snapshot("v0", "a").is_err() && pool.delete_snapshot("v0", "b").is_err());
    assert!(pool.roll_back("v0", "a").is_err() && pool.delete_volume("v0").is_err());
    drop((one, served));
    assert!(pool.delete_snapshot("v0", "a").is_err());
    pool.delete_snapshot("v0", "b").unwrap();
    drop(two);
    pool.delete_snapshot("v0", "a").unwrap();
    pool.delete_volume("v0").unwrap();
    assert!(pool.difference(Some(1), 1).is_err());
}
