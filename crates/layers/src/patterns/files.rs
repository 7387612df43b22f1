//! The files of a disk whose content was read or written lately: a bounded table.

use std::hash::BuildHasher;

use fathom_insight::{Facts, Name};
use hashbrown::DefaultHashBuilder;

use super::content::Frequencies;
use super::copies::Run;
use super::finder::Settled;
use super::formats::Start;

/// The most files; a power of two, and at most 2¹⁶.
const FILES: usize = 1 << 14;
/// The files that compete for a place.
const WAYS: usize = 8;
/// The most files whose samples are incomplete.
const SAMPLES: usize = 512;

/// What identifies a file of a guest, until its number is used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct FileKey {
    /// The block device of the file system.
    device: Name,
    file_system: Name,
    inode: u64,
}

impl FileKey {
    pub fn of(facts: &Facts) -> Self {
        Self { device: facts.device, file_system: facts.file_system, inode: facts.inode }
    }
}

/// A process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Process {
    /// The number; 0 if the process is unknown.
    pub id: u32,
    /// The start. Numbers are used again.
    pub start: u32,
    pub command: Name,
}

impl File {
    /// Whether what is written into it is new ciphertext, which equals nothing else.
    pub fn is_ciphertext(&self) -> bool {
        self.verdict == Verdict::Encrypted && self.is_made_here
    }

    /// What identifies the file, and its size.
    pub fn facts(&self) -> Facts {
        let FileKey { device, file_system, inode } = self.key;
        let (path, file_size) = (self.path, self.size);
        Facts { device, file_system, inode, path, file_size, ..Facts::default() }
    }
}

impl Process {
    pub fn of(facts: &Facts) -> Self {
        Self { id: facts.process_id, start: facts.process_start, command: facts.process }
    }

    pub fn is_known(self) -> bool {
        self.id != 0
    }

    pub fn is_same(self, other: Self) -> bool {
        self.is_known() && self.id == other.id && self.start == other.start
    }
}

/// A reference to a file, which is void when the file's place is given to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FileId {
    place: u16,
    version: u16,
}

impl FileId {
    pub fn to_bits(self) -> u32 {
        u32::from(self.place) << 16 | u32::from(self.version)
    }

    pub fn from_bits(bits: u32) -> Self {
        Self { place: (bits >> 16) as u16, version: bits as u16 }
    }
}

/// What is known of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct File {
    key: FileKey,
    /// 0 for an empty place.
    version: u16,
    used: u32,
    pub path: Name,
    pub cgroup: Name,
    pub size: u64,
    /// Hashes of the folder, and of the name up to its first dot.
    pub folder: u32,
    pub stem: u32,
    /// The processes that read and wrote it last.
    pub reader: Process,
    pub writer: Process,
    /// Its beginning, when it was last read or written.
    pub start: Start,
    /// Whether its content was once not random, or had a format that is not encrypted.
    pub is_plain: bool,
    /// When that was last noted, in nanoseconds.
    pub plain_ns: u64,
    /// The sample that is being gathered from written pages.
    pub sample: Sample,
    /// The verdict about its written content.
    pub verdict: Verdict,
    /// Whether it was encrypted in this guest, as far as is known: others may have come encrypted
    /// from elsewhere, and be there several times.
    pub is_made_here: bool,
    /// The copy whose target it is.
    pub run: Run,
    /// The bytes of copies into it that are known in one way only.
    pub settled: Settled,
}

/// What the written pages of a file say.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    /// The place of the frequencies, and the number of its use.
    frequencies: u16,
    ticket: u32,
    /// The written bytes that the current sample covers, counted or not.
    pub bytes: u64,
    /// Whether the current sample has a page that is not random.
    pub is_plain: bool,
    /// The results of the last samples, the last one in bit 0: set if random.
    pub results: u8,
    /// The number of complete samples, up to 255.
    pub complete: u8,
    /// All bytes written since the file is known.
    pub written: u64,
}

/// The verdict about what was written into a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Not enough is known, or nothing was found.
    #[default]
    None,
    /// It is random, without another sign of encryption.
    Random,
    /// It is encrypted.
    Encrypted,
}

/// The table.
pub(super) struct Files {
    all: Box<[File]>,
    /// Frequencies of byte values, each with the number of its current use.
    samples: Box<[(u32, Frequencies)]>,
    next_sample: usize,
    ticket: u32,
    clock: u32,
    hasher: DefaultHashBuilder,
}

impl Files {
    pub fn new() -> Self {
        Self {
            all: (0..FILES).map(|_| File::default()).collect(),
            samples: (0..SAMPLES).map(|_| (0, Frequencies::default())).collect(),
            next_sample: 0,
            ticket: 0,
            clock: 0,
            hasher: DefaultHashBuilder::default(),
        }
    }

    /// The memory of the table, in bytes.
    pub fn memory(&self) -> u64 {
        (size_of_val(&*self.all) + size_of_val(&*self.samples)) as u64
    }

