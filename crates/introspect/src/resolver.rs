//! One queue's way from a request to what it means.

use std::sync::Arc;

use fathom_insight::{ClassTable, Confidence, Facts, Insight, Kind, RequestFlags, Source};

use crate::bios::Bio;
use crate::completion::{Completion, Meaning};
use crate::files::{FileCache, Nature};
use crate::groups::{Group, GroupCache};
use crate::guest::{Counts, Guest, NEWS_MODULES, NEWS_SUSPECT, NEWS_WANTED};
use crate::kernel::Kernel;
use crate::pages::{Page, PageCache};

/// A request has no more bios than are looked at; what is left over is unknown.
const BIOS_MAX: usize = 512;
/// A request has no more pieces of memory than are looked at.
const PIECES_MAX: usize = 2048;
/// So many requests in a row that do not lie in the kernel's structures make it doubtful.
const MISMATCHES_MAX: u32 = 8;
/// Completions that nobody knows, remembered so that modules are read again once for each.
const STRANGERS: usize = 32;

/// What a disk knows of a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestView {
    /// The guest-physical address of the virtio-blk header.
    pub header: u64,
    /// Where the range begins, in sectors of 512 bytes.
    pub sector: u64,
    /// How long the range is, in bytes.
    pub length: u64,
    /// Whether data moves (reads and writes).
    pub carries_data: bool,
    /// Whether it changes the disk.
    pub is_write: bool,
    /// The time, in nanoseconds of any clock that does not go back.
    pub now_ns: u64,
}

/// Reads a guest's structures for one queue's thread, which alone uses it. It keeps what it has
/// read of files and groups, and asks the guest's memory again before it relies on it.
pub struct Resolver {
    guest: Arc<Guest>,
    counts: Arc<Counts>,
    generation: u64,
    kernel: Option<Arc<Kernel>>,
    caches: Caches,
    mismatches: u32,
    strangers: [u64; STRANGERS],
    strangers_count: usize,
}

/// What has been read of one kernel.
#[derive(Default)]
struct Caches {
    files: FileCache,
    groups: GroupCache,
    pages: PageCache,
}

/// What a bio says of its bytes.
enum Verdict {
    /// These facts hold for all of them.
    All(Facts),
    /// The first piece of memory tells for all.
    First,
    /// Each piece of memory tells for itself.
    Each(Each),
    /// This page tells for all: the pieces of memory are copies.
    Page(u64, Each),
}

/// What is known of pieces of memory that tell for themselves.
#[derive(Clone, Copy, Default)]
struct Each {
    /// The address of the buffer head that they belong to, or 0.
    buffer: u64,
    /// What it is where a page is a process's own.
    anonymous: Kind,
    /// What it is where a page tells nothing.
    other: Kind,
    /// Nobody knows who submitted it: a page may be what a process reads a device into.
    is_doubtful: bool,
}

impl Resolver {
    pub(crate) fn new(guest: Arc<Guest>, counts: Arc<Counts>) -> Self {
        Self {
            guest,
            counts,
            generation: 0,
            kernel: None,
            caches: Caches::default(),
            mismatches: 0,
            strangers: [0; STRANGERS],
            strangers_count: 0,
        }
    }

    /// The guest that it reads.
    pub fn guest(&self) -> &Arc<Guest> {
        &self.guest
    }

