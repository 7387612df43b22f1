//! The evidence that a bio gives about its bytes, and the facts that follow for its pieces of
//! memory.

use fathom_insight::{Confidence, Facts, Insight, InsightSource, Kind, ProcessRole};

use super::{RequestView, Resolver};
use crate::bios::Bio;
use crate::files::{Inode, Mounted, Nature};
use crate::groups::ControlGroup;
use crate::kernel::Kernel;
use crate::pages::{PageUse, Transfer};
use crate::pieces::Pieces;

/// The evidence that a bio gives about its bytes.
pub(super) enum Verdict {
    /// These facts hold for all bytes.
    All(Facts),
    /// The first piece of memory determines the facts of all bytes.
    First,
    /// Each piece of memory determines its own facts.
    Each(Each),
    /// This page determines the facts of all bytes: the pieces of memory are copies.
    Page(u64, Each),
}

/// The facts about pieces of memory whose pages are examined one by one.
#[derive(Clone, Copy, Default)]
pub(super) struct Each {
    /// The address of the buffer head of the pieces, or 0.
    pub buffer: u64,
    /// The place of the buffer, in sectors of the disk.
    pub sector: u64,
    /// The kind of a piece whose page is private memory of a process.
    pub anonymous: Kind,
    /// The kind of a piece whose page gives no evidence.
    pub other: Kind,
    /// Set if the pages may be the memory of a process's own I/O to a device. The bio then has to
    /// be for the device of the page's content.
    pub doubt: Option<Doubt>,
    /// The task that waits for the bio, if it is known.
    pub waiter: Option<u64>,
}

/// A bio that may not belong to the page cache.
#[derive(Clone, Copy)]
pub(super) struct Doubt {
    /// The `block_device` that the bio is for, or 0.
    device: u64,
    is_write: bool,
    /// Whether the completion function of the bio is known. The page cache uses it too.
    is_known: bool,
}

impl Doubt {
    pub fn new(bio: &Bio, view: &RequestView, is_known: bool) -> Self {
        Self { device: bio.device, is_write: view.is_write, is_known }
    }

    /// Whether the bio can transfer a page of this inode for the page cache itself.
    fn is_of(self, kernel: &Kernel, inode: &Inode, transfer: Transfer) -> bool {
        let is_moved = match inode.nature {
            // Buffers of devices are written under their own locks, without these flags.
            Nature::Device | Nature::Mounted(_) => true,
            Nature::File | Nature::Directory | Nature::Internal | Nature::Mover => {
                if self.is_write { transfer.is_written } else { transfer.is_read }
            }
        };
        is_moved && kernel.may_lie_on(inode.device, self.device)
    }
}

impl Resolver {
    /// Consumes the pieces of one bio, and adds their facts to `insight`.
    #[expect(clippy::too_many_arguments, reason = "the parts of one bio")]
    pub(super) fn add_parts(
        &mut self,
        kernel: &Kernel,
        verdict: &Verdict,
        size: u64,
        group: ControlGroup,
        pieces: &mut Pieces<impl Iterator<Item = (u64, u64)>>,
        now_ns: u64,
        insight: &mut Insight,
    ) {
        let is_transformed = self.is_transformed;
        let mut push = |length, (facts, file_offset): (Facts, Option<u64>)| {
            let cgroup = if facts.cgroup.is_some() { facts.cgroup } else { group.name };
            let is_transformed = facts.is_transformed || is_transformed && facts.inode != 0;
            insight.push_at(length, Facts { cgroup, is_transformed, ..facts }, file_offset);
        };
        match verdict {
            Verdict::All(facts) if facts.kind == Kind::Data && self.finds_writers() => {
                let mut left = size;
                while left > 0 {
                    let Some((address, length)) = pieces.next(left) else {
                        push(left, (*facts, None));
                        break;
                    };
                    left -= length;
                    for (address, count) in pages_of(address, length) {
                        let (frame, offset) = self.cached(kernel, address).unzip();
                        let mut own = *facts;
                        if let Some(frame) = frame {
                            self.add_writer(frame, &mut own);
                        }
                        push(count, (own, offset.flatten()));
                    }
                }
            }
            // The bio is contiguous in its file.
            Verdict::All(facts) if facts.kind == Kind::Data => {
                let offset = pieces.next(size).and_then(|(address, length)| {
                    pieces.skip(size - length);
                    self.cached(kernel, address)?.1
                });
                push(size, (*facts, offset));
            }
            Verdict::All(facts) => {
                pieces.skip(size);
                push(size, (*facts, None));
            }
            Verdict::Page(page, each) => {
                pieces.skip(size);
                push(size, self.page(kernel, *page, *each, group, now_ns));
            }
            // Each page has its own writer.
            Verdict::First if self.finds_writers() => {
                let each = Verdict::Each(Each::default());
                self.add_parts(kernel, &each, size, group, pieces, now_ns, insight);
            }
            Verdict::First => {
                let found = pieces.next(size).map_or_else(Default::default, |(address, length)| {
                    pieces.skip(size - length);
                    let page = kernel.page_of(address);
                    let (facts, page_offset) =
                        self.page(kernel, page, Each::default(), group, now_ns);
                    (facts, page_offset.map(|offset| offset + address % 4096))
                });
                push(size, found);
            }
            Verdict::Each(each) => {
                let mut waiter = Facts::default();
                self.add_process(kernel, each.waiter, ProcessRole::Submitter, &mut waiter);
                let mut push = |length, (facts, file_offset): (Facts, Option<u64>)| {
                    let Facts { process, process_id, process_start, process_role, .. } = waiter;
                    let own = match process_id {
                        0 => facts,
                        _ => Facts { process, process_id, process_start, process_role, ..facts },
                    };
                    push(length, (own, file_offset));
                };
                let mut left = size;
                while left > 0 {
                    let Some((address, length)) = pieces.next(left) else {
                        push(left, Default::default());
                        break;
                    };
                    for (address, count) in pages_of(address, length) {
                        let page = kernel.page_of(address);
                        let (facts, page_offset) = self.page(kernel, page, *each, group, now_ns);
                        push(count, (facts, page_offset.map(|offset| offset + address % 4096)));
                    }
                    left -= length;
                }
            }
        }
    }

