//! Manipulated memory: the same mutations from seeds and from a fuzzer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_guest_memory::GuestMemory;
use fathom_insight::{ClassTable, Confidence, Facts, Insight, Kind, Names};

use super::answer::NamedFacts;
use super::builder::Words;
use super::reads::{self, Sites};
use super::{Linux, Shape, Store, SyntheticRequest};
use crate::dirty::DiskObject;
use crate::dirty::{PageSample, WrittenPages};
use crate::guest::{EVENT_REQUEST, Guest, GuestState};
use crate::resolver::{RequestView, Resolver};

/// The work that is done with the memory after each mutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// A kernel that was found before the mutation resolves one request.
    Request,
    /// A search for the kernel, and all operations on it.
    Everything,
}

/// The most reads of the guest's memory for one request: see `resolver`.
pub const READS_MAX: u64 = 400_000;
/// The longest time of a run, on any machine under any load.
const TIME_MAX: Duration = Duration::from_secs(60);
/// The number of bytes that describe a mutation: its place, its kind, and its value.
pub const MUTATION: usize = 12;

/// Pointers that no other structure in the kernel's memory confirms. A wrong one may therefore give
/// another result.
const UNCHECKED: [&str; 8] = [
    // The text is any text at the address.
    "dentry.d_name.name",
    "kernfs_node.name",
    "file_system_type.name",
    // A null pointer means that the name was removed.
    "dentry.d_hash.pprev",
    // A device without a file system is reported as a device.
    "super_block.s_bdev",
    // Any operations but those of an inode that cannot be opened are a file's.
    "inode.i_fop",
    // A number.
    "btrfs_root.root_key.objectid",
    // Any function but Btrfs's special ones completes I/O of content.
    "btrfs_bio.end_io",
];

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct MutationOutcome {
    /// Whether a kernel was found.
    pub attached: bool,
    /// The number of parts of requests with the same facts as without the mutations.
    pub same: u64,
    /// The number of parts that are unknown or not sure, but differed before.
    pub unsure: u64,
    /// The number of parts with other facts and the confidence `Sure` that the memory explains:
    /// changed data, or a pointer to another object of the same kind.
    pub explained: u64,
    /// Such parts that nothing in the memory explains: the facts, and the mutations.
    pub unexplained: Vec<String>,
    /// The most reads of the memory for one request.
    pub reads_max: u64,
}

/// A guest whose memory is manipulated.
pub struct MutationSubject {
    store: Store,
    memory: GuestMemory,
    names: Arc<Names>,
    table: ClassTable,
    guest: Arc<Guest>,
    resolver: Resolver,
    requests: Vec<SyntheticRequest>,
    /// The facts about each request without mutations, and the words that are read for them.
    clean: Vec<(Vec<NamedFacts>, Sites)>,
    /// The words that are read to find the kernel and by all operations on it.
    sites: Sites,
    /// The meaning of the words in memory; empty if it is unknown.
    words: Words,
    /// The pages whose place a resolver caches; all pages if `None`.
    cached_pages: Option<Vec<u64>>,
    /// The values of pointers in memory.
    targets: Vec<u64>,
    /// The virtual address of the direct map.
    direct: u64,
    now_ns: u64,
}

/// One of so many pages is examined for the form of a page table.
const TABLES_STRIDE: u64 = 16;

/// A word that is written.
#[derive(Clone, Copy, Debug)]
struct Mutation {
    address: u64,
    old: u64,
    new: u64,
}

/// A guest with this `memory`, after the search for its kernel.
pub(crate) fn attach(memory: &GuestMemory, names: &Arc<Names>, header: u64) -> Arc<Guest> {
    let guest = Guest::new(memory, Arc::clone(names), Box::new(|| {}));
    guest.notify(EVENT_REQUEST, header);
    guest.step();
    guest
}

/// Up to eight bytes of `data` from `at` on, as a number.
fn word(data: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    let rest = data.get(at..).unwrap_or_default();
    let count = rest.len().min(8);
    bytes[..count].copy_from_slice(&rest[..count]);
    u64::from_le_bytes(bytes)
}

impl MutationSubject {
    /// A synthetic guest of this shape.
    ///
    /// # Panics
    /// When its kernel is not found.
    pub fn new(shape: &Shape) -> Self {
        let store = Store::new(&shape.memory()).expect("memory");
        let linux = Linux::build(&store, shape);
        let mut subject = Self::over(store, linux.requests, shape.direct);
        subject.targets = linux.words.targets();
        subject.words = linux.words;
        subject.cached_pages = Some(linux.tables);
        subject
    }

