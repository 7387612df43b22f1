//! A log that takes over the load of a slow disk while the disk's device is contended.
//!
//! At rest, requests go straight to the disk beneath, and the log is empty. [`Offload::start`]
//! makes the layer carry: changes go to a log on another device, as in the layer `wal`, and each of
//! them is durable there before it completes. [`Offload::stop`] ends that: the content of the log
//! returns home in idle time, and new changes go home past it. Both may be called at any time, from
//! any thread. `docs/offload.md` describes what is guaranteed.
//!
//! - `wal::switch`: the states, and what may go past the log.
//! - `regions`: which parts of the disk a scan of the log could still write to.
//! - `queue`: one queue's work. It passes requests to a part of the layer `wal`, or past it.
//! - `copies`, `heat`, `weight`, `serve`: copies of blocks that are read often, their choice, and
//!   one queue's work on them. `budget`: how much of what passes becomes copies.

mod budget;
mod copies;
mod heat;
mod queue;
mod serve;
mod weight;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use fathom_block::{
    Backend, BackendProblem, Capabilities, Disk, ErrorKind, Figure, Geometry, Layer, LayerPart,
    LayerReport, OpenContext,
};
use serde::{Deserialize, Serialize};

use fathom_failure::Failure;

use crate::Wal;
use crate::wal::switch::{Carry, Mode};
use crate::wal::{
    Claim, Completion, LogVolume, Settlement, WalError, WalOptions, emptied, not_written_back,
};
use copies::{Copies, CopyCounts, GRANULE};
use queue::OffloadQueue;
use serve::{Hot, HotQueue};

/// What [`Offload::start`] carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CarryKind {
    /// Nothing.
    Off,
    /// Reads of blocks with hot copies.
    Reads,
    /// Changes.
    Writes,
    /// Both.
    #[default]
    Both,
}

impl CarryKind {
    const ALL: [Self; 4] = [Self::Off, Self::Reads, Self::Writes, Self::Both];

    /// The name in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Reads => "reads",
            Self::Writes => "writes",
            Self::Both => "both",
        }
    }

    /// Whether reads are carried.
    pub fn has_reads(self) -> bool {
        matches!(self, Self::Reads | Self::Both)
    }

    /// Whether changes are carried.
    pub fn has_writes(self) -> bool {
        matches!(self, Self::Writes | Self::Both)
    }
}

/// What the layer carries, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadOptions {
    /// What [`Offload::start`] carries.
    pub carry: CarryKind,
    /// The size of the regions by which changes are compared with the content of the log, as a
    /// power of two.
    pub region_shift: u32,
    /// The bytes behind the log that have copies of blocks that are read often.
    pub copies: u64,
    /// The size of such a block, as a power of two; at least 12.
    pub block_shift: u32,
    /// The time after which the counts of reads are halved, in nanoseconds.
    pub window_ns: u64,
}

impl Default for OffloadOptions {
    fn default() -> Self {
        Self {
            carry: CarryKind::default(),
            region_shift: 20,
            copies: 0,
            block_shift: 16,
            window_ns: 600_000_000_000,
        }
    }
}

/// What the layer does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadState {
    /// Requests go straight to the disk beneath. The log is empty.
    Resting,
    /// The layer carries what it is configured to carry.
    Carrying,
    /// The content of the log returns home.
    Returning,
}

/// The state of the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadStatus {
    /// What it does.
    pub state: OffloadState,
    /// The bytes of the log that are in use.
    pub used: u64,
    /// The length of the log, in bytes.
    pub size: u64,
    /// Changes that went to the log.
    pub carried: u64,
    /// Changes that went home while the log was not empty.
    pub bypassed: u64,
    /// Changes of the log that are home.
    pub returned: u64,
    /// Changes that waited for the end of write-back.
    pub held: u64,
    /// The number of completed write-back rounds.
    pub rounds: u64,
    /// The number of copies.
    pub copies: u64,
    /// The number of copies that fit.
    pub copies_max: u64,
    /// The length of a copy, in bytes; 0 without copies.
    pub copy_length: u64,
    /// Copies that were made.
    pub copies_made: u64,
    /// Reads from copies.
    pub hits: u64,
    /// Copies that were lost to errors, or whose bytes were wrong.
    pub copies_failed: u64,
    /// The error of the log volume, after which no more changes go to the log.
    pub log_failed: Option<ErrorKind>,
    /// The error after which the log was recovered, and takes no changes until its content is home.
    pub emptied_after: Option<ErrorKind>,
    /// The error of the last write-back round, if it failed.
    pub home_failed: Option<ErrorKind>,
}

