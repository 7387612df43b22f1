//! An attached kernel: the addresses and the layout of its structures.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use fathom_guest_memory::{GuestMemory, MemoryWindow};
use fathom_insight::RequestFlags;

use crate::btf::{self, Btf};
use crate::completion::{ENTRIES_MAX, Meaning, Meanings, meanings};
use crate::counters::CounterPlaces;
use crate::dirty::{DirtyPlaces, KnownSuperBlocks, Trail};
use crate::kallsyms::{self, KallsymsError};
use crate::layout::{Layout, Types};
use crate::modules::{self, Module, ModuleLayout};
use crate::paging::AddressSpace;
use crate::tunables::TunablePlaces;
use crate::vmcoreinfo::{self, PAGE, VmcoreInfo};

/// Why no kernel was found, or why the kernel cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttachError {
    /// There is no kernel's note in memory: no kernel has booted yet, the system is not Linux, or
    /// its memory is encrypted.
    NoKernel,
    /// The note of this release does not have the addresses of the symbols: it is older than 6.0.
    TooOld(String),
    /// The note is that of a 32-bit kernel of this release.
    ThirtyTwoBits(String),
    /// The note is complete, and the structure that it names is not: it belongs to an earlier boot,
    /// or has an unknown format.
    Torn {
        /// The kernel's release.
        release: String,
        /// The symbol of the note whose content is inconsistent.
        what: &'static str,
    },
    /// The kernel can be read, but the given request is not one of its requests.
    Stale(String),
    /// The kernel has no description of its types (`CONFIG_DEBUG_INFO_BTF`).
    NoTypes(String),
    /// A required structure or member is missing.
    Missing {
        /// The kernel's release.
        release: String,
        /// The name of the structure or the member.
        what: &'static str,
    },
}

impl fmt::Display for AttachError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoKernel => formatter.write_str(
                "no Linux kernel in the guest's memory: not up yet, another system, or encrypted",
            ),
            Self::TooOld(release) => {
                write!(formatter, "Linux {release} is too old: 6.0 or later is needed")
            }
            Self::ThirtyTwoBits(release) => write!(
                formatter,
                "Linux {release} is a 32-bit kernel: only x86-64 kernels are understood"
            ),
            Self::Stale(release) => write!(
                formatter,
                "the requests do not match the structures of Linux {release}: the structures are \
                 left over from an earlier boot, or the guest copies its I/O (swiotlb, encrypted \
                 memory)"
            ),
            Self::Torn { release, what } => write!(
                formatter,
                "the {what} of Linux {release} is inconsistent: it is left over from an earlier \
                 boot, or its format is unknown"
            ),
            Self::NoTypes(release) => write!(
                formatter,
                "Linux {release} does not describe its types (CONFIG_DEBUG_INFO_BTF)"
            ),
            Self::Missing { release, what } => {
                write!(formatter, "Linux {release} has no {what}, which introspection needs")
            }
        }
    }
}

impl std::error::Error for AttachError {}

impl AttachError {
    /// Whether this error explains better than `other` why none of several notes led to a kernel.
    /// The remains of an earlier boot are torn sooner or later, so a torn structure is weak
    /// evidence about the running kernel.
    pub(crate) fn is_more_specific_than(&self, other: &Self) -> bool {
        let weight = |error: &Self| match error {
            Self::NoKernel => 0,
            Self::Torn { .. } => 1,
            Self::Stale(_) => 2,
            Self::TooOld(_) | Self::ThirtyTwoBits(_) | Self::NoTypes(_) | Self::Missing { .. } => 3,
        };
        weight(self) >= weight(other)
    }
}

