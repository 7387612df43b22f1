//! The pages that are away from a guest's memory: a file in memory with an entry for each page, and
//! the compressed content; and a [swap file](swap) for what of it takes too much memory. They
//! outlive the pager and its guard.
//!
//! ```text
//! header (4 KiB) │ index: 8 bytes a page │ data, from a multiple of 64 KiB: chunks of slots
//! ```
//! An entry is published by one store of 64 bits, after the content to which it refers:
//!
//! | bits 0, 1 | the others |
//! |---|---|
//! | 0 | no entry |
//! | 1 | the page has one number of 32 bits throughout: bits 32 to 63 |
//! | 2 | LZ4, or plain if it is as long as a page: bits 2 to 15 are the length in bytes, with the checksum; bits 16 to 63 are the place, in units of 256 bytes from the beginning of the data |
//! | 3 | in the swap file: bits 2 to 31 are the slot, bits 32 to 63 the checksum's low half |
//!
//! A slot begins with a checksum of 64 bits of the page's content, and of its number. Which slots
//! are taken follows from the index; nothing else says it. The format is in `docs/pager.md`.

mod map;
mod queue;
mod slots;
mod spill;
mod swap;

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_guest_memory::{Mapping, MemoryFile, MemoryOwner};
use rustix::fs::{FallocateFlags, fallocate};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::slots::{CHUNK, SLOT_BYTES_MAX, Slots, UNIT};
use self::spill::Swap;
pub(crate) use self::spill::{ReadContent, ReadFor, ReadPage};
use self::swap::{SwapFile, SwapPlace};
use crate::memory::MappedMemory;
use crate::vmm::{self, Vmm};

/// A page, in bytes.
pub(crate) const PAGE: u64 = 4096;
/// The content of a page.
pub(crate) type Page = [u8; PAGE as usize];

/// Where stores are by default: in memory.
pub const STORE_FOLDER: &str = "/dev/shm/fathom-pager";

/// `fathomPS`, and the version of the layout.
const MAGIC: u64 = 0x5350_6d6f_6874_6166;
/// 1 had no swap file.
const VERSION: u64 = 2;
/// The numbers of 64 bits before the index: one page.
const HEADER: usize = 512;
const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 1;
const AT_PROCESS: usize = 2;
const AT_START: usize = 3;
const AT_PARTS: usize = 4;
const AT_PAGES: usize = 5;
/// The swap file: its device, inode and slots (0 without one), and the most bytes that contents
/// take in memory with one.
const AT_SWAP_DEVICE: usize = 6;
const AT_SWAP_INODE: usize = 7;
const AT_SWAP_SLOTS: usize = 8;
const AT_MEMORY_MAX: usize = 9;
/// Each part has four numbers.
const AT_PART: usize = 16;
const PARTS_MAX: usize = (HEADER - AT_PART) / 4;
/// The most pages of a guest: 16 TiB.
const PAGES_MAX: u64 = 16 << 28;

/// The checksum at the beginning of a slot, in bytes.
const CHECKSUM_BYTES: usize = 8;
/// A page that does not become smaller than this stays: it would free too little.
const PACKED_BYTES_MAX: usize = 3072;
/// The length of a content that does not become smaller, with its checksum.
const PLAIN_BYTES: usize = PAGE as usize + CHECKSUM_BYTES;
const _: () = assert!(PLAIN_BYTES <= SLOT_BYTES_MAX);
/// The most slots of a swap file: 4 TiB.
const SWAP_SLOTS_MAX: u64 = 1 << 30;

/// tmpfs.
const TMPFS: u64 = 0x0102_1994;

/// What the index says of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    None,
    Filled(u32),
    Packed {
        place: u64,
        length: usize,
    },
    Swapped {
        slot: u64,
        checksum: u32,
    },
    /// Nothing that was ever written.
    Invalid,
}

