//! Volumes, snapshots, clones, roll-backs and deletions, by seed, against plain copies of their
//! contents; with power losses, and walks that free what is not used.

use std::collections::BTreeMap;
use std::sync::Arc;

use fathom_block::{Backend, ErrorKind};
use fathom_sim::{OneRequest, SimBackend, SimOptions, each_seed, pattern};
use fathom_store::{CheckReport, Pool, PoolError, PoolOptions, Rules, check};

mod support;

use support::{DEVICE, blank, content, disk, fast, options};

/// The size of a new volume, in bytes.
const SIZE: u64 = 96 << 10;
const BLOCK: usize = 4096;

/// The contents of volumes, and of snapshots by volume and name.
#[derive(Default)]
struct Model {
    volumes: BTreeMap<String, Vec<u8>>,
    snapshots: BTreeMap<(String, String), Vec<u8>>,
}

struct World {
    device: Arc<SimBackend>,
    pool: Pool,
    /// Open queues, by volume.
    queues: BTreeMap<String, OneRequest>,
    model: Model,
    random: fastrand::Rng,
    made: u64,
}

fn open(device: &Arc<SimBackend>) -> Pool {
    // While a size changes, no queue goes on that may have begun a checkpoint.
    let rules = Rules { dirty_pages_min: 64, ..Rules::default() };
    let options = PoolOptions { walk_pause_ns: 0, rules, ..options() };
    Pool::open(Arc::clone(device) as Arc<dyn Backend>, options).expect("a sound pool")
}

impl World {
    fn new(seed: u64) -> Self {
        let sim = SimOptions { rounds_max: (seed % 3) as u32, ..SimOptions::new(DEVICE) };
        let device = Arc::new(SimBackend::with_image(sim, seed, blank()));
        let pool = open(&device);
        let (queues, random) = (BTreeMap::new(), fastrand::Rng::with_seed(seed));
        Self { device, pool, queues, model: Model::default(), random, made: 0 }
    }

    fn name(&mut self, what: &str) -> String {
        self.made += 1;
        format!("{what}{}", self.made)
    }

    fn any_volume(&mut self) -> Option<String> {
        let names: Vec<_> = self.model.volumes.keys().cloned().collect();
        self.random.choice(names)
    }

    fn any_snapshot(&mut self) -> Option<(String, String)> {
        let names: Vec<_> = self.model.snapshots.keys().cloned().collect();
        let exists = |name: &(String, String)| self.model.volumes.contains_key(&name.0);
        let names: Vec<_> = names.into_iter().filter(exists).collect();
        self.random.choice(names)
    }

    /// The only open queue: another one that is not driven might have the checkpoint.
    fn queue(&mut self, volume: &str) -> &mut OneRequest {
        self.queues.retain(|name, _| name == volume);
        if !self.queues.contains_key(volume) {
            let queue = OneRequest::open(&disk(self.pool.volume(volume).unwrap()));
            self.queues.insert(volume.to_owned(), queue);
        }
        self.queues.get_mut(volume).unwrap()
    }