    /// Says what a request means, in `insight` (whose `io_priority` stays). `pages` are the
    /// guest-physical addresses and lengths of its data, in order. Nothing is known where the
    /// kernel has not been found.
    pub fn resolve(
        &mut self,
        request: &RequestView,
        pages: impl Iterator<Item = (u64, u64)>,
        table: &ClassTable,
        insight: &mut Insight,
    ) {
        if self.generation != self.guest.generation() {
            self.generation = self.guest.generation();
            self.kernel = self.guest.kernel();
            self.caches = Caches::default();
            self.mismatches = 0;
            self.strangers_count = 0;
        }
        // Taken out for the time of the call, so that nobody counts its holders.
        let Some(kernel) = self.kernel.take() else {
            if request.carries_data {
                self.guest.news(NEWS_WANTED, request.header);
            }
            return;
        };
        self.counts.request();
        let found = self.look(&kernel, request, pages, insight).is_some();
        self.kernel = Some(kernel);
        if found {
            self.mismatches = 0;
            insight.finish(table);
        } else {
            insight.parts.clear();
            self.counts.mismatch();
            self.mismatches += 1;
            if self.mismatches % MISMATCHES_MAX == 0 {
                self.guest.news(NEWS_SUSPECT, request.header);
            }
        }
    }

    /// Follows the request's bios. `None` where it is no request of this kernel.
    fn look(
        &mut self,
        kernel: &Kernel,
        view: &RequestView,
        pages: impl Iterator<Item = (u64, u64)>,
        insight: &mut Insight,
    ) -> Option<()> {
        let layout = &kernel.layout;
        self.caches.files.begin();
        self.caches.groups.begin();
        let memory = &kernel.memory;
        let request = view.header.checked_sub(layout.request_size)?;
        let request = memory.window(request);
        let flags = request.u32(layout.request_flags)?;
        let mut bio = request.u64(layout.request_bio)?;
        if view.carries_data {
            let sector = request.u64(layout.request_sector)?;
            let length = u64::from(request.u32(layout.request_length)?);
            if sector != view.sector || length != view.length {
                return None;
            }
        }
        insight.flags = kernel.request_flags(flags);
        let mut pieces = Pieces { inner: pages, left: None, count: 0 };
        let (mut sector, mut left) = (view.sector, view.length);
        for _ in 0..BIOS_MAX {
            if left == 0 || bio == 0 {
                break;
            }
            let Some(found) = kernel.bio(bio) else { break };
            let size = found.size.min(left);
            // The bios of a request adjoin on the disk: what does not is torn, or none of it.
            if found.sector != sector || size == 0 {
                break;
            }
            let group = self.group(kernel, &found, view.now_ns);
            if view.carries_data {
                let verdict = self.judge(kernel, &found, view, insight.flags);
                self.tell(kernel, &verdict, size, group, &mut pieces, view.now_ns, insight);
            } else {
                insight.push(size, Facts { cgroup: group.name, ..Facts::default() });
            }
            left -= size;
            sector = sector.wrapping_add(size / 512);
            bio = found.next;
        }
        // The requests of a kernel that was booted since look just so, but lead to nothing here.
        if view.carries_data && left == view.length {
            return None;
        }
        if left > 0 {
            insight.push(left, Facts::default());
        }
        Some(())
    }

    /// The group that a bio is charged to.
    #[inline]
    fn group(&mut self, kernel: &Kernel, bio: &Bio, now_ns: u64) -> Group {
        let layout = &kernel.layout;
        if bio.group == 0 {
            return Group::default();
        }
        let state = || {
            let blkcg = kernel.object(bio.group).u64(layout.blkg_blkcg?);
            let blkcg = blkcg.filter(|pointer| *pointer != 0)?;
            Some(blkcg.wrapping_add(layout.blkcg_state?))
        };
        state()
            .and_then(|state| self.caches.groups.group(kernel, self.guest.names(), state, now_ns))
            .unwrap_or_default()
    }

