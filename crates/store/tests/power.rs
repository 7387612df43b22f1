//! Runs a volume of a pool, by seed, over a faulty device. Whenever the device loses its power, all
//! flushed changes survive.

use std::sync::Arc;

use fathom_block::{Backend, Disk};
use fathom_sim::{
    Harness, HarnessOptions, ModelDisk, SimBackend, SimOptions, SimRecord, Workload,
    WorkloadOptions, each_seed,
};
use fathom_store::Pool;

mod support;

use support::{DEVICE, VOLUME, blank, content, disk, options, reopen};

struct Rig {
    record: SimRecord,
    device: Arc<SimBackend>,
    pool: Pool,
    disk: Arc<Disk>,
}

impl Rig {
    fn new(seed: u64, crash_rate: f64, sim: SimOptions) -> Self {
        let record = SimRecord::new(seed, crash_rate);
        let device = record.store(sim, seed, blank());
        let pool = Pool::open(Arc::clone(&device) as Arc<dyn Backend>, options()).unwrap();
        pool.create_volume("disk", VOLUME).unwrap();
        let disk = disk(pool.volume("disk").unwrap());
        record.crashes();
        Self { record, device, pool, disk }
    }

    fn harness(&self, seed: u64) -> Harness {
        let (queues, depth) = (1 + seed as usize % 4, 1 + (seed as usize * 5) % 16);
        Harness::new(&self.disk, &HarnessOptions { queues, depth, simulated: true }, seed)
    }

    /// Checks the content after each crash since the last call.
    fn check_crashes(&self, model: &ModelDisk) -> usize {
        let mut crashes = self.record.crashes();
        crashes.push(self.record.crash());
        for (number, images) in crashes.iter().enumerate() {
            let pool = reopen(&images[0]);
            let found = content(pool.volume("disk").unwrap());
            if let Err(violation) = model.check_crash(&found) {
                panic!("crash {number} after {} effects: {violation}", self.record.length());
            }
        }
        crashes.len()
    }
}

fn workload(seed: u64) -> Workload {
    let mut options = WorkloadOptions::new(VOLUME);
    options.length_max = 64 << 10;
    options.weights = [10, 50, 12, 5, 5, 1, 3];
    options.alignment = if seed % 3 == 0 { 512 } else { 4096 };
    Workload::new(options, seed)
}

#[test]
fn flushed_changes_survive_a_power_loss() {
    let (mut crashes, mut checkpoints, mut cases) = (0, 0, 0);
    each_seed(150, |seed| {
        cases += 1;
        let rig = Rig::new(seed, 0.02, SimOptions::new(DEVICE));
        let mut harness = rig.harness(seed);
        let mut count = 0;
        let mut inspect = |model: &ModelDisk| {
            count += 1;
            if count % 9 == 0 {
                crashes += rig.check_crashes(model);
            } else {
                rig.record.crashes();
            }
        };
        harness.run(&mut workload(seed), 120, &mut inspect);
        harness.drain(&mut inspect);
        harness.verify(VOLUME);
        harness.rest(|_| {});
        checkpoints += rig.pool.status().counts.checkpoints;
        assert_eq!(rig.pool.damage(), None);
        let _ = &rig.device;
    });
    assert!(checkpoints > cases && crashes as u64 > 4 * cases, "{checkpoints} {crashes}");
}
