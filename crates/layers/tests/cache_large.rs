//! A large warm cache: requests are served before its tables are loaded.
//!
//! `FATHOM_CACHE_SIZE=100G` sets the size; the file is sparse, but all its blocks are mapped.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_backend::{FileBackend, FileOptions, Memory};
use fathom_block::{Backend, Clock, Disk, DiskOptions, Operation};
use fathom_cache::Policy;
use fathom_layers::Cache;
use fathom_layers::cache::format::{
    BLOCK_BITS, DiskRecord, Owner, PAGE_LENGTH, SlotEntry, Superblock,
};
use fathom_layers::cache::{
    CacheDisk, CacheMark, CacheMode, CacheTimes, CacheVolume, VolumeOptions,
};
use fathom_options::Bytes;
use fathom_persistence::{Identity, Stamp, Superblock as _};
use fathom_reactor::Reactor;

const BLOCK_SIZE: u32 = 16 << 10;
const IDENTITY: Identity = Identity(*b"identity of test");

struct Mark;

impl CacheMark for Mark {
    fn read(&self) -> io::Result<Option<Stamp>> {
        Ok(Some(Stamp { identity: IDENTITY, age: 7 }))
    }

    fn write(&self, _: &Stamp) -> io::Result<()> {
        Ok(())
    }

    fn reject(&self) -> io::Result<()> {
        Ok(())
    }

    fn modified_ns(&self) -> io::Result<u64> {
        Ok(0)
    }
}

/// A cache whose slots all have blocks of one disk.
fn make(path: &std::path::Path, size: u64) -> Superblock {
    let format = Superblock::new(IDENTITY, size, BLOCK_SIZE, 4, 4).unwrap();
    let file = OpenOptions::new().write(true).create_new(true).open(path).unwrap();
    file.set_len(size).unwrap();
    let put = |at: u64, bytes: &[u8]| file.write_all_at(bytes, at).unwrap();
    put(0, &format.encode());
    put(PAGE_LENGTH as u64, &format.encode());
    let owner = Owner::new("disk", "image").unwrap();
    let record = DiskRecord { owner, generation: 7, region_shift: 24, ..DiskRecord::default() };
    put(format.page_offset(0, 0), &format.disk_bytes(0, 0, &record));
    let sums = [0; 4];
    // Each shard has blocks of its own: the index refuses others.
    let probe = CacheVolume::open(
        Arc::new(Memory::open(size).unwrap()),
        &VolumeOptions { is_kept: false, identity: Some(IDENTITY), ..options() },
    );
    let probe = probe.unwrap();
    let mut by_shard: HashMap<usize, Vec<u64>> = HashMap::new();
    let mut next = 0;
    let mut block_for = |slot: u32| loop {
        let shard = probe.shard_of_slot(slot);
        if let Some(block) = by_shard.get_mut(&shard).and_then(Vec::pop) {
            return block;
        }
        by_shard.entry(probe.shard_of_block(1, next)).or_default().push(next);
        next += 1;
    };
    for page in format.table_first()..format.pages() {
        let first = (page - format.table_first()) * format.entries_per_page();
        let slots = first..(first + format.entries_per_page()).min(format.slots);
        let entries = slots.map(|slot| {
            let key = 1 << BLOCK_BITS | block_for(slot);
            Some(SlotEntry { key, valid: 0b1111, class: 3, sums: &sums })
        });
        put(format.page_offset(page, 0), &format.table_bytes(page, 0, entries));
    }
    file.sync_all().unwrap();
    format
}

fn options() -> VolumeOptions {
    VolumeOptions {
        identity: None,
        block_size: BLOCK_SIZE,
        disks: 4,
        bitmap_pages: 4,
        is_kept: true,
        policy: Policy::Auto,
        times: CacheTimes::default(),
    }
}

#[test]
fn a_warm_cache_serves_before_its_tables_are_loaded() {
    let size = std::env::var("FATHOM_CACHE_SIZE")
        .map_or(1 << 30, |size| size.parse::<Bytes>().expect("a size").0);
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = folder.path().join("cache");
    let format = make(&path, size);

    let begun = Instant::now();
    let file = FileOptions { path, foreign_allowed: true, ..FileOptions::default() };
    let backend: Arc<dyn Backend> = Arc::new(FileBackend::open(&file).unwrap());
    let volume = Arc::new(CacheVolume::open(backend, &options()).unwrap());
    let disk = CacheDisk {
        name: "disk".into(),
        home: "image".into(),
        capacity: 1 << 40,
        expected: Some(7),
        modified_ns: None,
        generation: 8,
        log: Identity::NONE,
        changes: Vec::new(),
        region_shift: 24,
    };
    let cache = Cache::new(&volume, &disk, CacheMode::WriteThrough, Arc::new(Mark)).unwrap();
    let home = Arc::new(Memory::open(1 << 40).unwrap());
    let layers = vec![Arc::new(cache.clone()) as _];
    let disk = Disk::new(DiskOptions::default(), layers, home).unwrap();
    let mut reactor = Reactor::new(64).unwrap();
    let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
    let mut request = stack.request();
    (request.operation, request.length) = (Operation::Read, 4096);
    request.buffers.allocate(4096);
    stack.submit(request, &mut reactor);
    let first = loop {
        if let Some((request, outcome)) = stack.completed() {
            outcome.unwrap();
            stack.recycle(request);
            break begun.elapsed();
        }
        stack.wait(&mut reactor, Some(Duration::from_millis(1))).unwrap();
    };
    assert!(!cache.status().is_loaded, "the first request does not wait for the tables");
    let mut longest = Duration::ZERO;
    while !cache.status().is_loaded {
        let round = Instant::now();
        stack.wait(&mut reactor, Some(Duration::from_millis(1))).unwrap();
        longest = longest.max(round.elapsed());
    }
    let loaded = begun.elapsed();
    let status = cache.status();
    println!(
        "{} blocks: the first request after {first:.1?}, loaded after {loaded:.1?}, longest round \
         {longest:.1?}",
        status.mapped
    );
    assert_eq!(status.mapped, u64::from(format.slots));
    stack.finish(&mut reactor, Duration::from_secs(10)).unwrap();
}