    /// What the completion of a bio says, once the layers of devices are seen through.
    fn judge(
        &mut self,
        kernel: &Kernel,
        bio: &Bio,
        view: &RequestView,
        flags: RequestFlags,
    ) -> Verdict {
        let sure = |kind| Facts {
            kind,
            source: Source::Bio,
            confidence: Confidence::Sure,
            ..Facts::default()
        };
        // Where nothing else tells, the request's flags may.
        let other = if flags.contains(RequestFlags::SWAP) {
            Kind::Swap
        } else if flags.contains(RequestFlags::METADATA) {
            Kind::Metadata
        } else {
            Kind::Unknown
        };
        let each = Each { other, ..Each::default() };
        // Most are of the page cache, right on the disk.
        match kernel.meanings.get(bio.end) {
            Some(Meaning::Completion(Completion::OneFile)) => return Verdict::First,
            Some(Meaning::Completion(Completion::Pages)) => return Verdict::Each(each),
            _ => {}
        }
        let Some((bio, Meaning::Completion(completion), copied)) = kernel.origin(bio) else {
            self.stranger(bio.end);
            return Verdict::Each(Each { is_doubtful: true, ..each });
        };
        let verdict = match completion {
            Completion::OneFile => Verdict::First,
            // `origin` sees through those that other devices' layers submit.
            Completion::Pages
            | Completion::BtrfsStripe
            | Completion::DmClone
            | Completion::DmCrypt
            | Completion::MdClone
            | Completion::MdAccount
            | Completion::Raid1
            | Completion::Raid10
            | Completion::Chain => Verdict::Each(each),
            Completion::OfBuffer(_) => Verdict::Each(Each { is_doubtful: true, ..each }),
            // Nobody else waits on the spot for a process's own memory: `dd` on a device.
            Completion::Waited => Verdict::Each(Each { anonymous: Kind::Device, ..each }),
            Completion::Kind(kind) => Verdict::All(sure(kind)),
            Completion::Buffer => {
                let end = kernel.u64(bio.private.wrapping_add(kernel.layout.buffer_end));
                let buffer = bio.private;
                match end.and_then(|end| kernel.meanings.get(end)) {
                    Some(Meaning::Completion(Completion::OfBuffer(Some(kind)))) => {
                        Verdict::All(sure(kind))
                    }
                    Some(Meaning::Completion(Completion::OfBuffer(None)))
                        if kernel.is_journals(buffer) =>
                    {
                        Verdict::All(sure(Kind::Journal))
                    }
                    Some(Meaning::Completion(Completion::OfBuffer(None))) => {
                        Verdict::Each(Each { buffer, ..each })
                    }
                    _ => Verdict::Each(Each { buffer, is_doubtful: true, ..each }),
                }
            }
            Completion::IomapDirect | Completion::Direct => {
                let (inode, waiter) = kernel.direct_io(completion, bio.private);
                let mut facts = self.file(kernel, inode, Kind::Direct, view.now_ns);
                self.add_process(kernel, waiter, &mut facts);
                Verdict::All(facts)
            }
            Completion::Device | Completion::DeviceSimple => {
                let mut facts = sure(Kind::Device);
                let waiter = match (completion, kernel.layout.device_dio_waiter) {
                    (Completion::DeviceSimple, _) => Some(bio.private),
                    (_, Some(place)) => kernel.pointer(bio.private.wrapping_add(place)),
                    (_, None) => None,
                };
                self.add_process(kernel, waiter, &mut facts);
                Verdict::All(facts)
            }
            Completion::XfsBuffer => {
                let ops = kernel
                    .layout
                    .xfs_buffer_ops
                    .and_then(|place| kernel.u64(bio.private.wrapping_add(place)));
                let directory =
                    ops.and_then(|ops| kernel.meanings.get(ops)) == Some(Meaning::XfsDirectory);
                Verdict::All(sure(if directory { Kind::Directory } else { Kind::Metadata }))
            }
            Completion::Btrfs => {
                self.btrfs(kernel, &bio, view.now_ns).unwrap_or(Verdict::Each(each))
            }
        };
        match verdict {
            Verdict::First if copied => kernel
                .first_page(&bio)
                .map_or(Verdict::Each(each), |page| Verdict::Page(page, each)),
            Verdict::Each(each) if copied => kernel
                .first_page(&bio)
                .map_or(Verdict::Each(each), |page| Verdict::Page(page, each)),
            verdict => verdict,
        }
    }

