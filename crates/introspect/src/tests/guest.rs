//! The introspection of a guest: its kernel is found late, ends, boots again, and misleads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fathom_guest_memory::GuestMemory;
use fathom_insight::{ClassTable, Insight, Kind, Names};

use super::SyntheticGuest;
use crate::guest::{Guest, GuestState};
use crate::resolver::{RequestView, Resolver};
use crate::synthetic::{Linux, NamedFacts, Shape, Store, SyntheticRequest};

const PAGE: u64 = 4096;

/// A guest, one of its queues, and the number of calls of `wake`.
struct Followed {
    guest: Arc<Guest>,
    resolver: Resolver,
    wakes: Arc<AtomicU64>,
    names: Arc<Names>,
    now_ns: u64,
}

impl Followed {
    fn new(memory: &GuestMemory) -> Self {
        let wakes = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&wakes);
        let wake = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        let names = Arc::new(Names::default());
        let guest = Guest::new(memory, Arc::clone(&names), Box::new(wake));
        Self { resolver: guest.resolver(), guest, wakes, names, now_ns: 0 }
    }

    fn resolve(&mut self, request: &SyntheticRequest) -> NamedFacts {
        self.resolve_view(&request.view, &request.pieces)
    }

    fn resolve_view(&mut self, view: &RequestView, pieces: &[(u64, u64)]) -> NamedFacts {
        self.now_ns += 2_000_000_000;
        let view = RequestView { now_ns: self.now_ns, ..*view };
        let mut insight = Insight::default();
        let pieces = pieces.iter().copied();
        self.resolver.resolve(&view, pieces, &ClassTable::default(), &mut insight);
        NamedFacts::all(view.length, &insight, &self.names).remove(0)
    }

    fn wakes(&self) -> u64 {
        self.wakes.load(Ordering::Relaxed)
    }

    /// Calls `step` until there is nothing to do.
    fn settle(&self) {
        while let Some(left) = self.guest.step() {
            assert!(left <= Duration::from_secs(1), "{left:?}");
            std::thread::sleep(left);
        }
    }

    fn state(&self) -> GuestState {
        self.guest.status().state
    }

    fn reason(&self) -> String {
        match self.state() {
            GuestState::Searching { reason } | GuestState::Blind { reason } => reason,
            state => panic!("{state:?}"),
        }
    }

    /// A guest whose kernel has been found.
    fn attached(guest: &SyntheticGuest) -> Self {
        let mut followed = Self::new(&guest.memory);
        followed.resolve(guest.linux.request("data"));
        followed.settle();
        assert_eq!(followed.state(), GuestState::Attached);
        followed
    }
}

/// The same request at another sector, which does not match the kernel's structures.
fn elsewhere(request: &SyntheticRequest) -> RequestView {
    RequestView { sector: request.view.sector + 1, ..request.view }
}

#[test]
fn the_first_request_with_data_begins_the_search() {
    let guest = SyntheticGuest::new(&Shape::default());
    let mut followed = Followed::new(&guest.memory);
    assert_eq!((followed.state(), followed.guest.step()), (GuestState::Waiting, None));
    assert_eq!(followed.resolve(guest.linux.request("flush")).kind, Kind::Unknown);
    assert_eq!((followed.wakes(), followed.guest.step()), (0, None));
    for _ in 0..1000 {
        assert_eq!(followed.resolve(guest.linux.request("data")).kind, Kind::Unknown);
    }
    assert_eq!(followed.wakes(), 1, "the thread is woken once");
    assert_eq!(followed.guest.step(), None);
    let status = followed.guest.status();
    assert_eq!((status.state, status.kernels, status.modules), (GuestState::Attached, 1, 2));
    assert_eq!(status.release, "6.1.0-synthetic");
    assert!(status.search_ns > 0);
    assert_eq!((status.requests, status.mismatches), (0, 0));
    let request = guest.linux.request("data");
    assert_eq!(followed.resolve(request), request.truth[0]);
    assert_eq!((followed.wakes(), followed.guest.step()), (1, None));
    let status = followed.guest.status();
    assert_eq!((status.requests, status.mismatches), (1, 0));
}

