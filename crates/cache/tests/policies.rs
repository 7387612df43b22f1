//! What the policies save, on workloads by a seed, above a disk on which each request costs a seek
//! and each block a transfer.

use fathom_cache::{
    Action, CLASS_INDEX, CLASS_JOURNAL, CLASS_TABLE, CLASS_UNKNOWN, Policy, ReplacementOptions,
    SimulatedRequest, Simulation, SimulationCounts, SlowDisk, WriteMode,
};

const BLOCK: u64 = 4096;

/// A disk without a state.
struct Plain;

impl SlowDisk for Plain {
    fn transfer(&mut self, _: u64, _: u32, _: bool, _: u64, length: u64) -> u64 {
        8_000_000 + length * 5
    }
}

fn run(policy: Policy, slots: u32, requests: &[SimulatedRequest]) -> SimulationCounts {
    let options = ReplacementOptions { policy };
    let mut simulation = Simulation::new(&options, slots, BLOCK, WriteMode::Through, Plain);
    for request in requests {
        simulation.request(request);
    }
    simulation.counts().clone()
}

fn request(action: Action, block: u64, blocks: u64, class: u8) -> SimulatedRequest {
    let (offset, length) = (block * BLOCK, blocks * BLOCK);
    SimulatedRequest { time_ns: 0, disk: 0, action, offset, length, class }
}

/// Metadata is read again and again, and much data is written and read once in between.
fn search(class_of_metadata: u8, class_of_data: u8) -> Vec<SimulatedRequest> {
    let mut requests = Vec::new();
    for round in 0..12 {
        for block in 0..2000 {
            let block = block * 7919 % 2000 * 64;
            requests.push(request(Action::Read, block, 1, class_of_metadata));
        }
        for number in 0..1000 {
            let block = 1_000_000 + (round * 1000 + number) * 16;
            requests.push(request(Action::Write, block, 16, class_of_data));
            requests.push(request(Action::Read, 10_000_000 + block, 16, class_of_data));
        }
    }
    requests
}

/// Reads with a skew, whose blocks change some times; beside them a loop over a long file, and a
/// log.
fn mixed(seed: u64) -> Vec<SimulatedRequest> {
    let mut random = fastrand::Rng::with_seed(seed);
    let (phases, loops, logs) = (random.u64(1..6), random.u32(0..4), random.u32(0..4));
    let keys = random.u64(5_000..40_000) as f64;
    let mut requests = Vec::new();
    let (mut loop_block, mut log_block) = (0, 0);
    for phase in 0..phases {
        for _ in 0..150_000 / phases {
            let kind = random.u32(0..20);
            if kind < loops {
                requests.push(request(Action::Read, 1 << 30 | loop_block, 32, CLASS_UNKNOWN));
                loop_block = (loop_block + 32) % 100_000;
            } else if kind < loops + logs {
                requests.push(request(Action::Write, 1 << 31 | log_block, 8, CLASS_UNKNOWN));
                log_block += 8;
            } else {
                let block = (phase * 1_000_000 + (keys * random.f64().powi(3)) as u64) * 5;
                let action = if random.u32(0..5) == 0 { Action::Write } else { Action::Read };
                requests.push(request(action, block, random.u64(1..3), CLASS_UNKNOWN));
            }
        }
    }
    requests
}

#[test]
fn metadata_that_is_costly_to_lose_is_kept() {
    let requests = search(5, 0);
    let [none, sky, auto] = [Policy::None, Policy::Sky, Policy::Auto]
        .map(|policy| run(policy, 4000, &requests).disk_read_ns);
    assert!(2 * sky < none && 2 * auto < none, "{none} {sky} {auto}");
}

#[test]
fn auto_learns_what_is_costly_without_its_meaning() {
    // The classes say nothing of the worth here: only the learned costs do.
    let requests = search(20, 21);
    let [none, auto] =
        [Policy::None, Policy::Auto].map(|policy| run(policy, 4000, &requests).disk_read_ns);
    assert!(auto * 5 < none * 4, "{none} {auto}");
}

#[test]
fn auto_recovers_from_classes_that_mislead() {
    // What the classes call large files is what is read again.
    let requests = search(0, 5);
    let [none, auto] =
        [Policy::None, Policy::Auto].map(|policy| run(policy, 4000, &requests).disk_read_ns);
    assert!(auto < none + none / 50, "{none} {auto}");
}

#[test]
fn auto_is_never_much_slower_than_the_policy_without_classes() {
    for seed in 0..12 {
        let requests = mixed(seed);
        let slots = [200, 1000, 5000, 20_000][seed as usize % 4];
        let [none, auto] =
            [Policy::None, Policy::Auto].map(|policy| run(policy, slots, &requests).disk_read_ns);
        assert!(auto < none + none * 3 / 100, "seed {seed}, {slots} slots: {none} {auto}");
    }
}