impl Entry {
    fn decode(word: u64) -> Self {
        let length = (word >> 2 & 0x3fff) as usize;
        let is_length = length > CHECKSUM_BYTES && length <= CHECKSUM_BYTES + PACKED_BYTES_MAX
            || length == PLAIN_BYTES;
        match word & 0b11 {
            0 if word == 0 => Self::None,
            1 if word as u32 == 1 => Self::Filled((word >> 32) as u32),
            2 if is_length => Self::Packed { place: word >> 16, length },
            3 => Self::Swapped {
                slot: word >> 2 & (SWAP_SLOTS_MAX - 1),
                checksum: (word >> 32) as u32,
            },
            _ => Self::Invalid,
        }
    }

    fn encode(self) -> u64 {
        match self {
            Self::None | Self::Invalid => 0,
            Self::Filled(value) => u64::from(value) << 32 | 1,
            Self::Packed { place, length } => place << 16 | (length as u64) << 2 | 2,
            Self::Swapped { slot, checksum } => u64::from(checksum) << 32 | slot << 2 | 3,
        }
    }
}

/// What became of a page that was to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// It has an entry.
    Yes,
    /// It does not become small enough.
    Incompressible,
    /// There is no memory for it.
    Full,
}

/// What the store has of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing.
    Nothing,
    /// Its content.
    Content,
    /// It is in the swap file, and has to be [read](PageStore::read).
    InFile,
    /// Something else than what was stored.
    Damaged,
}

/// How a store has a swap file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwapOptions {
    /// The folder of the file: on a disk, for this user alone.
    pub folder: PathBuf,
    /// The most bytes of the file; `None` for as many as the guest's memory has.
    pub bytes_max: Option<u64>,
    /// The most bytes that contents take in memory before they go to the file.
    pub memory_max: u64,
}

/// A part of the guest's memory whose pages have entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredPart {
    pub file: MemoryFile,
    /// The offset of its first byte in the file.
    pub offset: u64,
    /// In bytes.
    pub length: u64,
    /// The number of its first page in the index.
    pub first: u64,
}

/// A store.
#[derive(Debug)]
pub(crate) struct PageStore {
    path: PathBuf,
    file: File,
    map: Mapping,
    owner: Arc<MemoryOwner>,
    parts: Vec<StoredPart>,
    pages: u64,
    slots: Slots,
    filled: u64,
    packed: u64,
    swap: Option<Swap>,
    /// Space for a compressed page.
    scratch: Vec<u8>,
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, text.into())
}

/// The offset of the data of a store of so many pages, in bytes.
fn data_offset(pages: u64) -> u64 {
    ((HEADER as u64 + pages) * 8).next_multiple_of(CHUNK)
}

/// The bytes of its data: as much as the guest's memory, with room for chunks that are not full.
fn data_bytes(pages: u64) -> u64 {
    (pages * PAGE).next_multiple_of(CHUNK) + 64 * CHUNK
}

fn name(vmm: &Vmm) -> String {
    format!("{}-{}-{}", vmm::namespace(), vmm.process(), vmm.start_ticks())
}

/// Whether a folder is of this user alone.
fn check_folder(folder: &Path) -> io::Result<()> {
    // Not made if it is there: that takes the lock of the folder above, which others may hold.
    let found = fs::symlink_metadata(folder).or_else(|error| {
        if error.kind() != ErrorKind::NotFound {
            return Err(error);
        }
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        fs::symlink_metadata(folder)
    })?;
    let is_own = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
    if !is_own || found.mode() & 0o077 != 0 {
        return Err(invalid("others may use the folder: it has to be of this user alone"));
    }
    Ok(())
}

impl PageStore {
    /// Makes the store of a VMM, in a folder that is in memory, perhaps with a swap file.
    ///
    /// # Errors
    /// When it cannot be made, or there is no memory for its index.
    pub fn create(
        folder: &Path,
        vmm: &Vmm,
        memory: &[MappedMemory],
        swap: Option<&SwapOptions>,
    ) -> io::Result<Self> {
        let place = swap.map(|swap| create_swap(vmm, memory, swap)).transpose()?;
        let made = Self::create_with(folder, vmm, memory, swap.zip(place.as_ref()));
        made.inspect_err(|_| {
            if let Some((place, _)) = &place {
                swap::remove(&place.path);
            }
        })
    }

