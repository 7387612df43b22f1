//! What operators see of a cache: its state, its problems and its metrics.

use std::sync::atomic::Ordering;

use fathom_block::{ErrorKind, Figure, LayerCause, LayerProblem, LayerReport};
use fathom_cache::{BlockCounts, CacheCounts};

use super::Cache;
use super::ending::Ending;

/// The state of a disk's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// The reads of the disk.
    pub reads: CacheCounts,
    /// Its reads whose content was not what the cache had noted.
    pub mismatches: u64,
    /// Slots of the volume, of all disks.
    pub slots: u64,
    /// Slots that have a block.
    pub mapped: u64,
    /// The blocks, of all disks.
    pub blocks: BlockCounts,
    /// Slots that the disk keeps however busy the other disks are.
    pub share: u64,
    /// Blocks of the disk, if it has or had a share.
    pub blocks_of_disk: Option<u64>,
    /// Regions of the disk with recent changes.
    pub regions: u64,
    /// The error of the volume, if it is out of service.
    pub failed: Option<ErrorKind>,
    /// Whether the tables have been loaded.
    pub is_loaded: bool,
}

impl CacheStatus {
    /// The problem of a volume that is out of service.
    fn failure(&self) -> Option<LayerProblem> {
        let kind = self.failed?;
        let message = if kind == ErrorKind::Malformed {
            "its cache returned other data than it was given, and is out of service".into()
        } else {
            format!("its cache is out of service: {kind}")
        };
        Some(LayerProblem {
            cause: LayerCause::OutOfService,
            message,
            remedy: "replace the cache's device, or remove the layer: no data is lost".into(),
        })
    }

    /// The state as metrics.
    fn figures(&self) -> Vec<Figure> {
        let counter = |(name, meaning, value)| Figure::counter(name, meaning, value);
        let mismatches = "Reads with other data than the cache was given.";
        let slots = "Blocks that the cache can have, of all disks.";
        let mapped = "Blocks that the cache has, of all disks.";
        let mut figures: Vec<Figure> = self.reads.metrics().map(counter).collect();
        figures.push(Figure::counter("mismatches_total", mismatches, self.mismatches));
        figures.push(Figure::gauge("slots", slots, self.slots));
        figures.push(Figure::gauge("blocks", mapped, self.mapped));
        figures.extend(self.blocks.metrics().map(counter));
        figures.push(Figure::gauge("regions", "Regions with recent changes.", self.regions));
        if let Some(blocks) = self.blocks_of_disk {
            let meaning = "Blocks that the disk keeps however busy others are.";
            figures.push(Figure::gauge("share", meaning, self.share));
            let meaning = "Blocks that the cache has of this disk.";
            figures.push(Figure::gauge("blocks_of_disk", meaning, blocks));
        }
        figures
    }
}

impl Cache {
    /// The state now.
    pub fn status(&self) -> CacheStatus {
        let inner = &self.inner;
        let (blocks, mapped) = inner.volume.counts();
        let mut reads = CacheCounts::default();
        inner.ledger.counts().iter().for_each(|counts| reads.merge(counts));
        CacheStatus {
            reads,
            mismatches: inner.mismatches.load(Ordering::Relaxed),
            slots: u64::from(inner.volume.slots()),
            mapped,
            blocks,
            share: inner.volume.share_of(inner.disk.number),
            blocks_of_disk: inner.volume.blocks_of(inner.disk.number),
            regions: inner.disk.regions.access(|regions| regions.active() as u64),
            failed: inner.volume.keeper.access(|keeper| keeper.failed),
            is_loaded: inner.volume.is_loaded(),
        }
    }

    /// The state now as metrics, and the problems.
    pub(super) fn report(&self) -> LayerReport {
        let status = self.status();
        let mut problems: Vec<LayerProblem> = status.failure().into_iter().collect();
        problems.extend(self.mark_problem(&status));
        problems.extend(self.inner.marking.problem());
        problems.extend(self.silence());
        LayerReport { figures: status.figures(), problems }
    }

    /// The problem of a mark that could not be removed.
    fn mark_problem(&self, status: &CacheStatus) -> Option<LayerProblem> {
        if self.inner.ending.lock().0 != Ending::Failed {
            return None;
        }
        let state =
            if status.failed.is_some() { "the disk rejects changes" } else { "changes wait" };
        Some(LayerProblem {
            cause: LayerCause::MarkNotRemoved,
            message: format!("the mark of its image cannot be changed: {state}"),
            remedy:
                "make the image's folder writable, and space on its file system: a later start \
                     could otherwise read old blocks from the cache"
                    .into(),
        })
    }
}
