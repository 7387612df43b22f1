//! Pools of each version of the format, as a power loss left them: what they have is there, in
//! later versions as well, and what is written today is, byte for byte, what an earlier build of
//! the same version wrote.
//!
//! `FATHOM_WRITE_FORMATS=1` writes the image of the newest version anew: only if the version is
//! new, or the same format has other content.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::Backend;
use fathom_sim::{OneRequest, SimBackend};
use fathom_store::{BLOCK, ChangeCursor, Pool, PoolOptions, check};

#[path = "support/image.rs"]
mod image;
mod support;

use support::{blank_of, content, disk, fast};

const DEVICE: u64 = 4 << 20;
/// The leaf of a map describes so many bytes.
const LEAF: u64 = 2 << 20;
const LIMIT: Duration = Duration::from_secs(9);
const NEWEST: u32 = 4;

/// The contents of volumes, and of snapshots, which have names such as `web@monday`.
type Contents = BTreeMap<String, Vec<u8>>;

/// A pool, and what it has to have.
struct Life {
    device: Arc<SimBackend>,
    pool: Pool,
    contents: Contents,
}

fn open(device: &Arc<SimBackend>) -> Pool {
    // Nothing depends on the host's time.
    let options = PoolOptions {
        checkpoint_ns: u64::MAX,
        walk_pause_ns: u64::MAX,
        merge_pause_ns: u64::MAX,
        relocates: Some(false),
        punches: false,
        ..PoolOptions::default()
    };
    Pool::open(Arc::clone(device) as Arc<dyn Backend>, options).expect("a sound pool")
}

fn device(image: Vec<u8>) -> Arc<SimBackend> {
    Arc::new(SimBackend::with_image(fast(image.len() as u64), 1, image))
}

/// Blocks with numbers from `first` on.
fn blocks(first: u64, count: u64) -> Vec<u8> {
    (first..first + count).flat_map(|number| number.to_le_bytes().repeat(512)).collect()
}

impl Life {
    fn create(&mut self, name: &str, size: u64, domain: &str) {
        self.pool.create_volume_in(name, size, domain).unwrap();
        self.contents.insert(name.into(), vec![0; size as usize]);
    }

