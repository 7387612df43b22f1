//! The messages between the daemon and an interceptor: words of 64 bits, little-endian.

use std::fmt;

use crate::pattern::{CommandPattern, PATTERNS_MAX};

/// The first word of each message: `FATHOMIC`.
const MAGIC: u64 = u64::from_le_bytes(*b"FATHOMIC");
/// The version of the messages, of the table of writers and of the ring of calls.
pub(crate) const VERSION: u64 = 3;
/// The most files with a guest's memory that an interceptor names.
pub const MEMORY_FILES_MAX: usize = 16;
/// The most regions of a guest's memory.
pub const REGIONS_MAX: usize = 8;

const HELLO_WORDS: usize = 3 + 2 * MEMORY_FILES_MAX;
/// The number of places for calls.
const CALL_WORDS: usize = 13;
/// The words with the first place for calls, the number of patterns, the most stops, whether other
/// processes are noted, and the first pattern.
const CALLS_START: usize = 14;
const PATTERN_COUNT: usize = CALLS_START + CALL_WORDS;
const STOPS_MAX: usize = PATTERN_COUNT + 1;
const OTHERS: usize = STOPS_MAX + 1;
const PATTERNS_START: usize = OTHERS + 1;
const PLACES_FIXED: usize = PATTERNS_START + 2 * PATTERNS_MAX;
const PLACES_WORDS: usize = PLACES_FIXED + 5 * REGIONS_MAX;
/// The length of [`Hello`], in bytes.
pub const HELLO_LENGTH: usize = 8 * HELLO_WORDS;
/// The length of [`Places`], in bytes.
pub const PLACES_LENGTH: usize = 8 * PLACES_WORDS;

/// Why a message is not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageError {
    /// It is not a message of this kind.
    Foreign,
    /// It has this version.
    Version(u64),
    /// A number in it is too large.
    TooMany,
}

impl fmt::Display for MessageError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => formatter.write_str("it is no message of an interceptor"),
            Self::Version(version) => {
                write!(formatter, "it has version {version}, and this program has {VERSION}")
            }
            Self::TooMany => formatter.write_str("it has more parts than a message may have"),
        }
    }
}

impl std::error::Error for MessageError {}

/// A file with memory of a guest, by its device and inode on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryFile {
    /// The device (`st_dev`).
    pub device: u64,
    /// The inode (`st_ino`).
    pub inode: u64,
}

/// The first message of an interceptor: the files that its process has mapped, by which the daemon
/// recognises the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hello {
    /// The files, at most [`MEMORY_FILES_MAX`].
    pub files: Vec<MemoryFile>,
}

impl Hello {
    /// The message as bytes. Further files are left out.
    pub fn to_bytes(&self) -> [u8; HELLO_LENGTH] {
        let mut words = [0; HELLO_WORDS];
        let files = &self.files[..self.files.len().min(MEMORY_FILES_MAX)];
        (words[0], words[1], words[2]) = (MAGIC, VERSION, files.len() as u64);
        for (file, words) in files.iter().zip(words[3..].chunks_exact_mut(2)) {
            words.copy_from_slice(&[file.device, file.inode]);
        }
        bytes(&words)
    }

    /// Reads the message.
    ///
    /// # Errors
    /// When the bytes are no such message of this version.
    pub fn from_bytes(bytes: &[u8; HELLO_LENGTH]) -> Result<Self, MessageError> {
        let words: [u64; HELLO_WORDS] = words(bytes);
        check(words[0], words[1])?;
        let count = usize::try_from(words[2]).ok().filter(|count| *count <= MEMORY_FILES_MAX);
        let count = count.ok_or(MessageError::TooMany)?;
        let files = words[3..].chunks_exact(2).take(count);
        Ok(Self {
            files: files.map(|pair| MemoryFile { device: pair[0], inode: pair[1] }).collect(),
        })
    }
}

/// A region of a guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionPlace {
    /// The guest-physical address.
    pub address: u64,
    /// The length, in bytes.
    pub length: u64,
    /// The file that has it.
    pub file: MemoryFile,
    /// The offset in the file, in bytes.
    pub offset: u64,
}

