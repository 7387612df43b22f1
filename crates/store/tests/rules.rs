//! Each rule by which nothing is lost, taken away: then something is lost.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use fathom_store::Rules;

mod support;

use fathom_block::{Backend, Clock, Flags, Operation};
use fathom_reactor::Reactor;
use fathom_sim::{
    Action, Harness, HarnessOptions, ModelDisk, OneRequest, SimBackend, SimOptions, Workload,
    WorkloadOptions,
};
use fathom_store::{Pool, PoolOptions, check};
use parking_lot::Mutex;

use support::storm::{Kind, Storm, StormOptions};
use support::{DEVICE, blank, disk, options};

fn pool(sim: SimOptions, rules: Rules, checkpoint_ns: u64) -> (Arc<SimBackend>, Pool) {
    let device = Arc::new(SimBackend::with_image(sim, 1, blank()));
    let options = PoolOptions { rules, checkpoint_ns, walk_pause_ns: 0, ..options() };
    let pool = Pool::open(Arc::clone(&device) as Arc<dyn Backend>, options).unwrap();
    (device, pool)
}

/// A leaf that only a deleted snapshot shared is copied behind the back of a walk. Returns what is
/// wrong then.
fn copied_during_a_walk(rules: Rules) -> Vec<String> {
    let rules = Rules { walk_step: 1, ..rules };
    let sim = SimOptions { rounds_max: 0, ..SimOptions::new(DEVICE) };
    let (device, pool) = pool(sim, rules, u64::MAX);
    let (block, leaf) = (4096, 2 << 20);
    pool.create_volume("a", 2 * leaf).unwrap();
    let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
    queue.write(0, &[1; 4096]).unwrap();
    queue.write(leaf, &[2; 8192]).unwrap();
    pool.take_snapshot(&["a"], "s", 1).unwrap();
    queue.write(0, &[3; 4096]).unwrap();
    pool.delete_snapshot("a", "s").unwrap();
    // The walk begins in the same round, and has not yet seen the second leaf.
    queue.write(leaf + block, &[4; 4096]).unwrap();
    while pool.status().counts.walks == 0 {
        queue.read(0, 512).unwrap();
    }
    drop(queue);
    pool.save(std::time::Duration::from_secs(9)).unwrap();
    let device = SimBackend::with_image(support::fast(DEVICE), 0, device.image());
    check(&(Arc::new(device) as Arc<dyn Backend>), true, |_| {}).unwrap().problems
}

#[test]
fn what_is_copied_during_a_walk_stays() {
    assert_eq!(copied_during_a_walk(Rules::default()), Vec::<String>::new());
    let found = copied_during_a_walk(Rules { walks_copied: false, ..Rules::default() });
    assert!(!found.is_empty());
}

/// A snapshot is taken after so many rounds of two writes whose leaves are not in memory. Returns
/// whether it has the same content before and after a power loss.
fn is_snapshot_stable(image: Vec<u8>, rounds: usize, rules: Rules) -> bool {
    let leaf = 2 << 20;
    let sim = SimOptions { rounds_max: 2, ..SimOptions::new(DEVICE) };
    let device = Arc::new(SimBackend::with_image(sim, 1, image));
    let options = PoolOptions { rules, checkpoint_ns: u64::MAX, ..options() };
    let pool = Pool::open(Arc::clone(&device) as Arc<dyn Backend>, options).unwrap();
    let disk = disk(pool.volume("a").unwrap());
    let options = HarnessOptions { queues: 1, depth: 8, simulated: true };
    let mut harness = Harness::new(&disk, &options, 1);
    for offset in [0, leaf] {
        let operation = Operation::Write;
        let (length, content, flags) = (4096, 5, Flags::default());
        harness.submit(0, &Action { operation, offset, length, flags, content });
    }
    for _ in 0..rounds {
        harness.step();
    }
    pool.take_snapshot(&["a"], "s", 1).unwrap();
    let after = support::reopen(&device.image());
    harness.drain(|_| {});
    drop(harness);
    let content = |pool: &Pool| support::content(pool.snapshot("a", "s").unwrap());
    content(&pool) == content(&after)
}

