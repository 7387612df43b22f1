//! What processes say to each other first: which they are, and what they answer.
//!
//! All numbers are little-endian: the magic (8 bytes), the version of the software (16 bytes, a
//! text with zeros behind it), the process and how many there are (4 each), and a hash of the
//! plans (8).

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::io;
use std::time::Instant;

use fathom_cql::plan::Plan;

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
        (own_results, format!("{plans:?}")).hash(&mut hasher);
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

    /// Says the own, until `end`.
    pub fn say(&self, channel: &mut Channel, end: Instant) -> io::Result<()> {
        let own = self.to_bytes();
        let mut sent = 0;
        while sent < LENGTH {
            sent += channel.write(&own[sent..])?;
            in_time(end)?;
        }
        Ok(())
    }

    /// Hears the other's, until `end`: which process it is.
    ///
    /// # Errors
    /// When it is none of this cluster: [`io::ErrorKind::InvalidData`] where it means to be one.
    pub fn hear(&self, channel: &mut Channel, end: Instant) -> io::Result<usize> {
        let mut theirs = [0; LENGTH];
        let mut come = 0;
        while come < LENGTH {
            let count = channel.read(&mut theirs[come..])?;
            come += count.ok_or(io::ErrorKind::UnexpectedEof)?;
            in_time(end)?;
        }
        self.check(&theirs)
    }

    /// Which process the other is, which must answer the same.
    fn check(&self, theirs: &[u8; LENGTH]) -> io::Result<usize> {
        let wrong = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if theirs[..8] != MAGIC {
            return Err(io::Error::other("somebody else has connected"));
        }
        if theirs[8..24] != self.version {
            return wrong("a process is of another version");
        }
        let number = |at: usize| {
            theirs[at..at + 4].iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte))
        };
        let (index, processes) = (number(24), number(28));
        if processes != self.processes {
            return wrong("the processes do not agree on how many they are");
        }
        if index >= processes || index == self.index {
            return wrong("two processes have the same number");
        }
        if theirs[32..] != self.plans.to_le_bytes() {
            return wrong(
                "the processes have different queries, or tell results in different ways",
            );
        }
        Ok(index as usize)
    }
}

fn in_time(end: Instant) -> io::Result<()> {
    if Instant::now() < end {
        return Ok(());
    }
    let what = "the other process does not say who it is";
    Err(io::Error::new(io::ErrorKind::TimedOut, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fellows_are_taken() {
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