    /// Btrfs embeds its bios in what tells the inode.
    fn btrfs(&mut self, kernel: &Kernel, bio: &Bio, now_ns: u64) -> Option<Verdict> {
        let layout = &kernel.layout;
        let find = || {
            let own = bio.address.wrapping_sub(layout.btrfs_bio_bio?);
            let end = kernel.meanings.get(kernel.u64(own.wrapping_add(layout.btrfs_bio_end?))?);
            let direct = end == Some(Meaning::BtrfsDirect);
            if let Some(place) = layout.btrfs_bio_inode {
                let inode = kernel.pointer(own.wrapping_add(place))?;
                let offset = if layout.btrfs_inode_is_own { layout.btrfs_inode_inode? } else { 0 };
                return Some((inode.wrapping_add(offset), direct));
            }
            // Kernels before 6.2 name the inode only where no page does.
            let place = match end? {
                Meaning::BtrfsDirect => layout.btrfs_dio_inode?,
                Meaning::BtrfsCompressed => layout.btrfs_compressed_inode?,
                Meaning::Completion(_) | Meaning::XfsDirectory => return None,
            };
            let private = kernel.pointer(own.wrapping_add(layout.btrfs_bio_private?))?;
            Some((kernel.pointer(private.wrapping_add(place))?, direct))
        };
        let (inode, direct) = find()?;
        let kind = if direct { Kind::Direct } else { Kind::Data };
        let facts = self.file(kernel, Some(inode), kind, now_ns);
        let known = facts.kind == Kind::Metadata || facts.inode != 0;
        known.then_some(Verdict::All(facts))
    }

    /// The facts of an inode that a bio names; its own kind where it is no plain file.
    fn file(&mut self, kernel: &Kernel, inode: Option<u64>, kind: Kind, now_ns: u64) -> Facts {
        let names = self.guest.names();
        let found = inode.and_then(|inode| self.caches.files.inode(kernel, names, inode, now_ns));
        // Only files and devices are read and written past the page cache.
        let found = found.filter(|found| {
            kind != Kind::Direct || matches!(found.nature, Nature::File | Nature::Device)
        });
        let mut facts = found.map(|found| found.facts).unwrap_or_default();
        facts.kind = match found.map(|found| found.nature) {
            Some(Nature::Internal | Nature::Mounted(_)) => Kind::Metadata,
            Some(Nature::Device) => Kind::Device,
            Some(Nature::Directory) => Kind::Directory,
            Some(Nature::File) | None => kind,
        };
        facts.source = Source::Bio;
        facts.confidence = if found.is_some() { Confidence::Sure } else { Confidence::Likely };
        facts
    }

    fn add_process(&self, kernel: &Kernel, task: Option<u64>, facts: &mut Facts) {
        if let Some(task) = task.and_then(|task| kernel.task(task)) {
            facts.process = self.guest.names().number(&task.command);
            facts.process_id = task.process_id;
        }
    }

    /// Takes the bytes of one bio off the pieces and tells what they are.
    #[expect(clippy::too_many_arguments, reason = "the parts of one bio")]
    fn tell(
        &mut self,
        kernel: &Kernel,
        verdict: &Verdict,
        size: u64,
        group: Group,
        pieces: &mut Pieces<impl Iterator<Item = (u64, u64)>>,
        now_ns: u64,
        insight: &mut Insight,
    ) {
        let mut push = |length, facts: Facts| {
            let cgroup = if facts.cgroup.is_some() { facts.cgroup } else { group.name };
            insight.push(length, Facts { cgroup, ..facts });
        };
        match verdict {
            Verdict::All(facts) => {
                pieces.skip(size);
                push(size, *facts);
            }
            Verdict::Page(page, each) => {
                pieces.skip(size);
                push(size, self.page(kernel, *page, *each, group, now_ns));
            }
            Verdict::First => {
                let first = pieces.next(size);
                let facts = first.map_or_else(Facts::default, |(address, length)| {
                    pieces.skip(size - length);
                    let page = kernel.page_of(address);
                    self.page(kernel, page, Each::default(), group, now_ns)
                });
                push(size, facts);
            }
            Verdict::Each(each) => {
                let mut left = size;
                while left > 0 {
                    let Some((address, length)) = pieces.next(left) else {
                        push(left, Facts::default());
                        break;
                    };
                    // A piece may cover several pages that lie together by chance.
                    let (mut address, mut rest) = (address, length);
                    while rest > 0 {
                        let count = (4096 - address % 4096).min(rest);
                        let page = kernel.page_of(address);
                        push(count, self.page(kernel, page, *each, group, now_ns));
                        address = address.wrapping_add(count);
                        rest -= count;
                    }
                    left -= length;
                }
            }
        }
    }

