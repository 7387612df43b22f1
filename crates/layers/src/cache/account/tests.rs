//! The accounts against plain counts.

use std::collections::HashMap;

use fathom_block::Facts;
use fathom_block::Insight;

use super::*;

const MINUTE_NS: u64 = 60_000_000_000;

fn insight(names: &Names, cgroup: &str) -> Insight {
    Insight {
        facts: Facts { cgroup: names.number(cgroup), ..Facts::default() },
        ..Insight::default()
    }
}

/// The sizes of LRU caches whose miss ratios are exact: the width of a bucket is 1.
const EXACT: u64 = 31;

/// An LRU stack in its plainest form.
#[derive(Default)]
struct Stack {
    blocks: Vec<u64>,
    distances: Vec<usize>,
    requests: u64,
}

impl Stack {
    fn touch(&mut self, block: u64, touch: Touch) {
        let place = self.blocks.iter().position(|other| *other == block);
        place.map(|place| self.blocks.remove(place));
        if touch == Touch::Request {
            self.requests += 1;
            self.distances.extend(place);
        }
        if touch != Touch::Removal {
            self.blocks.insert(0, block);
        }
    }

    fn check(&self, curve: &CurveSnapshot) {
        assert!((curve.ratios.requests() - self.requests as f64).abs() < 1e-6);
        for size in 1..EXACT {
            let hits = self.distances.iter().filter(|distance| **distance < size as usize).count();
            let expected = 1.0 - hits as f64 / self.requests.max(1) as f64;
            assert!((curve.ratios.at(size) - expected).abs() < 1e-9, "{size}");
        }
    }
}

#[test]
fn counts_and_curves_are_those_of_a_plain_count() {
    for seed in 0..30 {
        let mut random = fastrand::Rng::with_seed(seed);
        let names = Arc::new(Names::default());
        let ledger = Arc::new(Ledger::new(64, Some(Arc::clone(&names))));
        let mut queues: Vec<Account> = (0..3).map(|_| Account::open(&ledger)).collect();
        let groups: Vec<Insight> =
            (0..GROUPS).map(|number| insight(&names, &format!("/{number}"))).collect();
        let mut classes = [CacheCounts::default(); CLASSES];
        let mut of_groups: HashMap<String, CacheCounts> = HashMap::new();
        let (mut stack, mut stacks) = (Stack::default(), HashMap::<String, Stack>::new());
        for step in 0..3000 {
            // Curves get the blocks of one queue in batches, so that those of several have no exact
            // order.
            let queue = if seed % 2 == 0 { 0 } else { random.usize(0..3) };
            let queue = &mut queues[queue];
            let most = random.usize(1..=GROUPS);
            let number = random.usize(0..most);
            let insight = &groups[number];
            let name = format!("/{number}");
            let first = random.u64(0..40);
            let blocks = (first, first + random.u64(1..4));
            if random.u32(0..5) == 0 {
                let touch = [Touch::Insertion, Touch::Removal][random.usize(0..2)];
                queue.change(insight, blocks, touch, step);
                for block in blocks.0..blocks.1 {
                    stack.touch(block, touch);
                    if touch == Touch::Removal {
                        for stack in stacks.values_mut() {
                            stack.touch(block, touch);
                        }
                    } else if of_groups.contains_key(&name) {
                        // Changes of a group without a place are not noted in its curve.
                        stacks.entry(name.clone()).or_default().touch(block, touch);
                    }
                }
                continue;
            }
            let class = random.u8(..);
            let length = (blocks.1 - blocks.0) * 4096;
            let hit_bytes = random.u64(0..=length / 512) * 512;
            let (avoided_ns, time_ns) = (random.u64(0..1000), random.u64(0..1000));
            let counted = (length, hit_bytes, avoided_ns);
            let looked = queue.read_begins(insight, class, blocks, counted, step);
            let is_hit = hit_bytes == length;
            queue.read_ended(looked, is_hit, time_ns);
            let more = CacheCounts {
                reads: 1,
                hits: u64::from(is_hit),
                read_bytes: length,
                hit_bytes,
                avoided_ns,
                hit_ns: if is_hit { time_ns } else { 0 },
                miss_ns: if is_hit { 0 } else { time_ns },
            };
            classes[usize::from(class).min(CLASSES - 1)].merge(&more);
            of_groups.entry(name.clone()).or_default().merge(&more);
            let own = stacks.entry(name).or_default();
            for block in blocks.0..blocks.1 {
                stack.touch(block, Touch::Request);
                own.touch(block, Touch::Request);
            }
            if random.u32(0..100) == 0 {
                // Closed queues stay counted.
                let place = random.usize(0..3);
                queues[place] = Account::open(&ledger);
            }
        }
        let snapshot = ledger.snapshot(3000);
        assert_eq!(snapshot.classes, classes);
        assert_eq!(ledger.counts(), classes);
        assert_eq!((snapshot.groups.len(), snapshot.dropped), (of_groups.len(), 0));
        for group in &snapshot.groups {
            assert_eq!(group.counts, of_groups[&*group.cgroup], "{}", group.cgroup);
            let requests = group.curve.ratios.requests();
            assert!((requests - stacks[&*group.cgroup].requests as f64).abs() < 1e-6);
        }
        if seed % 2 == 0 {
            stack.check(&snapshot.curve);
            snapshot.groups.iter().for_each(|group| stacks[&*group.cgroup].check(&group.curve));
        }
    }
}