    /// The file with these facts, which is added if it is new. Of the files that compete for its
    /// place, it replaces the one that was used least recently. `true` if the file is new, or has
    /// another path than before.
    pub fn find(&mut self, facts: &Facts) -> (FileId, bool) {
        let key = FileKey::of(facts);
        let first = self.hasher.hash_one(key) as usize & (FILES / WAYS - 1);
        let set = &mut self.all[first * WAYS..][..WAYS];
        self.clock = self.clock.wrapping_add(1);
        let clock = self.clock;
        let age = |file: &File| match file.version {
            0 => u32::MAX,
            _ => clock.wrapping_sub(file.used),
        };
        let found = set.iter().position(|file| file.version != 0 && file.key == key);
        let way = found
            .unwrap_or_else(|| (0..WAYS).max_by_key(|way| age(&set[*way])).unwrap_or_default());
        let file = &mut set[way];
        if found.is_none() {
            let version = file.version.wrapping_add(1).max(1);
            *file = File { key, version, ..File::default() };
        }
        file.used = clock;
        let is_new = found.is_none() || facts.path.is_some() && file.path != facts.path;
        (FileId { place: (first * WAYS + way) as u16, version: file.version }, is_new)
    }

    /// The file of a reference; `None` if its place has another.
    pub fn get(&self, id: FileId) -> Option<&File> {
        self.all.get(usize::from(id.place)).filter(|file| file.version == id.version)
    }

    /// The file of a reference, to be changed.
    pub fn get_mut(&mut self, id: FileId) -> Option<&mut File> {
        self.all.get_mut(usize::from(id.place)).filter(|file| file.version == id.version)
    }

    /// Adds the frequencies of a page to the sample of a file. With too many incomplete samples,
    /// the one that was begun first is begun again.
    pub fn add(&mut self, id: FileId, page: &Frequencies) {
        let Some(file) = self.all.get_mut(usize::from(id.place)) else { return };
        let place = usize::from(file.sample.frequencies);
        let is_own = file.sample.ticket != 0 && self.samples[place].0 == file.sample.ticket;
        if is_own {
            self.samples[place].1.add(page);
            return;
        }
        self.ticket = self.ticket.wrapping_add(1).max(1);
        let sample = &mut self.samples[self.next_sample];
        sample.0 = self.ticket;
        sample.1.clear();
        sample.1.add(page);
        if file.sample.ticket != 0 {
            // What was gathered before is gone.
            file.sample.bytes = page.total();
        }
        file.sample.frequencies = self.next_sample as u16;
        file.sample.ticket = self.ticket;
        self.next_sample = (self.next_sample + 1) % SAMPLES;
    }

    /// Ends the sample of a file. Returns whether its bytes are random; `None` if it has too few.
    pub fn end_sample(&mut self, id: FileId) -> Option<bool> {
        let file = self.all.get_mut(usize::from(id.place))?;
        let place = usize::from(file.sample.frequencies);
        let is_own = file.sample.ticket != 0 && self.samples[place].0 == file.sample.ticket;
        file.sample.ticket = 0;
        let (used, frequencies) = self.samples.get_mut(place)?;
        let result = (is_own && frequencies.total() > 0).then(|| frequencies.is_random());
        if is_own {
            *used = 0;
        }
        result
    }
}

/// Hashes of the folder of a path, and of the file's name up to its first dot.
pub(super) fn parts_of(path: &str) -> (u32, u32) {
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    let hidden = name.len() - name.trim_start_matches('.').len();
    let stem = match name[hidden..].find('.') {
        Some(dot) => &name[..hidden + dot],
        None => name,
    };
    (hash(folder), hash(stem))
}

fn hash(text: &str) -> u32 {
    xxhash_rust::xxh3::xxh3_64(text.as_bytes()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(inode: u64, path: u32) -> Facts {
        Facts { inode, path: Name(path), device: Name(1), ..Facts::default() }
    }

    #[test]
    fn files_are_found_again_and_the_table_is_bounded() {
        let mut files = Files::new();
        let (first, is_new) = files.find(&facts(1, 7));
        assert!(is_new);
        files.get_mut(first).unwrap().path = Name(7);
        assert_eq!(files.find(&facts(1, 7)), (first, false));
        assert_eq!(files.find(&facts(1, 8)), (first, true));
        assert_eq!(files.find(&facts(1, 0)), (first, false));
        assert_eq!(FileId::from_bits(first.to_bits()), first);
        for inode in 2..20 * FILES as u64 {
            files.find(&facts(inode, 0));
        }
        assert!(files.get(first).is_none());
        assert!(files.memory() < 8 << 20, "{}", files.memory());
    }

    #[test]
    fn samples_are_bounded() {
        let mut files = Files::new();
        let mut random = fastrand::Rng::with_seed(1);
        let page: Vec<u8> = (0..4096).map(|_| random.u8(..)).collect();
        let page = Frequencies::of(&page);
        let ids: Vec<FileId> =
            (0..=SAMPLES as u64).map(|inode| files.find(&facts(inode + 1, 0)).0).collect();
        for id in &ids {
            files.add(*id, &page);
        }
        // The first one was taken away.
        assert_eq!(files.end_sample(ids[0]), None);
        assert_eq!(files.end_sample(ids[1]), Some(true));
        assert_eq!(files.end_sample(ids[1]), None);
        files.add(ids[0], &page);
        assert_eq!(files.end_sample(ids[0]), Some(true));
    }

    #[test]
    fn names_are_compared_up_to_their_first_dot() {
        assert_eq!(parts_of("/a/b.txt"), parts_of("/a/b.txt.locked"));
        assert_eq!(parts_of("/a/.b.txt").1, parts_of("/a/.b.enc").1);
        assert_ne!(parts_of("/a/.b.txt").1, parts_of("/a/.c.txt").1);
        assert_ne!(parts_of("/a/b.txt").0, parts_of("/c/b.txt").0);
        assert_eq!(parts_of("b").1, parts_of("/x/b.y").1);
    }
}