    fn create_with(
        folder: &Path,
        vmm: &Vmm,
        memory: &[MappedMemory],
        swap: Option<(&SwapOptions, &(SwapPlace, u64))>,
    ) -> io::Result<Self> {
        check_folder(folder)?;
        if rustix::fs::statfs(folder)?.f_type as u64 != TMPFS {
            return Err(invalid("the folder is not in memory (tmpfs)"));
        }
        let pages = memory.iter().map(|part| part.length() / PAGE).sum();
        if memory.len() > PARTS_MAX || pages > PAGES_MAX {
            return Err(invalid("the guest's memory is too large, or has too many parts"));
        }
        let path = folder.join(format!("{}.pages", name(vmm)));
        let _ = fs::remove_file(&path);
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(&path)?;
        let made = (|| {
            let index = data_offset(pages);
            file.set_len(index + data_bytes(pages))?;
            // All of it, so that no entry fails later.
            fallocate(&file, FallocateFlags::empty(), 0, index)?;
            let mut store = Self::map(path.clone(), file, pages)?;
            if let Some((options, (place, slots))) = swap {
                for (at, value) in [
                    (AT_SWAP_DEVICE, place.file.device),
                    (AT_SWAP_INODE, place.file.inode),
                    (AT_SWAP_SLOTS, *slots),
                    (AT_MEMORY_MAX, options.memory_max),
                ] {
                    store.set_number(at, value);
                }
                store.open_swap(&place.path)?;
            }
            for (at, part) in memory.iter().enumerate() {
                let numbers = [part.device, part.inode, part.offset, part.length()];
                for (number, value) in numbers.into_iter().enumerate() {
                    store.set_number(AT_PART + 4 * at + number, value);
                }
            }
            for (at, value) in [
                (AT_PROCESS, vmm.process() as u64),
                (AT_START, vmm.start_ticks()),
                (AT_PARTS, memory.len() as u64),
                (AT_PAGES, pages),
                (AT_VERSION, VERSION),
                (AT_MAGIC, MAGIC),
            ] {
                store.set_number(at, value);
            }
            store.with_parts()
        })();
        made.inspect_err(|_| drop(fs::remove_file(&path)))
    }

    /// Opens the store that an earlier pager of a VMM has made, with the swap file at `swap` if it
    /// has one. What is taken in it is not known before [`recover`](Self::recover).
    ///
    /// # Errors
    /// When there is none, or it is another VMM's, or of another version.
    pub fn open(path: &Path, vmm: &Vmm, swap: Option<&Path>) -> io::Result<Self> {
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
        let file = options.open(path)?;
        let length = file.metadata()?.len();
        if length < HEADER as u64 * 8 {
            return Err(invalid("it is no store of pages"));
        }
        let header = Mapping::read_only(&file, 0, HEADER as u64 * 8)?;
        let number = |at: usize| u64::from_ne_bytes(header.access().bytes(at * 8));
        if number(AT_MAGIC) != MAGIC {
            return Err(invalid("it is no store of pages"));
        }
        if number(AT_VERSION) != VERSION {
            let version = number(AT_VERSION);
            return Err(invalid(format!("another version of fathom has made it ({version})")));
        }
        let pages = number(AT_PAGES);
        let is_its = number(AT_PROCESS) == vmm.process() as u64
            && number(AT_START) == vmm.start_ticks()
            && pages <= PAGES_MAX
            && number(AT_SWAP_SLOTS) <= SWAP_SLOTS_MAX
            && length == data_offset(pages) + data_bytes(pages);
        if !is_its {
            return Err(invalid("it is the store of another machine"));
        }
        let mut store = Self::map(path.to_owned(), file, pages)?;
        match swap {
            Some(swap) => store.open_swap(swap)?,
            None if store.number(AT_SWAP_SLOTS) > 0 => {
                return Err(invalid("where its swap file is is not known"));
            }
            None => {}
        }
        store.with_parts()
    }

