//! The system calls of Linux for 64-bit programs on x86: their numbers, names, and which arguments
//! are files, places and lengths. A call that is not in the table has a number alone.

/// A system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemCall {
    /// The number.
    pub number: u64,
    /// The name.
    pub name: &'static str,
    /// The argument with the descriptor of its file, if it has one.
    pub file: Option<u8>,
    /// The argument with the descriptor of the file from which it copies.
    pub source: Option<u8>,
    /// Where in the file it begins.
    pub offset: CallOffset,
    /// The argument with the number of bytes.
    pub length: Option<u8>,
    /// Whether its result is the descriptor of a file.
    pub opens: bool,
}

/// Where in its file a call begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOffset {
    /// It has no such place, or it is not known.
    None,
    /// At the position of the descriptor, which it moves by its result.
    Position,
    /// At the value of an argument.
    Argument(u8),
}

const fn call(number: u64, name: &'static str) -> SystemCall {
    let (file, source, length) = (None, None, None);
    SystemCall { number, name, file, source, offset: CallOffset::None, length, opens: false }
}

const fn of_file(number: u64, name: &'static str) -> SystemCall {
    SystemCall { file: Some(0), ..call(number, name) }
}

const fn moves(number: u64, name: &'static str) -> SystemCall {
    SystemCall { offset: CallOffset::Position, length: Some(2), ..of_file(number, name) }
}

const fn at(number: u64, name: &'static str) -> SystemCall {
    SystemCall { offset: CallOffset::Argument(3), length: Some(2), ..of_file(number, name) }
}

const fn opens(number: u64, name: &'static str) -> SystemCall {
    SystemCall { opens: true, ..call(number, name) }
}

/// The calls, in order of their numbers.
#[rustfmt::skip]
pub static CALLS: &[SystemCall] = &[
    moves(0, "read"),
    moves(1, "write"),
    opens(2, "open"),
    of_file(3, "close"),
    call(4, "stat"),
    of_file(5, "fstat"),
    call(6, "lstat"),
    call(7, "poll"),
    of_file(8, "lseek"),
    SystemCall { file: Some(4), length: Some(1), offset: CallOffset::Argument(5), ..call(9, "mmap") },
    call(10, "mprotect"),
    call(11, "munmap"),
    call(12, "brk"),
    call(13, "rt_sigaction"),
    call(14, "rt_sigprocmask"),
    call(15, "rt_sigreturn"),
    of_file(16, "ioctl"),
    at(17, "pread64"),
    at(18, "pwrite64"),
    SystemCall { length: None, ..moves(19, "readv") },
    SystemCall { length: None, ..moves(20, "writev") },
    call(21, "access"),
    call(22, "pipe"),
    call(23, "select"),
    call(24, "sched_yield"),
    call(26, "msync"),
    call(28, "madvise"),
    opens(32, "dup"),
    opens(33, "dup2"),
    call(35, "nanosleep"),
    call(39, "getpid"),
    SystemCall { file: Some(0), source: Some(1), length: Some(3), ..call(40, "sendfile") },
    call(41, "socket"),
    call(42, "connect"),
    call(43, "accept"),
    call(44, "sendto"),
    call(45, "recvfrom"),
    call(46, "sendmsg"),
    call(47, "recvmsg"),
    call(56, "clone"),
    call(57, "fork"),
    call(58, "vfork"),
    call(59, "execve"),
    call(60, "exit"),
    call(61, "wait4"),
    call(62, "kill"),
    call(63, "uname"),
    of_file(72, "fcntl"),
    of_file(73, "flock"),
    of_file(74, "fsync"),
    of_file(75, "fdatasync"),
    call(76, "truncate"),
    SystemCall { length: Some(1), ..of_file(77, "ftruncate") },
    of_file(78, "getdents"),
    call(79, "getcwd"),
    call(80, "chdir"),
    of_file(81, "fchdir"),
    call(82, "rename"),
    call(83, "mkdir"),
    call(84, "rmdir"),
    opens(85, "creat"),
    call(86, "link"),
    call(87, "unlink"),
    call(88, "symlink"),
    call(89, "readlink"),
    call(90, "chmod"),
    of_file(91, "fchmod"),
    call(92, "chown"),
    of_file(93, "fchown"),
    call(102, "getuid"),
    call(137, "statfs"),
    of_file(138, "fstatfs"),
    call(162, "sync"),
    call(165, "mount"),
    call(166, "umount2"),
    call(186, "gettid"),
    of_file(187, "readahead"),
    call(202, "futex"),
    call(206, "io_setup"),
    call(207, "io_destroy"),
    call(208, "io_getevents"),
    call(209, "io_submit"),
    of_file(217, "getdents64"),
    call(219, "restart_syscall"),
    SystemCall { length: Some(2), offset: CallOffset::Argument(1), ..of_file(221, "fadvise64") },
    call(230, "clock_nanosleep"),
    call(231, "exit_group"),
    call(232, "epoll_wait"),
    opens(257, "openat"),
    call(258, "mkdirat"),
    call(262, "newfstatat"),
    call(263, "unlinkat"),
    call(264, "renameat"),
    call(265, "linkat"),
    call(266, "symlinkat"),
    call(267, "readlinkat"),
    call(269, "faccessat"),
    call(270, "pselect6"),
    call(271, "ppoll"),
    SystemCall { file: Some(2), source: Some(0), length: Some(4), ..call(275, "splice") },
    SystemCall { length: Some(2), offset: CallOffset::Argument(1), ..of_file(277, "sync_file_range") },
    call(280, "utimensat"),
    call(281, "epoll_pwait"),
    SystemCall { length: Some(3), offset: CallOffset::Argument(2), ..of_file(285, "fallocate") },
    opens(292, "dup3"),
    call(293, "pipe2"),
    SystemCall { length: None, ..at(295, "preadv") },
    SystemCall { length: None, ..at(296, "pwritev") },
    of_file(306, "syncfs"),
    call(316, "renameat2"),
    call(318, "getrandom"),
    call(322, "execveat"),
    SystemCall { file: Some(2), source: Some(0), length: Some(4), ..call(326, "copy_file_range") },
    SystemCall { length: None, ..at(327, "preadv2") },
    SystemCall { length: None, ..at(328, "pwritev2") },
    call(332, "statx"),
    call(334, "rseq"),
    call(425, "io_uring_setup"),
    call(426, "io_uring_enter"),
    call(427, "io_uring_register"),
    call(435, "clone3"),
    call(436, "close_range"),
    opens(437, "openat2"),
    call(439, "faccessat2"),
];

/// The call with a number.
pub fn system_call(number: u64) -> Option<&'static SystemCall> {
    let place = CALLS.binary_search_by_key(&number, |call| call.number).ok()?;
    Some(&CALLS[place])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_in_order_and_arguments_exist() {
        assert!(CALLS.is_sorted_by(|one, other| one.number < other.number));
        for call in CALLS {
            assert_eq!(system_call(call.number), Some(call));
            for place in [call.file, call.source, call.length].into_iter().flatten() {
                assert!(place < 6, "{}", call.name);
            }
        }
        assert_eq!(system_call(1000), None);
    }
}