/// The layer, and the handle that starts and stops it. See the module.
#[derive(Clone)]
pub struct Offload {
    wal: Wal,
    /// What it carries, as a number of [`CarryKind`].
    carry: Arc<AtomicU8>,
    hot: Option<Arc<Hot>>,
    /// The place of the copies belongs to this layer until it is dropped.
    _claim: Option<Arc<Claim>>,
}

impl Offload {
    /// Recovers the log in `volume`, or makes one if there is none. If it has content, the content
    /// returns home. The completion in `options` is not used: each change in the log is durable
    /// when it completes. Blocks.
    ///
    /// # Errors
    /// If the log cannot be used. Nothing has changed then.
    pub fn open(
        volume: &Arc<LogVolume>,
        options: &WalOptions,
        settings: OffloadOptions,
    ) -> Result<Self, WalError> {
        let options = WalOptions { completion: Completion::Durable, ..options.clone() };
        let has_copies = settings.copies > 0;
        let area =
            has_copies.then(|| copies_area(volume, &options, settings.copies)).transpose()?;
        let carry = Carry::new(settings.region_shift);
        let wal = Wal::open_at(volume, &options, true, (Some(carry), Settlement::Refuse))?;
        let (mut hot, mut claim) = (None, None);
        if let Some(area) = area {
            claim = volume.claim(&area).map(Arc::new);
            if claim.is_none() {
                let failure = Failure::new("its copies overlap another disk's log");
                let failure = failure.advise("correct `offset`, `size` or `copies`");
                return Err(WalError::Region(failure));
            }
            let is_forced = volume.backend().capabilities().force_unit_access;
            let OffloadOptions { block_shift, window_ns, .. } = settings;
            hot = Some(Arc::new(Hot::new(&area, block_shift, window_ns, is_forced)));
        }
        let carry = Arc::new(AtomicU8::new(settings.carry as u8));
        Ok(Self { wal, carry, hot, _claim: claim })
    }

    /// Sets what the next [`start`](Self::start) carries.
    pub fn set_carry(&self, carry: CarryKind) {
        self.carry.store(carry as u8, Ordering::Relaxed);
    }

    fn carry(&self) -> CarryKind {
        let number = self.carry.load(Ordering::Relaxed);
        let mut kinds = CarryKind::ALL.into_iter();
        kinds.find(|kind| *kind as u8 == number).unwrap_or_default()
    }

    /// The log.
    pub fn wal(&self) -> &Wal {
        &self.wal
    }

    /// Why the log should get no changes now: it has failed, or a problem of its store is known. A
    /// start would make changes wait or fail that the disk beneath could have carried out.
    pub fn unfit(&self) -> Option<String> {
        let problems = self.wal.inner.volume.backend().problems();
        let known = problems.iter().find(|problem| **problem != BackendProblem::LossNotRecorded);
        known.map(BackendProblem::message).or_else(|| {
            self.wal.inner.shared.access(|state| match state.failed {
                Some(kind) => Some(kind.to_string()),
                None => state.refuses().map(|_| "it had failed, and is being emptied".into()),
            })
        })
    }

