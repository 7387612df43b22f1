//! The completion function of a bio, which identifies its submitter.
//!
//! Each part of Linux that submits a bio sets the function that is called at its completion
//! (`bi_end_io`). This function is the best evidence of the bio's purpose. A journal's write of a
//! block and the later write-back of the same block differ in nothing else, and a page of user
//! memory that is written by direct I/O may belong to another file.

use fathom_insight::Kind;

use crate::submitters::{SUBMITTERS, Submitter};
use crate::systems::FILE_SYSTEMS;

/// The submitter of a bio, by its completion function (or of a buffer, by the buffer's).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    /// Content of one inode's page cache: the first page identifies the file.
    OneFile,
    /// Content of the page cache, of any number of inodes: each page identifies its own file.
    Pages,
    /// A buffer head in `bi_private`: its completion function identifies the submitter.
    Buffer,
    /// Of a buffer, by `b_end_io`; from 7.2 on, by the bio's own, with the buffer head in
    /// `bi_private`. The kind is certain, or the page determines it.
    OfBuffer(Option<Kind>),
    /// The kind is certain, regardless of the pages.
    Kind(Kind),
    /// Direct I/O, with `iomap_dio` in `bi_private`.
    IomapDirect,
    /// Direct I/O in one bio, which is embedded in an `iomap_dio_simple`.
    IomapSimple,
    /// Direct I/O, with `dio` in `bi_private`.
    Direct,
    /// Direct I/O of a block device, with `blkdev_dio` in `bi_private`.
    Device,
    /// Direct I/O of a block device in one bio, which is embedded in a `blkdev_dio`. No task waits
    /// for it.
    DeviceEmbedded,
    /// Direct I/O of a block device, with the waiting task in `bi_private`.
    DeviceSimple,
    /// A part of XFS's log, with its buffer (`xlog_in_core`) in `bi_private`.
    XfsLog,
    /// A flush of a device of Btrfs, with the `completion` that is waited for in `bi_private`.
    BtrfsBarrier,
    /// An `xfs_buf` in `bi_private`: its operations distinguish directories from other metadata.
    XfsBuffer,
    /// Btrfs: the structure in which the bio is embedded determines the meaning.
    Btrfs,
    /// A copy that Btrfs submits to another device, with `btrfs_io_stripe` in `bi_private`.
    BtrfsStripe,
    /// A device-mapper clone, which is embedded in a `dm_target_io`.
    DmClone,
    /// A bio of dm-io, with `io` in `bi_private`, whose low bits have the number of a device.
    DmIo,
    /// A bio of dm-crypt, with `dm_crypt_io` in `bi_private`.
    DmCrypt,
    /// A clone of md, which is embedded in a `md_io_clone`. Only kernels before 7.2 also have the
    /// address of that structure in `bi_private`.
    MdClone,
    /// A clone of md, which is embedded in a `md_io_acct`.
    MdAccount,
    /// A bio of RAID 1, with `r1bio` in `bi_private`.
    Raid1,
    /// A bio of RAID 10, with `r10bio` in `bi_private`.
    Raid10,
    /// The front part of a split bio: the rest is in `bi_private`.
    Chain,
    /// A clone of a bio that was submitted to bcache, with `search.cl` in `bi_private`.
    BcacheRequest,
    /// A part of such a bio that is written to the cache, with `data_insert_op.cl` in `bi_private`.
    BcacheInsert,
    /// A bio that was submitted to bcache without a cache, with `detached_dev_io_private` in
    /// `bi_private`.
    BcacheDetached,
    /// The submitter waits for the bio, which does not identify the pages: they may belong to a
    /// program, to the kernel, or to a file's page cache.
    Waited,
}

