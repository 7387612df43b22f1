//! A record of all effects in the stores of a disk, so that a crash point is one instant for all
//! stores.

use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use crate::backend::{JournalEntry, SimBackend, SimOptions};

/// The images of all stores of a disk, in the order in which the stores were made.
pub type Images = Vec<Vec<u8>>;

struct Effect {
    store: usize,
    entry: JournalEntry,
}

struct State {
    /// The stores, each of which adds its effects to this record.
    stores: Vec<Weak<SimBackend>>,
    bases: Images,
    effects: Vec<Effect>,
    random: fastrand::Rng,
    crash_rate: f64,
    crashes: Vec<Images>,
}

/// See the module. One thread drives all queues of the disk. An instant lies between two effects,
/// of the guest's requests or of the layers' own.
#[derive(Clone)]
pub struct SimRecord {
    state: Arc<Mutex<State>>,
}

impl SimRecord {
    /// A record without stores. After each effect in any store, all stores may crash, with the
    /// probability `crash_rate`.
    pub fn new(seed: u64, crash_rate: f64) -> Self {
        let state = State {
            stores: Vec::new(),
            bases: Vec::new(),
            effects: Vec::new(),
            random: fastrand::Rng::with_seed(seed),
            crash_rate,
            crashes: Vec::new(),
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Makes a further store with the durable content `image`.
    pub fn store(&self, options: SimOptions, seed: u64, image: Vec<u8>) -> Arc<SimBackend> {
        let mut state = self.lock();
        let number = state.stores.len();
        state.bases.push(image.clone());
        let store = SimBackend::with_image(options, seed, image);
        let store = Arc::new(store.recorded(self.clone(), number));
        state.stores.push(Arc::downgrade(&store));
        store
    }

    /// Records an effect in store `number`.
    pub(crate) fn note(&self, number: usize, entry: JournalEntry) {
        let mut state = self.lock();
        state.effects.push(Effect { store: number, entry });
        if state.random.f64() < state.crash_rate {
            let images = state.crash();
            state.crashes.push(images);
        }
    }

    /// The images that a crash of all stores at this moment leaves. The stores themselves do not
    /// change.
    pub fn crash(&self) -> Images {
        self.lock().crash()
    }

    /// The images left by the crashes since the last call.
    pub fn crashes(&self) -> Vec<Images> {
        std::mem::take(&mut self.lock().crashes)
    }

    /// The number of effects in all stores.
    pub fn length(&self) -> usize {
        self.lock().effects.len()
    }

    /// The images of the stores after exactly the first `count` effects.
    pub fn images_after(&self, count: usize) -> Images {
        let state = self.lock();
        let mut images = state.bases.clone();
        for Effect { store, entry } in state.effects.iter().take(count) {
            if let JournalEntry::Write { offset, data } = entry {
                images[*store][*offset as usize..][..data.len()].copy_from_slice(data);
            }
        }
        images
    }
}

impl State {
    fn crash(&mut self) -> Images {
        let seed = self.random.u64(..);
        let each = self.stores.iter().zip(seed..);
        each.filter_map(|(store, seed)| Some(store.upgrade()?.crash(seed))).collect()
    }
}

#[cfg(test)]
mod tests {
    use fathom_block::{Clock, Disk, DiskOptions, Operation};
    use fathom_reactor::Reactor;

    use super::*;
    use crate::SECTOR;

    #[test]
    fn a_crash_is_one_instant_for_all_stores() {
        let record = SimRecord::new(1, 1.0);
        let options = SimOptions { rounds_max: 0, ..SimOptions::new(SECTOR) };
        let stores: Vec<_> = (0..2)
            .map(|seed| record.store(options.clone(), seed, vec![0; SECTOR as usize]))
            .collect();
        let mut reactor = Reactor::new(8).unwrap();
        for count in 1..=20_u8 {
            // Each write becomes durable in the first store and then in the second, so in any crash
            // the first is at most one write ahead.
            for store in &stores {
                let layers = Vec::new();
                let disk =
                    Disk::new(DiskOptions::default(), layers, Arc::clone(store) as _).unwrap();
                let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
                let mut request = stack.request();
                (request.operation, request.length) = (Operation::Write, SECTOR);
                request.flags.force_unit_access = true;
                request.buffers.allocate(SECTOR as usize);
                request.buffers.owned_mut().unwrap().fill(count);
                stack.submit(request, &mut reactor);
                assert_eq!(stack.completed().unwrap().1, Ok(()));
            }
        }
        let crashes = record.crashes();
        assert_eq!((crashes.len(), record.length()), (40, 40));
        for (index, images) in crashes.iter().enumerate() {
            let counts = [images[0][0], images[1][0]];
            assert_eq!(counts, [index as u8 / 2 + 1, index.div_ceil(2) as u8]);
            assert_eq!(*images, record.images_after(index + 1));
        }
    }
}
