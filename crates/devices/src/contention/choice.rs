//! The disk whose load is carried elsewhere.

use super::Contention;

/// A disk of which less than this share of the device's load can be carried is chosen only if there
/// is no other.
const RELIEF_MIN: f64 = 0.05;

/// The choice of a disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskChoice {
    /// The disk.
    pub disk: u64,
    /// By how much its deviation exceeds the bound, in nanoseconds.
    pub excess_ns: u64,
    /// The share of its requests that can be carried.
    pub share: f64,
    /// The share of the device's load that is relieved.
    pub relief: f64,
}

/// The shares of a disk's requests that can be carried elsewhere; 0 for a disk that cannot be
/// carried.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Carriable {
    /// Of its reads: those that hit there.
    pub reads: f64,
    /// Of its other requests.
    pub writes: f64,
}

impl Contention {
    /// The disk in a peak with the greatest excess of its deviation, times the share of its
    /// requests that can be carried, by `carriable`. With the same product, the disk that relieves
    /// the device more is chosen. `None` without a peak, and if nothing can be carried.
    pub fn choose(&self, carriable: impl Fn(u64) -> Carriable) -> Option<DiskChoice> {
        let found: Vec<(DiskChoice, f64)> = self
            .disks
            .iter()
            .filter(|(_, model)| model.verdict().state.is_peak())
            .map(|(disk, model)| {
                let (share, load) = model.carried(carriable(*disk));
                let excess_ns = model.verdict().excess_ns();
                (DiskChoice { disk: *disk, excess_ns, share, relief: 0.0 }, load)
            })
            .collect();
        let all = self.load().max(1e-9);
        let relieved = found.into_iter().map(|(choice, load)| {
            let relief = (choice.share * load / all).clamp(0.0, 1.0);
            DiskChoice { relief, ..choice }
        });
        let key = |choice: &DiskChoice| {
            let product = (choice.excess_ns.max(1)) as f64 * choice.share;
            (choice.relief >= RELIEF_MIN, product, choice.relief)
        };
        relieved.filter(|choice| choice.share > 0.0).max_by(|one, other| {
            let ((one_large, one, one_relief), (other_large, other, other_relief)) =
                (key(one), key(other));
            one_large
                .cmp(&other_large)
                .then(one.total_cmp(&other))
                .then(one_relief.total_cmp(&other_relief))
        })
    }
}
