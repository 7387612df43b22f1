//! What a bio's completion tells: who submitted it.
//!
//! Each part of Linux that submits a bio names the function that is called when it is done
//! (`bi_end_io`). That function is the best witness of what the bio is: a journal's write of a
//! block and the later write-back of the same block differ in nothing else, and a page of user
//! memory that is written past the page cache may well be some other file's.

use fathom_insight::Kind;

use crate::systems::FILE_SYSTEMS;

/// Who submitted a bio, by its completion (or a buffer, by its own).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    /// Content of one inode's page cache: the first page speaks for the bio.
    OneFile,
    /// Content of the page cache, of any number of inodes: each page speaks for itself.
    Pages,
    /// A buffer head, in `bi_private`: its completion tells more.
    Buffer,
    /// Of a buffer, by `b_end_io`; from 7.2 on the bio's own, with the buffer head in `bi_private`.
    /// The kind, or the page tells.
    OfBuffer(Option<Kind>),
    /// The kind is certain, whatever the pages are.
    Kind(Kind),
    /// Past the page cache, `iomap_dio` in `bi_private`.
    IomapDirect,
    /// Past the page cache in one bio, which is embedded in an `iomap_dio_simple`.
    IomapSimple,
    /// Past the page cache, `dio` in `bi_private`.
    Direct,
    /// The block device's own, past the page cache; `blkdev_dio` in `bi_private`.
    Device,
    /// Likewise, with the waiting task in `bi_private`.
    DeviceSimple,
    /// An `xfs_buf` in `bi_private`: its operations tell a directory from the rest.
    XfsBuffer,
    /// Btrfs: what the bio is embedded in tells.
    Btrfs,
    /// A copy that Btrfs made for another device: `btrfs_io_stripe` in `bi_private`.
    BtrfsStripe,
    /// A device-mapper clone: it is embedded in a `dm_target_io`.
    DmClone,
    /// `dm_crypt_io` in `bi_private`.
    DmCrypt,
    /// `md_io_clone` in `bi_private`.
    MdClone,
    /// `md_io_acct` in `bi_private`.
    MdAccount,
    /// `r1bio` in `bi_private`.
    Raid1,
    /// `r10bio` in `bi_private`.
    Raid10,
    /// The front part of a bio that was split: the rest is in `bi_private`.
    Chain,
    /// A clone of what was submitted to bcache, `search.cl` in `bi_private`.
    BcacheRequest,
    /// A part of it that is written to the cache, `data_insert_op.cl` in `bi_private`.
    BcacheInsert,
    /// What was submitted to bcache without a cache, `detached_dev_io_private` in `bi_private`.
    BcacheDetached,
    /// Somebody waits for it on the spot, which says nothing of its pages: those of a program, of
    /// the kernel, or of a file's page cache.
    Waited,
}

