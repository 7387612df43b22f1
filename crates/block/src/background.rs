//! Background work: work of layers for which no request waits.
//!
//! A layer's part does such work in steps, for example the copy of one megabyte. It asks before
//! each step ([`Background::ask`]) and reports its end ([`Background::end`]). A scheduler that
//! knows all disks on a device decides when a step begins: while the device is idle, or when the
//! work has to be done to meet its deadline. So the layers need not know each other.

use std::sync::Arc;

use crate::waker::Waker;

/// A step of background work that a part offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackgroundStep {
    /// The bytes that the step moves.
    pub bytes: u64,
    /// The bytes of all work that waits, this step included.
    pub waiting_bytes: u64,
    /// About how many steps all of this work takes, this step included.
    pub waiting_steps: u64,
    /// When all of it has to be done, in nanoseconds. The scheduler lets it begin in time even if
    /// the device is never idle.
    pub deadline_ns: u64,
    /// For how long the part pauses after its last step while the device is used, in durations of
    /// that step.
    pub pause: u32,
}

/// The answer to an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// The step begins now.
    Begin,
    /// The part asks again at this time, in nanoseconds, or when it is woken.
    Wait(u64),
}

/// Decides when steps begin. The server has one for all disks. No call may block.
pub trait BackgroundScheduler: Send + Sync {
    /// Adds a part of the layer `layer` of the disk `disk`. `waker` wakes it when it should ask
    /// again. Returns the part's number.
    fn open(&self, disk: &str, layer: &'static str, waker: Waker) -> u64;

    /// Asks whether a step of a part may begin at `now_ns`.
    fn ask(&self, part: u64, step: BackgroundStep, now_ns: u64) -> Permission;

    /// The step of a part has ended.
    fn end(&self, part: u64, now_ns: u64);

    /// The part has no work that waits.
    fn rest(&self, part: u64);

    /// Removes a part. Its step has ended.
    fn close(&self, part: u64);
}

/// The background work of one part, made by
/// [`OpenContext::background`](crate::OpenContext::background). Without a scheduler every step
/// begins when it is offered.
pub struct Background {
    scheduler: Option<(Arc<dyn BackgroundScheduler>, u64)>,
    has_offered: bool,
}

impl Background {
    pub(crate) fn new(
        scheduler: Option<Arc<dyn BackgroundScheduler>>,
        disk: &str,
        layer: &'static str,
        waker: Waker,
    ) -> Self {
        let scheduler = scheduler.map(|scheduler| {
            let part = scheduler.open(disk, layer, waker);
            (scheduler, part)
        });
        Self { scheduler, has_offered: false }
    }

    /// Whether a scheduler decides when steps begin.
    pub fn is_scheduled(&self) -> bool {
        self.scheduler.is_some()
    }

    /// Asks whether a step may begin. A part has at most one step in flight that was begun with
    /// this call.
    pub fn ask(&mut self, step: BackgroundStep, now_ns: u64) -> Permission {
        let Some((scheduler, part)) = &self.scheduler else { return Permission::Begin };
        self.has_offered = true;
        scheduler.ask(*part, step, now_ns)
    }

    /// Reports the end of the step.
    pub fn end(&mut self, now_ns: u64) {
        if let Some((scheduler, part)) = &self.scheduler {
            scheduler.end(*part, now_ns);
        }
    }

    /// Reports that no work waits.
    pub fn rest(&mut self) {
        if let (Some((scheduler, part)), true) = (&self.scheduler, self.has_offered) {
            self.has_offered = false;
            scheduler.rest(*part);
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some((scheduler, part)) = &self.scheduler {
            scheduler.close(*part);
        }
    }
}
