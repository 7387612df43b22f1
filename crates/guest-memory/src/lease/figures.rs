//! What a pager says of its work: numbers in the header of each of its tables, which the daemon
//! shows.
//!
//! Each table has the figures of the whole machine, so that whoever maps a part of the memory finds
//! them. The pager stores them when it looks around, and never for a fault. Each number is stored
//! and read by itself: those of one reading may be of two moments. They are for people. Nothing
//! that concerns the memory's content depends on them, and any process that has the table may have
//! written them.
//!
//! ```text
//!  64 version, 1    70 limit        77 brought        84 time of those faults, ns
//!  65 its process   71 resident     78 wanted         85 their 99th percentile, ns
//!  66 when, ns      72 away         79 existing
//!  67 phase         73 filled       80 damaged
//!  68 hold          74 store        81 overwritten
//!  69 since, ns     75 file         82 faults
//!                   76 evicted      83 faults of pages that were away
//! ```
//! A later version adds numbers up to 127 under the same version; what an earlier one has not
//! stored is 0.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::time::{ClockId, clock_gettime};

use super::folder::{TableFolder, TableOwner};
use super::table::{HEADER, MemoryFile, PagerLeases, expected};

/// The place of the first figure in the header, which is the version.
const AT_FIGURES: usize = 64;
const VERSION: u64 = 1;
/// The figures behind the version.
const COUNT: usize = 21;
/// The places of the figures. The last ones are reserved.
const PLACES: usize = 64;
const _: () = assert!(COUNT < PLACES && AT_FIGURES + PLACES <= HEADER);

/// What a pager is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PagerPhase {
    /// It says nothing that this version knows.
    #[default]
    Unknown,
    /// It serves, and pages may leave.
    Attached,
    /// It was asked to detach: all pages come in.
    Detaching,
    /// It has ended, and the memory is the kernel's again.
    Detached,
    /// It has ended, and pages are away: its guard serves.
    Orphaned,
}

/// Why no page leaves now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictionHold {
    /// Pages may leave.
    #[default]
    None,
    /// The pager is finding out who has the memory, for a moment.
    Looking,
    /// Somebody is not ready for pages that leave. Those that are away stay away.
    Obstacle,
    /// It is not safe that pages are away: all come in.
    Retreat,
    /// A reason that this version does not know.
    Unknown,
}

/// The phases by their numbers.
const PHASES: [PagerPhase; 5] = [
    PagerPhase::Unknown,
    PagerPhase::Attached,
    PagerPhase::Detaching,
    PagerPhase::Detached,
    PagerPhase::Orphaned,
];

/// The holds by their numbers.
const HOLDS: [EvictionHold; 4] =
    [EvictionHold::None, EvictionHold::Looking, EvictionHold::Obstacle, EvictionHold::Retreat];

/// What a pager says of a machine. Counts are those of the pager's life, which begins with its
/// attaching or adopting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagerFigures {
    /// The pager's process.
    pub process: u32,
    /// When it has said this, by [`published_now_ns`], in nanoseconds.
    pub published_ns: u64,
    /// What it is doing.
    pub phase: PagerPhase,
    /// Why no page leaves.
    pub hold: EvictionHold,
    /// Since when it is so, by the same clock.
    pub held_since_ns: u64,
    /// The most bytes of the guest's memory that are to be in the host's; 0 without a limit.
    pub limit_bytes: u64,
    /// The bytes that are.
    pub resident_bytes: u64,
    /// The bytes of the pages that are away.
    pub away_bytes: u64,
    /// The part of them that is kept as a number for each page.
    pub filled_bytes: u64,
    /// The bytes of the host's memory that the contents of the others take.
    pub store_bytes: u64,
    /// The bytes of a file on a disk that contents take. A pager without such a file has 0.
    pub file_bytes: u64,
    /// Pages that have left.
    pub evicted: u64,
    /// Pages that have come back.
    pub brought: u64,
    /// Of these, pages that the daemon wanted.
    pub wanted: u64,
    /// Pages that existed when they were to come back.
    pub existing: u64,
    /// Pages whose content is damaged.
    pub damaged: u64,
    /// Pages that came back as zeroes, because a device was going to overwrite them. A pager that
    /// cannot do so has 0.
    pub overwritten: u64,
    /// Faults of missing pages.
    pub faults: u64,
    /// Of these, faults of pages that were away.
    pub away_faults: u64,
    /// The time of the faults of pages that were away, in nanoseconds.
    pub fault_sum_ns: u64,
    /// The 99th percentile of these times, in nanoseconds.
    pub fault_p99_ns: u64,
}

