//! The ring of completed system calls, in memory that the daemon and an interceptor share.
//!
//! ```text
//!      0  magic, version, number of places
//!     64  the number of calls so far
//!    128  the number of readers of all calls, and of those that copy
//!   4096  places of 184 bytes: a number, one more than that of the call, when the place is filled;
//!         then the words of the call
//! ```
//!
//! An interceptor never waits: it writes over the oldest call. It notes none while there is no
//! reader. The reader counts what it has
//! missed. Either side may write anything: what is read is checked, and a wrong call costs an
//! insight.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};

use crate::mapping::Mapping;
use crate::message::VERSION;

/// The first word of the ring: `FATHOMSC`.
const MAGIC: u64 = u64::from_le_bytes(*b"FATHOMSC");
/// The number of places: nearly 6 MiB.
const PLACES: u64 = 1 << 15;
const START: usize = 4096;
const HEAD: usize = 64;
const READERS: usize = 128;
/// The words of a place.
const WORDS: usize = 23;
const LENGTH: usize = START + PLACES as usize * WORDS * 8;

/// A file of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallFile {
    /// The address of its inode in the guest's memory; 0 if the call has no such file.
    pub address: u64,
    /// The number of the inode.
    pub inode: u64,
}

/// A system call that has ended, or that never ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// When it began, in nanoseconds of the host's monotonic clock.
    pub begun_ns: u64,
    /// How long it took, in nanoseconds.
    pub duration_ns: u64,
    /// The number of the call.
    pub number: u64,
    /// The arguments.
    pub arguments: [u64; 6],
    /// The result; 0 if the call never ends.
    pub result: u64,
    /// The process, in the table of writers ([`Writers::process`](crate::Writers::process)).
    pub process: u32,
    /// The number of the thread.
    pub thread_id: u32,
    /// The address of the process's `task_struct`.
    pub task: u64,
    /// The file.
    pub file: CallFile,
    /// The file from which it copied.
    pub source: CallFile,
    /// The position of the descriptor after the call.
    pub position: u64,
    /// The address of the process's control group; 0 if it is not known.
    pub group: u64,
    /// The file of the program.
    pub program: CallFile,
}

impl Call {
    fn to_words(self) -> [u64; WORDS - 1] {
        let mut words = [0; WORDS - 1];
        words[..3].copy_from_slice(&[self.begun_ns, self.duration_ns, self.number]);
        words[3..9].copy_from_slice(&self.arguments);
        words[9..20].copy_from_slice(&[
            self.result,
            u64::from(self.process) << 32 | u64::from(self.thread_id),
            self.task,
            self.file.address,
            self.file.inode,
            self.source.address,
            self.source.inode,
            self.position,
            self.group,
            self.program.address,
            self.program.inode,
        ]);
        words
    }

    fn from_words(words: [u64; WORDS - 1]) -> Self {
        let [begun_ns, duration_ns, number, rest @ ..] = words;
        let (mut arguments, mut after) = ([0; 6], [0; WORDS - 10]);
        arguments.copy_from_slice(&rest[..6]);
        after.copy_from_slice(&rest[6..]);
        let [result, of, rest @ ..] = after;
        let [task, address, inode, source, source_inode, position, group, rest @ ..] = rest;
        let [program, program_inode, ..] = rest;
        Self {
            begun_ns,
            duration_ns,
            number,
            arguments,
            result,
            process: (of >> 32) as u32,
            thread_id: of as u32,
            task,
            file: CallFile { address, inode },
            source: CallFile { address: source, inode: source_inode },
            position,
            group,
            program: CallFile { address: program, inode: program_inode },
        }
    }
}

/// The calls that a reader needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallReaders {
    /// All.
    All,
    /// Those that copy from another file.
    Copies,
}

impl CallReaders {
    /// Each kind of readers.
    pub const EACH: [Self; 2] = [Self::All, Self::Copies];

    const fn place(self) -> usize {
        match self {
            Self::All => READERS,
            Self::Copies => READERS + 8,
        }
    }
}

/// The ring.
pub struct Calls {
    mapping: Mapping,
}