    /// Begins to carry as [`start`](Self::start) does, but if the log rests and a queue is open,
    /// only when an empty record is durable in the log. So a log volume that has died unnoticed
    /// fails no change. Returns whether it carries already.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn begin(&self) -> Result<bool, ErrorKind> {
        let kind = self.carry();
        let (_, has_volume_failed) = self.wal.inner.volume.finished();
        let is_tried_out = kind.has_writes()
            && !has_volume_failed
            && self.wal.inner.shared.access(|state| state.try_out(kind.has_reads()));
        if is_tried_out {
            return Ok(false);
        }
        self.start().map(|()| true)
    }

    /// Whether the log is being tried out; see [`begin`](Self::begin).
    pub fn is_tried_out(&self) -> bool {
        let shared = &self.wal.inner.shared;
        shared.access(|state| state.carry.as_ref().is_some_and(Carry::is_tried_out))
    }

    /// Begins to carry.
    ///
    /// # Errors
    /// If the log has failed, so that it takes no changes. Reads are carried nevertheless.
    pub fn start(&self) -> Result<(), ErrorKind> {
        let (_, has_volume_failed) = self.wal.inner.volume.finished();
        let kind = self.carry();
        if has_volume_failed {
            self.wal.inner.fail(ErrorKind::Io);
        }
        if let Some(hot) = &self.hot {
            // Copies are tried again, too.
            hot.copies.restart();
        }
        self.wal.inner.shared.access(|state| {
            let works = state.refuses().map_or(Ok(()), Err);
            let has_writes = kind.has_writes();
            if let Some(carry) = &mut state.carry {
                carry.start(has_writes && works.is_ok(), kind.has_reads());
            }
            state.wake_queues();
            if has_writes { works } else { Ok(()) }
        })
    }

    /// Ends carrying. The content of the log returns home, in idle time.
    pub fn stop(&self) {
        self.wal.inner.shared.access(|state| {
            if let Some(carry) = &mut state.carry {
                carry.stop();
            }
            state.rest_if_empty();
            state.wake_queues();
        });
        self.wal.inner.shared.wake();
    }

    /// Stops, and brings all content of the log home within `limit`, in a queue that it opens for
    /// this. `disk` has this layer, and must not take changes any more. A queue's thread must not
    /// call this function.
    ///
    /// # Errors
    /// If the disk or the log volume fails, or `limit` has passed. The remaining content stays in
    /// the log.
    pub fn drain(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        self.stop();
        self.wal.drain(disk, limit)
    }

    /// The share of the reads of late for which there are copies, between 0 and 1.
    pub fn warmth(&self) -> f64 {
        self.hot.as_ref().map_or(0.0, |hot| hot.heat.warmth())
    }

    /// The state of the layer now.
    pub fn status(&self) -> OffloadStatus {
        let wal = self.wal.status();
        let count = |count: fn(&CopyCounts) -> u64| {
            self.hot.as_ref().map_or(0, |hot| count(&hot.copies.counts))
        };
        let size =
            |of: fn(&Copies) -> usize| self.hot.as_ref().map_or(0, |hot| of(&hot.copies) as u64);
        let copies = [size(Copies::len), size(Copies::slots)];
        let copy_length = self.hot.as_ref().map_or(0, |hot| hot.copies.block_size());
        let hits = count(|counts| counts.hits.load(Ordering::Relaxed));
        let made = count(|counts| counts.made.load(Ordering::Relaxed));
        let failed = count(|counts| {
            counts.failures.load(Ordering::Relaxed) + counts.mismatches.load(Ordering::Relaxed)
        });
        self.wal.inner.shared.access(|state| {
            let carry = state.carry.as_ref();
            let mode = carry.map_or(Mode::Resting, Carry::mode);
            let carries_reads = carry.is_some_and(Carry::carries_reads);
            let counts = carry.map(|carry| carry.counts).unwrap_or_default();
            OffloadStatus {
                state: match mode {
                    // A log that takes no changes sends them home.
                    Mode::Carrying if state.refuses().is_some() => OffloadState::Returning,
                    Mode::Carrying => OffloadState::Carrying,
                    _ if carries_reads => OffloadState::Carrying,
                    Mode::Resting => OffloadState::Resting,
                    Mode::Returning => OffloadState::Returning,
                },
                used: if state.is_idle() { 0 } else { wal.used },
                size: wal.size,
                carried: counts.carried,
                bypassed: counts.bypassed,
                returned: counts.returned,
                held: counts.held,
                rounds: wal.rounds,
                copies: copies[0],
                copies_max: copies[1],
                copy_length,
                copies_made: made,
                hits,
                copies_failed: failed,
                log_failed: state.failed,
                emptied_after: wal.emptied_after,
                home_failed: state.home_failed,
            }
        })
    }
}