/// A Linux kernel in a guest's memory.
pub struct Kernel {
    pub(crate) memory: GuestMemory,
    pub(crate) space: AddressSpace,
    pub(crate) layout: Layout,
    pub(crate) meanings: Meanings,
    pub(crate) places: Places,
    pub(crate) counters: CounterPlaces,
    pub(crate) dirty: DirtyPlaces,
    pub(crate) super_blocks: KnownSuperBlocks,
    pub(crate) trail: Trail,
    tunables: TunablePlaces,
    note: VmcoreInfo,
    modules: Vec<Module>,
    module_layout: Option<ModuleLayout>,
}

/// Addresses of unique objects, and bits and values in the structures of pages and buffers.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// The address of `struct page` number 0, whether or not it exists.
    pub pages: u64,
    /// The address of the pointer to the super block of all block devices.
    pub device_super: Option<u64>,
    pub super_blocks: Option<u64>,
    pub first_task: Option<u64>,
    pub modules: Option<u64>,
    /// The bit of `page.flags` that marks a page of a slab. Kernels from 6.10 on use the page type.
    pub slab_bit: Option<u64>,
    /// The bit of `page.flags` that marks the first page of a compound page.
    pub head_bit: Option<u64>,
    /// The bits of `page.flags` of a locked page, of a page with content, and of a page in
    /// write-back.
    pub locked_bit: Option<u64>,
    pub uptodate_bit: Option<u64>,
    pub writeback_bit: Option<u64>,
    /// The bit of `page.flags` of a page that a task waits for.
    pub waiters_bit: Option<u64>,
    /// The table of the lists of those that wait for pages.
    pub page_waits: Option<u64>,
    /// The bit of `page.flags` of a page that has to be written.
    pub dirty_bit: Option<u64>,
    /// The function that marks pages of files as dirty.
    pub page_dirtied: Option<u64>,
    /// The function that carries out the system calls of 64-bit programs.
    pub system_call: Option<u64>,
    /// The place of the pointer to the current task, in the area of each processor.
    pub current: Option<u64>,
    /// The kernel's clock, with its lock.
    pub clock: Option<u64>,
    /// The ticks since some time, which inodes note when they become dirty.
    pub ticks: Option<u64>,
    /// The clock that counts these ticks.
    pub tick_source: Option<u64>,
    /// The operations of an inode that cannot be opened.
    pub no_operations: Option<u64>,
    /// The value of the highest byte of `page.page_type` that marks a page of a slab.
    pub slab_type: Option<u32>,
    /// The bit of `buffer_head.b_state` that marks a block of the journal itself.
    pub journal_bit: Option<u64>,
    /// The bits of `request.cmd_flags`, with the flags that they mean.
    pub request_flags: FlagTable,
}

impl Places {
    /// The places by the kernel's types and symbols. `pages` is the address of the first page
    /// structure.
    fn new(types: &Types<'_>, symbol: impl Fn(&str) -> Option<u64>, pages: u64) -> Self {
        let bit = |list, name| types.enumerator(list, name).filter(|bit| *bit < 64);
        Self {
            pages,
            device_super: symbol("blockdev_superblock"),
            super_blocks: symbol("super_blocks"),
            first_task: symbol("init_task"),
            modules: symbol("modules"),
            slab_bit: bit("pageflags", "PG_slab"),
            head_bit: bit("pageflags", "PG_head"),
            locked_bit: bit("pageflags", "PG_locked"),
            uptodate_bit: bit("pageflags", "PG_uptodate"),
            writeback_bit: bit("pageflags", "PG_writeback"),
            waiters_bit: bit("pageflags", "PG_waiters"),
            page_waits: symbol("folio_wait_table"),
            dirty_bit: bit("pageflags", "PG_dirty"),
            page_dirtied: symbol("__folio_mark_dirty"),
            system_call: symbol("do_syscall_64"),
            current: symbol("current_task").or_else(|| {
                let member = types.kernel.member("pcpu_hot", "current_task")?;
                Some(symbol("pcpu_hot")?.wrapping_add(member.offset))
            }),
            clock: symbol("tk_core").or_else(|| symbol("timekeeper_data")),
            ticks: symbol("jiffies").or_else(|| symbol("jiffies_64")),
            tick_source: symbol("clocksource_jiffies"),
            no_operations: symbol("no_open_fops"),
            slab_type: types.enumerator("pagetype", "PGTY_slab").map(|value| value as u32),
            journal_bit: bit("jbd_state_bits", "BH_JWrite"),
            request_flags: FlagTable::new(REQUEST_FLAGS.iter().filter_map(|(name, flag)| {
                let bit = types.enumerator("req_flag_bits", name)?;
                Some((1_u32.checked_shl(bit as u32)?, *flag))
            })),
        }
    }
}