impl Calls {
    /// An empty ring, and its file.
    ///
    /// # Errors
    /// When there is too little memory.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let file = memfd_create(c"fathom-calls", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, LENGTH as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let ring = Self { mapping: Mapping::of(&file, LENGTH)? };
        ring.word(0).store(MAGIC, Ordering::Relaxed);
        ring.word(8).store(VERSION, Ordering::Relaxed);
        ring.word(16).store(PLACES, Ordering::Release);
        Ok((ring, file))
    }

    /// The ring in a file that another process has made.
    ///
    /// # Errors
    /// When it is no ring of this version.
    pub fn open(file: &OwnedFd) -> io::Result<Self> {
        if u64::try_from(fstat(file)?.st_size) != Ok(LENGTH as u64) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let ring = Self { mapping: Mapping::of(file, LENGTH)? };
        let is_ours = ring.word(16).load(Ordering::Acquire) == PLACES
            && ring.word(0).load(Ordering::Relaxed) == MAGIC
            && ring.word(8).load(Ordering::Relaxed) == VERSION;
        if is_ours { Ok(ring) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        self.mapping.wide(offset)
    }

    /// Adds a call. Never waits.
    pub fn add(&self, call: &Call) {
        let number = self.word(HEAD).fetch_add(1, Ordering::Relaxed);
        let place = START + (number % PLACES) as usize * WORDS * 8;
        self.word(place).store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        for (at, word) in call.to_words().into_iter().enumerate() {
            self.word(place + 8 * (at + 1)).store(word, Ordering::Relaxed);
        }
        self.word(place).store(number.wrapping_add(1), Ordering::Release);
    }

    /// The number of calls so far.
    pub fn count(&self) -> u64 {
        self.word(HEAD).load(Ordering::Acquire)
    }

    /// Whether there is a reader of these calls.
    pub fn has_reader(&self, of: CallReaders) -> bool {
        self.word(of.place()).load(Ordering::Relaxed) != 0
    }

    /// A reader of these calls comes, or leaves. They are noted while there is one.
    pub fn set_reading(&self, of: CallReaders, is_reading: bool) {
        let change = if is_reading { 1 } else { u64::MAX };
        self.word(of.place()).fetch_add(change, Ordering::Relaxed);
    }

    /// A reader of the calls from now on.
    pub fn reader(&self) -> CallPosition {
        CallPosition { next: self.count(), missed: 0 }
    }

    /// Adds the calls since the last time to `calls`, at most as many as the ring has places.
    pub fn read(&self, from: &mut CallPosition, calls: &mut Vec<Call>) {
        let head = self.count();
        let behind = head.wrapping_sub(from.next);
        if behind > PLACES {
            // Also if the other side has set the number back.
            let kept = head.wrapping_sub(PLACES.min(head));
            from.missed = from.missed.saturating_add(kept.saturating_sub(from.next));
            from.next = kept;
        }
        while from.next != head {
            let place = START + (from.next % PLACES) as usize * WORDS * 8;
            let number = self.word(place).load(Ordering::Acquire);
            let is_late = head.wrapping_sub(from.next) > PLACES / 2;
            if number != from.next.wrapping_add(1) {
                // It is being filled, unless whoever fills it is gone, or has gone round already.
                if number < from.next && !is_late {
                    return;
                }
                from.missed = from.missed.saturating_add(1);
                from.next = from.next.wrapping_add(1);
                continue;
            }
            let mut words = [0; WORDS - 1];
            for (at, word) in words.iter_mut().enumerate() {
                *word = self.word(place + 8 * (at + 1)).load(Ordering::Relaxed);
            }
            fence(Ordering::Acquire);
            if self.word(place).load(Ordering::Relaxed) == number {
                calls.push(Call::from_words(words));
            } else {
                from.missed = from.missed.saturating_add(1);
            }
            from.next = from.next.wrapping_add(1);
        }
    }
}

/// How far a reader has come.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallPosition {
    next: u64,
    /// The calls that were written over before they were read.
    pub missed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(number: u64) -> Call {
        Call {
            begun_ns: number,
            duration_ns: 2,
            number: 3,
            arguments: [4, 5, 6, 7, 8, 9],
            result: 10,
            process: 11,
            thread_id: 12,
            task: 13,
            file: CallFile { address: 14, inode: 15 },
            source: CallFile { address: 16, inode: 17 },
            position: 18,
            group: 19,
            program: CallFile { address: 20, inode: 21 },
        }
    }

    #[test]
    fn a_reader_gets_every_call_or_counts_it() {
        let (daemon, file) = Calls::create().unwrap();
        let other = Calls::open(&file).unwrap();
        other.add(&call(0));
        let readers = || CallReaders::EACH.map(|readers| other.has_reader(readers));
        assert_eq!(readers(), [false, false]);
        daemon.set_reading(CallReaders::Copies, true);
        assert_eq!(readers(), [false, true]);
        daemon.set_reading(CallReaders::All, true);
        daemon.set_reading(CallReaders::Copies, false);
        assert_eq!(readers(), [true, false]);
        let mut position = daemon.reader();
        let mut read = Vec::new();
        daemon.read(&mut position, &mut read);
        assert!(read.is_empty(), "before it began");
        other.add(&call(1));
        other.add(&call(2));
        daemon.read(&mut position, &mut read);
        assert_eq!((read.clone(), position.missed), (vec![call(1), call(2)], 0));
        read.clear();
        for number in 0..PLACES + 100 {
            other.add(&call(number));
        }
        daemon.read(&mut position, &mut read);
        assert_eq!((read.len() as u64, position.missed), (PLACES, 100));
        assert_eq!(read.last(), Some(&call(PLACES + 99)));
    }

    #[test]
    fn a_ring_with_any_content_is_read_to_an_end() {
        let (ring, file) = Calls::create().unwrap();
        let mut position = ring.reader();
        let mut read = Vec::new();
        let mut random = 1_u64;
        for head in [0, 1, 5, PLACES + 7, u64::MAX, u64::MAX / 2, 3, 1 << 20, 0] {
            ring.word(HEAD).store(head, Ordering::Relaxed);
            for place in 0..64 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let value =
                    if random >> 63 == 0 { head.wrapping_sub(place as u64) } else { random };
                ring.word(START + place * WORDS * 8).store(value, Ordering::Relaxed);
            }
            read.clear();
            ring.read(&mut position, &mut read);
            assert!(read.len() as u64 <= PLACES);
        }
        drop(ring);
        assert!(Calls::open(&file).is_ok());
        let other = memfd_create(c"other", MemfdFlags::CLOEXEC).unwrap();
        assert!(Calls::open(&other).is_err());
        ftruncate(&other, LENGTH as u64).unwrap();
        assert!(Calls::open(&other).is_err());
    }
}