    /// The number of the page of the page cache at an address, or of the first one of the larger
    /// page that it is part of, and the offset of the address in its file.
    fn cached(&mut self, kernel: &Kernel, address: u64) -> Option<(u64, Option<u64>)> {
        let page = kernel.page_of(address);
        let Some(PageUse::Cached { frame, index, .. }) = self.caches.pages.page(kernel, page)
        else {
            return None;
        };
        Some((frame, offset_of(index).map(|offset| offset + address % 4096)))
    }

    /// The facts about the content of the page whose `struct page` is at an address, and the offset
    /// of the page in its file.
    fn page(
        &mut self,
        kernel: &Kernel,
        page: u64,
        each: Each,
        group: ControlGroup,
        now_ns: u64,
    ) -> (Facts, Option<u64>) {
        let found = self.caches.pages.page(kernel, page);
        let names = self.guest.names();
        let inode = match found {
            Some(PageUse::Cached { inode, memory_group, index, frame, transfer }) => self
                .caches
                .files
                .inode(kernel, names, inode, now_ns)
                .filter(|inode| each.doubt.is_none_or(|doubt| doubt.is_of(kernel, inode, transfer)))
                .map(|inode| (inode, memory_group, index, frame)),
            _ => None,
        };
        let Some((found, memory_group, index, frame)) = inode else {
            let (kind, source) = match found {
                // Memory of a process: private, or of a mapped file.
                Some(PageUse::Anonymous | PageUse::Cached { .. })
                    if each.anonymous != Kind::Unknown =>
                {
                    (each.anonymous, InsightSource::Bio)
                }
                _ if each.other != Kind::Unknown => (each.other, InsightSource::Flags),
                _ => return Default::default(),
            };
            let confidence = Confidence::Likely;
            return (Facts { kind, source, confidence, ..Facts::default() }, None);
        };
        if let Nature::Mounted(Mounted { super_block, row }) = found.nature {
            // The place of the journal may be known to a module that was loaded later.
            let journal = row.journal_sectors.as_ref().filter(|journal| journal.has_buffers);
            if journal.is_some_and(|journal| !(journal.is_known)(&kernel.layout)) {
                self.unknown_function(super_block);
            }
        }
        let mut facts = found.facts;
        facts.kind = match found.nature {
            Nature::File => Kind::Data,
            Nature::Directory => Kind::Directory,
            Nature::Mover => return Default::default(),
            Nature::Mounted(mounted) if is_journal_buffer(kernel, mounted, found.device, each) => {
                Kind::Journal
            }
            Nature::Internal | Nature::Mounted(_) => Kind::Metadata,
            Nature::Device => Kind::Device,
        };
        facts.source = InsightSource::Page;
        let is_known =
            each.doubt.is_none_or(|doubt| doubt.is_known && doubt.device == found.device);
        facts.confidence = if is_known { Confidence::Sure } else { Confidence::Likely };
        if found.nature == Nature::File && self.finds_writers() {
            self.add_writer(frame, &mut facts);
        }
        // If the blocks are not charged to a group, the pages of a file may still be.
        if found.nature == Nature::File
            && memory_group != 0
            && (group.is_root || !group.name.is_some())
        {
            let place = kernel.layout.memcg_css.map(|css| memory_group.wrapping_add(css));
            let names = self.guest.names();
            let group =
                place.and_then(|state| self.caches.groups.group(kernel, names, state, now_ns));
            facts.cgroup = group.unwrap_or_default().name;
        }
        (facts, offset_of(index.filter(|_| found.nature == Nature::File)))
    }
}

/// The offset of a page in its file, in bytes. One that no file can have is not one.
fn offset_of(index: Option<u64>) -> Option<u64> {
    let offset = index.and_then(|index| index.checked_mul(4096));
    offset.filter(|offset| *offset <= i64::MAX as u64 - 4096)
}

/// The pages of a piece of memory, which may be contiguous by chance: the address and the length of
/// the part of the piece in each.
pub(super) fn pages_of(address: u64, length: u64) -> impl Iterator<Item = (u64, u64)> {
    let (mut address, mut rest) = (address, length);
    std::iter::from_fn(move || {
        let count = (4096 - address % 4096).min(rest);
        let page = (address, count);
        address = address.wrapping_add(count);
        rest -= count;
        (count > 0).then_some(page)
    })
}

/// Whether a buffer of a mounted file system belongs to its journal.
fn is_journal_buffer(kernel: &Kernel, mounted: Mounted, device: u64, each: Each) -> bool {
    if each.buffer == 0 {
        return false;
    }
    let Mounted { super_block, row } = mounted;
    row.journal_buffer.is_some_and(|get| get(kernel, super_block) == Some(each.buffer))
        || row.has_marked_journal && kernel.is_journal_block(each.buffer)
        || row.journal_sectors.as_ref().is_some_and(|journal| journal.has_buffers)
            && kernel.is_in_journal(super_block, device, each.sector)
}