    fn write(&mut self, volume: &str) {
        let unit = if self.random.bool() { 4096 } else { 512 };
        let size = self.model.volumes[volume].len() as u64;
        let length = (self.random.u64(1..=8) * unit).min(size);
        let offset = self.random.u64(0..=(size - length) / unit) * unit;
        let mut bytes = vec![0; length as usize];
        self.made += 1;
        if self.random.u8(..5) > 0 {
            // Some contents come again, and are kept once.
            let number = if self.random.u8(..4) > 0 { self.made } else { self.made % 4 };
            pattern(&mut bytes, number);
            match self.queue(volume).write(offset, &bytes) {
                Ok(()) => {}
                Err(ErrorKind::NoSpace) => return self.make_room(),
                Err(kind) => panic!("a write failed: {kind}"),
            }
        } else {
            match self.queue(volume).write_zeroes(offset, length) {
                Ok(()) => {}
                Err(ErrorKind::NoSpace) => return self.make_room(),
                Err(kind) => panic!("zeroes failed: {kind}"),
            }
        }
        let content = self.model.volumes.get_mut(volume).unwrap();
        content[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
    }

    /// The pool is full: what failed may have been carried out in part. The next power loss would
    /// not agree with the model, so the world takes over what is there, and deletes something.
    fn make_room(&mut self) {
        self.queues.clear();
        for (name, content) in &mut self.model.volumes {
            *content = self::content(self.pool.volume(name).unwrap());
        }
        if let Some((volume, name)) = self.any_snapshot() {
            self.pool.delete_snapshot(&volume, &name).unwrap();
            self.model.snapshots.remove(&(volume, name));
        } else if let Some(volume) = self.any_volume() {
            self.pool.delete_volume(&volume).unwrap();
            self.forget(&volume);
        }
    }

    /// Forgets a volume. Its snapshots stay, and have no name any more.
    fn forget(&mut self, volume: &str) {
        self.model.volumes.remove(volume);
        self.model.snapshots.retain(|(of, _), _| of != volume);
    }

    fn step(&mut self) {
        match self.random.u8(..40) {
            0..=1 if self.model.volumes.len() < 4 => {
                let name = self.name("volume");
                self.pool.create_volume(&name, SIZE).unwrap();
                self.model.volumes.insert(name, vec![0; SIZE as usize]);
            }
            2..=4 => {
                let Some(volume) = self.any_volume() else { return };
                let name = self.name("snapshot");
                let mut volumes = vec![volume];
                volumes.extend(self.any_volume().filter(|other| *other != volumes[0]));
                let members: Vec<_> = volumes.iter().map(String::as_str).collect();
                self.pool.take_snapshot(&members, &name, 1).unwrap();
                for volume in volumes {
                    let content = self.model.volumes[&volume].clone();
                    self.model.snapshots.insert((volume, name.clone()), content);
                }
            }
            5 if self.model.volumes.len() < 4 => {
                let Some((volume, name)) = self.any_snapshot() else { return };
                let clone = self.name("clone");
                self.pool.clone_snapshot(&volume, &name, &clone).unwrap();
                let content = self.model.snapshots[&(volume, name)].clone();
                self.model.volumes.insert(clone, content);
            }
            6..=7 => {
                let Some((volume, name)) = self.any_snapshot() else { return };
                self.queues.remove(&volume);
                self.pool.roll_back(&volume, &name).unwrap();
                let content = self.model.snapshots[&(volume.clone(), name)].clone();
                self.model.volumes.insert(volume, content);
            }
            8..=9 => {
                let Some((volume, name)) = self.any_snapshot() else { return };
                self.pool.delete_snapshot(&volume, &name).unwrap();
                self.model.snapshots.remove(&(volume, name));
            }
            10 => {
                let Some(volume) = self.any_volume() else { return };
                if self.random.bool() {
                    self.queues.remove(&volume);
                    self.pool.delete_volume(&volume).unwrap();
                    self.forget(&volume);
                } else {
                    self.resize(&volume);
                }
            }
            11..=12 => self.crash(),
            13 => self.pool.save(std::time::Duration::from_secs(9)).unwrap(),
            14 => self.check(),
            _ => {
                if let Some(volume) = self.any_volume() {
                    self.write(&volume);
                }
            }
        }
    }

    fn resize(&mut self, volume: &str) {
        let size = self.random.u64(1..=SIZE / 512) * 512;
        self.queues.remove(volume);
        let backend = self.pool.volume(volume).unwrap();
        if backend.resize(size).is_ok() {
            self.model.volumes.get_mut(volume).unwrap().resize(size as usize, 0);
        }
    }

    /// Everything is flushed; then the device loses its power.
    fn crash(&mut self) {
        let volumes: Vec<_> = self.model.volumes.keys().cloned().collect();
        if let Some(volume) = volumes.first() {
            self.queue(volume).flush().unwrap();
        }
        let seed = self.random.u64(..);
        let image = self.device.crash(seed);
        self.queues.clear();
        let rounds_max = self.random.u32(..3);
        let sim = SimOptions { rounds_max, ..SimOptions::new(DEVICE) };
        self.device = Arc::new(SimBackend::with_image(sim, seed, image));
        self.pool = open(&self.device);
        self.check();
    }

    fn check(&mut self) {
        self.queues.clear();
        for (name, expected) in &self.model.volumes {
            let found = content(self.pool.volume(name).unwrap());
            assert!(same(&found, expected), "volume {name} {}", difference(&found, expected));
        }
        for ((volume, name), expected) in &self.model.snapshots {
            let found = content(self.pool.snapshot(volume, name).unwrap());
            assert!(same(&found, expected), "{volume}@{name} {}", difference(&found, expected));
        }
        let report = self.report();
        assert_eq!(report.problems, Vec::<String>::new());
        assert_eq!(report.verified_blocks, report.blocks);
    }

    fn report(&self) -> CheckReport {
        let device = SimBackend::with_image(fast(DEVICE), 0, self.device.image());
        check(&(Arc::new(device) as Arc<dyn Backend>), true, |_| {}).unwrap()
    }

    /// Finds what deletions would free, and carries one of them out in a copy of the pool. Returns
    /// the blocks that it has freed.
    fn try_a_deletion(&mut self) -> u64 {
        self.queues.clear();
        let volumes = self.pool.volumes();
        let of = |id: u32| volumes.iter().find(|volume| volume.id == id);
        let named = self.pool.snapshots().into_iter();
        let named: Vec<_> =
            named.filter_map(|it| Some((of(it.volume)?.name.clone(), it))).collect();
        let all = volumes.iter().map(|it| it.id).chain(named.iter().map(|(_, it)| it.id));
        let mut groups: Vec<Vec<u32>> = all.map(|id| vec![id]).collect();
        let count = self.random.usize(..=groups.len());
        let mut together: Vec<u32> = groups.concat();
        self.random.shuffle(&mut together);
        together.truncate(count);
        let alone = self.pool.reclaimable(&groups, |_| true).unwrap();
        let joint = self.pool.reclaimable(&[together.clone()], |_| true).unwrap();
        assert_eq!((alone.unread_pages, joint.unread_pages), (0, 0));
        let (group, found) = if groups.is_empty() || self.random.bool() {
            (together, joint.groups[0])
        } else {
            let at = self.random.usize(..groups.len());
            (groups.swap_remove(at), alone.groups[at])
        };
        let before = self.report();
        let image = self.device.image();
        let device = Arc::new(SimBackend::with_image(fast(DEVICE), 0, image));
        let copy = open(&device);
        for (volume, snapshot) in named.iter().filter(|(_, it)| group.contains(&it.id)) {
            copy.delete_snapshot(volume, &snapshot.name).unwrap();
        }
        for volume in volumes.iter().filter(|it| group.contains(&it.id)) {
            copy.delete_volume(&volume.name).unwrap();
        }
        copy.save(std::time::Duration::from_secs(9)).unwrap();
        let after = Self { device, ..Self::new(0) }.report();
        assert_eq!(before.blocks - after.blocks, found.blocks, "{group:?}");
        let pages = before.map_pages - after.map_pages;
        assert!(found.map_places <= 2 * pages, "{found:?}, {pages} pages");
        found.blocks
    }
}

fn same(found: &[u8], expected: &[u8]) -> bool {
    found == expected
}

fn difference(found: &[u8], expected: &[u8]) -> String {
    let differ = |(one, other): (&[u8], &[u8])| one != other;
    let at = found.chunks(BLOCK).zip(expected.chunks(BLOCK)).position(differ);
    format!("of {} and {} bytes differ from block {at:?} on", found.len(), expected.len())
}

#[test]
fn volumes_and_snapshots_have_their_contents_whatever_happens() {
    let (mut cases, mut walks, mut freed) = (0, 0, 0);
    each_seed(300, |seed| {
        cases += 1;
        let mut world = World::new(seed);
        for _ in 0..120 {
            world.step();
        }
        world.crash();
        let counts = world.pool.status().counts;
        (walks, freed) = (walks + counts.walks, freed + counts.walk_freed_blocks);
    });
    assert!(walks > cases / 4 && freed > walks, "{walks} walks freed {freed} blocks");
}

#[test]
fn what_nothing_refers_to_is_freed_and_nothing_else() {
    let mut world = World::new(1);
    world.pool.create_volume("a", SIZE).unwrap();
    world.model.volumes.insert("a".into(), vec![0; SIZE as usize]);
    for round in 0..5 {
        for _ in 0..30 {
            world.write("a");
        }
        world.pool.take_snapshot(&["a"], &format!("s{round}"), 1).unwrap();
    }
    let used = world.pool.status().used_bytes;
    for round in 0..5 {
        world.pool.delete_snapshot("a", &format!("s{round}")).unwrap();
    }
    // A queue carries the walk out.
    while world.pool.status().has_garbage || world.pool.status().counts.walks == 0 {
        world.write("a");
    }
    // Blocks that it overwrote behind the walk may have been in use by no one else.
    world.pool.take_snapshot(&["a"], "last", 1).unwrap();
    world.pool.delete_snapshot("a", "last").unwrap();
    world.queues.clear();
    while world.pool.status().has_garbage {
        content(world.pool.volume("a").unwrap());
    }
    world.pool.save(std::time::Duration::from_secs(9)).unwrap();
    assert!(world.pool.status().used_bytes < used);
    world.check();
    let report = world.report();
    assert_eq!(report.unused_places, 0, "{report:?}");
    assert!(report.blocks <= SIZE / 4096 && report.map_pages == 4);
}

#[test]
fn what_a_deletion_frees_is_known_before() {
    let (mut cases, mut freed) = (0, 0);
    each_seed(40, |seed| {
        cases += 1;
        let mut world = World::new(seed);
        for _ in 0..6 {
            (0..20).for_each(|_| world.step());
            freed += world.try_a_deletion();
        }
    });
    assert!(freed > 10 * cases, "{freed} blocks in {cases} cases");
}

#[test]
fn what_is_in_use_is_not_deleted_and_names_are_checked() {
    let pool = World::new(1).pool;
    pool.create_volume("a", SIZE).unwrap();
    assert!(matches!(pool.create_volume("a", SIZE), Err(PoolError::Refused(_))));
    assert!(matches!(pool.create_volume("b/c", SIZE), Err(PoolError::Refused(_))));
    assert!(matches!(pool.create_volume("b", 100), Err(PoolError::Refused(_))));
    let volume = pool.volume("a").unwrap();
    assert!(matches!(pool.volume("a").map(drop), Err(PoolError::Refused(_))));
    assert!(matches!(pool.delete_volume("a"), Err(PoolError::Refused(_))));
    pool.take_snapshot(&["a"], "s", 1).unwrap();
    assert!(matches!(pool.take_snapshot(&["a"], "s", 1), Err(PoolError::Refused(_))));
    assert!(matches!(pool.roll_back("a", "s"), Err(PoolError::Refused(_))));
    drop(volume);
    pool.roll_back("a", "s").unwrap();
    pool.rename_volume("a", "b").unwrap();
    assert!(pool.volume("a").is_err());
    let snapshot = pool.snapshot("b", "s").unwrap();
    assert!(!snapshot.capabilities().write);
    assert!(matches!(pool.delete_snapshot("b", "s"), Err(PoolError::Refused(_))));
    drop(snapshot);
    pool.delete_snapshot("b", "s").unwrap();
    pool.delete_volume("b").unwrap();
    assert!(pool.volumes().is_empty() && pool.snapshots().is_empty());
}
