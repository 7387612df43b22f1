//! Makes a pool on an empty device.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::Arc;

use fathom_block::{Backend, Operation, StoreAccess};
use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, Superblock as _};

use crate::catalogue::Catalogue;
use crate::error::PoolError;
use crate::layout::{BLOCK, BLOCK_BYTES, Layout, PAYLOAD, SEGMENT_BLOCKS};
use crate::paged::encode;
use crate::record::CheckpointRecord;
use crate::seal::Key;
use crate::superblock::PoolSuperblock;

/// The pages of a table that are written at once.
const PAGES_AT_ONCE: u32 = 128;

/// How a pool is made.
#[derive(Clone, Copy, Debug)]
pub struct MakeOptions {
    /// The pool can later grow to this size, in bytes. 0 is 4 times the size of the device.
    pub capacity_max: u64,
    /// The blocks of a segment.
    pub segment_blocks: u32,
    /// The identity of the pool and the key of its headers, drawn at random.
    pub identity: Identity,
    /// The key of its headers.
    pub key: [u8; 32],
}

impl MakeOptions {
    /// The usual options, with a new identity and key.
    ///
    /// # Errors
    /// If the host has no random numbers.
    pub fn draw() -> io::Result<Self> {
        let mut key = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        let identity = Identity::draw()?;
        Ok(Self { capacity_max: 0, segment_blocks: SEGMENT_BLOCKS, identity, key })
    }
}

/// Makes a pool on a device whose first blocks are zeroes. `progress` is called with the share that
/// has been done, from 0 to 1.
///
/// # Errors
/// If the device has other content, is too small, or fails.
pub fn make(
    device: &Arc<dyn Backend>,
    options: &MakeOptions,
    mut progress: impl FnMut(f64),
) -> Result<Layout, PoolError> {
    let capacity = device.capacity();
    let capacity_max =
        if options.capacity_max == 0 { capacity.saturating_mul(4) } else { options.capacity_max };
    let layout = Layout::new(capacity, capacity_max, options.segment_blocks)
        .or_else(|| Layout::new(capacity, capacity, options.segment_blocks))
        .ok_or(PoolError::BadSize(capacity))?;
    let mut access = StoreAccess::open(device)?;
    let start = access.read(0, 2 * SUPERBLOCK_LENGTH as u64)?;
    if start.iter().any(|byte| *byte != 0) {
        return Err(PoolError::NotBlank);
    }
    let tables =
        [(layout.space_map(), layout.space_pages), (layout.page_table(), layout.table_pages)];
    let all = f64::from(layout.space_pages + layout.table_pages);
    let mut done = 0.0;
    for (first, pages) in tables {
        for start in (0..pages).step_by(PAGES_AT_ONCE as usize) {
            let end = (start + PAGES_AT_ONCE).min(pages);
            let mut bytes = vec![0; 2 * (end - start) as usize * BLOCK_BYTES];
            for (index, copies) in (start..end).zip(bytes.chunks_exact_mut(2 * BLOCK_BYTES)) {
                let page = encode(options.identity, 0, index, &[0; PAYLOAD]);
                copies[..BLOCK_BYTES].copy_from_slice(&page[..]);
            }
            let offset = (first + 2 * u64::from(start)) * BLOCK;
            access.carry_out(Operation::Write, offset, &mut bytes)?;
            done += f64::from(end - start);
            progress(done / all);
        }
    }
    let key = Key(options.key);
    let record =
        CheckpointRecord { pages: 1, catalogue: Catalogue::new(), ..CheckpointRecord::default() }
            .encode();
    for number in 0..2 {
        let mut bytes = record.clone();
        bytes.resize(record.len().next_multiple_of(BLOCK_BYTES), 0);
        access.carry_out(Operation::Write, layout.record(number) * BLOCK, &mut bytes)?;
    }
    access.carry_out(Operation::Flush, 0, &mut [])?;
    for number in 0..2 {
        let superblock = PoolSuperblock {
            version: PoolSuperblock::NEWEST,
            identity: options.identity,
            key,
            number,
            generation: 1,
            layout,
            record: (record.len() as u32, key.code(&record)),
        };
        access.carry_out(Operation::Write, superblock.offset(), &mut superblock.encode())?;
        access.carry_out(Operation::Flush, 0, &mut [])?;
    }
    Ok(layout)
}
