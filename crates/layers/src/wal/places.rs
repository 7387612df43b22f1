//! Several places for logs in one volume, all of the same length. A place belongs to the disk whose
//! log is in it, as the log's own superblock says, so that nothing else has to be read to find a
//! log. These functions block.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use fathom_block::{Backend, Operation, StoreAccess};
use fathom_failure::Failure;
use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, Verdict, erasure};

use super::open::read_superblock;
use super::volume::wait_until_closed;
use super::{LogVolume, Settlement, Wal, WalError, WalOptions};

/// The most names of disks in a message.
const NAMES_MAX: usize = 8;

/// Places for logs, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogPlaces {
    /// Where the first one begins, in bytes: a multiple of 4 KiB.
    pub offset: u64,
    /// The length of each, in bytes: a multiple of 4 KiB.
    pub length: u64,
    /// Their number.
    pub count: u32,
}

impl LogPlaces {
    fn place(&self, number: u32) -> Range<u64> {
        let start = self.offset + u64::from(number) * self.length;
        start..start + self.length
    }
}

/// The identities of the logs in `places` of `store`.
///
/// # Errors
/// If the store cannot be read.
pub fn logs_in(store: &Arc<dyn Backend>, places: &LogPlaces) -> io::Result<Vec<Identity>> {
    let mut access = StoreAccess::open(store)?;
    let mut found = Vec::new();
    for place in (0..places.count).map(|number| places.place(number)) {
        if let Ok(superblock) = read_superblock(&mut access, place.start)? {
            found.push(superblock.log);
        }
    }
    Ok(found)
}

impl Wal {
    /// Recovers the log of the disk, in whichever of `places` it is, or makes one in a free place.
    /// The offset and the size in `options` are not used. A volume that has lost writes is not
    /// used.
    ///
    /// # Errors
    /// If the log cannot be used, or there is no free place. Nothing has changed then.
    pub fn open_among(
        volume: &Arc<LogVolume>,
        places: &LogPlaces,
        options: &WalOptions,
    ) -> Result<Self, WalError> {
        Self::settle_among(volume, places, options, Settlement::Refuse)
    }

    /// As [`open_among`](Self::open_among), for a log that was refused; see
    /// [`settle`](Self::settle).
    ///
    /// # Errors
    /// As for [`open_among`](Self::open_among).
    pub fn settle_among(
        volume: &Arc<LogVolume>,
        places: &LogPlaces,
        options: &WalOptions,
        settlement: Settlement,
    ) -> Result<Self, WalError> {
        // Held while the log is made, so that two disks do not choose the same place.
        let _choice = volume.choice.lock();
        let place = choose(volume, places, options)?;
        let options =
            WalOptions { offset: place.start, size: place.end - place.start, ..options.clone() };
        Self::open_at(volume, &options, false, (None, settlement))
    }

    /// Removes the log, so that another one can be made in its place. The disk must not have the
    /// layer any more, and its store must not be marked as having changes in the log.
    ///
    /// # Errors
    /// If the log has changes, or its volume fails. The log may then still be there.
    pub fn erase(&self) -> io::Result<()> {
        let inner = &self.inner;
        if !inner.shared.access(|state| state.log.is_empty()) {
            return Err(io::Error::other("the log has changes"));
        }
        let mut access = StoreAccess::open(inner.volume.backend())?;
        let mut superblocks = [0; 2 * SUPERBLOCK_LENGTH];
        superblocks.copy_from_slice(&access.read(inner.base, 2 * SUPERBLOCK_LENGTH as u64)?);
        for (offset, mut bytes) in erasure(&superblocks) {
            access.carry_out(Operation::Write, inner.base + offset, &mut bytes)?;
            access.carry_out(Operation::Flush, 0, &mut [])?;
        }
        Ok(())
    }
}

/// The place of the disk's log, or a free one. Waits if there is none but one that another disk is
/// just leaving.
fn choose(
    volume: &Arc<LogVolume>,
    places: &LogPlaces,
    options: &WalOptions,
) -> Result<Range<u64>, WalError> {
    let mut access = StoreAccess::open(volume.backend())?;
    let (mut own, mut free, mut names, mut unreadable) = (None, None, Vec::new(), 0);
    let mut leaving = Vec::new();
    for place in (0..places.count).map(|number| places.place(number)) {
        match read_superblock(&mut access, place.start)? {
            Ok(found) if options.expected == Some(found.log) => return Ok(place),
            Ok(found) if found.owner.name == options.name => {
                own.get_or_insert(place);
            }
            Ok(found) => names.push(found.owner.name),
            // A log that another disk is just leaving may still be open.
            Err(Verdict::Blank) if volume.is_claimed(&place) => leaving.push(place),
            Err(Verdict::Blank) => {
                free.get_or_insert(place);
            }
            Err(_) => unreadable += 1,
        }
    }
    if options.expected.is_some() {
        return Err(WalError::NotExpected);
    }
    let mut chosen = own.or(free);
    if chosen.is_none() && !leaving.is_empty() {
        chosen =
            wait_until_closed(|| leaving.iter().find(|place| !volume.is_claimed(place)).cloned());
    }
    chosen.ok_or_else(|| WalError::Region(no_place(places, names, unreadable)))
}

fn no_place(places: &LogPlaces, mut names: Vec<String>, unreadable: u32) -> Failure {
    names.sort();
    let more = names.len().saturating_sub(NAMES_MAX);
    let mut users: Vec<String> =
        names.iter().take(NAMES_MAX).map(|name| format!("{name:?}")).collect();
    if more > 0 {
        users.push(format!("{more} more"));
    }
    if unreadable > 0 {
        users.push(format!("{unreadable} that cannot be read"));
    }
    let (count, users) = (places.count, users.join(", "));
    Failure::new(format!("all its {count} places for logs are in use, by {users}")).advise(
        "free the place of a disk that does not need one any more: serve it once more and remove it, \
         or, if its changes may be lost, run `fathom cache clear --log NAME` with its name while \
         nothing uses the cache. Or make a cache with more places",
    )
}