#[test]
fn a_snapshot_has_all_of_a_batch_or_nothing() {
    let sim = SimOptions { rounds_max: 0, ..SimOptions::new(DEVICE) };
    let (device, pool) = pool(sim, Rules::default(), u64::MAX);
    pool.create_volume("a", 4 << 20).unwrap();
    let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
    queue.write(0, &[1; 4096]).unwrap();
    queue.write(2 << 20, &[2; 4096]).unwrap();
    drop(queue);
    pool.save(std::time::Duration::from_secs(9)).unwrap();
    let image = device.image();
    let is_stable = |rounds, rules| is_snapshot_stable(image.clone(), rounds, rules);
    assert!((0..40).all(|rounds| is_stable(rounds, Rules::default())));
    let rules = Rules { applies_at_once: false, ..Rules::default() };
    assert!(!(0..40).all(|rounds| is_stable(rounds, rules)));
}

/// A read is in flight for a long time, while the other blocks of a small device are overwritten
/// again and again. Returns whether it succeeds.
fn long_read(rules: Rules) -> bool {
    let size = 1 << 20;
    let sim = SimOptions { rounds_max: 1, ..SimOptions::new(DEVICE) };
    let (_device, pool) = pool(sim, rules, 30_000);
    pool.create_volume("a", size).unwrap();
    let disk = disk(pool.volume("a").unwrap());
    let options = HarnessOptions { queues: 1, depth: 8, simulated: true };
    let mut harness = Harness::new(&disk, &options, 1);
    *harness.model_mut() = ModelDisk::new(size);
    harness.allow_errors();
    let mut workload = WorkloadOptions::new(size);
    (workload.alignment, workload.weights) = (4096, [0, 1, 0, 0, 0, 0, 0]);
    let mut workload = Workload::new(workload, 1);
    harness.run(&mut workload, 400, |_| {});
    harness.drain(|_| {});
    let mut reactor = Reactor::new(64).unwrap();
    let mut stack = disk.open_queue(&mut reactor, Clock::System).unwrap();
    let mut request = stack.request();
    (request.operation, request.offset, request.length) = (Operation::Read, 0, 128 << 10);
    request.buffers.allocate(128 << 10);
    stack.submit(request, &mut reactor);
    // Its blocks are looked up, and then nobody looks after it.
    for _ in 0..20_000 {
        if harness.step() < 8 {
            harness.submit(0, &workload.next().unwrap());
        }
    }
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        stack.advance(&mut reactor);
        if let Some((_, outcome)) = stack.completed() {
            return outcome.is_ok();
        }
        assert!(std::time::Instant::now() < end, "the read does not end");
    }
}

#[test]
fn what_is_being_read_is_not_overwritten() {
    assert!(long_read(Rules::default()));
    assert!(!long_read(Rules { waits_for_reads: false, ..Rules::default() }));
}

/// A block and a reference to it were written, and not flushed. Returns whether the pool is sound
/// after each of many power losses.
fn is_sound_without_targets(rules: Rules) -> bool {
    let sim = SimOptions { rounds_max: 0, ..SimOptions::new(DEVICE) };
    let (device, pool) = pool(sim, Rules::default(), u64::MAX);
    pool.create_volume("a", 1 << 20).unwrap();
    let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
    queue.flush().unwrap();
    for offset in [0, 8192] {
        queue.write(offset, &[7; 4096]).unwrap();
    }
    assert_eq!(pool.status().counts.shared_blocks, 1);
    (0..60).all(|seed| {
        let device = Arc::new(SimBackend::with_image(support::fast(DEVICE), 0, device.crash(seed)));
        let options = PoolOptions { rules, ..options() };
        drop(Pool::open(Arc::clone(&device) as Arc<dyn Backend>, options).unwrap());
        let device = SimBackend::with_image(support::fast(DEVICE), 0, device.image());
        let report = check(&(Arc::new(device) as Arc<dyn Backend>), true, |_| {}).unwrap();
        report.problems.is_empty()
    })
}

#[test]
fn a_reference_to_what_was_lost_is_lost() {
    assert!(is_sound_without_targets(Rules::default()));
    assert!(!is_sound_without_targets(Rules { drops_references: false, ..Rules::default() }));
}