#[test]
fn searches_without_success_are_rare() {
    let shape = Shape::default();
    let store = Store::new(&shape.memory()).unwrap();
    let mut followed = Followed::new(&store.memory());
    // The request belongs to no kernel: the firmware made it.
    let view = RequestView {
        header: 0x3000,
        sector: 0,
        length: 512,
        carries_data: true,
        is_write: false,
        now_ns: 0,
    };
    // The thread that calls `step`, with a request in each round.
    let (start, mut steps, mut due) = (Instant::now(), 0, None);
    let mut wakes = 0;
    while start.elapsed() < Duration::from_millis(900) {
        followed.resolve_view(&view, &[]);
        if followed.wakes() > wakes || due.is_some_and(|due| due <= Instant::now()) {
            wakes = followed.wakes();
            due = followed.guest.step().map(|left| Instant::now() + left);
            steps += 1;
        }
        std::thread::yield_now();
    }
    // After 0, 50, 150, 350 and 750 ms, each with a step that postpones the search.
    assert!((2..=12).contains(&steps), "{steps} steps");
    assert!(followed.wakes() <= 6, "{} wakes", followed.wakes());
    assert!(followed.reason().contains("no Linux kernel"), "{}", followed.reason());
    // The kernel has booted. After its driver has set up the device, searches are as frequent as at
    // the beginning.
    let linux = Linux::build(&store, &shape);
    followed.guest.restarted();
    followed.settle();
    followed.resolve(linux.request("data"));
    followed.settle();
    assert_eq!(followed.state(), GuestState::Attached);
    let request = linux.request("merged");
    assert_eq!(followed.resolve(request), request.truth[0]);
}

#[test]
fn the_running_kernel_is_distinguished_from_an_earlier_one() {
    // Two kernels in one memory. The note of either can be the first.
    for swapped in [false, true] {
        let [first, second] = if swapped { [5, 1] } else { [1, 5] };
        let old = Shape { note: first * PAGE, ..Shape::default() };
        let new = Shape {
            note: second * PAGE,
            room: (4 << 20, 640 << 10),
            release: "6.2.0-new".into(),
            slide: 0x40_0000,
            direct: 0xffff_9000_0000_0000,
            pages: 0xffff_eb00_0000_0000,
            ..Shape::default()
        };
        let store = Store::new(&[(0, 16 * PAGE), old.room, new.room]).unwrap();
        let old = Linux::build(&store, &old);
        let mut followed = Followed::new(&store.memory());
        followed.resolve(old.request("data"));
        followed.settle();
        assert_eq!(followed.guest.status().release, "6.1.0-synthetic");
        // Another kernel boots without a restart of the device: only the requests show it.
        let new = Linux::build(&store, &new);
        let request = new.request("data");
        let mut requests = 0;
        while followed.resolve(request) != request.truth[0] {
            requests += 1;
            assert!(requests < 40);
            followed.settle();
        }
        let status = followed.guest.status();
        assert_eq!((status.release.as_str(), status.kernels), ("6.2.0-new", 2));
        assert!(status.mismatches >= 8 && status.mismatches < 40, "{}", status.mismatches);
        // Back to the first kernel, with a restart of the device: the note of the second is
        // overwritten.
        store.write(second * PAGE, &[0; 8192]);
        followed.guest.restarted();
        followed.settle();
        assert!(matches!(followed.state(), GuestState::Searching { .. }));
        let request = old.request("data");
        assert_eq!(followed.resolve(request).kind, Kind::Unknown);
        followed.settle();
        assert_eq!(followed.resolve(request), request.truth[0]);
        assert_eq!(followed.guest.status().kernels, 3);
    }
}

#[test]
fn a_restart_of_the_same_kernel_changes_nothing() {
    let guest = SyntheticGuest::new(&Shape::default());
    let mut followed = Followed::attached(&guest);
    let generation = followed.guest.generation();
    followed.guest.restarted();
    assert_eq!(followed.wakes(), 2);
    followed.settle();
    assert_eq!(followed.guest.generation(), generation);
    // Before the first request, a restart has no effect.
    followed = Followed::new(&guest.memory);
    followed.guest.restarted();
    assert_eq!((followed.guest.step(), followed.state()), (None, GuestState::Waiting));
}

