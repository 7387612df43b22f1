//! The table against a model that keeps everything, and by hand.

use std::collections::HashMap;

use fathom_insight::{Facts, Kind, Name, Names};
use fathom_introspect::{FileState, PresentFile};

use super::groups::{Cause, GroupBy, Lives};
use super::table::{BLOCK, Table, Write};

const SECOND: u64 = 1_000_000_000;

fn facts(inode: u64) -> Facts {
    Facts {
        kind: Kind::Data,
        inode,
        inode_address: 0x1000 * inode,
        device: Name(7),
        ..Facts::default()
    }
}

struct Scene {
    table: Table,
    names: Names,
    now_ns: u64,
    files: HashMap<u64, FileState>,
}

impl Scene {
    fn new(blocks: usize) -> Self {
        let table = Table::new(blocks, 5);
        Self { table, names: Names::default(), now_ns: SECOND, files: HashMap::new() }
    }

    /// Writes blocks of a file, which have been dirty for `dirty_ns`.
    fn write(&mut self, inode: u64, page: u64, block: u64, count: u64, dirty_ns: u64) {
        let present = match self.files.get(&inode) {
            Some(FileState::Present(present)) => *present,
            _ => PresentFile::default(),
        };
        let size = present.size.max((page + count) * BLOCK);
        let present = PresentFile { size, ..present };
        self.files.insert(inode, FileState::Present(present));
        let write = Write {
            offset: block * BLOCK,
            length: count * BLOCK,
            facts: &facts(inode),
            file_offset: Some(page * BLOCK),
            file: Some(present),
            born_ns: self.now_ns - dirty_ns,
            now_ns: self.now_ns,
        };
        self.table.write(&write, &self.names);
        self.table.validate();
    }

    fn plain(&mut self, kind: Kind, block: u64, count: u64) {
        let write = Write {
            offset: block * BLOCK,
            length: count * BLOCK,
            facts: &Facts { kind, ..Facts::default() },
            file_offset: None,
            file: None,
            born_ns: self.now_ns,
            now_ns: self.now_ns,
        };
        self.table.write(&write, &self.names);
        self.table.validate();
    }

    fn pass(&mut self, seconds: u64) {
        self.now_ns += seconds * SECOND;
    }

    fn check(&mut self) {
        let mut from = Some(0);
        while let Some(place) = from {
            let look = |_, number| self.files.get(&number).copied();
            from = self.table.check(look, place, 3, self.now_ns);
            self.table.validate();
        }
    }

    fn lives(&self, by: GroupBy) -> Lives {
        let report = self.table.groups.report();
        report.into_iter().find(|(found, _)| *found == by).map(|(_, lives)| lives).unwrap()
    }

    fn died(&self, cause: Cause) -> u64 {
        self.table.groups.all().died[cause as usize] / BLOCK
    }

    /// The seconds below which half of the deaths are.
    fn median(&self) -> f64 {
        self.table.groups.all().lifetimes.percentile(50.0) as f64 / SECOND as f64
    }
}

#[test]
fn deleted_files_die_between_two_checks() {
    let mut scene = Scene::new(1000);
    // The content was made six seconds before the disk got it.
    scene.pass(10);
    scene.write(12, 0, 100, 80, 6 * SECOND);
    scene.pass(23);
    scene.check();
    assert_eq!(scene.died(Cause::Deleted), 0);
    scene.files.insert(12, FileState::Deleted);
    scene.pass(2);
    scene.check();
    assert_eq!(scene.died(Cause::Deleted), 80);
    assert!((29.9..31.0).contains(&scene.median()), "{}", scene.median());
    // The naive view believes that all of it lives, until the blocks are used again.
    assert_eq!(scene.table.groups.all().naive.count(), 0);
    scene.pass(100);
    scene.write(13, 0, 100, 80, 0);
    let all = scene.table.groups.all();
    assert_eq!(all.naive.count(), 80 * BLOCK);
    assert!(all.naive.percentile(50.0) >= 125 * SECOND);
    assert_eq!(scene.died(Cause::Reused), 0);
    assert_eq!(scene.table.living(), 80 * BLOCK);
}

#[test]
fn files_shrink_and_are_rewritten_elsewhere() {
    let mut scene = Scene::new(1000);
    scene.write(12, 0, 100, 10, 0);
    scene.pass(5);
    // A file system that never overwrites in place.
    scene.write(12, 2, 300, 3, 0);
    assert_eq!(scene.died(Cause::Overwritten), 3);
    assert!((5.0..5.2).contains(&scene.median()));
    scene.files.insert(
        12,
        FileState::Present(PresentFile { size: 4 * BLOCK + 1, ..PresentFile::default() }),
    );
    scene.pass(1);
    scene.check();
    assert_eq!(scene.died(Cause::Truncated), 5);
    assert_eq!(scene.table.living(), 5 * BLOCK);
    // Another file with the same number.
    let other = PresentFile { generation: 9, size: 0, tree: 0 };
    scene.files.insert(12, FileState::Present(other));
    scene.pass(1);
    scene.write(12, 0, 500, 1, 0);
    assert_eq!(scene.died(Cause::Deleted), 5);
    assert_eq!(scene.table.living(), BLOCK);
}