/// The kernel's types, which lie between two addresses.
fn read_types(
    memory: &GuestMemory,
    space: &AddressSpace,
    (start, end): (u64, u64),
) -> Option<Btf<'static>> {
    let length = end.checked_sub(start).filter(|length| *length <= btf::LENGTH_MAX as u64)?;
    let mut bytes = vec![0; length as usize];
    space.read(memory, start, &mut bytes)?;
    Btf::new(bytes, None)
}

/// The meaning of each value of each of the four bytes of `request.cmd_flags`, in bits of
/// [`RequestFlags`].
#[derive(Clone, Debug)]
pub(crate) struct FlagTable {
    bytes: [[u8; 256]; 4],
}

impl FlagTable {
    fn new(bits: impl Iterator<Item = (u32, RequestFlags)>) -> Self {
        let mut bytes = [[0; 256]; 4];
        for (bit, flag) in bits {
            for (place, table) in bytes.iter_mut().enumerate() {
                for (value, flags) in (0_u32..).zip(table) {
                    if bit >> (8 * place) & value != 0 {
                        *flags |= flag.0;
                    }
                }
            }
        }
        Self { bytes }
    }
}

/// A structure of the kernel, for several reads. A read gives the same as a read of the kernel at
/// the sum of the address and the offset. The place of contiguous memory is looked up once.
pub(crate) struct Object<'a> {
    kernel: &'a Kernel,
    address: u64,
    window: MemoryWindow<'a>,
}

impl Object<'_> {
    /// The number at an offset.
    #[inline]
    pub fn u64(&self, offset: u64) -> Option<u64> {
        self.window.u64(offset).or_else(|| self.elsewhere(offset))
    }

    #[cold]
    #[inline(never)]
    fn elsewhere(&self, offset: u64) -> Option<u64> {
        self.kernel.u64(self.address.wrapping_add(offset))
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Kernel")
            .field("release", &self.release())
            .field("modules", &self.modules.len())
            .finish_non_exhaustive()
    }
}

/// The time after which a search reads no further kernel.
const SEARCH_MAX: Duration = Duration::from_secs(2);

/// The names of unique symbols.
const PLACES: &[&str] = &[
    "__start_BTF",
    "__stop_BTF",
    "vmemmap_base",
    "page_offset_base",
    "blockdev_superblock",
    "super_blocks",
    "init_task",
    "no_open_fops",
    "modules",
    "btf_modules",
    "vm_node_stat",
    "vm_zone_stat",
    "_totalram_pages",
    "dirty_expire_interval",
    "node_data",
    "contig_page_data",
    "nr_node_ids",
    "nr_cpu_ids",
    "__per_cpu_offset",
    "bdi_list",
    "folio_wait_table",
    "tk_core",
    "timekeeper_data",
    "jiffies",
    "jiffies_64",
    "clocksource_jiffies",
    "__folio_mark_dirty",
    "do_syscall_64",
    "current_task",
    "pcpu_hot",
];