#[test]
fn modules_that_are_loaded_late() {
    let guest = SyntheticGuest::new(&Shape::default());
    guest.linux.load_xfs(&guest.store, false);
    let mut followed = Followed::attached(&guest);
    assert_eq!(followed.guest.status().modules, 1);
    let request = guest.linux.request("xfs directory");
    let wakes = followed.wakes();
    for _ in 0..100 {
        assert_eq!(followed.resolve(request).kind, Kind::Unknown);
    }
    assert_eq!(followed.wakes(), wakes + 1, "an unknown function is reported once");
    let generation = followed.guest.generation();
    followed.settle();
    assert_eq!(followed.guest.generation(), generation, "no module was loaded");
    guest.linux.load_xfs(&guest.store, true);
    followed.guest.restarted();
    followed.settle();
    assert_eq!(followed.guest.status().modules, 2);
    assert_eq!(followed.guest.status().kernels, 1, "the same kernel");
    assert_eq!(followed.resolve(request), request.truth[0]);
    // The other order: the module is loaded, then one of its requests arrives.
    guest.linux.load_xfs(&guest.store, false);
    let mut followed = Followed::attached(&guest);
    guest.linux.load_xfs(&guest.store, true);
    assert_eq!(followed.resolve(request).kind, Kind::Unknown);
    followed.settle();
    assert_eq!(followed.resolve(request), request.truth[0]);
}

#[test]
fn a_guest_cannot_keep_the_thread_busy_with_modules() {
    let guest = SyntheticGuest::new(&Shape::default());
    let mut followed = Followed::attached(&guest);
    let foreign = guest.linux.request("unknown function");
    let before = followed.guest.generation();
    let (start, mut loaded, mut steps) = (Instant::now(), true, 0);
    let mut due = None;
    let mut wakes = followed.wakes();
    while start.elapsed() < Duration::from_millis(400) {
        loaded = !loaded;
        guest.linux.load_xfs(&guest.store, loaded);
        followed.resolve(foreign);
        if followed.wakes() > wakes || due.is_some_and(|due| due <= Instant::now()) {
            wakes = followed.wakes();
            due = followed.guest.step().map(|left| Instant::now() + left);
            steps += 1;
        }
    }
    assert!(
        followed.guest.generation() - before <= 9,
        "at most one reading of the modules in 50 ms"
    );
    assert!(steps <= 20, "{steps} steps");
}

#[test]
fn requests_that_do_not_match_make_the_kernel_doubtful() {
    let guest = SyntheticGuest::new(&Shape::default());
    let mut followed = Followed::attached(&guest);
    let request = guest.linux.request("data");
    // Fewer than eight mismatches in a row are an accident.
    for _ in 0..10 {
        for _ in 0..7 {
            assert_eq!(
                followed.resolve_view(&elsewhere(request), &request.pieces).kind,
                Kind::Unknown
            );
        }
        assert_eq!(followed.resolve(request), request.truth[0]);
    }
    let wakes = followed.wakes();
    assert_eq!((wakes, followed.guest.step()), (1, None));
    // The header is in its place, though, so the kernel is kept for a while.
    for _ in 0..7 {
        for _ in 0..8 {
            followed.resolve_view(&elsewhere(request), &request.pieces);
        }
        followed.settle();
        assert_eq!(followed.state(), GuestState::Attached);
    }
    for _ in 0..8 {
        followed.resolve_view(&elsewhere(request), &request.pieces);
    }
    followed.settle();
    assert!(matches!(followed.state(), GuestState::Blind { .. }));
    assert!(followed.reason().contains("swiotlb"), "{}", followed.reason());
    assert_eq!(followed.guest.status().mismatches, 70 + 64);
    assert!(followed.guest.kernel().is_none());
    // The next search begins only after a long pause.
    std::thread::sleep(Duration::from_millis(60));
    let wakes = followed.wakes();
    for _ in 0..100 {
        assert_eq!(followed.resolve(request).kind, Kind::Unknown);
    }
    let left = followed.guest.step().unwrap();
    assert!(left > Duration::from_secs(5) && left <= Duration::from_secs(10), "{left:?}");
    assert!(matches!(followed.state(), GuestState::Blind { .. }));
    assert_eq!(followed.wakes(), wakes + 1);
    followed.resolve(request);
    assert_eq!(followed.wakes(), wakes + 1, "the thread is not woken again");
}

