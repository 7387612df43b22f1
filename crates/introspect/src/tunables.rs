//! The tunables of a guest kernel's write-back. `vm.dirty_expire_centisecs` is the only value in a
//! guest's memory that Fathom writes, and only for guests whose operator allows it.
//!
//! The kernel writes data that has been dirty for longer than this time at its next periodic
//! write-back, so a short time makes it write everything within `vm.dirty_writeback_centisecs`.

use std::fmt;

use crate::kernel::Kernel;

/// The longest time that is accepted as one of the tunables, in centiseconds: a day. A larger
/// number is most likely something else.
const CENTISECONDS_MAX: u32 = 24 * 3600 * 100;

/// The addresses of the tunables.
#[derive(Clone, Debug, Default)]
pub(crate) struct TunablePlaces {
    dirty_expire: Option<u64>,
    dirty_writeback: Option<u64>,
}

impl TunablePlaces {
    /// The symbols of the tunables.
    pub const SYMBOLS: [&str; 2] = ["dirty_expire_interval", "dirty_writeback_interval"];

    /// `symbol` has all addresses of a symbol. A symbol that is not unique is not used.
    pub fn new<'a>(symbol: impl Fn(&str) -> Option<&'a [u64]>) -> Self {
        let only = |name| match symbol(name) {
            Some([address]) => Some(*address),
            _ => None,
        };
        let [expire, writeback] = Self::SYMBOLS;
        Self { dirty_expire: only(expire), dirty_writeback: only(writeback) }
    }
}

/// The tunables of write-back, in centiseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunables {
    /// How long data is dirty before periodic write-back writes it (`vm.dirty_expire_centisecs`).
    pub dirty_expire: u32,
    /// The interval of periodic write-back (`vm.dirty_writeback_centisecs`); 0 for none.
    pub dirty_writeback: u32,
}

/// Why a tunable was not replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunableError {
    /// The kernel is not there any more, or its tunables are not known for certain.
    Unknown,
    /// The tunable has another value, in centiseconds.
    Other(u32),
}

impl fmt::Display for TunableError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => formatter.write_str("the kernel's tunables are not known for certain"),
            Self::Other(value) => write!(formatter, "vm.dirty_expire_centisecs is {value}"),
        }
    }
}

impl std::error::Error for TunableError {}

impl Kernel {
    /// The addresses of the tunables.
    #[cfg(test)]
    pub(crate) fn tunable_addresses(&self) -> [Option<u64>; 2] {
        let places = self.tunable_places();
        [places.dirty_expire, places.dirty_writeback]
    }

    /// The tunables of write-back; `None` if they are not known for certain.
    pub fn tunables(&self) -> Option<Tunables> {
        let places = self.tunable_places();
        let value = |place: Option<u64>| {
            let value = self.u32(place.filter(|address| address % 4 == 0)?)?;
            (value <= CENTISECONDS_MAX).then_some(value)
        };
        let tunables = Tunables {
            dirty_expire: value(places.dirty_expire)?,
            dirty_writeback: value(places.dirty_writeback)?,
        };
        self.is_there().then_some(tunables)
    }

    /// The guest-physical address of `vm.dirty_expire_centisecs`, which has four bytes.
    pub fn dirty_expire_place(&self) -> Option<u64> {
        self.physical(self.tunable_places().dirty_expire?)
    }

    /// Replaces `vm.dirty_expire_centisecs`, if it is `current`.
    ///
    /// # Errors
    /// If it has another value, or if the memory cannot be written.
    pub fn replace_dirty_expire(&self, current: u32, new: u32) -> Result<(), TunableError> {
        self.tunables().ok_or(TunableError::Unknown)?;
        let physical = self.dirty_expire_place().ok_or(TunableError::Unknown)?;
        match self.memory().replace_u32(physical, current, new) {
            Some(Ok(())) => Ok(()),
            Some(Err(other)) => Err(TunableError::Other(other)),
            None => Err(TunableError::Unknown),
        }
    }
}
