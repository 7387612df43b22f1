//! System calls of processes in guests. Records of the stream `Syscalls`.

use crate::record::record;

record! {
    /// One record of 96 bytes, described in `docs/syscalls.md`. Texts are numbers of
    /// [`Names`](crate::Names); 0 is none.
    Syscall {
        /// `SyscallTS`: when the call ended, in nanoseconds of `CLOCK_MONOTONIC`.
        syscall_ts: u64,
        /// `Duration`: how long it took, in nanoseconds.
        duration: u64,
        /// `Result`, `Errno`: the value that it returned.
        result: u64,
        /// `Offset`: where in the file it began, in bytes; all bits set if that is unknown.
        offset: u64,
        /// `Length`: the bytes that it was called for; all bits set if it has no length.
        length: u64,
        /// `Inode`: the number of the file; 0 if it has none.
        inode: u64,
        /// `Number`: the number of the call.
        number: u64,
        /// `Call`: its name.
        call: u32,
        /// `Path`: the file.
        path: u32,
        /// `SourcePath`: the file from which it copied.
        source_path: u32,
        /// `FileSystem`: the type of the file system.
        file_system: u32,
        /// `Device`: the block device of the file system.
        device: u32,
        /// `Cgroup`: the control group.
        cgroup: u32,
        /// `Process`: the command of the process.
        process: u32,
        /// `ProcessId`: its number.
        process_id: u32,
        /// `ProcessStart`: its start, in hundredths of a second since the guest's boot.
        process_start: u32,
        /// `ThreadId`: the number of the thread.
        thread_id: u32,
    }
}

/// The value of an unknown offset, and of no length.
pub const UNKNOWN: u64 = u64::MAX;

/// The highest number that a result can have which is an error, negated (`MAX_ERRNO` of Linux).
const ERRNO_MAX: u64 = 4095;

/// The error number of a result, if it is an error.
pub fn error_of(result: u64) -> Option<u64> {
    let error = result.wrapping_neg();
    (1..=ERRNO_MAX).contains(&error).then_some(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Record;

    #[test]
    fn words_keep_every_field() {
        let call = Syscall {
            syscall_ts: 1,
            duration: 2,
            result: 3,
            offset: 4,
            length: 5,
            inode: 6,
            number: 7,
            call: 8,
            path: 9,
            source_path: 10,
            file_system: 11,
            device: 12,
            cgroup: 13,
            process: 14,
            process_id: 15,
            process_start: 16,
            thread_id: 17,
        };
        assert_eq!(Syscall::from_words(call.to_words()), call);
    }

    #[test]
    fn results_of_calls_may_be_errors() {
        assert_eq!((error_of(5), error_of(-2_i64 as u64)), (None, Some(2)));
    }
}