/// Now, by the clock of figures: the kernel's monotonic one, which pager and daemon share and
/// which stands still while the host sleeps.
pub fn published_now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

impl PagerFigures {
    fn numbers(&self) -> [u64; COUNT] {
        let number_of = |found: Option<usize>| found.unwrap_or(0) as u64;
        [
            u64::from(self.process),
            self.published_ns,
            number_of(PHASES.iter().position(|phase| *phase == self.phase)),
            number_of(HOLDS.iter().position(|hold| *hold == self.hold)),
            self.held_since_ns,
            self.limit_bytes,
            self.resident_bytes,
            self.away_bytes,
            self.filled_bytes,
            self.store_bytes,
            self.file_bytes,
            self.evicted,
            self.brought,
            self.wanted,
            self.existing,
            self.damaged,
            self.overwritten,
            self.faults,
            self.away_faults,
            self.fault_sum_ns,
            self.fault_p99_ns,
        ]
    }

    fn of(numbers: [u64; COUNT]) -> Self {
        let at = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let [process, published_ns, phase, hold, held_since_ns, rest @ ..] = numbers;
        let [limit_bytes, resident_bytes, away_bytes, filled_bytes, rest @ ..] = rest;
        let [store_bytes, file_bytes, evicted, brought, wanted, existing, rest @ ..] = rest;
        let [damaged, overwritten, faults, away_faults, fault_sum_ns, fault_p99_ns] = rest;
        Self {
            process: u32::try_from(process).unwrap_or(0),
            published_ns,
            phase: PHASES.get(at(phase)).copied().unwrap_or_default(),
            hold: HOLDS.get(at(hold)).copied().unwrap_or(EvictionHold::Unknown),
            held_since_ns,
            limit_bytes,
            resident_bytes,
            away_bytes,
            filled_bytes,
            store_bytes,
            file_bytes,
            evicted,
            brought,
            wanted,
            existing,
            damaged,
            overwritten,
            faults,
            away_faults,
            fault_sum_ns,
            fault_p99_ns,
        }
    }

    /// The newest figures in the tables of a guest's memory files, and the VMM whose memory it is.
    /// `None` without a pager, and with one that has never said anything. The VMM is as a pager of
    /// root has written it, and all figures are as any process with the table has left them.
    pub fn read(folder: &Path, files: &[MemoryFile]) -> Option<(TableOwner, Self)> {
        let found = files.iter().filter_map(|file| read(folder, *file));
        found.max_by_key(|(_, figures)| figures.published_ns)
    }
}

/// Those in the table of one file. It is read, not mapped: a file that becomes shorter meanwhile is
/// no signal.
fn read(folder: &Path, memory: MemoryFile) -> Option<(TableOwner, PagerFigures)> {
    let mut options = File::options();
    // Another kind of file must not make it wait.
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK);
    let place = TableFolder::of(folder, memory);
    let file = options.open(place.table()).ok()?;
    let mut bytes = [0; (AT_FIGURES + PLACES) * 8];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let number = |at: usize| {
        let place = bytes[at * 8..].first_chunk::<8>();
        place.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    };
    let is_table = expected(memory).iter().all(|(at, value)| number(*at) == *value);
    if !is_table || number(AT_FIGURES) != VERSION {
        return None;
    }
    let numbers = std::array::from_fn(|at| number(AT_FIGURES + 1 + at));
    Some((place.owner()?, PagerFigures::of(numbers)))
}

