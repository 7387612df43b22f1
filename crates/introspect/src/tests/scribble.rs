//! Memory that changes while it is read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fathom_insight::{ClassTable, Insight};

use super::SyntheticGuest;
use crate::resolver::RequestView;
use crate::synthetic::{READS_MAX, Shape, attach, check, reads};

/// The duration of each kind of reading.
const TIME: Duration = Duration::from_millis(1500);

/// A thread that changes the words that are read, and restores them.
struct Scribbler {
    ends: Arc<AtomicBool>,
    words: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Scribbler {
    fn new(guest: &SyntheticGuest, sites: Vec<u64>) -> Self {
        let (ends, words) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ended, written) = (Arc::clone(&ends), Arc::clone(&words));
        let (store, memory) = (guest.store.clone(), guest.memory.clone());
        let targets = guest.linux.words.targets();
        let thread = std::thread::spawn(move || {
            let mut random = fastrand::Rng::with_seed(3);
            let mut torn = Vec::new();
            while !ended.load(Ordering::Relaxed) {
                for _ in 0..random.usize(1..4) {
                    let site = sites[random.usize(0..sites.len())];
                    let old = memory.u64(site).unwrap();
                    let new = match random.u8(0..5) {
                        0 => random.u64(..),
                        1 => 0,
                        2 => old.wrapping_add(random.u64(0..64)).wrapping_sub(32),
                        3 => memory.u64(sites[random.usize(0..sites.len())]).unwrap(),
                        _ => targets[random.usize(0..targets.len())],
                    };
                    torn.push((site, old));
                    store.write_u64(site, new);
                    written.fetch_add(1, Ordering::Relaxed);
                }
                for _ in 0..random.u32(0..2000) {
                    std::hint::spin_loop();
                }
                for (site, old) in torn.drain(..).rev() {
                    store.write_u64(site, old);
                }
            }
        });
        Self { ends, words, thread: Some(thread) }
    }
}

impl Drop for Scribbler {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

#[test]
fn requests_stay_within_bounds_and_are_right_again_at_the_end() {
    let guest = SyntheticGuest::new(&Shape::default());
    let followed = guest.guest();
    let mut resolver = followed.resolver();
    let table = ClassTable::default();
    let mut now_ns = 0;
    let mut resolve = |is_checked: bool| {
        now_ns += 1_000_000;
        for request in &guest.linux.requests {
            let view = RequestView { now_ns, ..request.view };
            let (mut insight, before) = (Insight::default(), reads::count());
            resolver.resolve(&view, request.pieces.iter().copied(), &table, &mut insight);
            resolver.find_waiters(&view, request.pieces.iter().copied(), &mut insight);
            assert!(reads::count() - before <= READS_MAX);
            check(&insight, view.length, &guest.names);
            if is_checked {
                let reported =
                    crate::synthetic::NamedFacts::all(view.length, &insight, &guest.names);
                assert_eq!(reported, request.truth, "{}", request.name);
            }
        }
        now_ns
    };
    let (_, sites) = reads::record(&guest.memory, || resolve(true));
    // The places of page structures are cached permanently, so they are not changed.
    let mut sites = sites.all;
    sites.retain(|site| !guest.linux.tables.contains(&(site & !4095)));
    let scribbler = Scribbler::new(&guest, sites);
    let (start, mut rounds) = (Instant::now(), 0_u64);
    while start.elapsed() < TIME {
        resolve(false);
        rounds += 1;
    }
    assert!(rounds > 10 && scribbler.words.load(Ordering::Relaxed) > 100);
    drop(scribbler);
    // The facts that were read from torn memory expire after a second.
    while resolve(false) < 2_000_000_000 + rounds * 1_000_000 {}
    resolve(true);
}

#[test]
fn kernels_are_found_and_read_meanwhile() {
    let guest = SyntheticGuest::new(&Shape::recent());
    let (_, sites) = reads::record(&guest.memory, || {
        let kernel = guest.guest().kernel().unwrap();
        (kernel.tasks(), kernel.cached_files(&guest.names), kernel.counters())
    });
    let scribbler = Scribbler::new(&guest, sites.all);
    let (start, mut found) = (Instant::now(), 0_u64);
    while start.elapsed() < TIME {
        let followed = attach(&guest.memory, &guest.names, guest.header());
        let Some(kernel) = followed.kernel() else { continue };
        found += 1;
        let _ = (kernel.counters(), kernel.is_there(), kernel.modules_changed());
        assert!(kernel.tasks().len() < 1 << 16);
        assert!(kernel.cached_files(&guest.names).len() < 1000);
        let _ = kernel.read_again();
    }
    drop(scribbler);
    assert!(found > 0);
    assert!(guest.guest().kernel().is_some());
}
