//! Requests of several queues, by seed, with snapshots, clones, roll-backs, deletions, queues that
//! end in the middle and power losses in between. A snapshot has what a power loss at its instant
//! may have left, and keeps it.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use fathom_block::{Backend, ErrorKind, Operation};
use fathom_sim::{
    Harness, HarnessOptions, ModelDisk, SimBackend, SimOptions, SimRecord, Workload,
    WorkloadOptions,
};
use fathom_store::{
    Pool, PoolError, PoolOptions, PoolRefusal, Rules, ScrubOptions, ScrubState, check,
};

use super::hints::WrongHints;
use super::pairs::{damage, pairs};
use super::{blank_of, content, disk_under, fast};

/// The size of the device and of the volumes, in bytes.
pub const DEVICE: u64 = 3 << 20;
const TIGHT: u64 = 1280 << 10;
const VOLUME: u64 = START + LENGTH;
/// The part of the volumes that is used, in which one leaf ends and another begins.
const START: u64 = LEAF - LENGTH / 2;
const LEAF: u64 = 2 << 20;
const LENGTH: u64 = 128 << 10;
/// The most changes of the catalogue between two checkpoints: nothing else drives the queues while
/// one waits for a place.
const CHANGES_MAX: u64 = 4;

/// What happens often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Everything, now and then.
    Mixed,
    /// Power losses, so that no page is in memory.
    Cold,
    /// Deletions of snapshots, among few and short writes, so that walks find something.
    Walks,
    /// Discards of a whole leaf.
    Drops,
    /// The device is nearly full, and slow.
    Tight,
    /// Few different contents, so that most blocks become references.
    Equal,
    /// The same on a slow device.
    EqualSlow,
    /// The same with many reads, and with hints that are wrong: what is read is written again, and
    /// is said to be new.
    Copies,
    /// Blocks that lie apart are put together all the time.
    Apart,
    /// The same with few different contents.
    ApartEqual,
}

fn is_equal(kind: Kind) -> bool {
    matches!(kind, Kind::Equal | Kind::EqualSlow | Kind::Copies | Kind::ApartEqual)
}

fn is_apart(kind: Kind) -> bool {
    matches!(kind, Kind::Apart | Kind::ApartEqual)
}

#[derive(Clone, Debug)]
pub struct StormOptions {
    pub kind: Kind,
    pub rules: Rules,
    pub sim: SimOptions,
    pub steps: usize,
    /// Whether the device fails, or becomes full.
    pub has_faults: bool,
    pub cached_pages: usize,
    /// Recoveries lose their power, too.
    pub crashes_recoveries: bool,
    /// The number of different contents of writes; 0 if all differ.
    pub contents: u64,
    /// The pool is verified all the time.
    pub scrubs: bool,
    /// Volumes get guarantees, and lose them.
    pub guarantees: bool,
    /// A power loss damages one of the two copies of each page of a map.
    pub damages: bool,
}

