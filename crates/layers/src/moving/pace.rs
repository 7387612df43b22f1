//! When the copier may begin with the next bytes: the scheduler of the devices' background work,
//! and the limit of the operator.

use fathom_block::{Background, BackgroundStep, Permission};

/// The bytes for which the scheduler is asked at once.
const STEP: u64 = 8 << 20;
/// The bytes per second that the first pass reaches on a device that is never idle.
const RATE_MIN: u64 = 16 << 20;
/// For how long the copier pauses after a step while the device is used, in durations of that step.
const PAUSE: u32 = 1;
/// How long a speed below the limit may be made up for, in nanoseconds.
const BURST_NS: u64 = 100_000_000;

/// See the module.
pub(super) struct Pace {
    background: Background,
    /// The bytes of the current step that have not begun; `None` if there is none.
    step: Option<u64>,
    /// The most bytes per second.
    speed: Option<u64>,
    /// When the next piece may begin by that limit, in nanoseconds.
    next_ns: u64,
    /// When the first pass is to have ended, in nanoseconds.
    deadline_ns: u64,
}

impl Pace {
    /// The pace of a copy of `bytes` bytes that begins at `now_ns`.
    pub(super) fn new(background: Background, speed: Option<u64>, bytes: u64, now_ns: u64) -> Self {
        let whole_ns = u128::from(bytes) * 1_000_000_000 / u128::from(RATE_MIN);
        let deadline_ns = now_ns.saturating_add(u64::try_from(whole_ns).unwrap_or(u64::MAX));
        Self { background, step: None, speed: speed.filter(|it| *it > 0), next_ns: 0, deadline_ns }
    }

    /// Whether a piece of `bytes` bytes may begin. `waiting` are the bytes that wait, and
    /// `is_first` says that this is the first pass: the later ones do not wait for idle time,
    /// because guests may be faster. If not, returns when to ask again, in nanoseconds.
    pub(super) fn ask(
        &mut self,
        bytes: u64,
        waiting: u64,
        is_first: bool,
        now_ns: u64,
    ) -> Result<(), u64> {
        if self.next_ns > now_ns {
            return Err(self.next_ns);
        }
        if self.background.is_scheduled() {
            match &mut self.step {
                Some(left) if *left >= bytes => *left -= bytes,
                // The step ends with its last piece.
                Some(_) => return Err(u64::MAX),
                None => self.begin_step(bytes, waiting, is_first, now_ns)?,
            }
        }
        if let Some(speed) = self.speed {
            let took_ns = u128::from(bytes) * 1_000_000_000 / u128::from(speed);
            let since_ns = self.next_ns.max(now_ns.saturating_sub(BURST_NS));
            self.next_ns = since_ns.saturating_add(u64::try_from(took_ns).unwrap_or(u64::MAX));
        }
        Ok(())
    }

    fn begin_step(
        &mut self,
        bytes: u64,
        waiting: u64,
        is_first: bool,
        now_ns: u64,
    ) -> Result<(), u64> {
        let step = BackgroundStep {
            bytes: STEP.min(waiting.max(bytes)),
            waiting_bytes: waiting.max(bytes),
            waiting_steps: waiting.div_ceil(STEP).max(1),
            deadline_ns: if is_first { self.deadline_ns } else { now_ns },
            pause: if is_first { PAUSE } else { 0 },
        };
        match self.background.ask(step, now_ns) {
            Permission::Begin => {
                self.step = Some(STEP.saturating_sub(bytes));
                Ok(())
            }
            Permission::Wait(again_ns) => Err(again_ns),
        }
    }

    /// No piece is in flight.
    pub(super) fn end_step(&mut self, now_ns: u64) {
        if self.step.take().is_some() {
            self.background.end(now_ns);
        }
    }

    /// Nothing waits.
    pub(super) fn rest(&mut self) {
        self.background.rest();
    }
}
