//! How a holder wakes who serves: a futex in the header of the table of leases.
//!
//! The word of a page says that it is wanted, the header which words to look at
//! ([`LeaseTable::ask`]), and the futex that there is something to look at. The last two are hints:
//! what is lost, because nobody serves or too much was asked for, is asked for again with the
//! holder's next attempt.
//!
//! It is no FIFO and no socket: whoever may write to a FIFO can hold its lock in the kernel for
//! ever, and a message of a socket can carry a descriptor whose end waits for ever. Here a holder
//! can do no more than wake who serves, as often as it likes.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::EventfdFlags;

use super::table::{LeaseTable, PagerLeases};

/// The pause after a wait that the kernel refuses: the table has been cut off.
const REFUSED_PAUSE: Duration = Duration::from_millis(50);

/// The side of who serves: a thread that waits at the futex.
#[derive(Debug)]
pub struct WantedPages {
    bell: Arc<OwnedFd>,
    table: Arc<LeaseTable>,
    is_over: Arc<AtomicBool>,
}

impl WantedPages {
    /// Begins to listen to the holders of a table. It is readable at once: something may have been
    /// asked for before.
    ///
    /// # Errors
    /// When there are no more descriptors or threads.
    pub fn listen(leases: &PagerLeases) -> io::Result<Self> {
        let bell = rustix::event::eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (bell, table) = (Arc::new(bell), leases.shared());
        let is_over = Arc::new(AtomicBool::new(false));
        let listener = (Arc::clone(&bell), Arc::clone(&table), Arc::clone(&is_over));
        let heard = table.wishes();
        std::thread::Builder::new().name("wanted".into()).spawn(move || {
            let (bell, table, is_over) = listener;
            listen_on(&bell, &table, &is_over, heard);
        })?;
        Ok(Self { bell, table, is_over })
    }

    /// Is not readable any more, until a holder asks for something.
    pub fn hear(&self) {
        let _ = rustix::io::read(&*self.bell, &mut [0; 8]);
    }
}

/// Readable when a holder wants a page.
impl AsFd for WantedPages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Drop for WantedPages {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.table.wish();
    }
}

fn listen_on(bell: &OwnedFd, table: &LeaseTable, is_over: &AtomicBool, mut heard: u32) {
    while !is_over.load(Ordering::SeqCst) {
        let now = table.wishes();
        if now != heard {
            heard = now;
            let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
        } else if table.await_wish(heard).is_err() {
            std::thread::sleep(REFUSED_PAUSE);
        }
    }
}

/// The side of a holder.
#[derive(Debug, Default)]
pub(super) struct PagerBell {
    turn: usize,
}

impl PagerBell {
    /// Asks for these pages in the place of a holder, and wakes who serves, if anybody does. It
    /// never waits.
    pub fn ring(&mut self, table: &LeaseTable, holder: usize, pages: &Range<u64>) {
        table.ask(holder, self.turn, pages);
        self.turn = self.turn.wrapping_add(1);
        table.wish();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::{MemoryFile, TableOwner};
    use super::*;

    const MEMORY: MemoryFile = MemoryFile { device: 7, inode: 9 };
    const OWNER: TableOwner = TableOwner { process: 1, start_ticks: 1, namespace: 1 };
    const PAGES: u64 = 1 << 20;

    struct Scene {
        folder: tempfile::TempDir,
        leases: PagerLeases,
        /// The table as a holder maps it.
        holder: LeaseTable,
        bell: PagerBell,
    }

    impl Scene {
        fn start() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let leases = PagerLeases::start(folder.path(), MEMORY, PAGES, OWNER).unwrap();
            let holder = LeaseTable::open(folder.path(), MEMORY, PAGES).unwrap().unwrap();
            Self { folder, leases, holder, bell: PagerBell::default() }
        }

        /// One that has heard what was asked for before.
        fn listen(&self) -> WantedPages {
            let pages = WantedPages::listen(&self.leases).unwrap();
            assert!(is_rung(&pages, 0));
            pages
        }

        fn ring(&mut self, pages: Range<u64>) {
            self.bell.ring(&self.holder, 1, &pages);
        }

        fn asked(&self) -> Vec<(u64, u64)> {
            let mut found = Vec::new();
            self.leases.table().take_asked(|range| found.push((range.start, range.end)));
            found
        }
    }

    /// Whether it becomes readable within so many seconds.
    fn is_rung(pages: &WantedPages, seconds: i64) -> bool {
        let mut polled = [rustix::event::PollFd::new(pages, rustix::event::PollFlags::IN)];
        let time = rustix::event::Timespec { tv_sec: seconds, tv_nsec: 20_000_000 };
        let is_ready = rustix::event::poll(&mut polled, Some(&time)).unwrap() > 0;
        pages.hear();
        is_ready
    }

    fn threads() -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name == "wanted\n").count()
    }

    #[test]
    fn what_a_holder_wants_reaches_who_serves() {
        let mut scene = Scene::start();
        scene.ring(1..2);
        let first = scene.listen();
        assert!(!is_rung(&first, 0));
        assert_eq!(scene.asked(), [(1, 2)]);
        assert_eq!(scene.asked(), []);
        scene.ring(3..9);
        scene.ring(5..6);
        assert!(is_rung(&first, 20));
        let mut asked = scene.asked();
        asked.sort_unstable();
        assert_eq!(asked, [(3, 9), (5, 6)]);
        // Both hear, a guard that waits for its turn too; who ends, ends.
        let next = scene.listen();
        scene.ring(7..8);
        assert!(is_rung(&first, 20) && is_rung(&next, 20));
        drop(first);
        scene.ring(9..10);
        assert!(is_rung(&next, 20));
        assert_eq!(scene.asked().len(), 2);
    }

    #[test]
    fn too_many_requests_keep_nobody_waiting_and_rubbish_is_any_pages() {
        let mut scene = Scene::start();
        let pages = scene.listen();
        (0..10_000).for_each(|page| scene.ring(page..page + 1));
        assert!(is_rung(&pages, 20));
        let asked = scene.asked();
        assert!(asked.len() <= 128 && asked.contains(&(9_999, 10_000)), "{asked:?}");
        scene.ring(5..u64::MAX);
        scene.ring(u64::MAX - 3..u64::MAX);
        scene.ring(4..4);
        assert_eq!(scene.asked(), [(5, 5 + 65_535)]);
        let table = scene.leases.table();
        for slot in 128..384 {
            table.set_number(slot, u64::MAX);
        }
        let asked = scene.asked();
        assert!(asked.len() == 256 && asked.iter().all(|(first, end)| end - first == 65_535));
    }

    #[test]
    fn a_table_that_is_cut_off_keeps_no_thread() {
        let scene = Scene::start();
        let path = super::super::folder::TableFolder::of(scene.folder.path(), MEMORY).table();
        let file = std::fs::File::options().write(true).open(path).unwrap();
        let before = threads();
        let pages = scene.listen();
        file.set_len(0).unwrap();
        // Its thread may have to look at it first.
        scene.holder.wish();
        std::thread::sleep(Duration::from_millis(100));
        drop(pages);
        let begun = Instant::now();
        while threads() > before {
            assert!(begun.elapsed() < Duration::from_secs(20), "a thread is left");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
