//! Faults with consequences: writes that a failed flush has lost, and failed writes that take
//! effect later.

use super::{Cached, SECTOR_BYTES, State};
use crate::SECTOR;

impl Cached {
    /// Whether a flush covers it that began after `completions` requests had completed.
    pub(super) fn is_covered(&self, completions: u64) -> bool {
        !self.is_lost && self.completed_at.is_some_and(|at| at < completions)
    }
}

impl State {
    /// Whether the store has lost writes and was not recovered.
    pub(super) fn is_lost(&self) -> bool {
        self.losses % 2 == 1
    }

    /// A flush has failed that began after `completions` requests had completed.
    pub(super) fn lose(&mut self, completions: u64) {
        for cached in &mut self.cache {
            cached.is_lost |= cached.is_covered(completions);
        }
        self.losses += u64::from(!self.is_lost());
    }

    /// Each sector has what the store has, durably: of a sector with lost writes, any of their
    /// contents or that before.
    pub(super) fn recover(&mut self, random: &mut fastrand::Rng) {
        if !self.is_lost() {
            return;
        }
        self.losses += 1;
        let mut cache = std::mem::take(&mut self.cache);
        random.shuffle(&mut cache);
        for cached in cache {
            let range = cached.sector * SECTOR_BYTES..(cached.sector + 1) * SECTOR_BYTES;
            if random.bool() {
                self.durable[range].copy_from_slice(&cached.data);
            }
        }
        self.visible.clone_from(&self.durable);
    }

    /// Failed writes take effect whose time has come. Returns their places and contents.
    pub(super) fn act_late(&mut self) -> Vec<(u64, Vec<u8>)> {
        let mut due = Vec::new();
        self.late.retain_mut(|(after, offset, data)| {
            *after -= 1;
            if *after == 0 {
                due.push((*offset, std::mem::take(data)));
            }
            *after > 0
        });
        for (offset, data) in &due {
            let number = self.submissions;
            self.submissions += 1;
            for (index, bytes) in data.chunks(SECTOR_BYTES).enumerate() {
                self.put((offset / SECTOR) as usize + index, bytes, number, false);
            }
            let at = self.completions;
            self.completions += 1;
            self.complete(number, at);
        }
        due
    }
}
