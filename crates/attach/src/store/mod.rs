//! The pages that are away from a guest's memory: a file in memory with an entry for each page, and
//! the compressed content. It outlives the pager and its guard.
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
//! | 2 | LZ4: bits 2 to 15 are the length in bytes, with the checksum; bits 16 to 63 are the place, in units of 256 bytes from the beginning of the data |
//!
//! A slot begins with a checksum of 64 bits of the page's content, and of its number. Which slots
//! are taken follows from the index; nothing else says it. The format is in `docs/pager.md`.

mod slots;

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
const VERSION: u64 = 1;
/// The numbers of 64 bits before the index: one page.
const HEADER: usize = 512;
const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 1;
const AT_PROCESS: usize = 2;
const AT_START: usize = 3;
const AT_PARTS: usize = 4;
const AT_PAGES: usize = 5;
/// Each part has four numbers.
const AT_PART: usize = 16;
const PARTS_MAX: usize = (HEADER - AT_PART) / 4;
/// The most pages of a guest: 16 TiB.
const PAGES_MAX: u64 = 16 << 28;

/// The checksum at the beginning of a slot, in bytes.
const CHECKSUM_BYTES: usize = 8;
/// A page that does not become smaller than this stays: it would free too little.
const PACKED_BYTES_MAX: usize = 3072;
const _: () = assert!(PACKED_BYTES_MAX + CHECKSUM_BYTES <= SLOT_BYTES_MAX);

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
    /// Nothing that was ever written.
    Invalid,
}

impl Entry {
    fn decode(word: u64) -> Self {
        let length = (word >> 2 & 0x3fff) as usize;
        let is_length = length > CHECKSUM_BYTES && length <= CHECKSUM_BYTES + PACKED_BYTES_MAX;
        match word & 0b11 {
            0 if word == 0 => Self::None,
            1 if word as u32 == 1 => Self::Filled((word >> 32) as u32),
            2 if is_length => Self::Packed { place: word >> 16, length },
            _ => Self::Invalid,
        }
    }

    fn encode(self) -> u64 {
        match self {
            Self::None | Self::Invalid => 0,
            Self::Filled(value) => u64::from(value) << 32 | 1,
            Self::Packed { place, length } => place << 16 | (length as u64) << 2 | 2,
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
    /// Something else than what was stored.
    Damaged,
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
    format!("{}-{}-{}.pages", vmm::namespace(), vmm.process(), vmm.start_ticks())
}

impl PageStore {
    /// Makes the store of a VMM, in a folder that is in memory.
    ///
    /// # Errors
    /// When it cannot be made, or there is no memory for its index.
    pub fn create(folder: &Path, vmm: &Vmm, memory: &[MappedMemory]) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let found = fs::symlink_metadata(folder)?;
        let is_own = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
        if !is_own || found.mode() & 0o077 != 0 {
            return Err(invalid("others may use the folder: it has to be of this user alone"));
        }
        if rustix::fs::statfs(folder)?.f_type as u64 != TMPFS {
            return Err(invalid("the folder is not in memory (tmpfs)"));
        }
        let pages = memory.iter().map(|part| part.length() / PAGE).sum();
        if memory.len() > PARTS_MAX || pages > PAGES_MAX {
            return Err(invalid("the guest's memory is too large, or has too many parts"));
        }
        let path = folder.join(name(vmm));
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
            let store = Self::map(path.clone(), file, pages)?;
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

    /// Opens the store that an earlier pager of a VMM has made. What is taken in it is not known
    /// before [`recover`](Self::recover).
    ///
    /// # Errors
    /// When there is none, or it is another VMM's, or of another version.
    pub fn open(path: &Path, vmm: &Vmm) -> io::Result<Self> {
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
            && length == data_offset(pages) + data_bytes(pages);
        if !is_its {
            return Err(invalid("it is the store of another machine"));
        }
        Self::map(path.to_owned(), file, pages)?.with_parts()
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
            Entry::Invalid => Found::Damaged,
            Entry::Filled(value) => {
                for word in target.chunks_exact_mut(4) {
                    word.copy_from_slice(&value.to_ne_bytes());
                }
                Found::Content
            }
            Entry::Packed { place, length } => self.unpack(page, place, length, target),
        }
    }

    fn unpack(&self, page: u64, place: u64, length: usize, target: &mut Page) -> Found {
        let Some(offset) = self.slot(place, length) else { return Found::Damaged };
        let mut bytes = [0; SLOT_BYTES_MAX];
        let bytes = &mut bytes[..length];
        self.map.access().read(offset, bytes);
        let (checksum, packed) = bytes.split_at(CHECKSUM_BYTES);
        let unpacked = lz4_flex::block::decompress_into(packed, target);
        let is_whole = matches!(unpacked, Ok(length) if length == PAGE as usize);
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
        match entry {
            Entry::None | Entry::Invalid => {}
            Entry::Filled(_) => self.filled = self.filled.saturating_sub(1),
            Entry::Packed { place, length } => {
                self.packed = self.packed.saturating_sub(1);
                if let Some(chunk) = self.slots.give(place, length) {
                    self.punch(chunk as u64, 1);
                }
            }
        }
    }

    /// Removes the store. No page may be away.
    pub fn end(self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes the stores of machines that have ended.
pub(crate) fn remove_stale(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str().and_then(|name| name.strip_suffix(".pages")) else {
            continue;
        };
        let numbers: Vec<u64> = name.split('-').filter_map(|word| word.parse().ok()).collect();
        let &[namespace, process, start] = &numbers[..] else { continue };
        let Ok(process) = i32::try_from(process) else { continue };
        if namespace == vmm::namespace() && vmm::is_gone(process, start) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The pages that have an entry in a store, which may be in use; 0 if it cannot be read.
pub(crate) fn count_entries(path: &Path, vmm: &Vmm) -> u64 {
    PageStore::open(path, vmm)
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
