//! The hello that processes exchange first: the process, and a hash of its queries.
//!
//! Numbers are little-endian: the magic (8 bytes), the software version (16 bytes, a text padded
//! with zeros), the number of the process and the number of processes (4 bytes each), and a hash (8
//! bytes). It covers the plans, and a sample of the hash by which rows are distributed, which
//! builds by different compilers may compute differently.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::io;
use std::time::Instant;

use fathom_cql::plan::Plan;

use crate::engine::hash_sample;
use crate::link::Channel;

const MAGIC: [u8; 8] = *b"fathomCL";
const LENGTH: usize = 40;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    version: [u8; 16],
    index: u32,
    processes: u32,
    plans: u64,
}

impl Hello {
    pub fn new(index: usize, processes: usize, own_results: bool, plans: &[Plan]) -> Self {
        let mut version = [0; 16];
        let own = env!("CARGO_PKG_VERSION").bytes();
        version.iter_mut().zip(own).for_each(|(place, byte)| *place = byte);
        let mut hasher = DefaultHasher::new();
        (own_results, format!("{plans:?}"), hash_sample()).hash(&mut hasher);
        Self { version, index: index as u32, processes: processes as u32, plans: hasher.finish() }
    }

    fn to_bytes(&self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&self.version);
        bytes[24..28].copy_from_slice(&self.index.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.processes.to_le_bytes());
        bytes[32..].copy_from_slice(&self.plans.to_le_bytes());
        bytes
    }

    /// Sends this process's hello before `end`.
    pub fn send(&self, channel: &mut Channel, end: Instant) -> io::Result<()> {
        let own = self.to_bytes();
        let mut sent = 0;
        while sent < LENGTH {
            sent += channel.write(&own[sent..])?;
            in_time(end)?;
        }
        Ok(())
    }

    /// Receives the other process's hello before `end`, and returns the number of the process.
    ///
    /// # Errors
    /// If the other process is not part of this cluster. [`io::ErrorKind::InvalidData`] if it
    /// claims to be.
    pub fn receive(&self, channel: &mut Channel, end: Instant) -> io::Result<usize> {
        let mut theirs = [0; LENGTH];
        let mut received = 0;
        while received < LENGTH {
            let count = channel.read(&mut theirs[received..])?;
            received += count.ok_or(io::ErrorKind::UnexpectedEof)?;
            in_time(end)?;
        }
        self.check(&theirs)
    }

    /// Checks the other process's hello, and returns the number of the process.
    fn check(&self, theirs: &[u8; LENGTH]) -> io::Result<usize> {
        let wrong = |message: &str| Err(io::Error::new(io::ErrorKind::InvalidData, message));
        if theirs[..8] != MAGIC {
            return Err(io::Error::other("another program has connected"));
        }
        if theirs[8..24] != self.version {
            return wrong("a process has another version");
        }
        let number = |at: usize| {
            theirs[at..at + 4].iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte))
        };
        let (index, processes) = (number(24), number(28));
        if processes != self.processes {
            return wrong("the processes have different lists of processes");
        }
        if index >= processes || index == self.index {
            return wrong("two processes have the same number");
        }
        if theirs[32..] != self.plans.to_le_bytes() {
            return wrong(
                "the processes have different queries, report results in different ways, or were \
                 built by different compilers",
            );
        }
        Ok(index as usize)
    }
}

fn in_time(end: Instant) -> io::Result<()> {
    if Instant::now() < end {
        return Ok(());
    }
    let message = "the other process does not identify itself";
    Err(io::Error::new(io::ErrorKind::TimedOut, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_of_the_cluster_are_accepted() {
        let hello = Hello::new(1, 3, false, &[]);
        let check = |other: &Hello| hello.check(&other.to_bytes()).map_err(|error| error.kind());
        assert_eq!(check(&Hello::new(2, 3, false, &[])), Ok(2));
        assert_eq!(check(&Hello::new(0, 3, false, &[])), Ok(0));
        let bad = Err(io::ErrorKind::InvalidData);
        assert_eq!(check(&Hello::new(1, 3, false, &[])), bad);
        assert_eq!(check(&Hello::new(3, 3, false, &[])), bad);
        assert_eq!(check(&Hello::new(0, 4, false, &[])), bad);
        assert_eq!(check(&Hello::new(0, 3, true, &[])), bad);
        assert_eq!(check(&Hello { plans: 1, ..Hello::new(0, 3, false, &[]) }), bad);
        assert_eq!(check(&Hello { version: [b'9'; 16], ..Hello::new(0, 3, false, &[]) }), bad);
        assert!(hello.check(&[b'x'; LENGTH]).is_err());
    }
}