fn read(queue: &mut Account, insight: &Insight, block: u64, now_ns: u64) {
    let looked = queue.read_begins(insight, 0, (block, block + 1), (4096, 0, 0), now_ns);
    queue.read_ended(looked, false, 1);
}

#[test]
fn the_most_active_groups_have_places_in_bounded_memory() {
    let names = Arc::new(Names::new(1000));
    let ledger = Arc::new(Ledger::new(1 << 20, Some(Arc::clone(&names))));
    let mut queue = Account::open(&ledger);
    // A guest makes groups with long and strange names, each of which reads once.
    for number in 0..20_000_u64 {
        let name = format!("/\u{1b}[2J\n{}{number}", "x".repeat(3000));
        read(&mut queue, &insight(&names, &name), number, number * 1_000_000);
    }
    let busy = insight(&names, "/busy");
    let begin_ns = 2 * MINUTE_NS;
    for number in 0..10_000_u64 {
        read(&mut queue, &busy, number % 50, begin_ns + number);
    }
    let snapshot = ledger.snapshot(begin_ns + 10_000);
    assert_eq!(snapshot.groups.len(), GROUPS);
    assert!(snapshot.groups.iter().all(|group| group.cgroup.len() <= Names::LENGTH_MAX));
    let found = snapshot.groups.iter().find(|group| &*group.cgroup == "/busy").expect("a place");
    assert!(found.counts.reads > 9_000 && found.counts.reads < 10_000);
    assert!((found.curve.ratios.requests() - found.counts.reads as f64).abs() < 1e-6);
    assert!(snapshot.memory_bytes < 1700 << 10, "{}", snapshot.memory_bytes);
    assert_eq!(snapshot.total().reads, 30_000);
    // It keeps its place against many others that read less.
    for number in 0..50_000_u64 {
        let name = format!("/other-{}", number % 100);
        read(&mut queue, &insight(&names, &name), number, begin_ns + number * 1_000_000);
        read(&mut queue, &busy, number % 50, begin_ns + number * 1_000_000);
    }
    let snapshot = ledger.snapshot(begin_ns + MINUTE_NS);
    let found = snapshot.groups.iter().find(|group| &*group.cgroup == "/busy").expect("a place");
    assert!(found.counts.reads > 59_000, "{}", found.counts.reads);
}

#[test]
fn readers_and_queues_agree_in_the_end() {
    const COUNT: u64 = 40_000;
    let names = Arc::new(Names::default());
    let ledger = Arc::new(Ledger::new(64, Some(Arc::clone(&names))));
    // A group that finds the curves locked tries to get a place with its next read, so that the
    // reads before it would be missing.
    let mut first = Account::open(&ledger);
    (0..2).for_each(|number| read(&mut first, &insight(&names, &format!("/{number}")), 0, 0));
    std::thread::scope(|scope| {
        for number in 0..2 {
            let (ledger, names) = (Arc::clone(&ledger), Arc::clone(&names));
            scope.spawn(move || {
                let insight = insight(&names, &format!("/{number}"));
                let mut queue = Account::open(&ledger);
                for block in 0..COUNT {
                    read(&mut queue, &insight, block % 100, block);
                }
            });
        }
        for _ in 0..100 {
            let snapshot = ledger.snapshot(1);
            assert!(snapshot.total().reads <= 2 * COUNT + 2 && snapshot.groups.len() <= 2);
        }
    });
    let snapshot = ledger.snapshot(COUNT);
    assert_eq!(snapshot.total().reads, 2 * COUNT + 2);
    assert!((snapshot.curve.ratios.requests() - (2 * COUNT + 2) as f64).abs() < 1e-6);
    let of_groups: u64 = snapshot.groups.iter().map(|group| group.counts.reads).sum();
    assert_eq!(of_groups, 2 * COUNT + 2);
}

/// The time that this thread has run on a processor, in nanoseconds.
fn processor_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

/// Prints the cost of the accounts of a read: `cargo test --release -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn cost_of_a_read() {
    const COUNT: u64 = 20_000_000;
    let names = Arc::new(Names::default());
    for (slots, blocks) in [(16_384_u64, 10_000_u64), (16_384, 100_000), (1 << 20, 800_000)] {
        for cgroup in ["", "/a"] {
            let ledger = Arc::new(Ledger::new(slots, Some(Arc::clone(&names))));
            let insight = insight(&names, cgroup);
            let mut queue = Account::open(&ledger);
            let begin_ns = processor_ns();
            let mut block = 1_u64;
            for now_ns in 0..COUNT {
                block = block.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040);
                read(&mut queue, &insight, (block >> 33) % blocks, now_ns);
            }
            let per_read = (processor_ns() - begin_ns) as f64 / COUNT as f64;
            println!("{slots} slots, {blocks} blocks, group {cgroup:?}: {per_read:.1} ns");
        }
    }
}
