//! A real cluster, and disks in it.

#![allow(dead_code, reason = "each suite uses a part of it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fathom_block::{Backend, Disk, DiskOptions};
use fathom_sim::{Harness, HarnessOptions, Workload, WorkloadOptions};
use fathom_valkey::local::{LocalCluster, LocalOptions};
use fathom_valkey::{ClusterOptions, ClusterVolume, VolumeOptions};

/// The size of a test's volume, in bytes.
pub const CAPACITY: u64 = 8 << 20;

/// Starts a cluster; `None` if there is no Valkey on this host.
pub fn cluster(
    change: impl FnOnce(&mut LocalOptions),
) -> Option<(tempfile::TempDir, LocalCluster)> {
    if std::process::Command::new("valkey-server").arg("--version").output().is_err() {
        eprintln!("valkey-server is absent: skipped");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut options = LocalOptions::new(folder.path());
    change(&mut options);
    let cluster = LocalCluster::start(&options).unwrap();
    Some((folder, cluster))
}

/// A cluster that takes no node for dead while a busy machine delays it.
pub fn steady_cluster() -> Option<(tempfile::TempDir, LocalCluster)> {
    cluster(|options| {
        options.extra.extend(["--cluster-node-timeout", "20000"].map(str::to_owned));
    })
}

pub fn options(cluster: &LocalCluster) -> ClusterOptions {
    ClusterOptions { nodes: cluster.addresses(), ..ClusterOptions::default() }
}

pub fn volume(name: &str) -> VolumeOptions {
    VolumeOptions { name: name.into(), capacity: CAPACITY, may_make: true, owner: "a test".into() }
}

pub fn open(options: &ClusterOptions, name: &str) -> Arc<ClusterVolume> {
    Arc::new(ClusterVolume::open(options, &volume(name)).unwrap())
}

pub fn disk(volume: &Arc<ClusterVolume>) -> Arc<Disk> {
    let backend = Arc::clone(volume) as Arc<dyn Backend>;
    Disk::new(DiskOptions::default(), Vec::new(), backend).unwrap()
}

/// Requests in real time. What completes must be there after a crash, so each write counts as one that forces unit
/// access.
pub fn harness(disk: &Arc<Disk>, depth: usize) -> Harness {
    let options = HarnessOptions { queues: 2, depth, simulated: false };
    Harness::new(disk, &options, 1)
}

pub fn workload(seed: u64, alignment: u64) -> Workload {
    let options = WorkloadOptions {
        alignment,
        length_max: 256 << 10,
        force_unit_access_rate: 1.0,
        ..WorkloadOptions::new(CAPACITY)
    };
    Workload::new(options, seed)
}

/// Runs requests, and `disturb` beside them; requests go on for as long as it takes. No request may fail, and a plain
/// model says what reads may find.
pub fn beside(options: &ClusterOptions, seed: u64, disturb: impl FnOnce() + Send) {
    let volume = open(options, "v");
    let served = disk(&volume);
    let mut harness = harness(&served, 8);
    let is_over = AtomicBool::new(false);
    let mut requests = workload(seed, 4096);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            disturb();
            is_over.store(true, Ordering::Release);
        });
        while !is_over.load(Ordering::Acquire) {
            harness.run(&mut requests, 50, |_| {});
        }
    });
    // No request has failed: the harness would have panicked.
    harness.run(&mut requests, 200, |_| {});
    harness.verify(CAPACITY);
    assert!(volume.problems().is_empty(), "{:?}", volume.problems());
    drop(volume);
    let again = open(options, "v");
    harness.model().check_now(&content(&disk(&again))).unwrap();
}

/// A cluster's options that give up soon.
pub fn impatient(cluster: &LocalCluster) -> ClusterOptions {
    ClusterOptions { timeout: Duration::from_secs(3), ..options(cluster) }
}

/// The content of a disk, read in one queue.
pub fn content(disk: &Arc<Disk>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut queue = queue::Queue::open(disk);
    for offset in (0..CAPACITY).step_by(256 << 10) {
        bytes.extend(queue.read(offset, 256 << 10).unwrap());
    }
    bytes
}

pub mod queue {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use fathom_block::{Clock, Disk, ErrorKind, Operation, Stack};
    use fathom_reactor::{Event, Reactor};

    /// One queue, with one request at a time.
    pub struct Queue {
        reactor: Reactor,
        stack: Stack,
        events: Vec<Event>,
    }

    impl Queue {
        pub fn open(disk: &Arc<Disk>) -> Self {
            let mut reactor = Reactor::new(64).unwrap();
            let stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
            Self { reactor, stack, events: Vec::new() }
        }

        pub fn read(&mut self, offset: u64, length: u64) -> Result<Vec<u8>, ErrorKind> {
            self.carry_out(Operation::Read, offset, vec![0; length as usize])
        }

        pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ErrorKind> {
            self.carry_out(Operation::Write, offset, bytes.to_vec()).map(drop)
        }

        fn carry_out(
            &mut self,
            operation: Operation,
            offset: u64,
            mut bytes: Vec<u8>,
        ) -> Result<Vec<u8>, ErrorKind> {
            let mut request = self.stack.request();
            (request.operation, request.offset) = (operation, offset);
            request.length = bytes.len() as u64;
            request.buffers.allocate(bytes.len());
            request.buffers.copy_from(0, &bytes);
            self.stack.submit(request, &mut self.reactor);
            let end = Instant::now() + Duration::from_secs(60);
            loop {
                self.stack.advance(&mut self.reactor);
                if let Some((request, outcome)) = self.stack.completed() {
                    request.buffers.copy_to(0, &mut bytes);
                    self.stack.recycle(request);
                    return outcome.map(|()| bytes);
                }
                assert!(Instant::now() < end, "a request takes too long");
                self.reactor.wait(Some(Duration::from_secs(1))).unwrap();
                self.reactor.collect(&mut self.events).unwrap();
                for event in self.events.drain(..) {
                    self.stack.event(&event, &mut self.reactor);
                }
            }
        }
    }
}