#[test]
fn none_and_auto_follow_a_change_of_what_is_used() {
    // The blocks that are read with a skew change six times: what was used last counts, not how
    // often. Without classes, `sky` is one fixed rule.
    let mut random = fastrand::Rng::with_seed(13);
    let mut requests = Vec::new();
    for phase in 0..6 {
        for _ in 0..30_000 {
            let block = phase * 1_000_000 + (random.f64().powi(3) * 20_000.0) as u64;
            let action = if random.u32(0..4) == 0 { Action::Write } else { Action::Read };
            let blocks = if random.bool() { 4 } else { 1 };
            requests.push(request(action, block * 3, blocks, CLASS_UNKNOWN));
        }
    }
    let [none, sky, auto] = [Policy::None, Policy::Sky, Policy::Auto]
        .map(|policy| run(policy, 33_333, &requests).disk_read_ns);
    assert!(none < sky / 100 * 90 && auto < sky / 100 * 90, "{none} {sky} {auto}");
}

/// The part of reads of blocks in use that hit, while a stream of reads of 64 KiB from a place on
/// passes by.
fn hits_beside_a_stream(policy: Policy, from: u64) -> f64 {
    let mut random = fastrand::Rng::with_seed(5);
    let mut hot = || request(Action::Read, random.u64(0..800) * 3, 1, CLASS_UNKNOWN);
    let mut requests: Vec<SimulatedRequest> = (0..20_000).map(|_| hot()).collect();
    for number in 0..40_000 {
        let (offset, length) = ((1 << 40) + from + (number << 16), 1 << 16);
        let action = Action::Read;
        requests.push(SimulatedRequest { time_ns: 0, disk: 1, action, offset, length, class: 0 });
        if number % 10 == 0 {
            requests.push(hot());
        }
    }
    let counts = run(policy, 1000, &requests);
    let used = counts.classes[usize::from(CLASS_UNKNOWN)];
    used.read_hits as f64 / used.reads as f64
}

#[test]
fn the_borders_of_a_stream_are_used_once() {
    // If requests do not end at the borders of blocks, two of them need the same block. As two
    // uses, these would replace what is used.
    for policy in [Policy::None, Policy::Auto] {
        let [whole, parts] = [0, 512].map(|from| hits_beside_a_stream(policy, from));
        assert!(parts > whole - 0.01, "{policy:?}: {whole} {parts}");
    }
}

#[test]
fn a_loop_over_nearly_all_slots_stays() {
    // 2000 blocks of metadata are read twelve times. The first reads and little more go to the
    // disk.
    for policy in [Policy::Sky, Policy::Auto] {
        let counts = run(policy, 2150, &search(5, 0));
        let metadata = &counts.classes[5];
        let hits = metadata.read_hits as f64 / metadata.reads as f64;
        assert!(hits > 0.9, "{policy:?}: {hits}");
    }
}

/// The disk time of the reads of `measured`, after `before`.
fn after(
    policy: Policy,
    slots: u32,
    before: &[SimulatedRequest],
    measured: &[SimulatedRequest],
) -> u64 {
    let options = ReplacementOptions { policy };
    let mut simulation = Simulation::new(&options, slots, BLOCK, WriteMode::Through, Plain);
    for request in before {
        simulation.request(request);
    }
    simulation.forget_counts();
    for request in measured {
        simulation.request(request);
    }
    simulation.counts().disk_read_ns
}

#[test]
fn written_metadata_stays_while_small_files_are_written() {
    // As when sources are unpacked: nothing is read that could teach what metadata is worth.
    let mut before = Vec::new();
    for number in 0..4000 {
        before.push(request(Action::Write, number * 64, 1, 5));
        before.push(request(Action::Write, 1_000_000 + number * 16, 16, 4));
    }
    let measured: Vec<SimulatedRequest> =
        (0..4000).map(|number| request(Action::Read, number * 7919 % 4000 * 64, 1, 5)).collect();
    let [none, sky, auto] = [Policy::None, Policy::Sky, Policy::Auto]
        .map(|policy| after(policy, 6000, &before, &measured));
    assert!(none > 3000 * 8_000_000, "most reads miss: {none}");
    assert!(2 * sky < none, "{none} {sky}");
    assert_eq!(auto, 0);
}

#[test]
fn files_that_were_read_stay_while_others_are_written_into_an_empty_cache() {
    let reads: Vec<SimulatedRequest> =
        (0..2000).map(|number| request(Action::Read, number * 64, 1, 0)).collect();
    let mut before = reads.clone();
    before.extend((0..4000).map(|number| request(Action::Write, 1_000_000 + number, 1, 0)));
    let [none, auto] =
        [Policy::None, Policy::Auto].map(|policy| after(policy, 3000, &before, &reads));
    assert!(none > 1900 * 8_000_000 && auto < 1200 * 8_000_000, "{none} {auto}");
}