/// The completion functions by name, except those of file systems, which are in their rows.
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
    // Direct I/O.
    ("iomap_dio_bio_end_io", Completion::IomapDirect),
    ("iomap_dio_simple_end_io", Completion::IomapSimple),
    ("dio_bio_end_io", Completion::Direct),
    ("dio_bio_end_aio", Completion::Direct),
    ("blkdev_bio_end_io", Completion::Device),
    ("blkdev_bio_end_io_async", Completion::DeviceEmbedded),
    ("blkdev_bio_end_io_simple", Completion::DeviceSimple),
    // Swap.
    ("end_swap_bio_read", Completion::Kind(Kind::Swap)),
    ("swap_bio_read_end_io", Completion::Kind(Kind::Swap)),
    ("end_swap_bio_write", Completion::Kind(Kind::Swap)),
    // Layers between a file system and its disk.
    ("clone_endio", Completion::DmClone),
    ("crypt_endio", Completion::DmCrypt),
    // Targets of device mapper that replace the completion of a clone.
    ("full_bio_end_io", Completion::DmClone),
    ("overwrite_endio", Completion::DmClone),
    ("integrity_end_io", Completion::DmClone),
    ("verity_end_io", Completion::DmClone),
    // Device mapper's own copies and structures, and what dm-mirror writes.
    ("endio", Completion::DmIo),
    ("bio_complete", Completion::Kind(Kind::Device)),
    // Bcache's own copies and structures, and the requests that it caches.
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
    // md's own copies.
    ("end_sync_read", Completion::Kind(Kind::Device)),
    ("end_sync_write", Completion::Kind(Kind::Device)),
    ("end_reshape_read", Completion::Kind(Kind::Device)),
    ("end_reshape_write", Completion::Kind(Kind::Device)),
    ("bio_chain_endio", Completion::Chain),
    ("submit_bio_wait_endio", Completion::Waited),
    ("bio_wait_end_io", Completion::Waited),
];

/// The meaning of the address of a function or of a table of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// A completion.
    Completion(Completion),
    /// The function that completes direct I/O of Btrfs.
    BtrfsDirect,
    /// The function that completes Btrfs's I/O of compressed data.
    BtrfsCompressed,
    /// The operations of XFS's buffers with parts of directories.
    XfsDirectory,
    /// The function that dm-io calls for dm-mirror, with the bio that dm-mirror got.
    DmMirror,
    /// The function that completes the I/O of a control block.
    Submitter(Submitter),
    /// The function that wakes a task which waits for a page.
    PageWait,
    /// The function that continues a request of `io_uring` which waits for a page.
    RingPageWait,
    /// A function that wakes the task that has put itself into a list.
    TaskWait,
}

/// The functions that dm-io calls at the end of what dm-mirror writes and reads.
const MIRROR: &[(&str, Meaning)] =
    &[("write_callback", Meaning::DmMirror), ("read_callback", Meaning::DmMirror)];

/// The functions of entries in the lists of those that wait for pages.
const PAGE_WAITS: &[(&str, Meaning)] =
    &[("wake_page_function", Meaning::PageWait), ("io_async_buf_func", Meaning::RingPageWait)];

/// The functions of entries in the lists of those that wait for something else.
const TASK_WAITS: &[(&str, Meaning)] = &[
    ("autoremove_wake_function", Meaning::TaskWait),
    ("default_wake_function", Meaning::TaskWait),
];

/// All names whose addresses have a meaning.
pub(crate) fn meanings() -> impl Iterator<Item = (&'static str, Meaning)> {
    let completions =
        COMPLETIONS.iter().map(|(name, completion)| (*name, Meaning::Completion(*completion)));
    completions
        .chain(MIRROR.iter().copied())
        .chain(PAGE_WAITS.iter().copied())
        .chain(TASK_WAITS.iter().copied())
        .chain(SUBMITTERS.iter().map(|(name, owner)| (*name, Meaning::Submitter(*owner))))
        .chain(FILE_SYSTEMS.iter().flat_map(|row| row.symbols.iter().copied()))
}

/// The most entries of a table. Without a limit, a guest could make each lookup search a crowded
/// table.
pub(crate) const ENTRIES_MAX: usize = 256;

/// A hash table with open addressing, from addresses to meanings. Each bio requires a lookup.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meanings {
    places: Vec<Option<(u64, Meaning)>>,
}

impl Meanings {
    /// A table of the first [`ENTRIES_MAX`] of these entries.
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

    /// The meaning of an address.
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