/// Blocks are read during a copy and discarded, and their places get other blocks. Returns whether
/// the first ones are right when they are written again.
fn is_right_in_a_used_place(rules: Rules) -> bool {
    let sim = SimOptions { rounds_max: 0, ..SimOptions::new(DEVICE) };
    let (_device, pool) = pool(sim, rules, 0);
    pool.create_volume("a", 1 << 20).unwrap();
    let mut queue = OneRequest::open(&disk(pool.volume("a").unwrap()));
    let content = |number: u64| {
        let mut bytes = vec![0; 4 * 4096];
        fathom_sim::pattern(&mut bytes, number);
        bytes
    };
    let at = |block: u64| block * 4096;
    // A copy goes on.
    queue.write(at(0), &content(1)).unwrap();
    let copied = queue.read(at(0), at(4)).unwrap();
    queue.write(at(4), &copied).unwrap();
    assert_eq!(pool.status().counts.copied_blocks, 4);
    queue.write(at(8), &content(2)).unwrap();
    assert!(queue.read(at(8), at(4)).unwrap() == content(2));
    queue.write_zeroes(at(8), at(4)).unwrap();
    (0..40).all(|round| {
        // Between a part of the device and several times all of it.
        for number in 0..16 * round {
            let block = 16 + 4 * (number % 36);
            queue.write(at(block), &content(1000 * round + number + 3)).unwrap();
        }
        queue.write(at(8), &content(2)).unwrap();
        let found = queue.read(at(8), at(4));
        queue.write_zeroes(at(8), at(4)).unwrap();
        found.is_ok_and(|found| found == content(2))
    })
}

#[test]
fn kept_content_is_that_of_its_place() {
    assert!(is_right_in_a_used_place(Rules::default()));
    assert!(!is_right_in_a_used_place(Rules { drops_contents: false, ..Rules::default() }));
}

/// How many rules are taken away at a time, each from a pool of its own.
const LANES: usize = 2;
/// The most storms until something is lost.
const STORMS_MAX: u64 = 48;

/// Whether something is lost in one of some storms.
fn is_lost(kind: Kind, rules: Rules) -> bool {
    (0..STORMS_MAX).any(|seed| {
        let rules = Rules { walk_step: 1 + seed as usize % 3, ..rules };
        let run = || Storm::new(StormOptions::new(kind, rules), seed).run();
        catch_unwind(AssertUnwindSafe(run)).is_err()
    })
}

#[test]
fn without_one_of_the_rules_something_is_lost() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let all = Rules::default();
    // Few fingerprints, so that blocks with equal ones differ.
    let few = Rules { fingerprint_bits: 2, ..all };
    // Second copies of pages take places to which blocks are relocated, and that are given back.
    let roomy = Rules { copies_pages: false, ..all };
    let without: [(&str, Kind, Rules); 19] = [
        ("compares_contents", Kind::Mixed, Rules { compares_contents: false, ..all }),
        ("goes_on_behind_gaps", Kind::Mixed, Rules { goes_on_behind_gaps: false, ..all }),
        ("is_serial", Kind::Mixed, Rules { is_serial: false, ..all }),
        ("waits_for_checkpoint", Kind::Tight, Rules { waits_for_checkpoint: false, ..all }),
        ("snapshot_names_batches", Kind::Mixed, Rules { snapshot_names_batches: false, ..all }),
        ("names_failed", Kind::Mixed, Rules { names_failed: false, ..all }),
        ("record_names_batches", Kind::Mixed, Rules { record_names_batches: false, ..all }),
        ("marks_new", Kind::Mixed, Rules { marks_new: false, ..all }),
        (
            "walks_between_checkpoints",
            Kind::Mixed,
            Rules { walks_between_checkpoints: false, ..all },
        ),
        ("raises_floor", Kind::Mixed, Rules { raises_floor: false, ..all }),
        ("copies_stale", Kind::Mixed, Rules { copies_stale: false, ..all }),
        ("keeps_shared", Kind::Equal, Rules { keeps_shared: false, ..all }),
        ("compares_equals", Kind::Equal, Rules { compares_equals: false, ..few }),
        ("takes_again", Kind::EqualSlow, Rules { takes_again: false, ..all }),
        ("visits_copies", Kind::ApartEqual, Rules { visits_copies: false, ..all }),
        (
            "punches_after_checkpoint",
            Kind::Drops,
            Rules { punches_after_checkpoint: false, ..roomy },
        ),
        ("holds_relocated", Kind::ApartEqual, Rules { holds_relocated: false, ..all }),
        (
            "keeps_relocated_shared",
            Kind::ApartEqual,
            Rules { keeps_relocated_shared: false, ..roomy },
        ),
        ("refers_to_saved", Kind::ApartEqual, Rules { refers_to_saved: false, ..all }),
    ];
    let (next, harmless) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let lane = || {
        while let Some((name, kind, rules)) = without.get(next.fetch_add(1, Ordering::Relaxed)) {
            if !is_lost(*kind, *rules) {
                harmless.lock().push(*name);
            }
        }
    };
    thread::scope(|scope| (0..LANES).for_each(|_| drop(scope.spawn(lane))));
    std::panic::set_hook(hook);
    assert_eq!(harmless.into_inner(), Vec::<&str>::new());
}
