//! Reads arbitrary bytes as parts of a pool, and as changes of the bytes of a whole pool: for the
//! fuzzer, and for tests with seeded inputs.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fathom_block::{
    Backend, BackendContext, BackendOpenContext, BackendProblem, BackendQueue, Capabilities,
    ErrorKind, Geometry, Operation, Request, StoreAccess,
};
use fathom_persistence::bytes::{put, u32_at, u64_at};
use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, Superblock as _, seal};
use fathom_reactor::Event;
use parking_lot::Mutex;

use crate::batch::BatchHeader;
use crate::catalogue::{Catalogue, Change};
use crate::layout::{BLOCK_BYTES, Layout, TABLE_ENTRIES, TABLE_ENTRY};
use crate::paged::Paged;
use crate::pages::TableEntry;
use crate::record::CheckpointRecord;
use crate::seal::Key;
use crate::superblock::PoolSuperblock;
use crate::transfer::fuzz_stream;
use crate::{ChangeCursor, MakeOptions, Pool, PoolOptions, check, make};

const IDENTITY: Identity = Identity(*b"identity of fuzz");
const KEY: Key = Key([7; 32]);
/// The size of the pool, in bytes.
const CAPACITY: usize = 1 << 20 | 1 << 18;
/// The size of its volumes.
const SIZE: u64 = (4 << 20) + 512;
/// The time of a request of a guest.
const LIMIT: Duration = Duration::from_secs(2);

/// Reads `data` as a part of a pool, or changes bytes of a pool as it says, corrects all checksums
/// and codes, and uses the pool. Panics if a reader breaks a promise.
pub fn fuzz_store(data: &[u8]) {
    let Some((how, data)) = data.split_first() else { return };
    match how % 8 {
        0 => fuzz_header(data),
        1 => {
            if let Some(record) = CheckpointRecord::decode(data, 100, 3) {
                assert_eq!(CheckpointRecord::decode(&record.encode(), 100, 3), Some(record));
            }
        }
        2 => fuzz_change(data),
        3 => {
            let mut copy = data.to_vec();
            copy.resize(SUPERBLOCK_LENGTH, 0);
            put(&mut copy, 0, &PoolSuperblock::MAGIC);
            put(&mut copy, 8, &PoolSuperblock::NEWEST.to_le_bytes());
            seal(&mut copy);
            if let Ok(superblock) = PoolSuperblock::select(&[&copy[..], &copy[..]].concat()) {
                assert_ne!(superblock.layout.block(superblock.layout.places()), 0);
                let _ = superblock.layout.segments_on(u64::MAX);
            }
        }
        4 => {
            let mut copies = data.to_vec();
            copies.resize(2 * BLOCK_BYTES, 0);
            copies.chunks_exact_mut(BLOCK_BYTES).for_each(|copy| seal_page(IDENTITY, copy));
            let index = u32_at(&copies, 8).min(3);
            let latest = u64_at(&copies, BLOCK_BYTES);
            let _ = Paged::new(100, 4).load(IDENTITY, latest, index, &copies, true);
        }
        5 => fuzz_stream(data),
        _ => {
            fuzz_pool(data);
        }
    }
}

fn fuzz_header(data: &[u8]) {
    let mut block = data.to_vec();
    block.resize(BLOCK_BYTES, 0);
    seal_header(IDENTITY, &KEY, &mut block);
    if let Some(header) = BatchHeader::decode(IDENTITY, &KEY, None, &block) {
        let mut again = vec![0; BLOCK_BYTES];
        header.encode(IDENTITY, &KEY, &mut again);
        assert_eq!(BatchHeader::decode(IDENTITY, &KEY, None, &again), Some(header));
    }
}

fn fuzz_change(data: &[u8]) {
    let mut catalogue = Catalogue::new();
    for data in data.chunks(64) {
        let Some(change) = Change::decode(data) else { continue };
        assert_eq!(Change::decode(&change.encode()), Some(change.clone()));
        if catalogue.apply(&change).is_none() {
            return;
        }
    }
}

/// Gives a header its magic, version, identity and code.
fn seal_header(identity: Identity, key: &Key, block: &mut [u8]) {
    put(block, 0, b"FATHOMBH");
    let version = 1 + u32::from(block[8] % 2 == 0);
    put(block, 8, &version.to_le_bytes());
    put(block, 16, &identity.0);
    if let Some(code) = BatchHeader::sealed(block).map(|bytes| key.code(bytes)) {
        put(block, BLOCK_BYTES - 16, &code.0);
    }
}

