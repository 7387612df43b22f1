//! How a holder wakes the pager: a socket beside the table of leases.
//!
//! The word of a page says that it is wanted, the table's header which words to look at
//! ([`LeaseTable::ask`](super::table::LeaseTable::ask)), and a message of the socket that there is
//! something to look at. The last two are hints: what is lost, because nobody serves or too much
//! was asked for, is asked for again with the holder's next attempt.
//!
//! It is a socket of datagrams, and not a FIFO: whoever may write to a FIFO can hold its lock in the
//! kernel, and its reader then waits and cannot be killed. A datagram is complete before it
//! is in the queue. What is in it is not looked at, and descriptors are refused (Linux 6.16; an
//! earlier kernel closes them here, and a TCP connection among them can make the pager wait for it,
//! which a signal ends).

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::folder::TableFolder;
use super::table::{LeaseTable, MemoryFile};

/// The name of the socket, and of one that is not complete.
const NAME: &str = "wanted";
const BEGUN: &str = ".wanted";
/// The most messages that are taken at a time: what is left is taken the next time.
const MESSAGES_MAX: usize = 1024;
/// `SO_PASSRIGHTS`: whether a socket takes descriptors.
const PASS_RIGHTS: libc::c_int = 83;

/// The side of who serves.
#[derive(Debug)]
pub struct WantedPages {
    socket: UnixDatagram,
}

impl WantedPages {
    /// Makes the socket of a memory file, in the folder of its table, in place of that of whoever
    /// has served before.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn listen(folder: &Path, memory: MemoryFile) -> io::Result<Self> {
        let place = TableFolder::of(folder, memory);
        let begun = place.path().join(BEGUN);
        match fs::remove_file(&begun) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = with_short_path(place.path(), BEGUN, |path| UnixDatagram::bind(path))?;
        socket.set_nonblocking(true)?;
        refuse_descriptors(&socket);
        fs::set_permissions(&begun, Permissions::from_mode(0o666))?;
        fs::rename(&begun, place.path().join(NAME))?;
        Ok(Self { socket })
    }

    /// Takes the messages that are there, without waiting.
    pub fn hear(&self) {
        for _ in 0..MESSAGES_MAX {
            match self.socket.recv(&mut [0]) {
                Err(error) if error.kind() != ErrorKind::Interrupted => return,
                _ => {}
            }
        }
    }
}

/// Readable when a holder wants a page.
impl AsFd for WantedPages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The side of a holder.
#[derive(Debug)]
pub(super) struct PagerBell {
    folder: PathBuf,
    socket: Option<UnixDatagram>,
    turn: usize,
}

impl PagerBell {
    /// That of a memory file's pager.
    pub fn new(folder: &Path, memory: MemoryFile) -> Self {
        let folder = TableFolder::of(folder, memory).path().to_owned();
        Self { folder, socket: None, turn: 0 }
    }

    /// Asks for these pages in the place of a holder, and wakes who serves, if anybody does. It
    /// never waits.
    pub fn ring(&mut self, table: &LeaseTable, holder: usize, pages: &Range<u64>) {
        table.ask(holder, self.turn, pages);
        self.turn = self.turn.wrapping_add(1);
        let is_heard = |socket: &UnixDatagram| match socket.send(&[0]) {
            Ok(_) => true,
            // So many messages wait that it is awake.
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        };
        if self.socket.as_ref().is_some_and(is_heard) {
            return;
        }
        // Nobody has served, or another one serves now.
        self.socket = self.connect().ok();
        self.socket.as_ref().map(is_heard);
    }

    fn connect(&self) -> io::Result<UnixDatagram> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        with_short_path(&self.folder, NAME, |path| socket.connect(path))?;
        Ok(socket)
    }
}

/// Calls `use_path` with a path of the socket `name` in `folder` that is short enough for an
/// address.
fn with_short_path<T>(
    folder: &Path,
    name: &str,
    use_path: impl FnOnce(&Path) -> io::Result<T>,
) -> io::Result<T> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = File::from(rustix::fs::open(folder, flags, Mode::empty())?);
    use_path(&PathBuf::from(format!("/proc/self/fd/{}/{name}", folder.as_raw_fd())))
}