    /// Any guest with these requests and with its direct map at `direct`.
    ///
    /// # Panics
    /// When its kernel is not found.
    pub fn over(store: Store, requests: Vec<SyntheticRequest>, direct: u64) -> Self {
        let memory = store.memory();
        let names = Arc::new(Names::default());
        let header = requests[0].view.header;
        let (guest, mut sites) = reads::record(&memory, || attach(&memory, &names, header));
        assert_eq!(guest.status().state, GuestState::Attached);
        let mut subject = Self {
            resolver: guest.resolver(),
            store,
            memory,
            names,
            table: ClassTable::default(),
            guest,
            requests,
            clean: Vec::new(),
            sites: Sites::default(),
            words: Words::default(),
            cached_pages: None,
            targets: Vec::new(),
            direct,
            now_ns: 0,
        };
        for place in 0..subject.requests.len() {
            subject.now_ns += 2_000_000_000;
            let memory = subject.memory.clone();
            let (reported, sites) = reads::record(&memory, || subject.resolve(place).0);
            subject.clean.push((reported, sites));
        }
        let ((), more) =
            reads::record(&subject.memory, || subject.run_all_operations(&subject.guest));
        sites.merge(&more);
        for (_, own) in &subject.clean {
            sites.merge(own);
        }
        let values = sites.structures.iter().filter_map(|site| subject.memory.u64(*site));
        subject.targets = values.filter(|value| *value >= 0xff00 << 48).collect();
        subject.sites = sites;
        subject
    }

    /// The guest's memory, which can be written.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The requests, each with the facts about it.
    pub fn clean(&self) -> impl Iterator<Item = (&SyntheticRequest, &[NamedFacts])> {
        self.requests.iter().zip(&self.clean).map(|(request, clean)| (request, &clean.0[..]))
    }

    /// Resolves a request and checks the properties of every result. Returns the parts and the
    /// number of reads of the memory.
    fn resolve(&mut self, place: usize) -> (Vec<NamedFacts>, u64) {
        let request = &self.requests[place];
        let view = RequestView { now_ns: self.now_ns, ..request.view };
        let mut insight = Insight::default();
        let before = reads::count();
        self.resolver.resolve(&view, request.pieces.iter().copied(), &self.table, &mut insight);
        self.resolver.find_waiters(&view, request.pieces.iter().copied(), &mut insight);
        let reads = reads::count() - before;
        check(&insight, view.length, &self.names);
        (NamedFacts::all(view.length, &insight, &self.names), reads)
    }

    /// Runs all operations on the kernel except the resolution of requests.
    fn run_all_operations(&self, guest: &Guest) {
        let Some(kernel) = guest.kernel() else { return };
        let _ = kernel.counters();
        let length = self.memory.length();
        let object = Arc::new(DiskObject::default());
        object.set(kernel.disk_of(self.requests[0].view.header).unwrap_or(0));
        let dirty = kernel.dirty(&[object]);
        let counts = [dirty.shown, dirty.writeback_shown, dirty.dirty, dirty.writeback];
        assert!(counts.into_iter().flatten().all(|bytes| bytes <= length));
        for device in dirty.devices.into_iter().flatten() {
            assert!(device.dirty <= length && device.writeback <= length);
            assert!(device.name.len() <= 64 * 3 && device.disks.len() <= 1);
        }
        let mapped = kernel.mapped_dirty().unwrap_or_default();
        assert!(mapped.unknown <= mapped.marked && mapped.marked <= length);
        let mut left = TABLES_STRIDE;
        let written = WrittenPages::count(
            &self.memory,
            TABLES_STRIDE,
            self.now_ns / 1_000_000_000,
            &mut || {
                left = left.saturating_sub(1);
                left > 0
            },
        );
        assert!(written.marked <= written.tables * TABLES_STRIDE * 512 * 512 * 4096);
        assert!(written.tables <= written.examined && written.examined <= length / 4096);
        let sample = PageSample::take(&self.memory, self.now_ns, &mut || true);
        let changed = sample.changed(&self.memory, &mut || true);
        assert_eq!((changed.changed, changed.is_whole), (0, true), "nothing is written meanwhile");
        for file in kernel.dirty_files(&self.names, 1000).into_iter().flat_map(|found| found.files)
        {
            assert!(file.dirty <= length);
        }
        let _ = (kernel.is_there(), kernel.modules_changed());
        let tasks = kernel.tasks();
        assert!(tasks.len() <= 1 << 16);
        assert!(tasks.iter().all(|task| task.command.len() <= 16 * 3));
        let processes = kernel.processes(&self.names).processes;
        assert!(processes.iter().all(|process| process.calls.len() <= process.threads as usize));
        let files = kernel.cached_files(&self.names);
        for file in &files {
            let Facts { inode, inode_address, .. } = file.facts;
            let _ = kernel.file_state(inode_address, inode);
            assert!(kernel.dirty_for_ns(inode_address).is_none_or(|age| age <= 3_600_000_000_000));
        }
        let pages: u64 = files.iter().map(|file| file.pages).sum();
        assert!(pages <= self.memory.length() / 4096);
        let _ = kernel.read_again();
    }

