//! A real cluster, and disks in it.

#![allow(dead_code, reason = "each suite uses a part of it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fathom_block::{Backend, Disk, DiskOptions};
use fathom_sim::{Harness, HarnessOptions, OneRequest, Workload, WorkloadOptions};
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

/// Requests in real time. What completes must be there after a crash, so each write counts as one
/// that forces unit access.
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

/// Runs requests, and `disturb` beside them; requests go on for as long as it takes. No request may
/// fail, and a plain model says what reads may find.
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
    let mut queue = OneRequest::open(disk);
    for offset in (0..CAPACITY).step_by(256 << 10) {
        bytes.extend(queue.read(offset, 256 << 10).unwrap());
    }
    bytes
}