/// Gives a two-copy page its checksum.
fn seal_page(identity: Identity, page: &mut [u8]) {
    let start = crc32c::crc32c_append(crc32c::crc32c(&identity.0), &page[..12]);
    let checksum = crc32c::crc32c_append(start, &page[16..]);
    put(page, 12, &checksum.to_le_bytes());
}

fn block(image: &[u8], number: u64) -> Option<&[u8]> {
    image.get(number.min(1 << 36) as usize * BLOCK_BYTES..)?.get(..BLOCK_BYTES)
}

fn block_mut(image: &mut [u8], number: u64) -> Option<&mut [u8]> {
    image.get_mut(number.min(1 << 36) as usize * BLOCK_BYTES..)?.get_mut(..BLOCK_BYTES)
}

/// A pool with volumes, snapshots, and batches after its last checkpoint; and the blocks in it that
/// are not data.
fn base() -> &'static (Vec<u8>, Vec<u64>) {
    static BASE: OnceLock<(Vec<u8>, Vec<u64>)> = OnceLock::new();
    BASE.get_or_init(|| {
        let memory = Arc::new(Memory(Arc::new(Mutex::new(vec![0; CAPACITY]))));
        let device = Arc::clone(&memory) as Arc<dyn Backend>;
        let options =
            MakeOptions { capacity_max: 1, segment_blocks: 16, identity: IDENTITY, key: KEY.0 };
        make(&device, &options, |_| {}).expect("room");
        let pool = Pool::open(device, PoolOptions::default()).expect("a pool");
        for name in ["a", "b"] {
            pool.create_volume(name, SIZE).expect("room");
            let volume = pool.volume(name).expect("a volume");
            let mut access = StoreAccess::open(&volume).expect("a queue");
            for round in 0..3_u8 {
                for at in [0, 2 << 20, (4 << 20) - 4096] {
                    let mut bytes = vec![round + 1; 8192 - 4096 * usize::from(round / 2)];
                    let done = access.carry_out(Operation::Write, at & !4095, &mut bytes);
                    done.unwrap_or_default();
                }
                let _ = pool.take_snapshot(&[name], ["s", "t", "u"][usize::from(round)], 1);
                if round < 2 {
                    pool.save(LIMIT).expect("a checkpoint");
                }
            }
            access.carry_out(Operation::Discard, 4096, &mut [0; 4096]).expect("a discard");
        }
        pool.delete_snapshot("a", "t").expect("a snapshot");
        // These are in no checkpoint.
        let volume = pool.volume("b").expect("a volume");
        let mut access = StoreAccess::open(&volume).expect("a queue");
        for round in 0..4 {
            let done =
                access.carry_out(Operation::Write, round * 4096, &mut [9 + round as u8; 4096]);
            done.expect("room");
        }
        let image = memory.0.lock().clone();
        let layout = layout(&image).expect("a superblock").layout;
        let is_not_data = |number: &u64| {
            let Some(bytes) = block(&image, *number) else { return false };
            let word = u64_at(bytes, 0);
            let is_map = bytes.chunks_exact(8).skip(1).step_by(7).all(|word| word == [0; 8]);
            *number < layout.first_segment() && bytes.iter().any(|byte| *byte != 0)
                || bytes.starts_with(b"FATHOMBH")
                || is_map && word != 0
        };
        let blocks = (0..(CAPACITY / BLOCK_BYTES) as u64).filter(is_not_data).collect();
        (image, blocks)
    })
}

/// The superblock of an image.
fn layout(image: &[u8]) -> Option<PoolSuperblock> {
    PoolSuperblock::select(&image[..2 * SUPERBLOCK_LENGTH]).ok()
}