    fn queue(&self, name: &str) -> OneRequest {
        OneRequest::open(&disk(self.pool.volume(name).unwrap()))
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) {
        let mut queue = self.queue(name);
        queue.write(offset, bytes).unwrap();
        queue.flush().unwrap();
        let content = self.contents.get_mut(name).unwrap();
        content[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn zero(&mut self, name: &str, offset: u64, length: u64) {
        self.queue(name).write_zeroes(offset, length).unwrap();
        let content = self.contents.get_mut(name).unwrap();
        content[offset as usize..][..length as usize].fill(0);
    }

    fn snapshot(&mut self, names: &[&str], snapshot: &str, time_s: u64) {
        self.pool.take_snapshot(names, snapshot, time_s).unwrap();
        for name in names {
            self.contents.insert(format!("{name}@{snapshot}"), self.contents[*name].clone());
        }
    }

    /// What happens before the last checkpoint.
    fn begin(version: u32) -> Self {
        let device = device(blank_of(DEVICE));
        let pool = open(&device);
        let mut life = Self { device, pool, contents: Contents::new() };
        life.create("web", 2 * LEAF, "default");
        life.create("db", 64 << 10, "default");
        life.create("key", 32 << 10, "");
        life.write("web", LEAF - 4 * BLOCK, &blocks(1, 8));
        life.write("web", 0, &blocks(100, 3));
        life.write("key", 512, &[7; 1024]);
        // Equal blocks, and a part of a block.
        life.write("db", 0, &blocks(1, 4));
        life.write("db", 5 * BLOCK + 512, &blocks(9, 1)[..1024]);
        life.snapshot(&["web", "db"], "one", 1_000);
        life.pool.hold_snapshot("web", "one", "until the audit").unwrap();
        life.write("web", BLOCK, &blocks(200, 2));
        life.zero("web", LEAF - 3 * BLOCK, 2 * BLOCK);
        life.snapshot(&["web"], "two", 2_000);
        life.pool.clone_snapshot("web", "two", "copy").unwrap();
        life.contents.insert("copy".into(), life.contents["web"].clone());
        life.write("copy", LEAF, &blocks(300, 2));
        life.write("web", 2 * LEAF - BLOCK, &blocks(400, 1));
        life.snapshot(&["web"], "three", 3_000);
        // Two are based on it, so that its set stays.
        life.pool.delete_snapshot("web", "two").unwrap();
        life.contents.remove("web@two");
        life.write("db", 0, &blocks(500, 1));
        life.pool.roll_back("db", "one").unwrap();
        life.contents.insert("db".into(), life.contents["db@one"].clone());
        life.pool.rename_volume("key", "keys").unwrap();
        let keys = life.contents.remove("key").unwrap();
        life.contents.insert("keys".into(), keys);
        life.pool.set_domain("copy", "other").unwrap();
        if version >= 3 {
            life.pool.set_guarantee("keys", 16 << 10).unwrap();
            life.write("keys", 4 * BLOCK, &blocks(550, 2));
        }
        life.pool.save(LIMIT).unwrap();
        life
    }

    /// What happens after it, and is found in the log.
    fn go_on(&mut self, version: u32) {
        self.write("web", 4 * BLOCK, &blocks(600, 2));
        self.write("db", 8 * BLOCK, &blocks(2, 2));
        self.zero("copy", LEAF, BLOCK);
        self.snapshot(&["copy"], "four", 4_000);
        self.pool.hold_snapshot("copy", "four", "in the log").unwrap();
        self.pool.release_snapshot("web", "one").unwrap();
        self.create("new", 16 << 10, "default");
        self.write("new", 0, &blocks(700, 1));
        self.pool.volume("new").unwrap().resize(24 << 10).unwrap();
        self.contents.get_mut("new").unwrap().resize(24 << 10, 0);
        if version >= 3 {
            self.pool.set_guarantee("new", 8 << 10).unwrap();
            self.write("new", BLOCK, &blocks(750, 1));
        }
    }
}

/// The image that a power loss leaves, and what it has, if all that happens is possible in this
/// version of the format.
fn life(version: u32) -> (Vec<u8>, Contents) {
    let mut life = Life::begin(version);
    life.go_on(version);
    (life.device.image(), life.contents)
}

fn file(version: u32) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/formats");
    folder.join(format!("pool-{version}.txt"))
}

fn kept(version: u32) -> Vec<u8> {
    image::from_text(&std::fs::read_to_string(file(version)).unwrap())
}

/// The version of the format that both superblocks, or the latest one, have.
fn versions(image: &[u8]) -> [u32; 2] {
    [8, 4096 + 8].map(|at| u32::from_le_bytes(image[at..at + 4].try_into().unwrap()))
}

fn backend(pool: &Pool, name: &str) -> Arc<dyn Backend> {
    match name.split_once('@') {
        Some((volume, snapshot)) => pool.snapshot(volume, snapshot).unwrap(),
        None => pool.volume(name).unwrap(),
    }
}

/// Checks that a pool has what was written, and nothing else.
fn check_contents(pool: &Pool, contents: &Contents) {
    for (name, expected) in contents {
        assert!(content(backend(pool, name)) == *expected, "{name} differs");
    }
    let snapshots = pool.snapshots().len();
    assert_eq!(pool.volumes().len() + snapshots, contents.len());
    let holds: Vec<_> = pool.snapshots().into_iter().filter_map(|found| found.hold).collect();
    assert_eq!(holds, ["in the log"]);
    let domains: Vec<_> =
        pool.volumes().into_iter().map(|found| (found.name, found.domain)).collect();
    let expected = [
        ("web", "default"),
        ("db", "default"),
        ("keys", ""),
        ("copy", "other"),
        ("new", "default"),
    ];
    assert_eq!(domains, expected.map(|(name, domain)| (name.to_owned(), domain.to_owned())));
    let times: Vec<u64> = pool.snapshots().iter().map(|found| found.time_s).collect();
    assert_eq!(times, [1_000, 1_000, 3_000, 4_000]);
}

fn number(pool: &Pool, name: &str) -> u32 {
    let (volume, snapshot) = name.split_once('@').unwrap();
    let volume = pool.volumes().into_iter().find(|found| found.name == volume).unwrap().id;
    let mut snapshots = pool.snapshots().into_iter();
    snapshots.find(|found| found.volume == volume && found.name == snapshot).unwrap().id
}

/// The blocks that have changed between two snapshots of the volume `web`.
fn changed(pool: &Pool) -> Vec<u64> {
    let (base, target) = (number(pool, "web@one"), number(pool, "web@three"));
    let mut cursor = ChangeCursor::open(&pool.difference(Some(base), target).unwrap(), 0).unwrap();
    let mut found = Vec::new();
    while !cursor.is_done() {
        cursor.step(&mut found).unwrap();
    }
    let blocks = |offset: u64, length: u64| offset / BLOCK..(offset + length) / BLOCK;
    found.into_iter().flat_map(|it| blocks(it.offset, it.length)).collect()
}

/// Checks that nothing is wrong with the pool in an image.
fn check_image(image: Vec<u8>) {
    let report = check(&(device(image) as Arc<dyn Backend>), true, |_| {}).unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
}

/// Opens a kept pool, goes on with it, and opens it once more.
fn go_on_with(version: u32) {
    let image = kept(version);
    assert_eq!(versions(&image), [version; 2]);
    let (_, mut contents) = life(version);
    check_image(image.clone());
    let device = device(image);
    let pool = open(&device);
    assert!(pool.status().recovered.batches > 5, "{:?}", pool.status().recovered);
    check_contents(&pool, &contents);
    let guarantees: Vec<u64> = pool.volumes().iter().map(|found| found.guarantee).collect();
    let expected = if version >= 3 { [0, 0, 16 << 10, 0, 8 << 10] } else { [0; 5] };
    assert_eq!(guarantees, expected);
    let end = 2 * LEAF / BLOCK - 1;
    assert_eq!(changed(&pool), [1, 2, LEAF / BLOCK - 3, LEAF / BLOCK - 2, end]);
    let mut life = Life { device, pool, contents: std::mem::take(&mut contents) };
    life.write("db", 2 * BLOCK, &blocks(800, 2));
    life.write("copy", LEAF, &blocks(900, 1));
    life.pool.save(LIMIT).unwrap();
    let Life { device, pool, contents } = life;
    drop(pool);
    let image = device.image();
    assert!(versions(&image).contains(&NEWEST));
    check_image(image.clone());
    check_contents(&open(&self::device(image)), &contents);
}

#[test]
fn what_is_written_is_what_earlier_builds_wrote() {
    let (image, _) = life(NEWEST);
    if std::env::var_os("FATHOM_WRITE_FORMATS").is_some() {
        std::fs::write(file(NEWEST), image::to_text(&image)).unwrap();
    }
    let kept = kept(NEWEST);
    let differs = (0..image.len()).find(|at| kept.get(*at) != image.get(*at));
    assert_eq!((image.len(), differs), (kept.len(), None), "the first other byte");
}

#[test]
fn pools_of_each_version_are_read_and_go_on() {
    (1..=NEWEST).for_each(go_on_with);
}

#[test]
fn an_image_is_read_as_written() {
    let image = [vec![0; 64], vec![7; 96], vec![1, 2], vec![0; 30]].concat();
    assert_eq!(image::from_text(&image::to_text(&image)), image);
}