/// Has the kernel refuse messages with descriptors, if it can.
fn refuse_descriptors(socket: &UnixDatagram) {
    let no: libc::c_int = 0;
    let length = size_of_val(&no) as libc::socklen_t;
    // SAFETY: the value lives during the call, which reads `length` bytes of it.
    let _ = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            PASS_RIGHTS,
            (&raw const no).cast(),
            length,
        )
    };
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileTypeExt;

    use super::super::{PagerLeases, TableOwner};
    use super::*;

    const MEMORY: MemoryFile = MemoryFile { device: 7, inode: 9 };
    const OWNER: TableOwner = TableOwner { process: 1, start_ticks: 1, namespace: 1 };
    const PAGES: u64 = 1 << 20;

    struct Scene {
        folder: tempfile::TempDir,
        leases: PagerLeases,
        bell: PagerBell,
    }

    impl Scene {
        fn start() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let leases = PagerLeases::start(folder.path(), MEMORY, PAGES, OWNER).unwrap();
            let bell = PagerBell::new(folder.path(), MEMORY);
            Self { folder, leases, bell }
        }

        fn listen(&self) -> WantedPages {
            WantedPages::listen(self.folder.path(), MEMORY).unwrap()
        }

        fn ring(&mut self, pages: Range<u64>) {
            self.bell.ring(self.leases.table(), 1, &pages);
        }

        fn asked(&self) -> Vec<(u64, u64)> {
            let mut found = Vec::new();
            self.leases.table().take_asked(|range| found.push((range.start, range.end)));
            found
        }
    }

    fn is_rung(pages: &WantedPages) -> bool {
        let mut polled = [rustix::event::PollFd::new(pages, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let is_ready = rustix::event::poll(&mut polled, Some(&now)).unwrap() > 0;
        pages.hear();
        is_ready
    }

    #[test]
    fn what_a_holder_wants_reaches_who_serves() {
        let mut scene = Scene::start();
        scene.ring(1..2);
        let first = scene.listen();
        assert!(!is_rung(&first), "nobody served");
        assert_eq!(scene.asked(), [(1, 2)], "it is asked for all the same");
        assert_eq!(scene.asked(), []);
        scene.ring(3..9);
        scene.ring(5..6);
        assert!(is_rung(&first) && !is_rung(&first));
        let mut asked = scene.asked();
        asked.sort_unstable();
        assert_eq!(asked, [(3, 9), (5, 6)]);
        // Who dies loses what it has not heard; the next one looks at what was asked for.
        scene.ring(7..8);
        drop(first);
        scene.ring(8..9);
        let next = scene.listen();
        scene.ring(9..10);
        assert!(is_rung(&next));
        assert_eq!(scene.asked().len(), 3);
        // One that serves while the one before still listens.
        let last = scene.listen();
        drop(next);
        scene.ring(2..4);
        assert!(is_rung(&last));
    }

    #[test]
    fn too_many_requests_keep_nobody_waiting_and_rubbish_is_any_pages() {
        let mut scene = Scene::start();
        let pages = scene.listen();
        (0..10_000).for_each(|page| scene.ring(page..page + 1));
        assert!(is_rung(&pages));
        let asked = scene.asked();
        assert!(asked.len() <= 128 && asked.contains(&(9_999, 10_000)), "{asked:?}");
        while is_rung(&pages) {}
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
    fn another_file_in_the_place_of_the_socket_is_not_written_to() {
        let mut scene = Scene::start();
        let folder = TableFolder::of(scene.folder.path(), MEMORY);
        let path = folder.path().join(NAME);
        fs::write(&path, "x").unwrap();
        scene.ring(0..1);
        assert_eq!(fs::read(&path).unwrap(), b"x");
        let pages = scene.listen();
        assert!(path.metadata().unwrap().file_type().is_socket());
        scene.ring(0..1);
        assert!(is_rung(&pages));
        // A path that is longer than an address may be.
        let long = tempfile::Builder::new().prefix(&"long".repeat(40)).tempdir().unwrap();
        let leases = PagerLeases::start(long.path(), MEMORY, 4, OWNER).unwrap();
        let pages = WantedPages::listen(long.path(), MEMORY).unwrap();
        PagerBell::new(long.path(), MEMORY).ring(leases.table(), 0, &(0..1));
        assert!(is_rung(&pages));
    }

    #[test]
    fn descriptors_are_not_taken_where_the_kernel_refuses_them() {
        let mut scene = Scene::start();
        let pages = scene.listen();
        let sender = scene.bell.connect().unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        let descriptors = [sender.as_fd()];
        control.push(rustix::net::SendAncillaryMessage::ScmRights(&descriptors));
        let parts = [io::IoSlice::new(&[0])];
        let flags = rustix::net::SendFlags::NOSIGNAL;
        let sent = rustix::net::sendmsg(&sender, &parts, &mut control, flags);
        println!("a message with a descriptor: {sent:?}");
        pages.hear();
        assert!(!is_rung(&pages));
        scene.ring(0..1);
        assert!(is_rung(&pages));
    }
}