/// Corrects the codes and checksums of a pool.
fn reseal(image: &mut [u8], layout: &Layout) {
    for number in layout.first_segment()..(CAPACITY / BLOCK_BYTES) as u64 {
        let Some(bytes) = block_mut(image, number) else { break };
        if bytes.starts_with(b"FATHOMBH") {
            seal_header(IDENTITY, &KEY, bytes);
        }
    }
    for number in layout.page_table()..layout.page_table() + 2 * u64::from(layout.table_pages) {
        for index in 0..TABLE_ENTRIES as usize {
            let at = 16 + index * TABLE_ENTRY;
            let Some(page) = block(image, number) else { break };
            let (found, _) = TableEntry::blocks_of(u64_at(page, at));
            let Some(target) = block(image, found) else { continue };
            let checksum = crc32c::crc32c(target);
            if let Some(page) = block_mut(image, number).filter(|page| u64_at(page, at) != 0) {
                put(page, at + 12, &checksum.to_le_bytes());
            }
        }
    }
    for number in layout.space_map()..layout.page_table() + 2 * u64::from(layout.table_pages) {
        let page = block_mut(image, number).filter(|page| page.iter().any(|byte| *byte != 0));
        if let Some(page) = page {
            seal_page(IDENTITY, page);
        }
    }
    for start in [0, SUPERBLOCK_LENGTH] {
        let first = layout.record(u64_at(image, start + 64)) as usize * BLOCK_BYTES;
        let length = u32_at(image, start + 104) as usize;
        let code = image.get(first..).and_then(|bytes| bytes.get(..length)).map(|b| KEY.code(b));
        if let Some(code) = code {
            put(image, start + 112, &code.0);
        }
        seal(&mut image[start..start + SUPERBLOCK_LENGTH]);
    }
}

/// Changes bytes of a pool, and uses it. Ten bytes of `data` say which block, where, and what.
/// Returns whether it could be opened.
fn fuzz_pool(data: &[u8]) -> bool {
    let (image, blocks) = base();
    let mut image = image.clone();
    let layout = layout(&image).expect("a superblock").layout;
    for change in data.chunks_exact(10).take(16) {
        let number = blocks[usize::from(change[0]) % blocks.len()];
        let Some(bytes) = block_mut(&mut image, number) else { continue };
        let at = usize::from(u16::from_le_bytes([change[1], change[2] & 15]));
        // Words are aligned, and most of what is not zero lies at the beginning.
        let at = if change[2] & 16 == 0 { at & 0x78 } else { at & !3 }.min(BLOCK_BYTES - 8);
        match change[2] >> 5 {
            0..=2 => put(bytes, at, &u64::from(change[3] % 40).to_le_bytes()),
            3 => put(bytes, at, &u32::from(change[3]).to_le_bytes()),
            4 => bytes[at] ^= change[3],
            5 => bytes[at..].fill(change[3]),
            // A page that refers to a page many times.
            6 => {
                for word in bytes.chunks_exact_mut(8) {
                    word.copy_from_slice(&u64::from(change[3] % 24).to_le_bytes());
                }
            }
            _ => bytes[at..at + 7].copy_from_slice(&change[3..10]),
        }
    }
    reseal(&mut image, &layout);
    use_pool(image)
}

/// Checks a pool, opens it, reads and changes its volumes.
fn use_pool(image: Vec<u8>) -> bool {
    let memory = Arc::new(Memory(Arc::new(Mutex::new(image))));
    let device = Arc::clone(&memory) as Arc<dyn Backend>;
    if let Ok(report) = check(&device, true, |_| {}) {
        assert!(report.map_pages < 2048 && report.blocks <= (CAPACITY / BLOCK_BYTES) as u64);
    }
    let options = PoolOptions { walk_pause_ns: 0, checkpoint_ns: 0, ..PoolOptions::default() };
    let Ok(pool) = Pool::open(device, options) else { return false };
    for snapshot in pool.snapshots().into_iter().take(4) {
        let Some(of) = pool.volumes().into_iter().find(|found| found.id == snapshot.volume) else {
            continue;
        };
        if let Ok(found) = pool.snapshot(&of.name, &snapshot.name) {
            use_volume(&found, false);
        }
    }
    for volume in pool.volumes().into_iter().take(4) {
        if let Ok(found) = pool.volume(&volume.name) {
            use_volume(&found, true);
        }
    }
    compare_all(&pool);
    let _ = pool.save(LIMIT);
    assert!(pool.status().memory_bytes < 64 << 20);
    true
}

/// Compares volumes and snapshots with each other.
fn compare_all(pool: &Pool) {
    let volumes = pool.volumes().into_iter().map(|volume| volume.id);
    let numbers: Vec<u32> =
        volumes.chain(pool.snapshots().into_iter().map(|snapshot| snapshot.id)).take(4).collect();
    for base in &numbers {
        for target in &numbers {
            let Ok(difference) = pool.difference(Some(*base), *target) else { continue };
            let Ok(mut cursor) = ChangeCursor::open(&difference, 0) else { continue };
            let mut changes = Vec::new();
            for _ in 0..20 {
                if cursor.is_done() || cursor.step(&mut changes).is_err() {
                    break;
                }
            }
            let ends =
                changes.windows(2).all(|pair| pair[0].offset + pair[0].length <= pair[1].offset);
            assert!(ends, "changes are in order");
        }
    }
}