    /// Takes the swap file of the header, which is at `path`, if there is one. It need not be there
    /// now: what is in it cannot come back then, and the rest can.
    fn open_swap(&mut self, path: &Path) -> io::Result<()> {
        let slots = self.number(AT_SWAP_SLOTS);
        if slots == 0 {
            return Ok(());
        }
        let file =
            MemoryFile { device: self.number(AT_SWAP_DEVICE), inode: self.number(AT_SWAP_INODE) };
        let file = SwapFile::new(SwapPlace { path: path.to_owned(), file })?;
        self.swap = Some(Swap::new(file, slots, self.pages, self.number(AT_MEMORY_MAX)));
        Ok(())
    }

    fn map(path: PathBuf, file: File, pages: u64) -> io::Result<Self> {
        let owner = Arc::new(MemoryOwner::new(None, None));
        let map = Mapping::new(&file, 0, data_offset(pages) + data_bytes(pages), &owner)?;
        Ok(Self {
            path,
            file,
            map,
            owner,
            parts: Vec::new(),
            pages,
            slots: Slots::new(data_bytes(pages)),
            filled: 0,
            packed: 0,
            swap: None,
            scratch: vec![0; lz4_flex::block::get_maximum_output_size(PAGE as usize)],
        })
    }

    fn with_parts(mut self) -> io::Result<Self> {
        let count = self.number(AT_PARTS) as usize;
        let mut first = 0;
        for at in 0..count.min(PARTS_MAX) {
            let number = |number: usize| self.number(AT_PART + 4 * at + number);
            let file = MemoryFile { device: number(0), inode: number(1) };
            let part = StoredPart { file, offset: number(2), length: number(3), first };
            first = first.saturating_add(part.length / PAGE);
            self.parts.push(part);
        }
        let is_part = |part: &StoredPart| part.length > 0 && part.length % PAGE == 0;
        if count > PARTS_MAX || first != self.pages || !self.parts.iter().all(is_part) {
            return Err(invalid("its parts are damaged"));
        }
        Ok(self)
    }

    fn number(&self, at: usize) -> u64 {
        self.map.access().load_u64(at, Ordering::Acquire)
    }

    fn set_number(&self, at: usize, value: u64) {
        if let Some(cell) = self.map.access().u64s().get(at) {
            cell.store(value, Ordering::Release);
        }
    }