    /// Applies the mutations that `data` describes, runs the given work on the memory, and reverts
    /// the mutations.
    ///
    /// # Panics
    /// When a bound is exceeded.
    pub fn run(&mut self, effort: Effort, data: &[u8]) -> MutationOutcome {
        let start = Instant::now();
        let first = data.first().copied().unwrap_or(0);
        let place = usize::from(first & 0x7f) % self.clean.len();
        // Nothing that was read before an earlier mutation is still valid in the caches. What is
        // read before this mutation may be: a file of a moment ago.
        self.now_ns += 2_000_000_000;
        if effort == Effort::Request && first & 0x80 != 0 {
            self.resolve(place);
        }
        let count = data.len().saturating_sub(1) / MUTATION;
        let mut mutations = Vec::with_capacity(count);
        for index in 0..count {
            let data = &data[1 + index * MUTATION..][..MUTATION];
            if let Some(mutation) = self.mutation(effort, place, data) {
                self.store.write_u64(mutation.address, mutation.new);
                mutations.push(mutation);
            }
        }
        let mut outcome = MutationOutcome::default();
        match effort {
            Effort::Request => {
                outcome.attached = true;
                self.compare(place, &mutations, &mut outcome);
            }
            Effort::Everything => self.search_and_compare(&mutations, &mut outcome),
        }
        for mutation in mutations.iter().rev() {
            self.store.write_u64(mutation.address, mutation.old);
        }
        if mutations.iter().any(|it| self.is_cached(it)) {
            self.resolver = self.guest.resolver();
        }
        assert!(start.elapsed() < TIME_MAX, "took {:?}: {mutations:x?}", start.elapsed());
        outcome
    }

    fn search_and_compare(&mut self, mutations: &[Mutation], outcome: &mut MutationOutcome) {
        let header = self.requests[0].view.header;
        let guest = attach(&self.memory, &self.names, header);
        outcome.attached = guest.kernel().is_some();
        if !outcome.attached {
            return;
        }
        let mut resolver = guest.resolver();
        std::mem::swap(&mut resolver, &mut self.resolver);
        for place in 0..self.clean.len() {
            self.compare(place, mutations, outcome);
        }
        self.resolver = resolver;
        self.run_all_operations(&guest);
    }

    /// Whether a resolver caches what it reads at this address: the places of page structures.
    fn is_cached(&self, mutation: &Mutation) -> bool {
        let page = mutation.address & !4095;
        self.cached_pages.as_ref().is_none_or(|pages| pages.contains(&page))
    }

    /// Resolves a request and compares the facts with those without mutations.
    fn compare(&mut self, place: usize, mutations: &[Mutation], outcome: &mut MutationOutcome) {
        let (reported, reads) = self.resolve(place);
        outcome.reads_max = outcome.reads_max.max(reads);
        assert!(reads <= READS_MAX, "{reads} reads: {mutations:x?}");
        let clean = &self.clean[place].0;
        if reported == *clean {
            outcome.same += reported.len() as u64;
            return;
        }
        let mut offset = 0;
        for part in &reported {
            let before = at(clean, offset);
            offset += part.length;
            let Some(what) = part.contradicts(before) else {
                let known = part.kind != Kind::Unknown;
                outcome.same += u64::from(known);
                outcome.unsure += u64::from(!known);
                continue;
            };
            // The bio's own group is reported if the page's group is torn.
            let is_fallback = what == "group" && part.cgroup == "/";
            if part.confidence < Confidence::Sure
                || is_fallback && self.requests[place].name == "charged page"
            {
                outcome.unsure += 1;
            } else if mutations.iter().any(|mutation| self.explains(mutation)) {
                outcome.explained += 1;
            } else {
                let members: Vec<_> =
                    mutations.iter().map(|it| self.words.pointer(it.address)).collect();
                outcome.unexplained.push(format!(
                    "{}: {what}: {part:?} instead of {before:?} by {members:?} {mutations:x?}",
                    self.requests[place].name
                ));
            }
        }
    }