/// The functions by name, but those of file systems, which their rows have.
pub(crate) const COMPLETIONS: &[(&str, Completion)] = &[
    // The page cache.
    ("mpage_end_io", Completion::OneFile),
    ("mpage_read_end_io", Completion::OneFile),
    ("mpage_write_end_io", Completion::OneFile),
    ("iomap_writepage_end_bio", Completion::OneFile),
    ("iomap_writeback_end_bio", Completion::OneFile),
    ("ioend_writeback_end_bio", Completion::OneFile),
    ("iomap_read_end_io", Completion::OneFile),
    // Buffers, and the journals that write through them.
    ("end_bio_bh_io_sync", Completion::Buffer),
    ("bio_submit_or_kill", Completion::Buffer),
    ("journal_end_buffer_io_sync", Completion::OfBuffer(Some(Kind::Journal))),
    ("end_buffer_async_read", Completion::OfBuffer(None)),
    ("end_buffer_async_read_io", Completion::OfBuffer(None)),
    ("end_buffer_async_write", Completion::OfBuffer(None)),
    ("end_buffer_read_sync", Completion::OfBuffer(None)),
    ("end_buffer_write_sync", Completion::OfBuffer(None)),
    ("bh_end_async_read", Completion::OfBuffer(None)),
    ("bh_end_async_write", Completion::OfBuffer(None)),
    ("bh_end_read", Completion::OfBuffer(None)),
    ("bh_end_write", Completion::OfBuffer(None)),
    // Past the page cache.
    ("iomap_dio_bio_end_io", Completion::IomapDirect),
    ("iomap_dio_simple_end_io", Completion::IomapSimple),
    ("dio_bio_end_io", Completion::Direct),
    ("dio_bio_end_aio", Completion::Direct),
    ("blkdev_bio_end_io", Completion::Device),
    ("blkdev_bio_end_io_async", Completion::Device),
    ("blkdev_bio_end_io_simple", Completion::DeviceSimple),
    // Swap.
    ("end_swap_bio_read", Completion::Kind(Kind::Swap)),
    ("swap_bio_read_end_io", Completion::Kind(Kind::Swap)),
    ("end_swap_bio_write", Completion::Kind(Kind::Swap)),
    // Layers between a file system and its disk.
    ("clone_endio", Completion::DmClone),
    ("crypt_endio", Completion::DmCrypt),
    // Targets of device mapper that take the end of a clone over.
    ("full_bio_end_io", Completion::DmClone),
    ("overwrite_endio", Completion::DmClone),
    // Copies and structures of device mapper itself.
    ("endio", Completion::Kind(Kind::Device)),
    ("bio_complete", Completion::Kind(Kind::Device)),
    // Bcache: the same of its own, and what it has cached.
    ("btree_node_read_endio", Completion::Kind(Kind::Device)),
    ("btree_node_write_endio", Completion::Kind(Kind::Device)),
    ("journal_read_endio", Completion::Kind(Kind::Device)),
    ("journal_write_endio", Completion::Kind(Kind::Device)),
    ("prio_endio", Completion::Kind(Kind::Device)),
    ("uuid_endio", Completion::Kind(Kind::Device)),
    ("write_super_endio", Completion::Kind(Kind::Device)),
    ("write_bdev_super_endio", Completion::Kind(Kind::Device)),
    ("dirty_endio", Completion::Kind(Kind::Device)),
    ("read_dirty_endio", Completion::Kind(Kind::Device)),
    ("request_endio", Completion::BcacheRequest),
    ("backing_request_endio", Completion::BcacheRequest),
    ("bch_cache_read_endio", Completion::BcacheRequest),
    ("bch_data_insert_endio", Completion::BcacheInsert),
    ("detached_dev_end_io", Completion::BcacheDetached),
    ("md_end_clone_io", Completion::MdClone),
    ("md_end_io_acct", Completion::MdAccount),
    ("raid1_end_read_request", Completion::Raid1),
    ("raid1_end_write_request", Completion::Raid1),
    ("raid10_end_read_request", Completion::Raid10),
    ("raid10_end_write_request", Completion::Raid10),
    ("super_written", Completion::Kind(Kind::Device)),
    ("bio_chain_endio", Completion::Chain),
    ("submit_bio_wait_endio", Completion::Waited),
    ("bio_wait_end_io", Completion::Waited),
];

/// What an address of a function or of operations means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// A completion.
    Completion(Completion),
    /// It ends Btrfs's I/O past the page cache.
    BtrfsDirect,
    /// It ends Btrfs's I/O of compressed data.
    BtrfsCompressed,
    /// Operations of XFS's buffers that hold parts of directories.
    XfsDirectory,
}

/// Every name whose address has a meaning.
pub(crate) fn meanings() -> impl Iterator<Item = (&'static str, Meaning)> {
    let completions =
        COMPLETIONS.iter().map(|(name, completion)| (*name, Meaning::Completion(*completion)));
    completions.chain(FILE_SYSTEMS.iter().flat_map(|row| row.symbols.iter().copied()))
}

/// No more addresses have a meaning: a guest could have each question search a crowded table.
pub(crate) const ENTRIES_MAX: usize = 256;

/// Addresses and what they mean: a table with open places, asked for each bio.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meanings {
    places: Vec<Option<(u64, Meaning)>>,
}

impl Meanings {
    /// A table of these.
    pub fn new(entries: &[(u64, Meaning)]) -> Self {
        let entries = &entries[..entries.len().min(ENTRIES_MAX)];
        let length = (entries.len() * 4).next_power_of_two().max(8);
        let mut table = Self { places: vec![None; length] };
        for (address, meaning) in entries {
            let mut place = table.start(*address);
            while table.places[place].is_some_and(|(there, _)| there != *address) {
                place = (place + 1) & (length - 1);
            }
            table.places[place] = Some((*address, *meaning));
        }
        table
    }

    fn start(&self, address: u64) -> usize {
        let mixed = (address >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize & (self.places.len() - 1)
    }

    /// What an address means.
    #[inline]
    pub fn get(&self, address: u64) -> Option<Meaning> {
        if self.places.is_empty() {
            return None;
        }
        let mut place = self.start(address);
        while let Some((there, meaning)) = self.places[place] {
            if there == address {
                return Some(meaning);
            }
            place = (place + 1) & (self.places.len() - 1);
        }
        None
    }
}
