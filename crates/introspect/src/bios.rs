//! The kernel's bios, and the path from a bio to the part of the kernel that submitted it.

use crate::completion::{Completion, Meaning};
use crate::kernel::Kernel;
use crate::submitters::Submission;
use crate::vmcoreinfo::PAGE;

/// The most layers of devices through which a bio is followed.
const STACKED_MAX: usize = 16;
/// The bits of `bi_private` of a bio of dm-io that have the number of a device
/// (`DM_IO_MAX_REGIONS`).
const DM_IO_DEVICES: u64 = 63;
/// The most pages of a bio that are examined one by one.
const PAGES_MAX: usize = 1024;

/// A copy of a `struct bio`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bio {
    pub address: u64,
    pub next: u64,
    pub sector: u64,
    pub size: u64,
    pub end: u64,
    pub private: u64,
    pub group: u64,
    /// The address of the bio's `block_device`, or 0.
    pub device: u64,
}

/// What layers of devices do with the pages of a bio.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Passage {
    /// They transfer copies.
    pub is_copied: bool,
    /// They encrypt them.
    pub is_encrypted: bool,
}

impl Kernel {
    /// Copies a bio. The members lie close together, so the copy touches two cache lines.
    #[inline]
    pub(crate) fn bio(&self, address: u64) -> Option<Bio> {
        let layout = &self.layout;
        if address % 8 != 0 {
            return None;
        }
        let object = self.object(address);
        let word = |offset| object.u64(offset);
        Some(Bio {
            address,
            next: word(layout.bio_next)?,
            sector: word(layout.bio_sector)?,
            size: word(layout.bio_size)? & 0xffff_ffff,
            end: word(layout.bio_end)?,
            private: word(layout.bio_private)?,
            group: layout.bio_group.and_then(word).unwrap_or(0),
            device: layout.bio_device.and_then(word).unwrap_or(0),
        })
    }

    /// Follows a bio through the layers of devices to the bio that a file system submitted. Returns
    /// that bio, the meaning of its completion, and what becomes of its pages on their way.
    pub(crate) fn origin(&self, bio: &Bio) -> Option<(Bio, Meaning, Passage)> {
        let layout = &self.layout;
        let (mut bio, mut passage) = (*bio, Passage::default());
        for _ in 0..STACKED_MAX {
            let meaning = self.meanings.get(bio.end)?;
            let Meaning::Completion(completion) = meaning else { return None };
            let at = |place: Option<u64>| self.pointer(bio.private.wrapping_add(place?));
            // A member of the structure in which the bio is embedded, at `own`.
            let around = |own: Option<u64>, place: Option<u64>| {
                self.pointer(bio.address.wrapping_sub(own?).wrapping_add(place?))
            };
            let above = match completion {
                Completion::DmClone => {
                    let target = bio.address.wrapping_sub(layout.dm_io_clone?);
                    let io = self.pointer(target.wrapping_add(layout.dm_target_io?))?;
                    self.pointer(io.wrapping_add(layout.dm_io_original?))
                }
                Completion::DmIo => {
                    let io = bio.private & !DM_IO_DEVICES;
                    let at = |place: Option<u64>| self.pointer(io.wrapping_add(place?));
                    let callback = at(layout.dm_io_callback);
                    if callback.and_then(|callback| self.meanings.get(callback))
                        != Some(Meaning::DmMirror)
                    {
                        return Some((bio, meaning, passage));
                    }
                    at(layout.dm_io_context)
                }
                Completion::DmCrypt => {
                    passage = Passage { is_copied: true, is_encrypted: true };
                    at(layout.dm_crypt_bio)
                }
                Completion::MdClone => around(layout.md_clone, layout.md_original),
                Completion::MdAccount => {
                    around(layout.md_account_clone, layout.md_account_original)
                }
                Completion::Raid1 => at(layout.raid1_master),
                Completion::Raid10 => at(layout.raid10_master),
                Completion::Chain => Some(bio.private),
                Completion::BcacheRequest => {
                    let search = bio.private.wrapping_sub(layout.bcache_search_closure?);
                    let original =
                        self.pointer(search.wrapping_add(layout.bcache_search_original?))?;
                    // Data that is not in the cache is read into bcache's own pages.
                    let vectors = |bio: u64| self.pointer(bio.wrapping_add(layout.bio_vectors));
                    passage.is_copied |= vectors(original)? != vectors(bio.address)?;
                    Some(original)
                }
                Completion::BcacheInsert => self.bcache_inserted(&bio),
                Completion::BcacheDetached => {
                    let Some(original) = layout.bcache_detached_original else {
                        // The bio is the file system's own, with a replaced completion.
                        let end = at(layout.bcache_detached_end)?;
                        let private = at(layout.bcache_detached_private).unwrap_or(0);
                        let device = at(layout.bcache_detached_device).unwrap_or(0);
                        bio = Bio { end, private, device, ..bio };
                        continue;
                    };
                    at(Some(original))
                }
                Completion::BtrfsStripe => {
                    let context = at(layout.btrfs_stripe_context)?;
                    self.pointer(context.wrapping_add(layout.btrfs_context_bio?))
                }
                _ => return Some((bio, meaning, passage)),
            };
            bio = self.bio(above.filter(|above| *above != 0)?)?;
            if completion == Completion::BtrfsStripe {
                let meaning = Meaning::Completion(Completion::Btrfs);
                return Some((bio, meaning, passage));
            }
        }
        None
    }

