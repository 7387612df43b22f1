//! Checks a pool without changing it: what its opening would see, each page of each map, and, by
//! choice, the content of each block.

use std::collections::BTreeSet;
use std::sync::Arc;

use fathom_block::{Backend, Shared, StoreAccess};

use crate::bitmap::ALL;
use crate::catalogue::PageId;
use crate::error::PoolError;
use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::pages::{Fault, Page, Pages, WORDS};
use crate::place_bits::PlaceBits;
use crate::recover::{Opened, Recovered, find, load};
use crate::rules::Rules;
use crate::state::State;
use crate::tree::{BLOCKS_MAX, ROOT_LEVEL};

/// The most problems that are described.
const PROBLEMS_MAX: usize = 100;
/// The most blocks that are read at once.
const READ_BLOCKS_MAX: usize = 256;

/// What a check has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Volumes and snapshots.
    pub volumes: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Pages of maps.
    pub map_pages: u64,
    /// Blocks of data to which a map refers, each counted once.
    pub blocks: u64,
    /// Of these, those whose content was read and is right.
    pub verified_blocks: u64,
    /// Places in use to which nothing refers. A walk frees them; they are no damage.
    pub unused_places: u64,
    /// What came after the last checkpoint.
    pub recovered: Recovered,
    /// The number of problems.
    pub problem_count: u64,
    /// The first of them, as sentences.
    pub problems: Vec<String>,
}

impl CheckReport {
    fn report(&mut self, problem: impl FnOnce() -> String) {
        self.problem_count += 1;
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(problem());
        }
    }
}

struct Checker<'a> {
    state: &'a Shared<State>,
    access: StoreAccess,
    report: CheckReport,
    pages: BTreeSet<PageId>,
    /// The places to which something refers.
    referred: PlaceBits,
    reads_data: bool,
}

/// Checks the pool on a device, which nobody uses. Reads the content of all blocks if `reads_data`.
/// `progress` is called with the number of checked blocks.
///
/// # Errors
/// If there is no pool, or the device fails.
pub fn check(
    device: &Arc<dyn Backend>,
    reads_data: bool,
    mut progress: impl FnMut(u64),
) -> Result<CheckReport, PoolError> {
    let Opened { state, found: recovered, access, .. } =
        find(device, (1 << 12, 1), Rules::default())?;
    let layout = state.access(|state| state.layout());
    let mut checker = Checker {
        state: &state,
        access,
        report: CheckReport { recovered, ..CheckReport::default() },
        pages: BTreeSet::new(),
        referred: PlaceBits::new(layout.places()),
        reads_data,
    };
    let roots = state.access(|state| {
        let volumes = state.catalogue.volumes.values();
        let mut roots: Vec<(String, PageId)> =
            volumes.map(|volume| (volume.name.clone(), volume.root)).collect();
        checker.report.volumes = roots.len() as u64;
        for snapshot in state.catalogue.snapshots.values() {
            let volume = state.catalogue.volumes.get(&snapshot.volume);
            let volume = volume.map_or("(deleted)", |volume| &volume.name);
            roots.push((format!("{volume}@{}", snapshot.name), snapshot.root));
        }
        checker.report.snapshots = state.catalogue.snapshots.len() as u64;
        roots
    });
    for (name, root) in roots {
        if root != 0 {
            checker.walk(&name, root, ROOT_LEVEL, 0, &mut progress)?;
        }
    }
    for root in state.access(|state| state.catalogue.set_roots().collect::<Vec<_>>()) {
        checker.check_set(root, ROOT_LEVEL)?;
    }
    checker.check_guarantees()?;
    if recovered.wrong_blocks > 0 {
        let count = recovered.wrong_blocks;
        checker.report.report(|| format!("{count} blocks after the last checkpoint are damaged"));
    }
    checker.count_unused();
    Ok(checker.report)
}