    /// Whether this mutation changes the facts in memory, rather than damaging the structures.
    fn explains(&self, mutation: &Mutation) -> bool {
        match self.words.pointer(mutation.address) {
            Some(member) => {
                UNCHECKED.contains(&member) || self.words.is_plausible(member, mutation.new)
            }
            None => true,
        }
    }

    /// The mutation that some bytes describe.
    fn mutation(&self, effort: Effort, place: usize, data: &[u8]) -> Option<Mutation> {
        const HUGE: [u64; 10] = [
            u64::MAX,
            i64::MAX as u64,
            1 << 63,
            u32::MAX as u64,
            i32::MAX as u64,
            1 << 32,
            1 << 40,
            0xffff_ffff_0000_0000,
            0xffff,
            0x8000_0000,
        ];
        let sites = match effort {
            Effort::Request => &self.clean[place].1,
            Effort::Everything => &self.sites,
        };
        let (how, value) = (data[3], word(data, 4));
        // Most words that are read for a kernel are its symbols and types, in long reads.
        let sites = if how & 0x80 == 0 { &sites.all } else { &sites.structures };
        if sites.is_empty() {
            return None;
        }
        let site = |number: u64| sites[number as usize % sites.len()];
        let address = site(word(data, 0) & 0xff_ffff);
        let old = self.memory.u64(address)?;
        let new = match (how & 0x7f) % 10 {
            0 => value,
            1 | 2 => self.targets[value as usize % self.targets.len()],
            3 => old.wrapping_add(value % 65).wrapping_sub(32),
            4 => HUGE[value as usize % HUGE.len()],
            5 => 0,
            // A pointer to itself, or to its structure.
            6 => self.direct + (address & !(value & 0x3f | 7)),
            // The value of another word that is read: an ancestor, a sibling.
            7 => self.memory.u64(site(value))?,
            8 => old ^ 1 << (value % 64),
            // Only the lower half changes.
            _ => old & !0xffff_ffff | HUGE[value as usize % HUGE.len()] & 0xffff_ffff,
        };
        Some(Mutation { address, old, new })
    }
}

/// The part of a result that contains an offset.
fn at(reported: &[NamedFacts], offset: u64) -> &NamedFacts {
    let mut end = 0;
    let found = reported.iter().find(|part| {
        end += part.length;
        offset < end
    });
    found.unwrap_or(&reported[0])
}

/// Checks the properties of every result, for any content of the memory.
pub(crate) fn check(insight: &Insight, length: u64, names: &Names) {
    let mut end = 0;
    for part in insight.parts(length) {
        assert_eq!(part.offset, end, "parts follow each other");
        assert!(part.length > 0 || length == 0);
        end += part.length;
        let facts = part.facts;
        for name in [facts.path, facts.file_system, facts.device, facts.cgroup, facts.process] {
            assert!(names.text(name).is_none_or(|text| text.len() <= Names::LENGTH_MAX));
        }
    }
    assert_eq!(end, length, "parts add up");
}

/// Manipulates a synthetic guest according to the bytes of a fuzzer, and runs the work on it.
/// Panics when a bound is exceeded.
pub fn fuzz_introspection(data: &[u8]) {
    thread_local! {
        static SUBJECTS: std::cell::RefCell<Vec<MutationSubject>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    let Some((first, data)) = data.split_first() else { return };
    SUBJECTS.with_borrow_mut(|subjects| {
        if subjects.is_empty() {
            subjects.push(MutationSubject::new(&Shape::default()));
            subjects.push(MutationSubject::new(&Shape::recent()));
        }
        let subject = &mut subjects[usize::from(first & 1)];
        let effort = if first & 2 == 0 { Effort::Everything } else { Effort::Request };
        let data = &data[..data.len().min(1 + 64 * MUTATION)];
        let _ = subject.run(effort, data);
    });
}