/// The bits of a request's flags by name.
const REQUEST_FLAGS: &[(&str, RequestFlags)] = &[
    ("__REQ_META", RequestFlags::METADATA),
    ("__REQ_PRIO", RequestFlags::PRIORITY),
    ("__REQ_SYNC", RequestFlags::SYNCHRONOUS),
    ("__REQ_RAHEAD", RequestFlags::READ_AHEAD),
    ("__REQ_SWAP", RequestFlags::SWAP),
    ("__REQ_FUA", RequestFlags::FORCE_UNIT_ACCESS),
    ("__REQ_PREFLUSH", RequestFlags::FLUSH),
    ("__REQ_BACKGROUND", RequestFlags::BACKGROUND),
];

impl Kernel {
    /// Finds the kernel in `memory`. If there are several (with the remains of an earlier boot), it
    /// is the kernel of the request whose virtio header is at the guest-physical address `header`;
    /// without a header, the first consistent one. The whole memory is searched, regardless of the
    /// time.
    ///
    /// # Errors
    /// When there is no kernel, or it cannot be read. Of several errors, the most specific is
    /// returned.
    pub fn attach(memory: &GuestMemory, header: Option<u64>) -> Result<Self, AttachError> {
        let notes = vmcoreinfo::find(memory, 0, None).notes;
        Self::first(memory, header, notes, Instant::now() + SEARCH_MAX)
    }

    /// As [`attach`](Self::attach), from a guest-physical address on and for a limited time.
    /// Without a kernel, also returns the address at which to continue, if there was not enough
    /// time.
    pub(crate) fn attach_part(
        memory: &GuestMemory,
        header: Option<u64>,
        start: u64,
        limit: Duration,
    ) -> Result<Self, (AttachError, Option<u64>)> {
        let begin = Instant::now();
        let found = vmcoreinfo::find(memory, start, Some(begin + limit));
        Self::first(memory, header, found.notes, begin + SEARCH_MAX)
            .map_err(|error| (error, found.rest))
    }

    /// The kernel of the first of these notes with a readable kernel that owns the request.
    fn first(
        memory: &GuestMemory,
        header: Option<u64>,
        notes: Vec<VmcoreInfo>,
        end: Instant,
    ) -> Result<Self, AttachError> {
        let mut nearest = AttachError::NoKernel;
        for note in notes {
            // A guest with many slowly readable remains of kernels must not keep other guests
            // waiting.
            if Instant::now() > end {
                break;
            }
            let error = match Self::read(memory, note) {
                Ok(kernel) if header.is_none_or(|header| kernel.owns_request(header)) => {
                    return Ok(kernel);
                }
                Ok(kernel) => AttachError::Stale(kernel.release().to_owned()),
                Err(error) => error,
            };
            if error.is_more_specific_than(&nearest) {
                nearest = error;
            }
        }
        Err(nearest)
    }

    /// Reads the same kernel again: its modules may have changed.
    ///
    /// # Errors
    /// When the kernel is no longer there.
    pub fn read_again(&self) -> Result<Self, AttachError> {
        Self::read(&self.memory, self.note.clone())
    }

    /// The same kernel in the same memory after some was plugged in or out. `None` if the kernel
    /// has changed.
    pub(crate) fn in_memory(&self, memory: &GuestMemory) -> Option<Self> {
        let mut space = AddressSpace::new(&self.note)?;
        let direct = self.space.direct_start();
        let is_there = self.note.is_there(memory) && space.set_direct(memory, direct, memory.end());
        is_there.then(|| Self {
            memory: memory.clone(),
            space,
            layout: self.layout.clone(),
            meanings: self.meanings.clone(),
            places: self.places.clone(),
            counters: self.counters.clone(),
            dirty: self.dirty.clone(),
            super_blocks: KnownSuperBlocks::default(),
            trail: Trail::default(),
            tunables: self.tunables.clone(),
            note: self.note.clone(),
            modules: self.modules.clone(),
            module_layout: self.module_layout,
        })
    }