/// Where copies are in the volume: behind the log.
fn copies_area(
    volume: &LogVolume,
    options: &WalOptions,
    length: u64,
) -> Result<Range<u64>, WalError> {
    let start = options.offset.saturating_add(options.size).next_multiple_of(GRANULE);
    let end = start.saturating_add(length);
    if options.size == 0 || end > volume.backend().capacity() {
        let remedy = "give the log a `size`, and choose smaller `copies` or a larger volume";
        let failure = Failure::new("the copies do not fit behind the log").advise(remedy);
        return Err(WalError::Region(failure));
    }
    Ok(start..end)
}

impl Layer for Offload {
    fn name(&self) -> &'static str {
        "offload"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        // At rest, and past the log, requests have only what the disk beneath offers.
        below
    }

    fn geometry(&self, below: Geometry) -> Geometry {
        self.wal.geometry(below)
    }

    fn resizing(&self, from: u64, to: u64) -> Result<(), ErrorKind> {
        self.wal.resizing(from, to)
    }

    fn status(&self) -> LayerReport {
        let status = Offload::status(self);
        let mut problems = Vec::new();
        if status.log_failed.is_some() {
            let consequence =
                "the disk is not relieved, and rejects changes of what only the log has";
            problems.push(self.wal.failed(consequence));
        } else if status.emptied_after.is_some() {
            problems.push(emptied("changes of what the log has"));
        } else if let Some(kind) = status.home_failed {
            problems.push(not_written_back(status.used, status.size, kind));
        }
        problems.extend(self.wal.old_mark());
        let state = match status.state {
            OffloadState::Resting => 0,
            OffloadState::Carrying => 1,
            OffloadState::Returning => 2,
        };
        let figures = vec![
            Figure::gauge("state", "0 at rest, 1 while it carries, 2 while it returns.", state),
            Figure::gauge("used_bytes", "Bytes of the log in use.", status.used),
            Figure::gauge("size_bytes", "Bytes of the log.", status.size),
            Figure::counter("carried_total", "Changes that went to the log.", status.carried),
            Figure::counter(
                "bypassed_total",
                "Changes that went home while the log was not empty.",
                status.bypassed,
            ),
            Figure::counter("returned_total", "Changes of the log that are home.", status.returned),
            Figure::counter(
                "held_total",
                "Changes that waited for the end of write-back.",
                status.held,
            ),
            Figure::counter("rounds_total", "Completed write-back rounds.", status.rounds),
            Figure::counter(
                "recoveries_total",
                "Recoveries of logs on the volume after it had failed.",
                self.wal.inner.volume.recoveries(),
            ),
            Figure::gauge("copies", "Blocks with copies.", status.copies),
            Figure::gauge("copies_max", "Copies that fit.", status.copies_max),
            Figure::counter("copies_made_total", "Copies that were made.", status.copies_made),
            Figure::counter("hits_total", "Reads from copies.", status.hits),
            Figure::counter(
                "copies_failed_total",
                "Copies lost to errors, or with wrong bytes.",
                status.copies_failed,
            ),
        ];
        LayerReport { figures, problems }
    }

    fn stores(&self) -> Vec<Arc<dyn Backend>> {
        self.wal.stores()
    }

    fn retire(&self, disk: &Arc<Disk>, limit: Duration) {
        self.stop();
        self.wal.retire(disk, limit);
    }

    fn leave(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        self.drain(disk, limit)
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let wal = self.wal.open_part("offload", context)?;
        let gate = self
            .wal
            .inner
            .shared
            .access(|state| state.carry.as_ref().map(|carry| Arc::clone(carry.gate())));
        let gate = gate.ok_or(io::ErrorKind::Other)?;
        let hot = match &self.hot {
            Some(hot) => {
                let background = context.background("offload")?;
                let capacity = context.below().capacity;
                Some(HotQueue::new(Arc::clone(hot), wal.store, capacity, background))
            }
            None => None,
        };
        Ok(LayerPart::queue(OffloadQueue::new(wal, gate, hot)))
    }
}