/// Where a guest's kernel has what an interceptor needs. Addresses are virtual addresses of the
/// kernel, all other places are offsets in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// A number that changes with each kernel, and is never 0.
    pub epoch: u64,
    /// The function that marks pages of files as dirty (`__folio_mark_dirty`); 0 if nothing is to
    /// be intercepted.
    pub page_dirtied: u64,
    /// The structure of page number 0 (`vmemmap_base`).
    pub pages: u64,
    /// The length of the structure of a page.
    pub page_size: u64,
    /// The beginning of the map of all memory (`page_offset_base`).
    pub direct: u64,
    /// The place of the pointer to the current task, in the area of a processor.
    pub current: u64,
    /// Members of `task_struct`: `group_leader`, `tgid`, `start_boottime`, `comm`, `flags`.
    pub task_leader: u64,
    /// See [`task_leader`](Self::task_leader).
    pub task_process: u64,
    /// See [`task_leader`](Self::task_leader).
    pub task_start: u64,
    /// See [`task_leader`](Self::task_leader).
    pub task_command: u64,
    /// See [`task_leader`](Self::task_leader).
    pub task_flags: u64,
    /// The most stops at a hook in a second. A hook with more is taken away for a while.
    pub stops_max: u64,
    /// Where system calls are noted.
    pub calls: CallPlaces,
    /// The commands of the processes whose calls are noted, at most [`PATTERNS_MAX`].
    pub commands: Vec<CommandPattern>,
    /// Whether calls of processes with other commands are noted too, until the daemon says of a
    /// process that it is not meant ([`Writers::decline`](crate::Writers::decline)).
    pub others: bool,
    /// The regions of the guest's memory, at most [`REGIONS_MAX`].
    pub regions: Vec<RegionPlace>,
}

/// Where a guest's kernel has what the noting of system calls needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallPlaces {
    /// The function that carries out the system calls of 64-bit programs (`do_syscall_64`); 0 if no
    /// calls are to be noted.
    pub entry: u64,
    /// Members of `task_struct`: `pid`, `files`.
    pub task_number: u64,
    /// See [`task_number`](Self::task_number).
    pub task_files: u64,
    /// `files_struct.fdt`, `fdtable.max_fds` and `fdtable.fd`.
    pub files_table: u64,
    /// See [`files_table`](Self::files_table).
    pub file_count: u64,
    /// See [`files_table`](Self::files_table).
    pub file_list: u64,
    /// `file.f_inode` and `file.f_pos`.
    pub file_inode: u64,
    /// See [`file_inode`](Self::file_inode).
    pub file_position: u64,
    /// `inode.i_ino`.
    pub inode_number: u64,
    /// `task_struct.cgroups` and `css_set.dfl_cgrp`; 0 if control groups are not known.
    pub task_groups: u64,
    /// See [`task_groups`](Self::task_groups).
    pub groups_default: u64,
    /// `task_struct.mm` and `mm_struct.exe_file`; 0 if the file of a program is not known.
    pub task_memory: u64,
    /// See [`task_memory`](Self::task_memory).
    pub memory_program: u64,
}

impl CallPlaces {
    fn to_words(self) -> [u64; CALL_WORDS] {
        [
            self.entry,
            self.task_number,
            self.task_files,
            self.files_table,
            self.file_count,
            self.file_list,
            self.file_inode,
            self.file_position,
            self.inode_number,
            self.task_groups,
            self.groups_default,
            self.task_memory,
            self.memory_program,
        ]
    }

    fn from_words(words: [u64; CALL_WORDS]) -> Self {
        let [entry, task_number, task_files, files_table, file_count, file_list, rest @ ..] = words;
        let [file_inode, file_position, inode_number, rest @ ..] = rest;
        let [task_groups, groups_default, task_memory, memory_program] = rest;
        Self {
            entry,
            task_number,
            task_files,
            files_table,
            file_count,
            file_list,
            file_inode,
            file_position,
            inode_number,
            task_groups,
            groups_default,
            task_memory,
            memory_program,
        }
    }
}

impl Places {
    /// The message as bytes. Further regions are left out.
    pub fn to_bytes(&self) -> [u8; PLACES_LENGTH] {
        let mut words = [0; PLACES_WORDS];
        let regions = &self.regions[..self.regions.len().min(REGIONS_MAX)];
        words[..14].copy_from_slice(&[
            MAGIC,
            VERSION,
            self.epoch,
            self.page_dirtied,
            self.pages,
            self.page_size,
            self.direct,
            self.current,
            self.task_leader,
            self.task_process,
            self.task_start,
            self.task_command,
            self.task_flags,
            regions.len() as u64,
        ]);
        words[CALLS_START..PATTERN_COUNT].copy_from_slice(&self.calls.to_words());
        let commands = &self.commands[..self.commands.len().min(PATTERNS_MAX)];
        words[PATTERN_COUNT] = commands.len() as u64;
        words[STOPS_MAX] = self.stops_max;
        words[OTHERS] = u64::from(self.others);
        for (command, words) in commands.iter().zip(words[PATTERNS_START..].chunks_exact_mut(2)) {
            words.copy_from_slice(&command.to_words());
        }
        for (region, words) in regions.iter().zip(words[PLACES_FIXED..].chunks_exact_mut(5)) {
            let MemoryFile { device, inode } = region.file;
            words.copy_from_slice(&[region.address, region.length, device, inode, region.offset]);
        }
        bytes(&words)
    }

