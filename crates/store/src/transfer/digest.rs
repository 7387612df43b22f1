//! The digest of a snapshot: the same in each pool that has the same content.
//!
//! It is made of the map alone: a hash of the size, and of the number and the checksum of each
//! block. Blocks of zeroes count as holes. It takes no read of the content.

use fathom_block::StoreAccess;

use super::TransferError;
use super::format::HASH;
use crate::difference::ChangeCursor;
use crate::entry::MapEntry;
use crate::error::PoolError;
use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::pages::Fault;
use crate::pool::Pool;
use crate::recover::complete;

/// The most blocks that are looked up at once.
const STEP: u64 = 1 << 12;

/// The digest of a volume or a snapshot, by its number.
pub(super) fn digest(pool: &Pool, number: u32) -> Result<[u8; HASH], TransferError> {
    let content = pool.difference(None, number)?;
    let mut cursor = ChangeCursor::open(&content, 0)?;
    let mut access = StoreAccess::open(&pool.inner.device).map_err(PoolError::from)?;
    let zeroes = MapEntry::new(1, crc32c::crc32c(&[0; BLOCK_BYTES])).checksum();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&content.capacity().to_le_bytes());
    let mut found = Vec::new();
    while !cursor.is_done() {
        cursor.step(&mut found)?;
        for extent in found.drain(..) {
            let end = (extent.offset + extent.length).div_ceil(BLOCK);
            let mut at = extent.offset / BLOCK;
            while at < end {
                let next = (at + STEP).min(end);
                let entries = look_up(pool, &mut access, number, at..next)?;
                for (block, entry) in (at..).zip(entries) {
                    if !entry.is_hole() && entry.checksum() != zeroes {
                        hasher.update(&block.to_le_bytes());
                        hasher.update(&entry.checksum().to_le_bytes());
                    }
                }
                at = next;
            }
        }
    }
    Ok(*hasher.finalize().as_bytes())
}

fn look_up(
    pool: &Pool,
    access: &mut StoreAccess,
    number: u32,
    blocks: std::ops::Range<u64>,
) -> Result<Vec<MapEntry>, PoolError> {
    complete(&pool.inner.shared, access, |state| {
        let (root, _) = state.catalogue.branch(number).ok_or(Fault::Damaged)?;
        let (mut entries, mut missing) = (Vec::new(), Vec::new());
        state.pages.look_up(root, blocks.clone(), &mut entries, &mut missing)?;
        Ok(entries)
    })
}