impl StormOptions {
    pub fn new(kind: Kind, rules: Rules) -> Self {
        let (capacity, rounds_max) = match kind {
            Kind::Mixed | Kind::Walks | Kind::Cold | Kind::Drops => (DEVICE, 5),
            Kind::Equal | Kind::Copies | Kind::Apart | Kind::ApartEqual => (DEVICE, 4),
            Kind::EqualSlow => (DEVICE, 30),
            Kind::Tight => (TIGHT, 30),
        };
        let sim = SimOptions { rounds_max, ..SimOptions::new(capacity) };
        let dirty_pages_min = if kind == Kind::Tight { 32 } else { 64 };
        let rules = Rules { dirty_pages_min, ..rules };
        // A relocation takes many steps.
        let (steps, cached_pages) = (if is_apart(kind) { 700 } else { 250 }, 16);
        let (has_faults, crashes_recoveries) = (false, false);
        let contents = if is_equal(kind) { 5 } else { 0 };
        let rules = if is_apart(kind) { Rules { run_min: 2, ..rules } } else { rules };
        let (scrubs, guarantees, damages) = (false, false, false);
        Self {
            kind,
            rules,
            sim,
            steps,
            has_faults,
            cached_pages,
            crashes_recoveries,
            contents,
            scrubs,
            guarantees,
            damages,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct StormCounts {
    pub snapshots: u64,
    pub clones: u64,
    pub roll_backs: u64,
    pub losses: u64,
    pub checks: u64,
    pub walks: u64,
    pub checkpoints: u64,
    pub failures: u64,
    pub merged: u64,
    pub relocated: u64,
    pub punched: u64,
    pub shared: u64,
    pub unequal: u64,
    pub copied: u64,
    pub kept: u64,
    pub unique: u64,
    pub scrubs: u64,
    pub guarantees: u64,
    pub damaged: u64,
}

/// A volume that is used.
struct Head {
    name: String,
    harness: Harness,
    queues: usize,
    /// Whether it is not known if a roll-back was carried out.
    is_unsure: bool,
    submitted: u64,
    in_flight: usize,
}

pub struct Storm {
    options: StormOptions,
    record: SimRecord,
    device: Arc<SimBackend>,
    pool: Pool,
    heads: Vec<Head>,
    /// The content of each snapshot, by volume and name.
    snapshots: BTreeMap<(String, String), Vec<u8>>,
    workload: Workload,
    random: fastrand::Rng,
    made: u64,
    /// Changes of the catalogue since this number of checkpoints.
    changes: (u64, u64),
    pub counts: StormCounts,
}

fn blank(capacity: u64) -> Vec<u8> {
    static IMAGES: [OnceLock<Vec<u8>>; 2] = [OnceLock::new(), OnceLock::new()];
    let make = || {
        let device = SimBackend::with_image(fast(capacity), 0, blank_of(capacity));
        let device = Arc::new(device);
        let pool = Pool::open(Arc::clone(&device) as _, PoolOptions::default()).expect("a pool");
        pool.create_volume("disk", VOLUME).expect("room");
        device.image()
    };
    IMAGES[usize::from(capacity == DEVICE)].get_or_init(make).clone()
}

impl Storm {
    pub fn new(options: StormOptions, seed: u64) -> Self {
        let record = SimRecord::new(seed, 0.0);
        let device = record.store(options.sim.clone(), seed, blank(options.sim.capacity));
        let pool = loop {
            match open(Arc::clone(&device) as _, &options) {
                Ok(pool) => break pool,
                Err(error) => assert!(options.has_faults, "{error}"),
            }
            device.recover().expect("a device that lives");
        };
        let mut workload = WorkloadOptions::new(LENGTH);
        let kind = options.kind;
        workload.length_max = if kind == Kind::Walks { 4096 } else { 16 << 10 };
        workload.weights = [12, 50, if kind == Kind::Cold { 1 } else { 8 }, 6, 6, 0, 2];
        if kind == Kind::Drops {
            workload.weights = [5, 50, 2, 25, 6, 0, 2];
        }
        if kind == Kind::Copies {
            (workload.length_max, workload.weights[0]) = (32 << 10, 40);
        }
        if kind == Kind::Cold {
            workload.force_unit_access_rate = 0.01;
        }
        workload.alignment = if seed % 3 == 0 && !is_equal(kind) { 512 } else { 4096 };
        let mut storm = Self {
            options,
            record,
            device,
            pool,
            heads: Vec::new(),
            snapshots: BTreeMap::new(),
            workload: Workload::new(workload, seed),
            random: fastrand::Rng::with_seed(seed),
            made: 0,
            changes: (0, 0),
            counts: StormCounts::default(),
        };
        storm.begin("disk", ModelDisk::new(VOLUME));
        storm
    }

    /// Opens the queues of a volume.
    fn begin(&mut self, name: &str, model: ModelDisk) {
        let volume = self.pool.volume(name).expect("a volume");
        let hints = (self.options.kind == Kind::Copies).then(|| self.random.u64(..));
        let disk = disk_under(hints.map(WrongHints::layer).into_iter().collect(), volume);
        let (queues, depth) = (self.random.usize(1..=3), self.random.usize(1..=12));
        let options = HarnessOptions { queues, depth, simulated: true };
        let mut harness = Harness::new(&disk, &options, self.random.u64(..));
        if self.options.has_faults || self.options.kind == Kind::Tight {
            harness.allow_errors();
        }
        *harness.model_mut() = model;
        self.heads.push(Head {
            name: name.into(),
            harness,
            queues,
            is_unsure: false,
            submitted: 0,
            in_flight: 0,
        });
    }

    /// Closes the queues of a volume with what is in flight, which may take effect or not.
    fn end(&mut self, index: usize) -> (String, ModelDisk) {
        let Head { name, mut harness, submitted, .. } = self.heads.swap_remove(index);
        let mut model = std::mem::replace(harness.model_mut(), ModelDisk::new(0));
        drop(harness);
        for id in 0..submitted {
            for operation in [Operation::Write, Operation::Read, Operation::Flush] {
                model.finish(id, operation, Err(ErrorKind::Io), &[]).expect("nothing was read");
            }
        }
        (name, model)
    }

    pub fn run(&mut self) {
        for _ in 0..self.options.steps {
            for head in &mut self.heads {
                let whole = if self.options.kind == Kind::Drops { 7 } else { 1 };
                let count = if self.options.kind == Kind::Walks { 2 } else { 4 };
                for _ in 0..self.random.usize(..count) {
                    if head.in_flight < 24 {
                        let mut action = self.workload.next().expect("no end");
                        action.offset += if action.length > 0 { START } else { 0 };
                        if self.options.contents > 0 {
                            action.content %= self.options.contents;
                        }
                        if action.operation == Operation::Discard && self.random.u8(..8) < whole {
                            // All of the first leaf.
                            (action.offset, action.length) = (0, LEAF);
                        }
                        head.harness.submit(self.random.usize(..head.queues), &action);
                        head.submitted += 1;
                    }
                }
                head.in_flight = head.harness.step();
            }
            self.disturb();
            if self.options.scrubs {
                self.scrub();
            }
        }
        self.lose_power();
        self.counts.failures +=
            self.heads.iter().map(|head| head.harness.statistics().failed).sum::<u64>();
        // A read of a failing device may fail.
        let is_read = |_: &_| !self.options.has_faults;
        for (key, expected) in self.snapshots.iter().filter(is_read) {
            let found = content(self.pool.snapshot(&key.0, &key.1).expect("a snapshot"));
            assert!(found == *expected, "{key:?} differs");
        }
    }

    /// Begins a scrub if none is in progress. Nothing is damaged, so that none is found to be.
    fn scrub(&mut self) {
        let last = self.pool.scrub();
        if let Some(report) = &last {
            assert!(!report.is_damaged(), "{report:?}");
            assert_eq!(report.mended_pages, 0, "{report:?}");
            if report.state == ScrubState::Running {
                if self.random.u8(..60) == 0 {
                    self.pool.end_scrub(report.number);
                }
                return;
            }
            self.counts.scrubs += u64::from(report.state == ScrubState::Complete);
        }
        // One that was ended goes on, or not.
        let is_ended = |report: &_| matches!(report, ScrubState::Ended);
        let earlier = last.filter(|last| is_ended(&last.state) && self.random.bool());
        self.pool.begin_scrub(ScrubOptions { maps_only: false, pause: 0 }, earlier);
    }

    fn disturb(&mut self) {
        let checkpoints = self.pool.status().counts.checkpoints;
        if checkpoints != self.changes.0 {
            self.changes = (checkpoints, 0);
        }
        let may_change = self.changes.1 < CHANGES_MAX;
        let mut what = self.random.u8(..100);
        what = match (self.options.kind, what) {
            (Kind::Cold, 17..30) => 16,
            (Kind::Apart | Kind::ApartEqual, 12 | 16) if self.random.u8(..4) > 0 => 99,
            (Kind::Cold, 30..45) | (Kind::Walks, 17..25) => 0,
            (Kind::Walks, 25..34)
            | (Kind::Tight, 8)
            | (
                Kind::Walks
                | Kind::Equal
                | Kind::EqualSlow
                | Kind::Copies
                | Kind::Apart
                | Kind::ApartEqual,
                8..=12,
            ) => 5,
            (Kind::Walks, 13..=16) | (Kind::Drops, 20..50) => 13,
            _ => what,
        };
        if self.options.guarantees && what >= 90 {
            what = 200;
        }
        self.changes.1 += u64::from(what < 12 || what == 200);
        match what {
            0..=4 if may_change => self.take_snapshot(),
            5..=7 if may_change => self.delete_snapshot(),
            8 if may_change && self.heads.len() < 2 => self.clone(),
            9 if may_change && self.heads.len() > 1 => self.delete_clone(),
            10..=11 if may_change => self.roll_back(),
            12 => {
                let index = self.random.usize(..self.heads.len());
                let (name, model) = self.end(index);
                self.begin(&name, model);
            }
            13..=15 => {
                let image = self.record.crash().remove(0);
                self.check_image(&image, self.options.crashes_recoveries);
            }
            16 => self.lose_power(),
            200 if may_change => self.guarantee(),
            _ => {
                if self.has_failed() {
                    self.lose_power();
                }
            }
        }
    }

    fn has_failed(&self) -> bool {
        self.options.has_faults && self.pool.damage().is_some()
    }

    /// Whether a change of the catalogue was carried out. If that is not known, the device loses
    /// its power, and what is there is taken over.
    fn is_done(&mut self, done: Result<(), PoolError>) -> bool {
        match done {
            Ok(()) => true,
            Err(PoolError::Refused(PoolRefusal::Guaranteed)) if self.options.guarantees => false,
            Err(PoolError::Full) if self.options.kind == Kind::Tight => false,
            Err(PoolError::Full) if self.options.has_faults => false,
            Err(_) if self.options.has_faults => {
                self.lose_power();
                false
            }
            Err(error) => panic!("a change failed: {error}"),
        }
    }

    fn guarantee(&mut self) {
        let index = self.random.usize(..self.heads.len());
        let bytes = self.random.u64(..64 << 10) * u64::from(self.random.u8(..4) > 0);
        let done = self.pool.set_guarantee(&self.heads[index].name, bytes);
        self.counts.guarantees += u64::from(self.is_done(done));
    }

    fn take_snapshot(&mut self) {
        let tight = self.options.kind == Kind::Tight;
        if self.snapshots.len() >= if tight { 1 } else { 4 } {
            return self.delete_snapshot();
        }
        self.made += 1;
        let name = format!("s{}", self.made);
        let names: Vec<String> = self.heads.iter().map(|head| head.name.clone()).collect();
        let members: Vec<&str> = names.iter().map(String::as_str).collect();
        let done = self.pool.take_snapshot(&members, &name, 1);
        if !self.is_done(done) {
            return;
        }
        let pool = reopen(self.device.image(), &self.options);
        for head in &self.heads {
            let found = content(pool.snapshot(&head.name, &name).expect("the new snapshot"));
            let checked = head.harness.model().check_crash(&found);
            if let (Err(violation), false) = (checked, head.is_unsure) {
                panic!("the snapshot {name} of {}: {violation}", head.name);
            }
            self.snapshots.insert((head.name.clone(), name.clone()), found);
        }
        self.counts.snapshots += 1;
    }

    fn any_snapshot(&mut self) -> Option<(String, String)> {
        let exists = |name: &str| self.heads.iter().any(|head| head.name == name);
        let names: Vec<_> = self.snapshots.keys().filter(|key| exists(&key.0)).cloned().collect();
        self.random.choice(names)
    }

    fn delete_snapshot(&mut self) {
        let Some(key) = self.any_snapshot() else { return };
        let done = self.pool.delete_snapshot(&key.0, &key.1);
        self.snapshots.remove(&key);
        self.is_done(done);
    }

    fn clone(&mut self) {
        let Some((volume, name)) = self.any_snapshot() else { return };
        self.made += 1;
        let clone = format!("c{}", self.made);
        let done = self.pool.clone_snapshot(&volume, &name, &clone);
        if self.is_done(done) {
            let mut model = ModelDisk::new(VOLUME);
            model.restart(&self.snapshots[&(volume, name)]);
            self.begin(&clone, model);
            self.counts.clones += 1;
        }
    }

    fn delete_clone(&mut self) {
        let index = self.heads.iter().position(|head| head.name != "disk").expect("a clone");
        let (name, _) = self.end(index);
        self.snapshots.retain(|key, _| key.0 != name);
        let done = self.pool.delete_volume(&name);
        self.is_done(done);
    }

    fn roll_back(&mut self) {
        let Some((volume, name)) = self.any_snapshot() else { return };
        let index = self.heads.iter().position(|head| head.name == volume).expect("a head");
        let (_, mut model) = self.end(index);
        let done = self.pool.roll_back(&volume, &name);
        if done.is_ok() {
            model.restart(&self.snapshots[&(volume.clone(), name)]);
            self.counts.roll_backs += 1;
        }
        self.begin(&volume, model);
        self.heads.last_mut().expect("it was just made").is_unsure = done.is_err();
        self.is_done(done);
    }

    /// An image in which some pages have lost one of their copies.
    fn damaged(&mut self, mut image: Vec<u8>) -> Vec<u8> {
        if self.options.damages {
            for (block, copy) in pairs(&image) {
                damage(&mut image, if self.random.bool() { block } else { copy });
                self.counts.damaged += 1;
            }
        }
        image
    }

    /// Goes on with what a power loss leaves.
    fn lose_power(&mut self) {
        let image = self.record.crash().remove(0);
        self.check_image(&image, self.options.crashes_recoveries);
        let counts = self.pool.status().counts;
        self.counts.walks += counts.walks;
        self.counts.checkpoints += counts.checkpoints;
        self.counts.merged += counts.merged_blocks;
        self.counts.relocated += counts.relocated_blocks;
        self.counts.punched += counts.punched_segments;
        self.counts.shared += counts.shared_blocks;
        self.counts.unequal += counts.unequal_blocks;
        self.counts.copied += counts.copied_blocks;
        self.counts.kept += counts.kept_blocks;
        self.counts.unique += counts.unique_blocks;
        self.counts.losses += 1;
        let mut models = Vec::new();
        while !self.heads.is_empty() {
            models.push(self.end(0));
        }
        let seed = self.random.u64(..);
        self.record = SimRecord::new(seed, 0.0);
        let image = self.damaged(image);
        self.device = self.record.store(self.options.sim.clone(), seed, image);
        self.pool = loop {
            match open(Arc::clone(&self.device) as _, &self.options) {
                Ok(pool) => break pool,
                Err(_) if self.options.has_faults => {
                    let image = self.record.crash().remove(0);
                    self.record = SimRecord::new(self.random.u64(..), 0.0);
                    let (sim, seed) = (self.options.sim.clone(), self.random.u64(..));
                    self.device = self.record.store(sim, seed, image);
                }
                Err(error) => panic!("no pool after a power loss: {error}"),
            }
        };
        self.changes = (0, 0);
        // What the opening found is durable.
        let copy = reopen(self.device.image(), &self.options);
        let mut lost = Vec::new();
        for (name, mut model) in models {
            match copy.volume(&name) {
                Ok(volume) => {
                    model.restart(&content(volume));
                    self.begin(&name, model);
                }
                Err(_) => lost.push(name),
            }
        }
        let names: Vec<String> = self.pool.volumes().into_iter().map(|found| found.name).collect();
        for name in names {
            // Of changes that failed it is not known whether they were carried out.
            if !self.heads.iter().any(|head| head.name == name) {
                assert!(self.options.has_faults, "{name} reappeared");
                let mut model = ModelDisk::new(VOLUME);
                model.restart(&content(copy.volume(&name).expect("a volume")));
                self.begin(&name, model);
            }
        }
        assert!(lost.is_empty() || self.options.has_faults, "lost {lost:?}");
        self.snapshots.retain(|key, _| !lost.contains(&key.0));
    }

    /// Compares what an opening finds in an image that a power loss has left.
    fn check_image(&mut self, image: &[u8], crashes_recovery: bool) {
        self.counts.checks += 1;
        let record = SimRecord::new(self.random.u64(..), if crashes_recovery { 0.2 } else { 0.0 });
        let sim = SimOptions { rounds_max: 2, ..SimOptions::new(self.options.sim.capacity) };
        let device = record.store(sim, 1, image.to_vec());
        let pool = open(device, &self.options).expect("a pool that can be recovered");
        for head in self.heads.iter().filter(|head| !head.is_unsure) {
            let found = match pool.volume(&head.name) {
                Ok(volume) => content(volume),
                Err(_) if self.options.has_faults => continue,
                Err(error) => panic!("{}: {error}", head.name),
            };
            if let Err(violation) = head.harness.model().check_crash(&found) {
                panic!("{}: {violation}", head.name);
            }
        }
        for (key, expected) in &self.snapshots {
            let snapshot = match pool.snapshot(&key.0, &key.1) {
                Ok(snapshot) => snapshot,
                Err(_) if self.options.has_faults => continue,
                Err(error) => panic!("{key:?}: {error}"),
            };
            assert!(content(snapshot) == *expected, "{key:?} differs after a power loss");
        }
        let device = SimBackend::with_image(fast(image.len() as u64), 0, image.to_vec());
        let report = check(&(Arc::new(device) as Arc<dyn Backend>), true, |_| {}).expect("a pool");
        let is_half = |problem: &String| problem.contains("one copy of page");
        let mut problems = report.problems;
        problems.retain(|problem| !self.options.damages || !is_half(problem));
        assert_eq!(problems, Vec::<String>::new());
        for mut images in record.crashes().into_iter().take(3) {
            self.check_image(&images.remove(0), false);
        }
    }
}

fn open(device: Arc<dyn Backend>, options: &StormOptions) -> Result<Pool, PoolError> {
    let options = PoolOptions {
        checkpoint_ns: 30_000,
        walk_pause_ns: 0,
        cached_pages: options.cached_pages,
        index_pages: 1,
        merge_pause_ns: if is_apart(options.kind) { u64::MAX } else { 0 },
        relocates: Some(is_apart(options.kind)),
        idle_ns: 0,
        punches: true,
        rules: options.rules,
    };
    Pool::open(device, options)
}

fn reopen(image: Vec<u8>, options: &StormOptions) -> Pool {
    let device = SimBackend::with_image(fast(image.len() as u64), 0, image);
    open(Arc::new(device), options).expect("a pool that can be recovered")
}