    fn read(memory: &GuestMemory, note: VmcoreInfo) -> Result<Self, AttachError> {
        let release = || note.release().to_owned();
        // The page tables, under the name that kernels of all processors have in their notes.
        if note.symbol("swapper_pg_dir").is_some_and(|address| address >> 32 == 0) {
            return Err(AttachError::ThirtyTwoBits(release()));
        }
        if note.symbol("kallsyms_names").is_none() {
            return Err(AttachError::TooOld(release()));
        }
        let torn = |what| AttachError::Torn { release: release(), what };
        let missing = |what| AttachError::Missing { release: release(), what };
        let mut space = AddressSpace::new(&note).ok_or_else(|| torn("init_top_pgt"))?;
        let names: Vec<&str> = PLACES
            .iter()
            .copied()
            .chain(TunablePlaces::SYMBOLS)
            .chain(meanings().map(|(name, _)| name))
            .collect();
        let symbols =
            kallsyms::find(memory, &space, &note, &names).map_err(|error| match error {
                KallsymsError::Missing(what) => missing(what),
                KallsymsError::Torn(what) => torn(what),
            })?;
        let symbol = |name: &str| symbols.get(name).and_then(|all| all.first()).copied();
        let value = |name| space.u64(memory, symbol(name)?);

        let direct = value("page_offset_base").ok_or_else(|| missing("page_offset_base"))?;
        let pages = value("vmemmap_base").ok_or_else(|| missing("vmemmap_base"))?;
        if !space.set_direct(memory, direct, memory.end()) {
            return Err(torn("page_offset_base"));
        }
        let range = symbol("__start_BTF").zip(symbol("__stop_BTF"));
        let btf = range.and_then(|range| read_types(memory, &space, range));
        let btf = btf.ok_or_else(|| AttachError::NoTypes(release()))?;

        let mut types = Types { kernel: &btf, modules: Vec::new() };
        let module_layout = ModuleLayout::new(&types);
        let mut found = Vec::new();
        for (name, meaning) in meanings() {
            for address in symbols.get(name).into_iter().flatten() {
                found.push((*address, meaning));
            }
        }
        let mut loaded = Vec::new();
        if let Some((head, layout)) = symbol("modules").zip(module_layout.as_ref()) {
            let known: HashMap<&[u8], Meaning> =
                meanings().map(|(name, meaning)| (name.as_bytes(), meaning)).collect();
            loaded = modules::list(memory, &space, head, layout);
            let mut left = modules::SYMBOLS_TOTAL;
            for module in &loaded {
                let add = |name: &[u8], address| {
                    if let Some(meaning) = known.get(name).filter(|_| found.len() < ENTRIES_MAX) {
                        found.push((address, *meaning));
                    }
                };
                let _ = modules::symbols(memory, &space, module, layout, &mut left, add);
            }
            if let Some(head) = symbol("btf_modules") {
                types.modules = modules::types(memory, &space, head, layout, &loaded, &btf);
            }
        }
        let layout = Layout::new(&types).map_err(missing)?;
        let places = Places::new(&types, symbol, pages);
        let counters = CounterPlaces::new(&types, symbol);
        let dirty = DirtyPlaces::new(&types, symbol);
        let tunables = TunablePlaces::new(|name| symbols.get(name).map(Vec::as_slice));
        drop(types);
        Ok(Self {
            memory: memory.clone(),
            space,
            layout,
            meanings: Meanings::new(&found),
            places,
            counters,
            dirty,
            super_blocks: KnownSuperBlocks::default(),
            trail: Trail::default(),
            tunables,
            note,
            modules: loaded,
            module_layout,
        })
    }

    /// The kernel's release, such as `6.1.0-48-cloud-amd64`.
    pub fn release(&self) -> &str {
        self.note.release()
    }

    /// The names of the modules that were loaded when the kernel was read.
    pub fn modules(&self) -> impl ExactSizeIterator<Item = &str> {
        self.modules.iter().map(|module| module.name.as_str())
    }

