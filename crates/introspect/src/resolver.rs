//! The resolver of a queue: finds the meaning of its requests.

mod verdict;
mod waiters;

use std::sync::Arc;

use fathom_insight::{
    ClassTable, Confidence, Facts, Insight, InsightSource, Kind, ProcessRole, RequestFlags,
};
use fathom_intercept::Writers;

use crate::bios::Bio;
use crate::completion::{Completion, Meaning};
use crate::dirty::DiskObject;
use crate::files::{FileCache, Nature};
use crate::groups::{ControlGroup, GroupCache};
use crate::guest::{EVENT_MISMATCH, EVENT_REQUEST, EVENT_UNKNOWN_FUNCTION, Guest, ResolverCounts};
use crate::kernel::Kernel;
use crate::pages::{PageCache, PageUse};
use crate::pieces::Pieces;
use crate::submitters::Submission;
use crate::tasks::StackCache;
use verdict::{Doubt, Each, Verdict};

/// The most bios of a request that are examined: 254 pages of buffers of 512 bytes have 2,032. The
/// remaining bytes are unknown.
const BIOS_MAX: usize = 2048;
/// The number of consecutive requests that do not match the kernel's structures, after which the
/// kernel is doubtful.
const MISMATCHES_MAX: u32 = 8;
/// The number of unknown completion functions that are remembered. The modules are read again once
/// for each.
const UNKNOWN_FUNCTIONS_MAX: usize = 32;

/// The disk's view of a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestView {
    /// The guest-physical address of the virtio-blk header.
    pub header: u64,
    /// The start of the range, in sectors of 512 bytes.
    pub sector: u64,
    /// The length of the range, in bytes.
    pub length: u64,
    /// Whether the request transfers data (reads and writes).
    pub carries_data: bool,
    /// Whether the request changes the disk.
    pub is_write: bool,
    /// The time, in nanoseconds of any monotonic clock.
    pub now_ns: u64,
}

impl RequestView {
    /// Whether the request is a flush, which has no range.
    fn is_flush(&self) -> bool {
        !self.carries_data && self.length == 0
    }
}

/// Reads a guest's structures for the requests of one queue. Only the queue's thread uses it. It
/// caches files and groups, and checks a cached entry against the guest's memory before each use.
pub struct Resolver {
    guest: Arc<Guest>,
    counts: Arc<ResolverCounts>,
    /// The object of the disk, and whether it was set since the kernel was found.
    object: Arc<DiskObject>,
    knows_object: bool,
    generation: u64,
    kernel: Option<Arc<Kernel>>,
    /// The table of the writers of pages, if the guest is intercepted.
    writers: Option<Arc<Writers>>,
    /// Whether the current request changes the disk.
    is_write: bool,
    /// Whether the guest encrypts or compresses the bytes of the current bio.
    is_transformed: bool,
    caches: Caches,
    mismatches: u32,
    unknown_functions: [u64; UNKNOWN_FUNCTIONS_MAX],
    unknown_functions_count: usize,
}

/// The caches of one kernel's structures.
#[derive(Default)]
struct Caches {
    files: FileCache,
    groups: GroupCache,
    pages: PageCache,
    stacks: StackCache,
}

impl Resolver {
    pub(crate) fn new(
        guest: Arc<Guest>,
        counts: Arc<ResolverCounts>,
        object: Arc<DiskObject>,
    ) -> Self {
        Self {
            guest,
            counts,
            object,
            knows_object: false,
            generation: 0,
            kernel: None,
            writers: None,
            is_write: false,
            is_transformed: false,
            caches: Caches::default(),
            mismatches: 0,
            unknown_functions: [0; UNKNOWN_FUNCTIONS_MAX],
            unknown_functions_count: 0,
        }
    }

    /// The guest of the requests.
    pub fn guest(&self) -> &Arc<Guest> {
        &self.guest
    }

