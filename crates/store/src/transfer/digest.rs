//! The digest of a snapshot: the same in each pool that has the same content.
//!
//! It is made of the map alone: a hash of the size, and of the number and the checksum of each
//! block. Blocks of zeroes count as holes. It takes no read of the content.

use fathom_block::StoreAccess;

use super::TransferError;
use super::format::HASH;
use crate::difference::{ChangeCursor, ReadPages};
use crate::entry::MapEntry;
use crate::error::PoolError;
use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::pages::{Fault, Page, Pages, WORDS, from_bytes};
use crate::pool::Pool;

/// The digest of a volume or a snapshot, by its number.
pub(super) fn digest(pool: &Pool, number: u32) -> Result<[u8; HASH], TransferError> {
    // It is not deleted meanwhile.
    let content = pool.difference(None, number)?;
    let mut cursor = ChangeCursor::open(&content, 0)?;
    let mut reader = MapReader::open(pool, number)?;
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
                let first = at / WORDS as u64 * WORDS as u64;
                let leaf = reader.leaf(at)?;
                let next = (first + WORDS as u64).min(end);
                for block in at..next {
                    let entry = Pages::leaf_entry(&leaf, (block - first) as usize);
                    let entry = entry.map_err(|_| damaged())?;
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

fn damaged() -> PoolError {
    PoolError::Damaged("a map leads to a page that does not exist".into())
}

/// Reads a map, with pages of its own: those in the memory of the pool are for disks.
struct MapReader<'p> {
    pool: &'p Pool,
    number: u32,
    access: StoreAccess,
    pages: ReadPages,
}

impl<'p> MapReader<'p> {
    fn open(pool: &'p Pool, number: u32) -> Result<Self, PoolError> {
        let access = StoreAccess::open(&pool.inner.device)?;
        Ok(Self { pool, number, access, pages: ReadPages::default() })
    }

    /// The leaf with a block.
    fn leaf(&mut self, block: u64) -> Result<Box<Page>, PoolError> {
        let shared = &self.pool.inner.shared;
        loop {
            let missing = shared.access(|state| {
                let (root, _) = state.catalogue.branch(self.number).ok_or_else(damaged)?;
                match state.pages.find_leaf(root, block, &self.pages) {
                    Ok(leaf) => Ok(Ok(Box::new(*leaf))),
                    Err(Fault::Missing(id)) => {
                        let entry = state.pages.entry(id);
                        state.layout().place(entry.block).ok_or_else(damaged)?;
                        // The place is not used again before the read has ended.
                        Ok(Err((id, entry, state.begin_read())))
                    }
                    Err(Fault::Damaged) => Err(damaged()),
                }
            });
            let (id, entry, interval) = match missing? {
                Ok(leaf) => return Ok(leaf),
                Err(missing) => missing,
            };
            let read = self.access.read(entry.block * BLOCK, BLOCK);
            if shared.access(|state| state.end_read(interval)) {
                shared.wake();
            }
            let bytes = read?;
            if crc32c::crc32c(&bytes) == entry.checksum {
                self.pages.insert(id, entry, from_bytes(&bytes));
            } else if shared.access(|state| state.pages.entry(id)) == entry {
                return Err(PoolError::Damaged(format!("page {id} of its maps")));
            }
        }
    }
}