#[test]
fn blocks_die_without_a_file_too() {
    let mut scene = Scene::new(1000);
    scene.plain(Kind::Journal, 0, 8);
    scene.pass(2);
    scene.plain(Kind::Journal, 0, 8);
    assert_eq!(scene.died(Cause::Overwritten), 8);
    let journal = scene.lives(GroupBy::Kind(Kind::Journal));
    assert_eq!((journal.born, journal.naive.count()), (16 * BLOCK, 8 * BLOCK));
    scene.write(12, 0, 20, 4, 0);
    // The block belongs to another file, and the first one is unknown to have let it go.
    scene.write(13, 0, 20, 1, 0);
    assert_eq!(scene.died(Cause::Reused), 1);
    // Only whole blocks are discarded.
    scene.table.discard(21 * BLOCK - 1, 2 * BLOCK, scene.now_ns);
    assert_eq!(scene.died(Cause::Discarded), 1);
    scene.table.discard(0, u64::MAX, scene.now_ns);
    scene.table.discard(BLOCK, u64::MAX - BLOCK, scene.now_ns);
    scene.table.validate();
    assert_eq!((scene.table.living(), scene.table.counts()), (0, (0, 0)));
}

#[test]
fn a_file_that_left_memory_is_found_again() {
    let mut scene = Scene::new(1000);
    scene.write(12, 0, 20, 4, 0);
    let present = scene.files.insert(12, FileState::Gone);
    scene.pass(1);
    scene.check();
    scene.files.insert(12, FileState::Deleted);
    scene.check();
    // Nobody looks at memory that may be another object's.
    assert_eq!(scene.table.living(), 4 * BLOCK);
    scene.files.insert(12, present.unwrap());
    scene.write(12, 9, 40, 1, 0);
    scene.files.insert(12, FileState::Deleted);
    scene.pass(1);
    scene.check();
    assert_eq!((scene.table.living(), scene.died(Cause::Deleted)), (0, 5));
}

#[test]
fn a_sample_stands_for_all_blocks() {
    let mut scene = Scene::new(2000);
    for inode in 1..=200 {
        scene.write(inode, 0, inode * 1000, 500, 0);
    }
    let (blocks, files) = scene.table.counts();
    assert!(blocks == 2000 && files > 195, "{blocks} {files}");
    let share = scene.table.share();
    assert!((0.018..0.022).contains(&share), "{share}");
    scene.pass(10);
    for inode in 1..=100 {
        scene.files.insert(inode, FileState::Deleted);
    }
    scene.check();
    let all = 100_000.0;
    let born = scene.table.groups.all().born as f64 / BLOCK as f64;
    let died = scene.died(Cause::Deleted) as f64;
    assert!((0.95 * all..1.05 * all).contains(&born), "{born}");
    assert!((0.45 * all..0.55 * all).contains(&died), "{died}");
}

/// What a model knows of a block of a file: when it was made.
type Model = HashMap<(u64, u64), u64>;

/// Any sequence of writes, deletions, truncations and discards gives what a model gives that keeps
/// everything by file, for a file system that never overwrites in place and for one that does.
#[test]
fn any_sequence_agrees_with_a_model() {
    for seed in 0..300_u64 {
        let mut random = fastrand::Rng::with_seed(seed);
        let is_in_place = seed % 2 == 0;
        let mut scene = Scene::new(100_000);
        let mut model: Model = HashMap::new();
        let mut places: HashMap<(u64, u64), u64> = HashMap::new();
        let mut expected = [0_u64; 5];
        let mut next = 0;
        for _ in 0..120 {
            scene.pass(random.u64(0..4));
            let inode = random.u64(1..6);
            match random.u8(0..10) {
                0 => {
                    scene.files.insert(inode, FileState::Deleted);
                    let before = model.len();
                    model.retain(|(of, _), _| *of != inode);
                    expected[Cause::Deleted as usize] += (before - model.len()) as u64;
                    scene.check();
                    places.retain(|(of, _), _| *of != inode);
                }
                1 => {
                    let Some(FileState::Present(present)) = scene.files.get_mut(&inode) else {
                        continue;
                    };
                    let pages = random.u64(0..8);
                    present.size = present.size.min(pages * BLOCK);
                    let before = model.len();
                    model.retain(|(of, page), _| *of != inode || *page < pages);
                    expected[Cause::Truncated as usize] += (before - model.len()) as u64;
                    scene.check();
                }
                _ => {
                    let (page, count) = (random.u64(0..10), random.u64(1..4));
                    for page in page..page + count {
                        let place = *places
                            .entry((inode, page))
                            .and_modify(|place| {
                                if !is_in_place {
                                    next += 1;
                                    *place = next;
                                }
                            })
                            .or_insert_with(|| {
                                next += 1;
                                next
                            });
                        scene.write(inode, page, place, 1, 0);
                        if model.insert((inode, page), scene.now_ns).is_some() {
                            expected[Cause::Overwritten as usize] += 1;
                        }
                    }
                }
            }
            let died = scene.table.groups.all().died.map(|bytes| bytes / BLOCK);
            assert_eq!(died, expected, "seed {seed}");
            assert_eq!(scene.table.living() / BLOCK, model.len() as u64, "seed {seed}");
        }
    }
}