impl Checker<'_> {
    fn page(&mut self, id: PageId) -> Result<Option<Arc<Page>>, PoolError> {
        for _ in 0..2 {
            match self.state.access(|state| state.pages.get(id).cloned()) {
                Ok(page) => return Ok(Some(page)),
                Err(Fault::Damaged) => return Ok(None),
                Err(Fault::Missing(id)) => match load(self.state, &mut self.access, id) {
                    Ok(()) => {}
                    Err(PoolError::Damaged(_)) => return Ok(None),
                    Err(error) => return Err(error),
                },
            }
        }
        Ok(None)
    }

    /// Notes that something refers to a block. Returns whether that is new; `None` if the block is
    /// no place, or is free.
    fn refer(&mut self, block: u64) -> Option<bool> {
        let place = self.state.access(|state| {
            let place = state.layout().place(block)?;
            state.space.is_used(place).then_some(place)
        })?;
        self.referred.set(place)
    }

    /// Checks a page, whose first block of the volume is `first`, and what lies below it.
    fn walk(
        &mut self,
        name: &str,
        id: PageId,
        level: u32,
        first: u64,
        progress: &mut impl FnMut(u64),
    ) -> Result<(), PoolError> {
        if !self.pages.insert(id) {
            return Ok(());
        }
        let offset = first * BLOCK;
        let Some(page) = self.page(id)? else {
            self.report
                .report(|| format!("{name}: the map of what begins at byte {offset} is damaged"));
            return Ok(());
        };
        self.report.map_pages += 1;
        self.check_copies(name, id);
        if level == 0 {
            self.check_leaf(name, &page, first)?;
            progress(self.report.blocks);
            return Ok(());
        }
        for index in 0..WORDS {
            let first = first + ((index as u64) << (9 * level));
            match Pages::child(&page, index) {
                Ok(0) => {}
                Ok(child) => self.walk(name, child, level - 1, first, progress)?,
                Err(_) => self.report.report(|| format!("{name}: page {id} of its map is damaged")),
            }
        }
        Ok(())
    }

    /// Checks the places of a page and of its second copy, and that both have its content. A page
    /// that came after the last checkpoint has none.
    fn check_copies(&mut self, name: &str, id: PageId) {
        let entry = self.state.access(|state| state.pages.entry(id));
        for block in entry.blocks() {
            if self.refer(block) != Some(true) {
                self.report.report(|| format!("{name}: a place of page {id} is not its own"));
                continue;
            }
            let is_right = match self.access.read(block * BLOCK, BLOCK) {
                Ok(bytes) => crc32c::crc32c(&bytes) == entry.checksum,
                Err(_) => false,
            };
            if !is_right {
                self.report.report(|| {
                    format!("{name}: one copy of page {id} is damaged; a check in use mends it")
                });
            }
        }
    }

    /// Counts the fresh blocks of volumes with guarantees.
    fn check_guarantees(&mut self) -> Result<(), PoolError> {
        let volumes = self.state.access(|state| state.catalogue.volumes.clone());
        let guaranteed = volumes.values().filter(|volume| volume.guarantee > 0);
        for volume in guaranteed.filter(|volume| volume.own.is_complete()) {
            let (mut fresh, mut at) = (0, 0);
            while at < BLOCKS_MAX {
                let counted = self
                    .state
                    .access(|state| state.pages.count_fresh(volume.root, volume.floor, at));
                match counted {
                    Ok((count, next)) => (fresh, at) = (fresh + count, next),
                    Err((Fault::Missing(id), next)) => at = self.page(id)?.map_or(next, |_| at),
                    Err((Fault::Damaged, next)) => at = next,
                }
            }
            let (name, known) = (&volume.name, volume.own.fresh);
            if known != fresh {
                self.report.report(|| {
                    format!(
                        "{name}: {known} blocks count for its guarantee, and {fresh} are its own"
                    )
                });
            }
        }
        Ok(())
    }

    /// Checks a page of a change set, and what lies below it.
    fn check_set(&mut self, id: PageId, level: u32) -> Result<(), PoolError> {
        let Some(page) = self.page(id)? else {
            self.report.report(|| format!("page {id} of what has changed is damaged"));
            return Ok(());
        };
        self.report.map_pages += 1;
        if !self.pages.insert(id) {
            self.report
                .report(|| format!("the place of page {id} of what has changed is not its own"));
            return Ok(());
        }
        self.check_copies("what has changed", id);
        for word in page.iter().filter(|word| level > 0 && **word != 0 && **word != ALL) {
            match PageId::try_from(*word) {
                Ok(child) => self.check_set(child, level - 1)?,
                Err(_) => {
                    self.report.report(|| format!("page {id} of what has changed is damaged"));
                }
            }
        }
        Ok(())
    }

    fn check_leaf(&mut self, name: &str, page: &Page, first: u64) -> Result<(), PoolError> {
        // Adjoining blocks, of which the first one is at this index.
        let mut runs: Vec<(usize, usize, u64)> = Vec::new();
        for index in 0..WORDS {
            let offset = (first + index as u64) * BLOCK;
            let Ok(entry) = Pages::leaf_entry(page, index) else {
                self.report.report(|| format!("{name}: the map of byte {offset} is damaged"));
                continue;
            };
            if entry.is_hole() {
                continue;
            }
            match self.refer(entry.block()) {
                Some(false) => continue,
                Some(true) => self.report.blocks += 1,
                None => {
                    self.report.report(|| format!("{name}: the place of byte {offset} is free"));
                    continue;
                }
            }
            match runs.last_mut() {
                Some((start, count, block))
                    if *start + *count == index
                        && *block + *count as u64 == entry.block()
                        && *count < READ_BLOCKS_MAX =>
                {
                    *count += 1;
                }
                _ => runs.push((index, 1, entry.block())),
            }
        }
        for (start, count, block) in runs.into_iter().filter(|_| self.reads_data) {
            let bytes = self.access.read(block * BLOCK, count as u64 * BLOCK)?;
            for (index, bytes) in (start..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
                let entry = Pages::leaf_entry(page, index).unwrap_or_default();
                if entry.has_checksum(crc32c::crc32c(bytes)) {
                    self.report.verified_blocks += 1;
                } else {
                    let offset = (first + index as u64) * BLOCK;
                    let say = || format!("{name}: the content of byte {offset} is damaged");
                    self.report.report(say);
                }
            }
        }
        Ok(())
    }

    fn count_unused(&mut self) {
        let used = self.state.access(|state| state.space.used_places());
        self.report.unused_places = used.saturating_sub(self.referred.count());
    }
}
