//! Extents that say what differs between two maps.

use fathom_block::{BackendContext, ErrorKind};

use super::{StoreQueue, Wanted};
use crate::catalogue::PageId;
use crate::difference::{Compared, ComparedRun};
use crate::layout::BLOCK;
use crate::pages::Fault;

/// The most steps of an answer: it takes as many reads of pages as a slow device has in seconds.
const STEPS_MAX: usize = 8;

impl StoreQueue {
    /// Whether the queue compares. Such a queue leaves checkpoints and walks to others.
    pub(super) fn is_comparison(&self) -> bool {
        matches!(self.wanted, Wanted::Difference { .. })
    }

    /// Compares the maps from block `first` on.
    fn compare_maps(&self, first: u64, end: u64) -> Result<(Vec<ComparedRun>, Vec<PageId>), Fault> {
        let Wanted::Difference { base, target } = self.wanted else { return Err(Fault::Damaged) };
        let (mut runs, mut missing) = (Vec::new(), Vec::new());
        self.inner.shared.access(|state| {
            let branch = |id: u32| state.catalogue.branch(id).ok_or(Fault::Damaged);
            let (target, size) = branch(target)?;
            let (base, base_blocks) = match base.map(branch).transpose()? {
                Some((base, before)) if before < size => (base, before / BLOCK),
                Some((base, _)) => (base, u64::MAX),
                None => (0, u64::MAX),
            };
            let maps = Compared { base, base_blocks, target };
            state.pages.compare(&maps, first..end, &self.compared, &mut runs, &mut missing)
        })?;
        Ok((runs, missing))
    }

    /// Goes on with a request for extents. Returns false if pages are missing.
    pub(super) fn go_on_comparing(
        &mut self,
        number: u64,
        context: &mut BackendContext<'_>,
    ) -> bool {
        if !self.to_compare.is_empty() {
            // All of them are looked at together.
            return false;
        }
        let Some(read) = self.reads.get(&number) else { return false };
        // A damaged map has neither runs nor pages to read.
        let (runs, missing) = self.compare_maps(read.first, read.end()).unwrap_or_default();
        if let Some(read) = self.reads.get_mut(&number).filter(|_| !runs.is_empty()) {
            let mut block = read.first;
            for run in runs {
                read.put_extent(block..block + run.count, run.state);
                block += run.count;
            }
            read.steps += 1;
            read.end_extents(block, read.steps >= STEPS_MAX);
            return true;
        }
        let fault = missing.first().map_or(Fault::Damaged, |id| Fault::Missing(*id));
        self.to_compare.extend(&missing);
        let is_broken = self.load_all(fault, &missing, context);
        // Those that cannot be read at all are not awaited.
        self.to_compare.retain(|id| self.loading.contains(id));
        if let Some(read) = self.reads.get_mut(&number).filter(|_| is_broken) {
            read.outcome = Err(ErrorKind::Io);
        }
        is_broken
    }
}
