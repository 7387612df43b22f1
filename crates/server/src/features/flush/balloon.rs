//! QEMU's memory balloon: it takes memory from a guest, whose kernel then writes dirty data and
//! evicts cached files.
//!
//! The first step takes as much memory as is dirty. Free memory and clean pages go first, and the
//! limits of dirty data (`vm.dirty_background_ratio`) fall with the memory, so further steps follow
//! until the data is written, down to the floor. The kernel writes until it is below its limits:
//! some data may stay dirty. The connection stays open meanwhile: QEMU serves one client, so nobody
//! else changes the balloon.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::process::line::PeerError;
use crate::process::qmp::Qmp;

/// How long QEMU may take for a command. An emulated guest on a busy host delays its answers.
pub(super) const COMMAND_TIME_MAX: Duration = Duration::from_secs(3);
/// The interval between two steps: a guest needs some time to give up memory.
const STEP_INTERVAL: Duration = Duration::from_millis(250);
/// The least step, in bytes.
const STEP_MIN: u64 = 16 << 20;
/// The most memory that a guest can have: a larger number is not a size of memory.
const MEMORY_MAX: u64 = 1 << 50;

/// The balloon of a guest.
#[derive(Debug)]
pub(super) struct Balloon {
    qmp: Qmp,
}

impl Balloon {
    /// Connects to QEMU.
    pub(super) fn open(path: &Path) -> Result<Self, PeerError> {
        Ok(Self { qmp: Qmp::open(path, COMMAND_TIME_MAX)? })
    }

    /// The memory that the guest has, in bytes.
    pub(super) fn memory(&mut self) -> Result<u64, PeerError> {
        let found = self.qmp.command("query-balloon", &json!({}), COMMAND_TIME_MAX)?;
        found["actual"].as_u64().filter(|bytes| *bytes <= MEMORY_MAX).ok_or(PeerError::Foreign)
    }

    /// Sets the memory that the guest is to have, in bytes. The guest follows later.
    pub(super) fn set(&mut self, bytes: u64) -> Result<(), PeerError> {
        let bytes = bytes.min(MEMORY_MAX);
        self.qmp.command("balloon", &json!({ "value": bytes }), COMMAND_TIME_MAX)?;
        Ok(())
    }
}

/// The sizes of a guest's memory, step by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Steps {
    memory: u64,
    step: u64,
    floor: u64,
    last: Option<Instant>,
}

impl Steps {
    /// `memory` is the guest's own memory, of which `dirty` bytes are dirty.
    pub(super) fn new(memory: u64, dirty: u64, floor: u64) -> Self {
        Self { memory, step: dirty.max(STEP_MIN), floor: floor.min(memory), last: None }
    }

    /// The next size at the time `now`; `None` if it does not change.
    pub(super) fn next(&mut self, now: Instant) -> Option<u64> {
        let is_early = self.last.is_some_and(|last| now.duration_since(last) < STEP_INTERVAL);
        let next = self.memory.saturating_sub(self.step).max(self.floor);
        if is_early || next >= self.memory {
            return None;
        }
        (self.memory, self.last) = (next, Some(now));
        Some(next)
    }

    /// For how long the guest has had the floor at the time `now`; `None` if it has more.
    pub(super) fn at_floor(&self, now: Instant) -> Option<Duration> {
        let last = self.last.filter(|_| self.memory == self.floor)?;
        Some(now.duration_since(last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_guest_never_gets_less_than_the_floor() {
        let sizes = |memory: u64, dirty: u64, floor: u64| {
            let (mut now, mut sizes) = (Instant::now(), Vec::new());
            let mut steps = Steps::new(memory * MIB, dirty * MIB, floor * MIB);
            for _ in 0..100 {
                sizes.extend(steps.next(now).map(|bytes| bytes / MIB));
                assert_eq!(steps.next(now), None, "a step follows too early");
                now += STEP_INTERVAL;
            }
            sizes
        };
        assert_eq!(sizes(512, 100, 200), [412, 312, 212, 200]);
        assert_eq!(sizes(512, 0, 480), [496, 480]);
        assert_eq!(sizes(512, 1000, 500), [500]);
        assert_eq!(sizes(512, 100, 512), [0; 0]);
        assert_eq!(sizes(512, 100, 600), [0; 0], "the guest already has less");
        assert_eq!(Steps::new(0, u64::MAX, 0).next(Instant::now()), None);
    }

    #[test]
    fn the_time_at_the_floor_begins_with_the_last_step() {
        let begun = Instant::now();
        let mut steps = Steps::new(64 * MIB, 0, 40 * MIB);
        assert_eq!(steps.at_floor(begun), None);
        assert_eq!(steps.next(begun), Some(48 * MIB));
        assert_eq!(steps.at_floor(begun + STEP_INTERVAL), None);
        assert_eq!(steps.next(begun + STEP_INTERVAL), Some(40 * MIB));
        assert_eq!(steps.at_floor(begun + STEP_INTERVAL * 3), Some(STEP_INTERVAL * 2));
    }
}
