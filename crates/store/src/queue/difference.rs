//! Extents that say what differs between two maps.

use fathom_block::{Allocation, BackendContext, ErrorKind};

use super::{StoreQueue, Wanted};
use crate::catalogue::PageId;
use crate::difference::{Compared, ComparedRun, Comparison};
use crate::layout::BLOCK;
use crate::pages::Fault;

/// The most steps of an answer: it takes as many reads of pages as a slow device has in seconds.
const STEPS_MAX: usize = 8;

impl StoreQueue {
    /// Whether the queue compares. Such a queue leaves checkpoints and walks to others.
    pub(super) fn is_comparison(&self) -> bool {
        matches!(self.wanted, Wanted::Difference(_))
    }

    /// Compares the blocks from `first` on.
    fn find_changes(&self, first: u64, end: u64) -> Result<(Vec<ComparedRun>, Vec<PageId>), Fault> {
        let Wanted::Difference(compared) = self.wanted else { return Err(Fault::Damaged) };
        let Comparison { base, target, finds_holes } = compared;
        let (mut runs, mut missing) = (Vec::new(), Vec::new());
        self.inner.shared.access(|state| {
            let branch = |id: u32| state.catalogue.branch(id).ok_or(Fault::Damaged);
            let sets = base.and_then(|base| state.catalogue.sets_between(base, target));
            let (target, size) = branch(target)?;
            let (base, base_blocks) = match base.map(branch).transpose()? {
                Some((base, before)) if before < size => (base, before / BLOCK),
                Some((base, _)) => (base, u64::MAX),
                None => (0, u64::MAX),
            };
            let (pages, read) = (&state.pages, &self.compared);
            // Sets that cannot be read are done without.
            let sets = sets.filter(|_| !self.has_broken_set);
            let Some(sets) = sets else {
                let maps = Compared { base, base_blocks, target };
                return pages.compare(&maps, first..end, read, &mut runs, &mut missing);
            };
            pages.changed_by_sets(&sets, base_blocks, first..end, read, &mut runs, &mut missing)?;
            if finds_holes && missing.is_empty() {
                let changed = std::mem::take(&mut runs);
                runs = pages.with_holes(target, first, changed, read, &mut missing)?;
            }
            Ok(())
        })?;
        for run in runs.iter_mut().filter(|run| !finds_holes && run.state == Allocation::Zero) {
            run.state = Allocation::Data;
        }
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
        let (runs, missing) = self.find_changes(read.first, read.end()).unwrap_or_default();
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
        if is_broken && !std::mem::replace(&mut self.has_broken_set, true) {
            return true;
        }
        if let Some(read) = self.reads.get_mut(&number).filter(|_| is_broken) {
            read.outcome = Err(ErrorKind::Io);
        }
        is_broken
    }
}