    /// The bio whose data bcache writes into its cache with `bio`. Both have the same pages.
    fn bcache_inserted(&self, bio: &Bio) -> Option<u64> {
        let layout = &self.layout;
        let insert = bio.private.wrapping_sub(layout.bcache_insert_closure?);
        let search = insert.wrapping_sub(layout.bcache_search_insert?);
        let original = self.pointer(search.wrapping_add(layout.bcache_search_original?))?;
        let vectors = |bio: u64| self.pointer(bio.wrapping_add(layout.bio_vectors));
        (vectors(original)? == vectors(bio.address)?).then_some(original)
    }

    /// Whether a buffer head is a block of a journal itself, other than its super block: jbd2
    /// writes revoke blocks like other buffers, but marks them with a bit. The bit has this meaning
    /// only on a file system with a jbd2 journal.
    pub(crate) fn is_journal_block(&self, buffer: u64) -> bool {
        let state = || {
            let bit = self.places.journal_bit?;
            let state = self.u64(buffer.wrapping_add(self.layout.buffer_state?))?;
            Some(state >> bit & 1 != 0)
        };
        state().unwrap_or(false)
    }

    /// The inode and the task of direct I/O: the one that waits for it, or the one of the process
    /// that submitted it.
    pub(crate) fn direct_io(
        &self,
        completion: Completion,
        private: u64,
    ) -> (Option<u64>, Submission) {
        let layout = &self.layout;
        let at = |place: Option<u64>| self.pointer(private.wrapping_add(place?));
        if matches!(completion, Completion::IomapDirect | Completion::IomapSimple) {
            let (iocb, waiter) = match completion {
                Completion::IomapSimple => (layout.iomap_simple_iocb, None),
                _ => (layout.iomap_dio_iocb, layout.iomap_dio_waiter),
            };
            let Some(iocb) = at(iocb) else { return (None, Submission::Unknown) };
            let inode = || {
                let file = self.pointer(iocb.wrapping_add(layout.kiocb_file))?;
                self.pointer(file.wrapping_add(layout.file_inode))
            };
            // I/O without a completion callback is synchronous: a task waits for it.
            let waits = self.u64(iocb.wrapping_add(layout.kiocb_complete)) == Some(0);
            let task = if waits { Submission::of(at(waiter)) } else { self.submitter(iocb) };
            return (inode(), task);
        }
        let is_async = layout
            .dio_is_async
            .and_then(|place| self.u64(private.wrapping_add(place)))
            .is_some_and(|is_async| is_async & 0xff != 0);
        let task = if is_async {
            at(layout.dio_block).map_or(Submission::Unknown, |iocb| self.submitter(iocb))
        } else {
            Submission::of(at(layout.dio_waiter))
        };
        (at(layout.dio_inode), task)
    }

    /// The first page of a bio: the address of its `struct page`.
    pub(crate) fn first_page(&self, bio: &Bio) -> Option<u64> {
        self.pointer(self.vector(bio)?.wrapping_add(self.layout.vector_page))
    }

    /// The page of the piece of a bio with this number, whether or not that has been transferred:
    /// the address of its `struct page`.
    pub(crate) fn page_at(&self, bio: &Bio, number: u64) -> Option<u64> {
        self.pointer(self.vector_at(bio, number)?.wrapping_add(self.layout.vector_page))
    }

    /// The address of the current `bio_vec` of a bio.
    fn vector(&self, bio: &Bio) -> Option<u64> {
        let index = self.u32(bio.address.wrapping_add(self.layout.bio_vector_index))?;
        self.vector_at(bio, u64::from(index.min(256)))
    }

    /// The address of the `bio_vec` of a bio with this number.
    fn vector_at(&self, bio: &Bio, number: u64) -> Option<u64> {
        let layout = &self.layout;
        let vectors = self.pointer(bio.address.wrapping_add(layout.bio_vectors))?;
        Some(vectors.wrapping_add(number.wrapping_mul(layout.vector_size)))
    }

    /// Whether `holds` is true for all pages of a bio. It is called with the address of each
    /// `struct page`. `None` if not all pages can be examined.
    pub(crate) fn all_pages(&self, bio: &Bio, mut holds: impl FnMut(u64) -> bool) -> Option<bool> {
        let layout = &self.layout;
        let number = |address: u64, place: Option<u64>| {
            Some(u64::from(self.u32(address.wrapping_add(place?))?))
        };
        let mut vector = self.vector(bio)?;
        let mut done = number(bio.address, layout.bio_vector_done)?;
        let (mut left, mut pages) = (bio.size, 0);
        if left == 0 {
            return None;
        }
        while left > 0 {
            let page = self.pointer(vector.wrapping_add(layout.vector_page))?;
            let length = number(vector, layout.vector_length)?.checked_sub(done)?;
            let start = number(vector, layout.vector_offset)? + done;
            let length = length.min(left);
            if length == 0 {
                return None;
            }
            for place in start / PAGE..(start + length).div_ceil(PAGE) {
                pages += 1;
                if pages > PAGES_MAX {
                    return None;
                }
                if !holds(page.wrapping_add(place.wrapping_mul(layout.page_size))) {
                    return Some(false);
                }
            }
            left -= length;
            done = 0;
            vector = vector.wrapping_add(layout.vector_size);
        }
        Some(true)
    }
}