    /// Reads the message.
    ///
    /// # Errors
    /// When the bytes are no such message of this version.
    pub fn from_bytes(bytes: &[u8; PLACES_LENGTH]) -> Result<Self, MessageError> {
        let words: [u64; PLACES_WORDS] = words(bytes);
        check(words[0], words[1])?;
        let count = usize::try_from(words[13]).ok().filter(|count| *count <= REGIONS_MAX);
        let count = count.ok_or(MessageError::TooMany)?;
        let regions = words[PLACES_FIXED..].chunks_exact(5).take(count);
        let count = usize::try_from(words[PATTERN_COUNT]).ok();
        let count = count.filter(|count| *count <= PATTERNS_MAX).ok_or(MessageError::TooMany)?;
        let commands = words[PATTERNS_START..].chunks_exact(2).take(count);
        let mut calls = [0; CALL_WORDS];
        calls.copy_from_slice(&words[CALLS_START..PATTERN_COUNT]);
        Ok(Self {
            epoch: words[2],
            page_dirtied: words[3],
            pages: words[4],
            page_size: words[5],
            direct: words[6],
            current: words[7],
            task_leader: words[8],
            task_process: words[9],
            task_start: words[10],
            task_command: words[11],
            task_flags: words[12],
            stops_max: words[STOPS_MAX],
            calls: CallPlaces::from_words(calls),
            commands: commands.map(|pair| CommandPattern::from_words([pair[0], pair[1]])).collect(),
            others: words[OTHERS] != 0,
            regions: regions
                .map(|words| RegionPlace {
                    address: words[0],
                    length: words[1],
                    file: MemoryFile { device: words[2], inode: words[3] },
                    offset: words[4],
                })
                .collect(),
        })
    }
}

fn check(magic: u64, version: u64) -> Result<(), MessageError> {
    match (magic, version) {
        (MAGIC, VERSION) => Ok(()),
        (MAGIC, version) => Err(MessageError::Version(version)),
        _ => Err(MessageError::Foreign),
    }
}

fn bytes<const WORDS: usize, const BYTES: usize>(words: &[u64; WORDS]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn words<const WORDS: usize, const BYTES: usize>(bytes: &[u8; BYTES]) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut eight = [0; 8];
        eight.copy_from_slice(place);
        *word = u64::from_le_bytes(eight);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_every_field() {
        let file = |number| MemoryFile { device: number, inode: number + 1 };
        let hello = Hello { files: (0..5).map(|number| file(10 * number)).collect() };
        assert_eq!(Hello::from_bytes(&hello.to_bytes()), Ok(hello));
        let region = |number| RegionPlace {
            address: number,
            length: number + 1,
            file: file(number + 2),
            offset: number + 4,
        };
        let places = Places {
            epoch: 1,
            page_dirtied: 2,
            pages: 3,
            page_size: 4,
            direct: 5,
            current: 6,
            task_leader: 7,
            task_process: 8,
            task_start: 9,
            task_command: 10,
            task_flags: 11,
            stops_max: 1_000_000,
            calls: CallPlaces::from_words([12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24]),
            commands: vec![CommandPattern::new("postgres*").unwrap(); 3],
            others: true,
            regions: (1..=8).map(|number| region(100 * number)).collect(),
        };
        assert_eq!(Places::from_bytes(&places.to_bytes()), Ok(places.clone()));
        let many = Places { regions: vec![region(1); 9], ..places };
        assert_eq!(Places::from_bytes(&many.to_bytes()).unwrap().regions.len(), REGIONS_MAX);
    }

    #[test]
    fn other_bytes_are_refused() {
        assert_eq!(Hello::from_bytes(&[0; HELLO_LENGTH]), Err(MessageError::Foreign));
        let mut bytes = Hello::default().to_bytes();
        bytes[16] = 17;
        assert_eq!(Hello::from_bytes(&bytes), Err(MessageError::TooMany));
        bytes[8] = 9;
        assert_eq!(Hello::from_bytes(&bytes), Err(MessageError::Version(9)));
        let mut bytes = Places::default().to_bytes();
        bytes[13 * 8 + 7] = 1;
        assert_eq!(Places::from_bytes(&bytes), Err(MessageError::TooMany));
        let mut bytes = Places::default().to_bytes();
        bytes[PATTERN_COUNT * 8] = 17;
        assert_eq!(Places::from_bytes(&bytes), Err(MessageError::TooMany));
    }
}
