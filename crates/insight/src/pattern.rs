//! Patterns: what several requests together say about files. Records of the stream `Patterns`.

use crate::record::record;

/// What was recognised. Its number in the record is its position here plus 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PatternKind {
    /// A file was copied, or a part of it.
    Copy = 1,
    /// A file was encrypted.
    Encryption,
    /// Many files are encrypted by one process, or in one container.
    EncryptionInProgress,
    /// What was written into a file looks random, and nothing else says that it is encrypted.
    RandomContent,
}

impl PatternKind {
    /// The names, in the order of the numbers.
    pub const NAMES: [&'static str; 4] =
        ["copy", "encryption", "encryption-in-progress", "random-content"];
}

/// Why a file is considered encrypted, or the copy of another. Its number in the record is its
/// position here plus 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Evidence {
    /// It begins as files of a program for encryption do.
    Format = 1,
    /// It had other content before.
    Overwritten,
    /// A file with other content has its name or size, or was read by its writer.
    Converted,
    /// Its name promises a format that it does not have.
    Name,
    /// A system call has copied it.
    Call,
}

impl Evidence {
    /// The names, in the order of the numbers.
    pub const NAMES: [&'static str; 5] = ["format", "overwritten", "converted", "name", "call"];

    /// The name.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize - 1]
    }
}

record! {
    /// One record of 80 bytes, described in `docs/patterns.md`. Texts are numbers of
    /// [`Names`](crate::Names); 0 is none.
    Pattern {
        /// `PatternTS`: the time, in nanoseconds of `CLOCK_MONOTONIC`.
        pattern_ts: u64,
        /// `Inode`: the number of the file.
        inode: u64,
        /// `Bytes`: of a copy, those that were recognised since its last event; of encryption,
        /// those that were written into the file or the files.
        bytes: u64,
        /// `Files`: the number of files.
        files: u64,
        /// `Path`: the file; of encryption in progress, the last one.
        path: u32,
        /// `SourcePath`: the file that was copied or encrypted.
        source_path: u32,
        /// `FileSystem`: the type of the file system.
        file_system: u32,
        /// `Device`: the block device of the file system.
        device: u32,
        /// `Cgroup`: the control group.
        cgroup: u32,
        /// `Process`: the command of the process.
        process: u32,
        /// `ProcessId`: its number; 0 if several processes have the command.
        process_id: u32,
        /// `ProcessStart`: its start, in hundredths of a second since the guest's boot.
        process_start: u32,
        /// `Pattern`: the number of the [`PatternKind`].
        kind: u8,
        /// `Evidence`: the number of the [`Evidence`]; 0 for none.
        evidence: u8,
        /// 0, for later use.
        spare: u16,
        /// 0, for later use.
        spare_word: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Record;

    #[test]
    fn words_keep_every_field() {
        let pattern = Pattern {
            pattern_ts: 1,
            inode: 2,
            bytes: 3,
            files: 4,
            path: 5,
            source_path: 6,
            file_system: 7,
            device: 8,
            cgroup: 9,
            process: 10,
            process_id: 11,
            process_start: 12,
            kind: 13,
            evidence: 14,
            spare: 15,
            spare_word: 16,
        };
        assert_eq!(Pattern::from_words(pattern.to_words()), pattern);
    }

    #[test]
    fn the_numbers_are_the_positions_of_the_names() {
        assert_eq!(PatternKind::NAMES.len(), PatternKind::RandomContent as usize);
        assert_eq!(PatternKind::NAMES[PatternKind::Encryption as usize - 1], "encryption");
        assert_eq!(Evidence::NAMES.len(), Evidence::Call as usize);
    }
}