    /// The parts of the guest's memory that have entries.
    pub fn parts(&self) -> &[StoredPart] {
        &self.parts
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether another file is in its place now.
    pub fn is_other(&self) -> bool {
        let own = MemoryFile::of(&self.file).ok();
        let there = File::open(&self.path).and_then(|file| MemoryFile::of(&file)).ok();
        there.is_some() && own != there
    }

    /// The bytes of memory that the contents take.
    pub fn bytes(&self) -> u64 {
        self.slots.used() * CHUNK
    }

    /// The pages that have an entry and take no memory, and those that do.
    pub fn entries(&self) -> (u64, u64) {
        (self.filled, self.packed)
    }

    fn entry(&self, page: u64) -> Entry {
        if page >= self.pages {
            return Entry::Invalid;
        }
        Entry::decode(self.number(HEADER + page as usize))
    }

    /// Whether a page has an entry.
    pub fn has(&self, page: u64) -> bool {
        self.entry(page) != Entry::None
    }

    /// Finds what is taken, and removes the entries of pages that are not away. Entries that cannot
    /// be stay: such a page is damaged.
    pub fn recover(&mut self, is_away: impl Fn(u64) -> bool) {
        self.slots = Slots::new(data_bytes(self.pages));
        (self.filled, self.packed) = (0, 0);
        let slots = self.number(AT_SWAP_SLOTS);
        self.swap.iter_mut().for_each(|swap| swap.forget(slots));
        for page in 0..self.pages {
            let entry = self.entry(page);
            // What its memory does not have any more says nothing.
            if self.owner.is_lost() {
                return;
            }
            if entry != Entry::None && !is_away(page) {
                self.set_number(HEADER + page as usize, 0);
                continue;
            }
            match entry {
                Entry::None | Entry::Invalid => {}
                Entry::Filled(_) => self.filled += 1,
                Entry::Packed { place, length } => {
                    self.packed += 1;
                    // One that overlaps is found by its checksum.
                    let _ = self.slots.occupy(place, length);
                    self.swap.iter_mut().for_each(|swap| swap.push(page, length));
                }
                Entry::Swapped { slot, .. } => {
                    self.swap.iter_mut().for_each(|swap| swap.occupy(slot));
                }
            }
        }
        for chunks in self.slots.settle() {
            self.punch(chunks.start as u64, chunks.len() as u64);
        }
    }

    fn punch(&self, chunk: u64, count: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let offset = data_offset(self.pages) + chunk * CHUNK;
        // What is not given back is used again.
        let _ = fallocate(&self.file, flags, offset, count * CHUNK);
    }

    /// The offset of a slot in the file.
    fn slot(&self, place: u64, length: usize) -> Option<usize> {
        let offset = data_offset(self.pages).checked_add(place.checked_mul(UNIT)?)?;
        let offset = usize::try_from(offset).ok()?;
        (offset.checked_add(length)? <= self.map.length()).then_some(offset)
    }

    /// Stores the content of a page, and publishes its entry.
    pub fn put(&mut self, page: u64, content: &Page) -> Stored {
        if page >= self.pages || self.owner.is_lost() {
            return Stored::Full;
        }
        self.remove(page);
        if let Some(value) = filled_with(content) {
            self.publish(page, Entry::Filled(value));
            self.filled += 1;
            return Stored::Yes;
        }
        let packed = lz4_flex::block::compress_into(content, &mut self.scratch);
        let packed = match packed {
            Ok(packed) if packed <= PACKED_BYTES_MAX => packed,
            _ if self.swap.as_ref().is_some_and(Swap::takes_plain) => {
                self.scratch[..PAGE as usize].copy_from_slice(content);
                PAGE as usize
            }
            _ => return Stored::Incompressible,
        };
        let length = CHECKSUM_BYTES + packed;
        let (file, start) = (&self.file, data_offset(self.pages));
        let place = self.slots.take(length, |chunk| {
            let offset = start + chunk as u64 * CHUNK;
            fallocate(file, FallocateFlags::empty(), offset, CHUNK).is_ok()
        });
        let Some((place, offset)) =
            place.and_then(|place| Some((place, self.slot(place, length)?)))
        else {
            self.swap.iter_mut().for_each(Swap::press);
            return Stored::Full;
        };
        let access = self.map.access();
        access.write(offset, &xxh3_64_with_seed(content, page).to_ne_bytes());
        access.write(offset + CHECKSUM_BYTES, &self.scratch[..packed]);
        if self.owner.is_lost() {
            return Stored::Full;
        }
        self.publish(page, Entry::Packed { place, length });
        self.packed += 1;
        if let Some(swap) = &mut self.swap {
            swap.push(page, length);
        }
        Stored::Yes
    }

    fn publish(&self, page: u64, entry: Entry) {
        self.set_number(HEADER + page as usize, entry.encode());
    }

    /// Copies the content of a page into `target`, if there is an entry.
    pub fn get(&self, page: u64, target: &mut Page) -> Found {
        let entry = self.entry(page);
        // Lost memory reads as zeroes.
        if self.owner.is_lost() {
            return Found::Damaged;
        }
        match entry {
            Entry::None => Found::Nothing,
            Entry::Filled(value) => {
                for word in target.chunks_exact_mut(4) {
                    word.copy_from_slice(&value.to_ne_bytes());
                }
                Found::Content
            }
            Entry::Packed { place, length } => self.unpack(page, place, length, target),
            Entry::Swapped { .. } if self.swap.is_some() => Found::InFile,
            Entry::Swapped { .. } | Entry::Invalid => Found::Damaged,
        }
    }

    fn unpack(&self, page: u64, place: u64, length: usize, target: &mut Page) -> Found {
        let Some(offset) = self.slot(place, length) else { return Found::Damaged };
        let mut bytes = [0; SLOT_BYTES_MAX];
        let bytes = &mut bytes[..length];
        self.map.access().read(offset, bytes);
        let (checksum, packed) = bytes.split_at(CHECKSUM_BYTES);
        let is_whole = if length == PLAIN_BYTES {
            target.copy_from_slice(packed);
            true
        } else {
            let unpacked = lz4_flex::block::decompress_into(packed, target);
            matches!(unpacked, Ok(length) if length == PAGE as usize)
        };
        let is_it = is_whole && checksum == xxh3_64_with_seed(target, page).to_ne_bytes();
        if is_it { Found::Content } else { Found::Damaged }
    }

    /// Removes the entry of a page, if it has one.
    pub fn remove(&mut self, page: u64) {
        let entry = self.entry(page);
        if entry == Entry::None || page >= self.pages {
            return;
        }
        self.publish(page, Entry::None);
        self.swap.iter_mut().for_each(|swap| swap.cancel(page));
        match entry {
            Entry::None | Entry::Invalid => {}
            Entry::Filled(_) => self.filled = self.filled.saturating_sub(1),
            Entry::Packed { place, length } => self.free_packed(place, length),
            Entry::Swapped { slot, .. } => {
                self.swap.iter_mut().for_each(|swap| swap.give(slot));
            }
        }
    }

    /// Gives the memory of a content back.
    fn free_packed(&mut self, place: u64, length: usize) {
        self.packed = self.packed.saturating_sub(1);
        if let Some(chunk) = self.slots.give(place, length) {
            self.punch(chunk as u64, 1);
        }
    }

    /// Removes the store. No page may be away.
    pub fn end(self) {
        remove_files(&self.path, self.swap_path());
    }
}

/// Removes a store and its swap file.
pub(crate) fn remove_files(store: &Path, swap: Option<&Path>) {
    let _ = fs::remove_file(store);
    swap.into_iter().for_each(swap::remove);
}

/// Makes the swap file of a VMM. Returns how many slots it has, too.
fn create_swap(
    vmm: &Vmm,
    memory: &[MappedMemory],
    options: &SwapOptions,
) -> io::Result<(SwapPlace, u64)> {
    let pages: u64 = memory.iter().map(|part| part.length() / PAGE).sum();
    let most = options.bytes_max.map_or(u64::MAX, |bytes| bytes / PAGE);
    let slots = pages.min(most).min(SWAP_SLOTS_MAX);
    let place = swap::create(&options.folder, &name(vmm), slots).map_err(|error| {
        io::Error::new(error.kind(), format!("{}: {error}", options.folder.display()))
    })?;
    Ok((place, slots))
}

/// Removes the stores, or the swap files, of machines that have ended.
pub(crate) fn remove_stale(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_str().and_then(|name| name.rsplit_once('.'));
        let Some((name, "pages" | "swap")) = name else { continue };
        let numbers: Vec<u64> = name.split('-').filter_map(|word| word.parse().ok()).collect();
        let &[namespace, process, start, ..] = &numbers[..] else { continue };
        let Ok(process) = i32::try_from(process) else { continue };
        if namespace == vmm::namespace() && vmm::is_gone(process, start) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The pages that have an entry in a store, which may be in use; 0 if it cannot be read.
pub(crate) fn count_entries(path: &Path, vmm: &Vmm) -> u64 {
    PageStore::open(path, vmm, Some(Path::new("")))
        .map_or(0, |store| (0..store.pages).filter(|page| store.has(*page)).count() as u64)
}

/// The number of 32 bits that a page has throughout.
fn filled_with(content: &Page) -> Option<u32> {
    let (first, rest) = content.split_at(4);
    let is_same = content[..PAGE as usize - 4] == *rest;
    is_same.then(|| u32::from_ne_bytes(first.try_into().expect("4 bytes")))
}

#[cfg(test)]
mod tests;