fn use_volume(volume: &Arc<dyn Backend>, may_write: bool) {
    let Ok(mut access) = StoreAccess::open_within(volume, LIMIT) else { return };
    let capacity = volume.capacity();
    for at in [0, 2 << 20, capacity.saturating_sub(64 << 10) / 4096 * 4096] {
        let length = capacity.saturating_sub(at).min(64 << 10);
        if length == 0 {
            continue;
        }
        let _ = access.read(at, length);
        if may_write {
            let _ = access.carry_out(Operation::Write, at, &mut [9; 512]);
            let _ = access.carry_out(Operation::Discard, at, &mut vec![0; length as usize]);
        }
    }
    if may_write {
        let long = capacity.min(4 << 20);
        let _ = access.carry_out(Operation::WriteZeroes, 0, &mut vec![0; long as usize]);
        let _ = access.carry_out(Operation::Flush, 0, &mut []);
    }
}

/// A device in memory.
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Backend for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn capacity(&self) -> u64 {
        CAPACITY as u64
    }

    fn geometry(&self) -> Geometry {
        Geometry::default()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::ALL
    }

    fn open_queue(&self, _: &mut BackendOpenContext<'_>) -> io::Result<Box<dyn BackendQueue>> {
        Ok(Box::new(Self(Arc::clone(&self.0))))
    }

    fn resize(&self, _: u64) -> Result<(), ErrorKind> {
        Err(ErrorKind::Unsupported)
    }

    fn problems(&self) -> Vec<BackendProblem> {
        Vec::new()
    }

    fn losses(&self) -> u64 {
        0
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        Ok(())
    }
}

impl BackendQueue for Memory {
    fn submit(&mut self, mut request: Box<Request>, context: &mut BackendContext<'_>) {
        let mut bytes = self.0.lock();
        let start = request.offset as usize;
        let range = start..start + request.length as usize;
        match request.operation {
            Operation::Read => {
                request.buffers.copy_from(0, &bytes[range]);
            }
            Operation::Write => {
                request.buffers.copy_to(0, &mut bytes[range]);
            }
            Operation::Discard | Operation::WriteZeroes => bytes[range].fill(0),
            Operation::Flush | Operation::GetId | Operation::Extents => {}
        }
        drop(bytes);
        context.complete(request, Ok(()));
    }

    fn event(&mut self, _: &Event, _: &mut BackendContext<'_>) {}

    fn advance(&mut self, _: &mut BackendContext<'_>) {}
}

#[cfg(test)]
mod tests {
    use fathom_sim::each_seed;

    use super::*;

    #[test]
    fn no_bytes_break_a_reader() {
        let (mut opened, mut cases) = (0, 0);
        each_seed(2000, |seed| {
            let mut random = fastrand::Rng::with_seed(seed);
            let length = [11, 41, 160, 4000][seed as usize / 8 % 4];
            let mut data: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
            data[0] = seed as u8;
            if seed % 8 < 3 {
                // Small numbers reach further.
                data[1..].iter_mut().for_each(|byte| *byte %= 7);
            }
            let start = std::time::Instant::now();
            match data[0] % 8 {
                0..=5 => fuzz_store(&data),
                _ => opened += u32::from(fuzz_pool(&data[1..])),
            }
            let time = start.elapsed();
            assert!(time < LIMIT, "seed {seed} took {time:?}");
            cases += 1;
        });
        assert!(cases < 100 || opened > cases / 12, "{opened} of {cases}");
    }

    #[test]
    fn the_pool_that_is_changed_is_sound() {
        let (mut image, _) = base().clone();
        let layout = layout(&image).unwrap().layout;
        reseal(&mut image, &layout);
        let device = Arc::new(Memory(Arc::new(Mutex::new(image)))) as Arc<dyn Backend>;
        let report = check(&device, true, |_| {}).unwrap();
        assert_eq!(report.problems, Vec::<String>::new());
        assert!(report.recovered.batches > 2 && report.map_pages > 8, "{report:?}");
    }
}
