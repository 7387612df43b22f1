//! How a fault is served: by the pager, and after its death by its guard.

use std::ops::Range;

use rustix::io::Errno;

use crate::away::{AwayPages, Brought};
use crate::memory::MappedMemory;
use crate::store::PAGE;
use crate::userfault::UserFault;

/// A missing page comes into being with its neighbours: so many pages, from a multiple of it.
pub const RUN_PAGES: u64 = 16;
const RUN: u64 = RUN_PAGES * PAGE;

/// What became of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// So many bytes of zeroes came into being.
    Zeroed(u64),
    /// The page was away, and is there.
    Brought,
    /// The page was there.
    Present,
    /// There is no such memory any more.
    Stray,
    /// It could not come now, and its thread tries again; or its content is damaged.
    Later,
    /// It is being read, and its thread waits.
    Reading,
    /// The kernel could not make a page. It serves the faults itself now.
    Released,
}

/// The page of an address.
pub(crate) fn page_of(address: u64) -> Range<u64> {
    let page = address & !(PAGE - 1);
    page..page + PAGE
}

/// The mapping of an address.
pub(crate) fn part_of(memory: &[MappedMemory], address: u64) -> Option<&MappedMemory> {
    memory.iter().find(|part| part.range().contains(&address))
}

/// Serves the fault of a missing page.
pub(crate) fn serve_missing(
    faults: &UserFault,
    memory: &[MappedMemory],
    mut away: Option<&mut AwayPages>,
    address: u64,
) -> Served {
    let own = page_of(address);
    let page = own.start;
    let Some(part) = part_of(memory, address) else {
        let _ = faults.wake(&own);
        return Served::Stray;
    };
    if let Some(away) = &mut away {
        match away.bring(page, faults) {
            Brought::Here => return Served::Brought,
            Brought::Reading => return Served::Reading,
            Brought::Later | Brought::Damaged => return Served::Later,
            Brought::Unmapped => return Served::Stray,
            Brought::NotAway => {}
        }
    }
    let run = run_of(page, &part.range());
    let run = away.as_ref().map_or(run.clone(), |away| away.without_away(run, page));
    // From the beginning of the run, as if it were all missing; else from the page on.
    let mut zeroed = 0;
    for attempt in [run.clone(), page..run.end] {
        match faults.zero(&attempt) {
            Ok(bytes) => {
                zeroed += bytes;
                if attempt.start + bytes > page {
                    return Served::Zeroed(zeroed);
                }
            }
            Err(error) => match Errno::from_io_error(&error) {
                // The VMM changes its mappings at this moment: the thread tries again.
                Some(Errno::EXIST | Errno::AGAIN) => {}
                Some(Errno::NOENT | Errno::SRCH) => {
                    let _ = faults.wake(&own);
                    return Served::Stray;
                }
                // Not while a page is away: the kernel would make zeroes of it.
                _ if away.as_ref().is_some_and(|away| away.count() > 0) => {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    let _ = faults.wake(&own);
                    return Served::Later;
                }
                _ => {
                    let _ = faults.unregister(&part.range());
                    return Served::Released;
                }
            },
        }
    }
    let _ = faults.wake(&own);
    Served::Present
}

/// Serves the fault of a write to a protected page: it may have left since, or it was protected by
/// a pager that is dead.
pub(crate) fn serve_protected(faults: &UserFault, away: Option<&mut AwayPages>, address: u64) {
    if away.is_none_or(|away| away.bring(address, faults) == Brought::NotAway) {
        let _ = faults.protect(&page_of(address), false);
    }
}

/// The run of pages that comes into being with `page`, within its mapping.
pub(crate) fn run_of(page: u64, part: &Range<u64>) -> Range<u64> {
    let start = page & !(RUN - 1);
    start.max(part.start)..(start + RUN).min(part.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_lies_in_its_mapping() {
        let part = 0x1_3000..0x4_2000;
        assert_eq!(run_of(0x2_5000, &part), 0x2_0000..0x3_0000);
        assert_eq!(run_of(0x1_3000, &part), 0x1_3000..0x2_0000);
        assert_eq!(run_of(0x4_1000, &part), 0x4_0000..0x4_2000);
    }
}