#[test]
fn tables_stay_while_indices_are_written() {
    let mut before: Vec<SimulatedRequest> =
        (0..3000).map(|number| request(Action::Write, number, 1, CLASS_TABLE)).collect();
    before.extend((0..6000).map(|number| request(Action::Write, 100_000 + number, 1, CLASS_INDEX)));
    let measured: Vec<SimulatedRequest> = (0..3000)
        .map(|number| request(Action::Read, number * 7919 % 3000, 1, CLASS_TABLE))
        .collect();
    let [none, sky, auto] = [Policy::None, Policy::Sky, Policy::Auto]
        .map(|policy| after(policy, 4000, &before, &measured));
    assert!(sky * 8 < none && auto * 8 < none, "{none} {sky} {auto}");
    // An index that is read again and again replaces the table, although it was written last.
    let hot = |count: u64| {
        (0..count)
            .map(|number| request(Action::Read, 100_000 + number * 7919 % 2000, 1, CLASS_INDEX))
            .collect::<Vec<_>>()
    };
    before.extend(hot(20_000));
    let misses = after(Policy::Auto, 4000, &before, &hot(20_000)) / 8_000_000;
    assert!(misses < 200, "{misses}");
}

#[test]
fn a_table_larger_than_the_cache_is_kept_in_part() {
    // Two scans: a cache that takes all of the table in the order of its reads has nothing of it.
    let table: Vec<SimulatedRequest> =
        (0..6000).map(|number| request(Action::Write, number, 1, CLASS_TABLE)).collect();
    let scan: Vec<SimulatedRequest> =
        (0..6000).map(|number| request(Action::Read, number, 1, CLASS_TABLE)).collect();
    let [none, sky, auto] =
        [Policy::None, Policy::Sky, Policy::Auto].map(|policy| after(policy, 4000, &table, &scan));
    assert!(3 * sky < 2 * none && 3 * auto < 2 * none, "{none} {sky} {auto}");
}

#[test]
fn forgotten_counts_do_not_change_what_follows() {
    let requests = mixed(3);
    let (first, second) = requests.split_at(requests.len() / 2);
    let whole = run(Policy::Auto, 1000, &requests).disk_read_ns;
    let begin = run(Policy::Auto, 1000, first).disk_read_ns;
    assert_eq!(after(Policy::Auto, 1000, first, second), whole - begin);
}

#[test]
fn sky_does_not_admit_journals() {
    let journal: Vec<SimulatedRequest> =
        (0..100).map(|block| request(Action::Read, block % 10, 1, CLASS_JOURNAL)).collect();
    assert_eq!(run(Policy::Sky, 100, &journal).insertions, 0);
    assert_eq!(run(Policy::None, 100, &journal).insertions, 10);
}

#[test]
fn a_long_write_leaves_nothing_in_the_cache() {
    // Rows of databases, and other classes. The policy `sky` does not sift them.
    for (policy, class, length_max) in [
        (Policy::None, 0, 1 << 20),
        (Policy::None, CLASS_TABLE, 1 << 20),
        (Policy::Sky, 4, 1 << 20),
        (Policy::Sky, CLASS_TABLE, 4 << 20),
    ] {
        assert_eq!(policy.write_inserted_max(class), length_max);
        let blocks = length_max / BLOCK;
        let read = request(Action::Read, 0, blocks + 1, class);
        // The first read has the hits of the write before it, the second those of the first read
        // too.
        for (count, read_hits) in [(blocks, 2 * blocks + 1), (blocks + 1, 0)] {
            let write = request(Action::Write, 0, count, class);
            let counts = run(policy, 4000, &[write, read, write, read]);
            let found = counts.classes[usize::from(class)];
            assert_eq!((found.read_hits, found.write_hits), (read_hits, count), "{count} blocks");
        }
    }
}

#[test]
fn a_simulation_counts_what_a_plain_model_does() {
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        // The cache is larger than all blocks, so that the model needs no replacement.
        let mode = if seed % 2 == 0 { WriteMode::Through } else { WriteMode::Around };
        let options = ReplacementOptions { policy: Policy::None };
        let mut simulation = Simulation::new(&options, 4000, BLOCK, mode, Plain);
        let mut held = std::collections::HashSet::new();
        let (mut hits, mut reads, mut writes) = (0, 0, 0);
        for _ in 0..5000 {
            let (disk, first, count) = (random.u32(0..3), random.u64(0..1000), random.u64(1..9));
            let action =
                [Action::Read, Action::Read, Action::Write, Action::Discard][random.usize(0..4)];
            let mut is_missing = false;
            for block in first..first + count {
                let is_held = held.contains(&(disk, block));
                hits += u64::from(is_held && action != Action::Discard);
                is_missing |= !is_held;
                match (action, mode) {
                    (Action::Read, _) | (Action::Write, WriteMode::Through) => {
                        held.insert((disk, block));
                    }
                    _ => drop(held.remove(&(disk, block))),
                }
            }
            reads += u64::from(action == Action::Read && is_missing);
            writes += u64::from(action == Action::Write);
            let request = SimulatedRequest { disk, ..request(action, first, count, 0) };
            simulation.request(&request);
        }
        let counts = simulation.counts();
        assert_eq!(
            (counts.total().hits(), counts.disk_reads, counts.disk_writes, counts.evictions),
            (hits, reads, writes, 0),
            "seed {seed}"
        );
    }
}