    /// Finds the meaning of a request, and writes it to `insight` (`io_priority` stays as it is).
    /// `pages` are the guest-physical addresses and the lengths of the request's data, in order.
    /// Without a kernel, the meaning is unknown.
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
            self.writers = self.guest.writers();
            self.caches = Caches::default();
            self.knows_object = false;
            self.mismatches = 0;
            self.unknown_functions_count = 0;
        }
        // The kernel is moved out for the time of the call, which avoids a count of its references.
        let Some(kernel) = self.kernel.take() else {
            if request.carries_data {
                self.guest.notify(EVENT_REQUEST, request.header);
            }
            return;
        };
        self.counts.request();
        self.is_write = request.is_write;
        let found = self.follow_bios(&kernel, request, pages, insight).is_some();
        if found && !self.knows_object && request.carries_data {
            self.knows_object = true;
            self.object.set(kernel.disk_of(request.header).unwrap_or(0));
        }
        self.kernel = Some(kernel);
        if found {
            self.mismatches = 0;
            insight.finish(table);
        } else {
            insight.parts.clear();
            self.counts.mismatch();
            self.mismatches += 1;
            if self.mismatches % MISMATCHES_MAX == 0 {
                self.guest.notify(EVENT_MISMATCH, request.header);
            }
        }
    }

    /// Follows the request's bios. `None` if it is not a request of this kernel.
    fn follow_bios(
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
        if view.is_flush() {
            self.add_flusher(kernel, view, insight);
            return Some(());
        }
        let mut pieces = Pieces::new(pages);
        let (mut sector, mut left) = (view.sector, view.length);
        for _ in 0..BIOS_MAX {
            if left == 0 || bio == 0 {
                break;
            }
            let Some(found) = kernel.bio(bio) else { break };
            let size = found.size.min(left);
            // The bios of a request are contiguous on the disk. Any other bio is torn, or not part
            // of it.
            if found.sector != sector || size == 0 {
                break;
            }
            let group = self.group(kernel, &found, view.now_ns);
            if view.carries_data {
                let verdict = self.judge(kernel, &found, view, insight.flags);
                self.add_parts(kernel, &verdict, size, group, &mut pieces, view.now_ns, insight);
            } else {
                insight.push(size, Facts { cgroup: group.name, ..Facts::default() });
            }
            left -= size;
            sector = sector.wrapping_add(size / 512);
            bio = found.next;
        }
        // Requests of a kernel that has booted since look the same here, but lead to no bios.
        if view.carries_data && left == view.length {
            return None;
        }
        if left > 0 {
            insight.push(left, Facts::default());
        }
        Some(())
    }

    /// The group to which a bio is charged.
    #[inline]
    fn group(&mut self, kernel: &Kernel, bio: &Bio, now_ns: u64) -> ControlGroup {
        let layout = &kernel.layout;
        if bio.group == 0 {
            return ControlGroup::default();
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

    /// The evidence of a bio's completion function, after the layers of devices have been followed.
    fn judge(
        &mut self,
        kernel: &Kernel,
        bio: &Bio,
        view: &RequestView,
        flags: RequestFlags,
    ) -> Verdict {
        // Without other evidence, the request's flags determine the kind.
        let other = if flags.contains(RequestFlags::SWAP) {
            Kind::Swap
        } else if flags.contains(RequestFlags::METADATA) {
            Kind::Metadata
        } else {
            Kind::Unknown
        };
        let each = Each { other, ..Each::default() };
        self.is_transformed = false;
        // Most bios are the page cache's, without a layer of devices.
        match kernel.meanings.get(bio.end) {
            Some(Meaning::Completion(Completion::OneFile)) => return Verdict::First,
            Some(Meaning::Completion(Completion::Pages)) => return Verdict::Each(each),
            _ => {}
        }
        let Some((bio, Meaning::Completion(completion), passage)) = kernel.origin(bio) else {
            self.unknown_function(bio.end);
            let doubt = Some(Doubt::new(bio, view, false));
            return self
                .by_place(kernel, bio, other)
                .unwrap_or(Verdict::Each(Each { doubt, ..each }));
        };
        self.is_transformed = passage.is_encrypted;
        let doubt = |is_known| Some(Doubt::new(&bio, view, is_known));
        let verdict = match completion {
            Completion::OneFile => Verdict::First,
            // `origin` follows the bios of other devices' layers.
            Completion::Pages
            | Completion::BtrfsStripe
            | Completion::DmClone
            | Completion::DmCrypt
            | Completion::MdClone
            | Completion::MdAccount
            | Completion::Raid1
            | Completion::Raid10
            | Completion::BcacheRequest
            | Completion::BcacheInsert
            | Completion::BcacheDetached
            | Completion::Chain => Verdict::Each(each),
            // The kernel also waits in this way for I/O to its own memory, and the page cache for
            // the rest of a partly written page. Private memory is that of a process with I/O to a
            // device (`dd`).
            Completion::Waited => self.by_place(kernel, &bio, other).unwrap_or_else(|| {
                Verdict::Each(Each {
                    anonymous: Kind::Device,
                    doubt: doubt(true),
                    waiter: self.caches.stacks.waiter(kernel, bio.private, view.now_ns),
                    ..each
                })
            }),
            // Whether it is a mirror's depends on one pointer.
            Completion::DmIo => Verdict::All(likely(Kind::Device)),
            Completion::Kind(kind) | Completion::OfBuffer(Some(kind)) => Verdict::All(sure(kind)),
            Completion::XfsLog => Verdict::All(sure(Kind::Journal)),
            Completion::BtrfsBarrier => {
                Verdict::Each(Each { waiter: kernel.completion_waiter(bio.private), ..each })
            }
            Completion::OfBuffer(None) => {
                Verdict::Each(Each { buffer: bio.private, sector: bio.sector, ..each })
            }
            Completion::Buffer => {
                let each = Each { buffer: bio.private, sector: bio.sector, ..each };
                self.of_buffer(kernel, &bio, each, doubt(false))
            }
            Completion::IomapDirect | Completion::IomapSimple | Completion::Direct => {
                Verdict::All(self.of_direct_io(kernel, &bio, completion, view.now_ns))
            }
            Completion::Device | Completion::DeviceEmbedded | Completion::DeviceSimple => {
                Verdict::All(self.of_device_io(kernel, &bio, completion))
            }
            Completion::XfsBuffer => Verdict::All(of_xfs_buffer(kernel, &bio)),
            Completion::Btrfs => {
                self.btrfs(kernel, &bio, view.now_ns).unwrap_or(Verdict::Each(each))
            }
        };
        match verdict {
            Verdict::First if passage.is_copied => kernel
                .first_page(&bio)
                .map_or(Verdict::Each(each), |page| Verdict::Page(page, each)),
            Verdict::Each(each) if passage.is_copied => self
                .only_page(kernel, &bio)
                .map_or(Verdict::Each(each), |page| Verdict::Page(page, each)),
            verdict => verdict,
        }
    }

    /// The evidence of a buffer's completion function.
    #[inline]
    fn of_buffer(
        &mut self,
        kernel: &Kernel,
        bio: &Bio,
        each: Each,
        doubt: Option<Doubt>,
    ) -> Verdict {
        let place = kernel.layout.buffer_end;
        let end = place.and_then(|place| kernel.u64(bio.private.wrapping_add(place)));
        match end.and_then(|end| kernel.meanings.get(end)) {
            Some(Meaning::Completion(Completion::OfBuffer(Some(kind)))) => Verdict::All(sure(kind)),
            Some(Meaning::Completion(Completion::OfBuffer(None))) => Verdict::Each(each),
            _ => {
                self.unknown_function(end.unwrap_or(0));
                Verdict::Each(Each { doubt, ..each })
            }
        }
    }

    /// The file of direct I/O, and its process.
    #[inline]
    fn of_direct_io(
        &mut self,
        kernel: &Kernel,
        bio: &Bio,
        completion: Completion,
        now_ns: u64,
    ) -> Facts {
        let private = match (completion, kernel.layout.iomap_simple_bio) {
            (Completion::IomapSimple, Some(place)) => bio.address.wrapping_sub(place),
            _ => bio.private,
        };
        let (inode, task) = kernel.direct_io(completion, private);
        let mut facts = self.file(kernel, inode, Kind::Direct, now_ns);
        self.add_submitter(kernel, task, &mut facts);
        facts
    }

    /// The process of direct I/O of a block device.
    #[inline]
    fn of_device_io(&mut self, kernel: &Kernel, bio: &Bio, completion: Completion) -> Facts {
        let mut facts = sure(Kind::Device);
        let layout = &kernel.layout;
        let dio = match completion {
            Completion::DeviceSimple => {
                self.add_process(kernel, Some(bio.private), ProcessRole::Submitter, &mut facts);
                return facts;
            }
            Completion::DeviceEmbedded => {
                layout.device_dio_bio.map(|place| bio.address.wrapping_sub(place))
            }
            _ => Some(bio.private),
        };
        let at = |place: Option<u64>| kernel.pointer(dio?.wrapping_add(place?));
        // One word has the task that waits, or the control block.
        if completion == Completion::Device {
            let task = at(layout.device_dio_waiter);
            self.add_process(kernel, task, ProcessRole::Submitter, &mut facts);
        }
        if let Some(block) = at(layout.device_dio_block).filter(|_| facts.process_id == 0) {
            self.add_submitter(kernel, kernel.submitter(block), &mut facts);
        }
        facts
    }

    /// A page of a bio that determines the facts of all its pages, because they belong to one
    /// inode.
    fn only_page(&mut self, kernel: &Kernel, bio: &Bio) -> Option<u64> {
        let first = kernel.first_page(bio)?;
        let pages = &mut self.caches.pages;
        let mut inode_of = |page| match pages.page(kernel, page) {
            Some(PageUse::Cached { inode, .. }) => Some(inode),
            _ => None,
        };
        let inode = inode_of(first)?;
        let is_one = kernel.all_pages(bio, |page| inode_of(page) == Some(inode));
        (is_one == Some(true)).then_some(first)
    }

    /// The evidence of Btrfs, which embeds its bios in structures that lead to the inode.
    fn btrfs(&mut self, kernel: &Kernel, bio: &Bio, now_ns: u64) -> Option<Verdict> {
        let layout = &kernel.layout;
        let own = bio.address.wrapping_sub(layout.btrfs_bio_bio?);
        // A scrub, or the replacement of a device, copies everything by its place, for which it
        // uses the inode of the trees.
        if let Some((place, bit)) = layout.btrfs_scrub {
            if kernel.u8(own.wrapping_add(place))? >> bit & 1 != 0 {
                return Some(Verdict::All(Facts::default()));
            }
        }
        let mut is_compressed = false;
        let mut find = || {
            let end = kernel.meanings.get(kernel.u64(own.wrapping_add(layout.btrfs_bio_end?))?);
            let direct = end == Some(Meaning::BtrfsDirect);
            is_compressed = end == Some(Meaning::BtrfsCompressed);
            if let Some(place) = layout.btrfs_bio_inode {
                let inode = kernel.pointer(own.wrapping_add(place))?;
                let offset = if layout.btrfs_inode_is_own { layout.btrfs_inode_inode? } else { 0 };
                return Some((inode.wrapping_add(offset), direct));
            }
            // Kernels before 6.2 store the inode only if no page leads to it.
            let place = match end? {
                Meaning::BtrfsDirect => layout.btrfs_dio_inode?,
                Meaning::BtrfsCompressed => layout.btrfs_compressed_inode?,
                Meaning::Completion(_)
                | Meaning::XfsDirectory
                | Meaning::DmMirror
                | Meaning::Submitter(_)
                | Meaning::PageWait
                | Meaning::RingPageWait
                | Meaning::TaskWait => return None,
            };
            let private = kernel.pointer(own.wrapping_add(layout.btrfs_bio_private?))?;
            Some((kernel.pointer(private.wrapping_add(place))?, direct))
        };
        let (inode, direct) = find()?;
        self.is_transformed |= is_compressed;
        let kind = if direct { Kind::Direct } else { Kind::Data };
        let mut facts = self.file(kernel, Some(inode), kind, now_ns);
        if direct {
            self.add_submitter(kernel, btrfs_submitter(kernel, own, inode), &mut facts);
        }
        let known = facts.kind == Kind::Metadata || facts.inode != 0;
        known.then_some(Verdict::All(facts))
    }

    /// The facts about the inode to which a bio refers. The kind is `kind` for a plain file, and
    /// otherwise the inode's own.
    fn file(&mut self, kernel: &Kernel, inode: Option<u64>, kind: Kind, now_ns: u64) -> Facts {
        let names = self.guest.names();
        let found = inode.and_then(|inode| self.caches.files.inode(kernel, names, inode, now_ns));
        // Direct I/O is possible only for files and devices.
        let found = found.filter(|found| {
            let can_be_direct = matches!(found.nature, Nature::File | Nature::Device);
            found.nature != Nature::Mover && (kind != Kind::Direct || can_be_direct)
        });
        let mut facts = found.map(|found| found.facts).unwrap_or_default();
        facts.kind = match found.map(|found| found.nature) {
            Some(Nature::Internal | Nature::Mounted(_)) => Kind::Metadata,
            Some(Nature::Device) => Kind::Device,
            Some(Nature::Directory) => Kind::Directory,
            Some(Nature::File | Nature::Mover) | None => kind,
        };
        facts.source = InsightSource::Bio;
        facts.confidence = if found.is_some() { Confidence::Sure } else { Confidence::Likely };
        facts
    }

    /// Adds the process of a task, if there is one.
    fn add_process(
        &self,
        kernel: &Kernel,
        task: Option<u64>,
        role: ProcessRole,
        facts: &mut Facts,
    ) {
        if let Some(task) = task.and_then(|task| kernel.task(task)) {
            facts.process = self.guest.names().number(&task.command);
            facts.process_id = task.process_id;
            facts.process_start = task.start;
            facts.process_role = role;
        }
    }

    fn add_submitter(&mut self, kernel: &Kernel, submission: Submission, facts: &mut Facts) {
        match submission {
            Submission::Task(task) => {
                self.add_process(kernel, Some(task), ProcessRole::Submitter, facts);
            }
            Submission::Function(function) => self.unknown_function(function),
            Submission::Unknown => {}
        }
    }

    /// The evidence of the place of a bio, which neither its function nor its pages identify: the
    /// journal of the file system that is mounted from the device has a known place. A file system
    /// reads its journal before the mount completes, perhaps just after its module was loaded.
    /// Until the module is known, nothing is.
    fn by_place(&mut self, kernel: &Kernel, bio: &Bio, other: Kind) -> Option<Verdict> {
        // A file system marks reads of its own structures; programs that read devices do not.
        if other != Kind::Metadata || bio.device == 0 {
            return None;
        }
        let super_block = self.caches.files.super_block_of(kernel, bio.device)?;
        let journal = kernel.journal_place(super_block)?;
        if !(journal.is_known)(&kernel.layout) {
            self.unknown_function(super_block);
            return Some(Verdict::All(Facts::default()));
        }
        let is_in_journal = kernel.is_in_journal(super_block, bio.device, bio.sector);
        is_in_journal.then(|| Verdict::All(sure(Kind::Journal)))
    }

    /// Handles an unknown completion function: it may belong to a module that was loaded later.
    fn unknown_function(&mut self, end: u64) {
        let known = self.unknown_functions_count.min(UNKNOWN_FUNCTIONS_MAX);
        if end == 0 || self.unknown_functions[..known].contains(&end) {
            return;
        }
        self.unknown_functions[self.unknown_functions_count % UNKNOWN_FUNCTIONS_MAX] = end;
        self.unknown_functions_count += 1;
        self.guest.notify(EVENT_UNKNOWN_FUNCTION, 0);
    }
}

/// The facts about a buffer of XFS.
fn of_xfs_buffer(kernel: &Kernel, bio: &Bio) -> Facts {
    let place = kernel.layout.xfs_buffer_ops;
    let operations = place.and_then(|place| kernel.u64(bio.private.wrapping_add(place)));
    let meaning = operations.and_then(|operations| kernel.meanings.get(operations));
    sure(if meaning == Some(Meaning::XfsDirectory) { Kind::Directory } else { Kind::Metadata })
}

/// Who submitted direct I/O of Btrfs, from the `btrfs_bio` at `own` and the inode.
fn btrfs_submitter(kernel: &Kernel, own: u64, inode: u64) -> Submission {
    let layout = &kernel.layout;
    let find = || {
        let mut private = kernel.pointer(own.wrapping_add(layout.btrfs_bio_private?))?;
        // At first, Btrfs's own structure was between, with a bio for all of the I/O.
        if let Some(place) = layout.btrfs_dio_bio {
            let bio = private.wrapping_add(place);
            private = kernel.pointer(bio.wrapping_add(layout.bio_private))?;
        }
        let (found, submission) = kernel.direct_io(Completion::IomapDirect, private);
        (found == Some(inode)).then_some(submission)
    };
    find().unwrap_or(Submission::Unknown)
}

/// The facts of data whose kind a bio's completion function proves.
fn sure(kind: Kind) -> Facts {
    Facts { kind, source: InsightSource::Bio, confidence: Confidence::Sure, ..Facts::default() }
}

/// The facts of data whose kind a bio's completion function suggests.
fn likely(kind: Kind) -> Facts {
    Facts { confidence: Confidence::Likely, ..sure(kind) }
}