    /// What the page whose `struct page` is at an address holds.
    fn page(&mut self, kernel: &Kernel, page: u64, each: Each, group: Group, now_ns: u64) -> Facts {
        let found = self.caches.pages.page(kernel, page);
        let names = self.guest.names();
        let inode = match found {
            Some(Page::Cached { inode, memory_group }) => self
                .caches
                .files
                .inode(kernel, names, inode, now_ns)
                .map(|inode| (inode, memory_group)),
            _ => None,
        };
        let Some((found, memory_group)) = inode else {
            let (kind, source) = match found {
                Some(Page::Anonymous) if each.anonymous != Kind::Unknown => {
                    (each.anonymous, Source::Bio)
                }
                _ if each.other != Kind::Unknown => (each.other, Source::Flags),
                _ => return Facts::default(),
            };
            return Facts { kind, source, confidence: Confidence::Likely, ..Facts::default() };
        };
        let mut facts = found.facts;
        facts.kind = match found.nature {
            Nature::File => Kind::Data,
            Nature::Directory => Kind::Directory,
            Nature::Mounted(journal) if journal != 0 && journal == each.buffer => Kind::Journal,
            Nature::Internal | Nature::Mounted(_) => Kind::Metadata,
            Nature::Device => Kind::Device,
        };
        facts.source = Source::Page;
        facts.confidence = if each.is_doubtful { Confidence::Likely } else { Confidence::Sure };
        // Where blocks are charged to nobody, the pages of a file may still be.
        if found.nature == Nature::File
            && memory_group != 0
            && (group.is_root || !group.name.is_some())
        {
            let place = kernel.layout.memcg_css.map(|css| memory_group.wrapping_add(css));
            let group =
                place.and_then(|state| self.caches.groups.group(kernel, names, state, now_ns));
            facts.cgroup = group.unwrap_or_default().name;
        }
        facts
    }

    /// A completion that nobody knows: perhaps a module's that was loaded since.
    fn stranger(&mut self, end: u64) {
        let known = self.strangers_count.min(STRANGERS);
        if end == 0 || self.strangers[..known].contains(&end) {
            return;
        }
        self.strangers[self.strangers_count % STRANGERS] = end;
        self.strangers_count += 1;
        self.guest.news(NEWS_MODULES, 0);
    }
}

/// The pieces of memory of a request, cut where bios end.
struct Pieces<I> {
    inner: I,
    left: Option<(u64, u64)>,
    count: usize,
}

impl<I: Iterator<Item = (u64, u64)>> Pieces<I> {
    /// The next piece, at most `length_max` of it.
    fn next(&mut self, length_max: u64) -> Option<(u64, u64)> {
        let (address, length) = match self.left.take() {
            Some(left) => left,
            None if self.count < PIECES_MAX => {
                self.count += 1;
                self.inner.next().filter(|(_, length)| *length > 0)?
            }
            None => return None,
        };
        let count = length.min(length_max);
        if count < length {
            self.left = Some((address.wrapping_add(count), length - count));
        }
        Some((address, count))
    }

    fn skip(&mut self, mut length: u64) {
        while length > 0 {
            let Some((_, count)) = self.next(length) else { break };
            length -= count;
        }
    }
}