    /// The memory in which the kernel was found.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Whether the kernel's note is unchanged. A guest that has booted another kernel has most
    /// likely overwritten it.
    pub fn is_there(&self) -> bool {
        self.note.is_there(&self.memory)
    }

    /// Whether the list of modules has changed since the kernel was read.
    pub fn modules_changed(&self) -> bool {
        match self.places.modules.zip(self.module_layout.as_ref()) {
            Some((head, layout)) => {
                modules::list(&self.memory, &self.space, head, layout) != self.modules
            }
            None => false,
        }
    }

    /// Whether the virtio header at a guest-physical address is part of a request of this kernel:
    /// the header follows a `struct request` whose queue belongs to a virtio disk.
    pub fn owns_request(&self, header: u64) -> bool {
        self.disk_of(header).is_some()
    }

    /// The `gendisk` of the virtio disk to which the request with a header at a guest-physical
    /// address was sent.
    pub(crate) fn disk_of(&self, header: u64) -> Option<u64> {
        let layout = &self.layout;
        let request = header.checked_sub(layout.request_size)?;
        if !self.memory.contains(request) {
            return None;
        }
        let queue = self.memory.u64(request + layout.request_queue)?;
        let queue = self.space.direct(queue)?;
        let disk = self.memory.u64(queue + layout.queue_disk)?;
        let mut name = [0; 2];
        self.memory.read(self.space.direct(disk)? + layout.disk_name, &mut name)?;
        (&name == b"vd").then_some(disk)
    }

    /// The flags that the kernel set in a request.
    #[inline]
    pub(crate) fn request_flags(&self, bits: u32) -> RequestFlags {
        let [a, b, c, d] = bits.to_le_bytes().map(usize::from);
        let tables = &self.places.request_flags.bytes;
        RequestFlags(tables[0][a] | tables[1][b] | tables[2][c] | tables[3][d])
    }

    /// The structure at a virtual address of the kernel, for several reads.
    #[inline]
    pub(crate) fn object(&self, address: u64) -> Object<'_> {
        let window = match self.space.direct(address) {
            Some(physical) => self.memory.window(physical),
            None => self.page_window(address),
        };
        Object { kernel: self, address, window }
    }

    /// The rest of the page at a virtual address; empty if the address is not mapped.
    #[cold]
    fn page_window(&self, address: u64) -> MemoryWindow<'_> {
        match self.space.walk(&self.memory, address) {
            Some(physical) => self.memory.window(physical).first(PAGE - address % PAGE),
            None => self.memory.window(0).first(0),
        }
    }

    /// The addresses of the tunables of write-back.
    pub(crate) fn tunable_places(&self) -> &TunablePlaces {
        &self.tunables
    }

    /// The guest-physical address of a virtual address of the kernel.
    pub(crate) fn physical(&self, address: u64) -> Option<u64> {
        self.space.direct(address).or_else(|| self.space.walk(&self.memory, address))
    }

    /// The number at a virtual address of the kernel.
    #[inline]
    pub(crate) fn u64(&self, address: u64) -> Option<u64> {
        self.space.u64(&self.memory, address)
    }

    /// The number at a virtual address of the kernel.
    pub(crate) fn u32(&self, address: u64) -> Option<u32> {
        self.space.u32(&self.memory, address)
    }

    /// The byte at a virtual address of the kernel.
    pub(crate) fn u8(&self, address: u64) -> Option<u8> {
        let mut byte = [0];
        self.space.read(&self.memory, address, &mut byte)?;
        Some(byte[0])
    }

    /// The pointer at a virtual address of the kernel; `None` if it is null.
    #[inline]
    pub(crate) fn pointer(&self, address: u64) -> Option<u64> {
        self.u64(address).filter(|pointer| *pointer != 0)
    }

    /// The text at a virtual address, of at most `length_max` bytes.
    pub(crate) fn text(&self, address: u64, length_max: usize) -> Option<String> {
        self.space.text(&self.memory, address, length_max)
    }
}
