//! The mode of a cache changes in the middle of the disk's work, by seed, mostly to and from
//! `write-back`. Both stores may crash at any instant.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use fathom_block::{Disk, Layer};
use fathom_layers::cache::CacheMode;
use fathom_layers::wal::{LogVolume, WalOptions};
use fathom_layers::{Cache, Wal};
use fathom_persistence::Identity;
use fathom_sim::{Harness, ModelDisk, each_seed};

#[path = "support/images.rs"]
mod images;
#[path = "support/kept.rs"]
mod kept;
#[path = "support/write_back.rs"]
mod write_back;

use kept::harness;
use write_back::{CAPACITY, Rig, Watch, blank, log_options, workload};

/// The time limit of each phase of a change of layers.
const LIMIT: Duration = Duration::from_secs(20);

/// A disk whose cache changes its mode, as the daemon does it.
struct Modes<'r> {
    watch: &'r Watch,
    seed: u64,
    disk: &'r Arc<Disk>,
    cache: &'r Cache,
    wal: Option<Wal>,
    /// The number of logs made so far.
    opened: u8,
}

impl Modes<'_> {
    fn inspect(&self, model: &ModelDisk) -> usize {
        self.watch.check_crashes(model).0
    }

    /// Changes the layers on a separate thread, while the queues work.
    fn restack(&self, layers: Vec<Arc<dyn Layer>>, harness: &mut Harness) {
        let disk = Arc::clone(self.disk);
        let change = thread::spawn(move || disk.restack(layers, LIMIT));
        while !change.is_finished() {
            harness.step_beside(|model| _ = self.inspect(model));
        }
        change.join().unwrap().unwrap();
    }

    fn set(&mut self, mode: CacheMode, logs: &Arc<LogVolume>, harness: &mut Harness) {
        // The same layer, so that it stays.
        let cache = Arc::clone(&self.disk.layers()[0]);
        match (mode == CacheMode::WriteBack, self.wal.take()) {
            (true, None) => {
                self.opened += 1;
                let options =
                    WalOptions { identity: Identity([self.opened; 16]), ..log_options(self.seed) };
                let wal = Wal::open(logs, &options).unwrap();
                self.restack(vec![cache, Arc::new(wal.clone())], harness);
                self.cache.set_log(wal.identity());
                wal.set_notes(self.cache.notes());
                self.cache.rely_on_log(true);
                self.wal = Some(wal);
            }
            (false, Some(wal)) => {
                self.cache.rely_on_log(false);
                self.restack(vec![cache], harness);
                wal.erase().unwrap();
                self.cache.set_log(Identity::NONE);
            }
            (_, kept) => self.wal = kept,
        }
        self.cache.set_mode(mode);
    }
}

#[test]
fn the_mode_changes_in_the_middle_of_the_work() {
    let (mut crashes, mut cases, mut changes) = (0, 0, 0);
    each_seed(16, |seed| {
        cases += 1;
        let Rig { watch, logs, cache, wal, disk, home, .. } = Rig::new(seed, 0, 0.05, blank(seed));
        let mut harness = harness(&disk, seed);
        let mut workload = workload(seed);
        let mut modes =
            Modes { watch: &watch, seed, disk: &disk, cache: &cache, wal: Some(wal), opened: 0 };
        let mut random = fastrand::Rng::with_seed(seed);
        for step in 0..8 {
            for _ in 0..20 {
                harness.run(&mut workload, 2, |model| crashes += modes.inspect(model));
            }
            if step % 3 == 2 {
                harness.drain(|model| crashes += modes.inspect(model));
                for _ in 0..random.usize(0..200) {
                    harness.step();
                    crashes += modes.inspect(harness.model());
                }
            }
            // Most changes are to or from the mode write-back. Requests are in flight meanwhile.
            let mode = if modes.wal.is_none() && random.u8(0..3) > 0 {
                CacheMode::WriteBack
            } else {
                CacheMode::ALL[random.usize(0..4)]
            };
            changes += usize::from(modes.wal.is_some() != (mode == CacheMode::WriteBack));
            modes.set(mode, &logs, &mut harness);
        }
        modes.set(CacheMode::WriteThrough, &logs, &mut harness);
        harness.verify(CAPACITY);
        harness.rest(|_| {});
        assert_eq!(harness.model().check_now(&home.image()), Ok(()));
        assert_eq!((cache.status().failed, watch.mark.0.load(Ordering::Relaxed)), (None, 7));
    });
    assert!(crashes > 50 * cases && changes > 3 * cases, "{crashes} crashes, {changes} changes");
}