#[test]
fn requests_in_copies_belong_to_no_kernel() {
    // The behaviour of a guest with encrypted memory: headers are in separate pages.
    let guest = SyntheticGuest::new(&Shape::default());
    let mut followed = Followed::new(&guest.memory);
    let view = RequestView { header: 0xf00, ..guest.linux.request("data").view };
    followed.resolve_view(&view, &[]);
    assert_eq!(followed.guest.step(), None);
    assert!(followed.reason().contains("swiotlb"), "{}", followed.reason());
    for header in [0, 1, 0xff, u64::MAX, u64::MAX - 255, 1 << 52, guest.linux.used.0 + 7] {
        let view = RequestView { header, ..view };
        assert_eq!(followed.resolve_view(&view, &[]).kind, Kind::Unknown);
    }
    // The same headers after the kernel has been found.
    let mut followed = Followed::attached(&guest);
    for header in [0, 1, 0xff, u64::MAX, u64::MAX - 255, 1 << 52, guest.linux.used.0 + 7] {
        let view = RequestView { header, ..view };
        assert_eq!(followed.resolve_view(&view, &[(u64::MAX - 5, 4096)]).kind, Kind::Unknown);
    }
}

#[test]
fn kernels_that_cannot_be_read() {
    let hide = |guest: &SyntheticGuest, what: &str| {
        for page in [0, PAGE] {
            let note = guest.linux.shape.note + page;
            let mut text = vec![0; 4096];
            guest.memory.read(note, &mut text).unwrap();
            if let Some(at) = text.windows(what.len()).position(|part| part == what.as_bytes()) {
                guest.store.write(note + at as u64, &what.as_bytes().to_ascii_uppercase());
            }
        }
    };
    let follow = |guest: &SyntheticGuest| {
        let mut followed = Followed::new(&guest.memory);
        followed.resolve(guest.linux.request("data"));
        assert_eq!(followed.guest.step(), None);
        followed
    };
    let guest = SyntheticGuest::new(&Shape::default());
    hide(&guest, "kallsyms_names");
    let mut followed = follow(&guest);
    assert!(matches!(followed.state(), GuestState::Blind { .. }));
    assert!(followed.reason().contains("6.1.0-synthetic is too old"), "{}", followed.reason());
    followed.resolve(guest.linux.request("data"));
    assert!(followed.guest.step().unwrap() > Duration::from_secs(5));

    // The note of a 32-bit kernel.
    let guest = SyntheticGuest::new(&Shape::default());
    let note = "OSRELEASE=6.1.0-41-686-pae\nPAGESIZE=4096\nSYMBOL(swapper_pg_dir)=c7d86000\n\
        SYMBOL(kallsyms_names)=c7a0b6bc\nCONFIG_X86_PAE=y\n\0";
    guest.store.write(guest.linux.shape.note, note.as_bytes());
    guest.store.write(guest.linux.shape.note + PAGE, &[0; 64]);
    let followed = follow(&guest);
    assert!(matches!(followed.state(), GuestState::Blind { .. }));
    assert!(followed.reason().contains("6.1.0-41-686-pae is a 32-bit"), "{}", followed.reason());

    // The description of types does not begin with the magic number.
    let guest = SyntheticGuest::new(&Shape::default());
    let kernel = guest.guest().kernel().unwrap();
    drop(kernel);
    let mut content = guest.store.content(guest.linux.used.0).unwrap();
    let at = content.windows(4).position(|part| part == [0x9f, 0xeb, 1, 0]).unwrap() as u64;
    guest.store.write(guest.linux.used.0 + at, &[0]);
    assert!(follow(&guest).reason().contains("CONFIG_DEBUG_INFO_BTF"));

    // A member is missing.
    let guest = SyntheticGuest::new(&Shape::default());
    content = guest.store.content(guest.linux.used.0).unwrap();
    let name = b"\0__data_len\0";
    let at = content.windows(name.len()).position(|part| part == name).unwrap() as u64;
    guest.store.write(guest.linux.used.0 + at + 1, b"X");
    let followed = follow(&guest);
    assert!(matches!(followed.state(), GuestState::Blind { .. }));
    assert!(followed.reason().contains("request.__data_len"), "{}", followed.reason());
}

#[test]
fn dropped_queues_are_counted() {
    let guest = SyntheticGuest::new(&Shape::default());
    let mut followed = Followed::attached(&guest);
    let request = guest.linux.request("data");
    followed.resolve(request);
    for round in 1..=3 {
        followed.resolver = followed.guest.resolver();
        followed.resolve(request);
        followed.resolve_view(&elsewhere(request), &[]);
        let status = followed.guest.status();
        assert_eq!((status.requests, status.mismatches), (1 + 2 * round, round));
    }
}