impl PagerLeases {
    /// Shows `figures` to the daemon.
    pub fn publish(&self, figures: &PagerFigures) {
        let table = self.table();
        for (at, number) in (AT_FIGURES + 1..).zip(figures.numbers()) {
            table.set_number(at, number);
        }
        table.set_number(AT_FIGURES, VERSION);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const OWNER: TableOwner = TableOwner { process: 77, start_ticks: 5, namespace: 9 };

    fn memory(folder: &Path, name: &str) -> MemoryFile {
        let file = File::create(folder.join(name)).unwrap();
        MemoryFile::of(&file).unwrap()
    }

    /// Figures that are all different.
    fn figures(published_ns: u64) -> PagerFigures {
        let numbers = std::array::from_fn(|at| at as u64 + 100);
        let (phase, hold) = (PagerPhase::Detaching, EvictionHold::Retreat);
        PagerFigures { published_ns, phase, hold, ..PagerFigures::of(numbers) }
    }

    #[test]
    fn the_daemon_reads_what_the_newest_table_of_a_machine_says() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["a", "b", "c"].map(|name| memory(folder.path(), name));
        let read = || PagerFigures::read(folder.path(), &files);
        assert_eq!(read(), None, "without a pager");
        let tables = [0, 1].map(|at| PagerLeases::start(folder.path(), files[at], 4, OWNER));
        let [first, second] = tables.map(Result::unwrap);
        assert_eq!(read(), None, "a pager that has said nothing");
        first.publish(&figures(5));
        assert_eq!(read(), Some((OWNER, figures(5))));
        let mut later = figures(6);
        later.phase = PagerPhase::Detached;
        second.publish(&later);
        assert_eq!(read(), Some((OWNER, later)));
        // They do not touch what else the header has, nor the words.
        assert_eq!(first.members().unwrap(), [] as [u32; 0]);
        assert!((0..4).all(|page| first.table().word(page) == super::super::PageWord(0)));
        // What the next pager takes up still says what the last one did.
        drop(first);
        let next = PagerLeases::start(folder.path(), files[0], 4, OWNER).unwrap();
        assert_eq!(PagerFigures::read(folder.path(), &files[..1]), Some((OWNER, figures(5))));
        next.put_aside();
        assert_eq!(PagerFigures::read(folder.path(), &files[..1]), None);
    }

    #[test]
    fn hostile_tables_are_numbers_or_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = memory(folder.path(), "a");
        let pager = PagerLeases::start(folder.path(), file, 4, OWNER).unwrap();
        pager.publish(&figures(1));
        let path = TableFolder::of(folder.path(), file).table();
        let table = File::options().write(true).open(&path).unwrap();
        let put = |at: usize, number: u64| {
            table.write_all_at(&number.to_ne_bytes(), at as u64 * 8).unwrap();
        };
        let read = || PagerFigures::read(folder.path(), &[file]).map(|(_, figures)| figures);
        for at in AT_FIGURES + 1..AT_FIGURES + PLACES {
            put(at, u64::MAX);
        }
        let found = read().unwrap();
        assert_eq!((found.process, found.published_ns, found.away_bytes), (0, u64::MAX, u64::MAX));
        assert_eq!((found.phase, found.hold), (PagerPhase::Unknown, EvictionHold::Unknown));
        assert_eq!(found.fault_p99_ns, u64::MAX);
        // Another version, and another file's table.
        put(AT_FIGURES, 2);
        assert_eq!(read(), None);
        put(AT_FIGURES, VERSION);
        assert!(read().is_some());
        let other = MemoryFile { inode: file.inode + 1, ..file };
        let others = TableFolder::of(folder.path(), other);
        std::fs::create_dir(others.path()).unwrap();
        std::fs::copy(&path, others.table()).unwrap();
        std::fs::write(others.path().join("owner"), "77 5 9\n").unwrap();
        assert_eq!(PagerFigures::read(folder.path(), &[other]), None);
        // Without a VMM that is known.
        let owner = path.with_file_name("owner");
        for text in ["", "77 5\n", "77 5 9", "77 5 9 1\n", "-7 5 9\n", &"7".repeat(99)] {
            std::fs::write(&owner, text).unwrap();
            assert_eq!(read(), None, "{text:?}");
        }
        std::fs::write(&owner, "77 5 9\n").unwrap();
        assert!(read().is_some());
        // One that is too short, a folder, and a pipe that nobody writes to.
        table.set_len(700).unwrap();
        assert_eq!(read(), None);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(read(), None);
        std::fs::remove_dir(&path).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert_eq!(read(), None);
    }
}
