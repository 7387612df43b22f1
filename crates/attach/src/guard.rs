//! The guard: a small process that waits for its pager's death, and then serves in its place.
//!
//! Threads of the guest that meet a missing page wait for the pager. The VMM keeps the userfaultfd
//! open, so the kernel does not notice that nobody serves it. The guard does: it has a copy of the
//! userfaultfd, and a connection that ends with the pager. While no page is away, it leaves all
//! faults to the kernel, which is right then, and ends. While pages are away, the kernel would make
//! zeroes of them: so the guard serves the faults, until the next pager does, or all pages have
//! come. It takes nothing away.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use fathom_guest_memory::{PagerFigures, PagerPhase, published_now_ns};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::away::{AwayPages, clean};
use crate::faults::{serve_missing, serve_protected};
use crate::memory::MappedMemory;
use crate::record::{self, PagerRecord, RecordPlace};
use crate::trace;
use crate::userfault::{MISSING_SHMEM, UserFault};
use crate::vmm::Vmm;

/// What the guard says when it is ready.
const READY: u8 = b'r';
/// What it says when it cannot do what it was told.
const FAILED: u8 = b'f';
/// What the pager says when it has detached: the guard ends.
const OVER: u8 = b'o';
/// What the pager says before a page leaves: the length of a [`StorePlace`] as JSON, in two bytes
/// of which the first is the higher, and that follow.
const STORE: u8 = b's';
/// A guard is ready, and has ended, within this time.
const TIME_MAX: Duration = Duration::from_secs(10);
/// The longest message, in bytes: the mappings of a VMM.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// The pause before a guard that has given the lock away wants it again.
const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// How often a guard that serves looks whether a pager wants to.
const LOOK_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// What a guard is told at its start.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ward {
    /// The VMM's process.
    pub process: i32,
    /// When it started.
    pub start_ticks: u64,
    /// The guest's memory.
    pub memory: Vec<MappedMemory>,
    /// The record of the VMM.
    pub record: PathBuf,
    /// The file that a pager locks which waits to serve.
    pub wish: PathBuf,
}

impl Ward {
    /// That of a pager.
    pub fn of(vmm: &Vmm, memory: &[MappedMemory], place: &RecordPlace) -> Self {
        Self {
            process: vmm.process(),
            start_ticks: vmm.start_ticks(),
            memory: memory.to_vec(),
            record: place.path().to_owned(),
            wish: place.wish(),
        }
    }
}

/// Where the pages are that are away.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StorePlace {
    /// The store.
    pub store: PathBuf,
    /// Its swap file, if it has one.
    #[serde(default)]
    pub swap: Option<PathBuf>,
    /// The folder of the tables of leases.
    pub leases: PathBuf,
}

impl StorePlace {
    /// That of a record. `None` if no page may be away.
    pub fn of(record: &PagerRecord) -> Option<Self> {
        let (swap, leases) = (record.swap.clone(), record.leases.clone());
        Some(Self { store: record.store.clone()?, swap, leases })
    }

    /// Opens it.
    ///
    /// # Errors
    /// Those of [`AwayPages::open`].
    pub fn open(&self, vmm: &Vmm, memory: &[MappedMemory]) -> Result<AwayPages, Failure> {
        AwayPages::open(vmm, memory, &self.leases, &self.store, self.swap.as_deref())
    }
}

/// A running guard, as its pager has it.
#[derive(Debug)]
pub(crate) struct Guard {
    child: Child,
    link: UnixStream,
}

impl Guard {
    /// Starts a guard by `command`. Returns when it waits. It shares `lock`, the lock of who
    /// serves.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(
        mut command: Command,
        faults: &UserFault,
        lock: BorrowedFd<'_>,
        ward: &Ward,
    ) -> Result<Self, Failure> {
        let started = (|| {
            let (link, other) = UnixStream::pair()?;
            let stdin = Stdio::from(OwnedFd::from(other));
            let child = command.stdin(stdin).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
            // The command keeps the other end open.
            drop(command);
            let mut guard = Self { child, link };
            match guard.greet(faults, lock, ward) {
                Ok(()) => Ok(guard),
                Err(error) => {
                    // It would take the end of the connection for the pager's.
                    guard.bury();
                    Err(error)
                }
            }
        })();
        started.map_err(|error| Failure::new(format!("the pager's guard does not start: {error}")))
    }

    fn greet(&mut self, faults: &UserFault, lock: BorrowedFd<'_>, ward: &Ward) -> io::Result<()> {
        let message = serde_json::to_vec(ward)?;
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(io::Error::other("the guest's memory has too many parts"));
        }
        let descriptors = [faults.as_fd(), lock];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let parts = [IoSlice::new(&message)];
        if sendmsg(&self.link, &parts, &mut control, SendFlags::NOSIGNAL)? != message.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.link.set_read_timeout(Some(TIME_MAX))?;
        self.await_ready()
    }

    fn await_ready(&mut self) -> io::Result<()> {
        let mut answer = [0];
        self.link.read_exact(&mut answer)?;
        if answer[0] == READY { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// Has the guard open the store of the pages that are away, or will be. Only when it has, a
    /// page may leave.
    ///
    /// # Errors
    /// When it cannot.
    pub fn open_store(&mut self, place: &StorePlace) -> Result<(), Failure> {
        let told = (|| {
            let message = serde_json::to_vec(place)?;
            let length = u16::try_from(message.len()).map_err(io::Error::other)?;
            let head = [&[STORE], length.to_be_bytes().as_slice()].concat();
            self.link.write_all(&[head, message].concat())?;
            self.await_ready()
        })();
        told.map_err(|error: io::Error| {
            Failure::new(format!("the pager's guard cannot open the store: {error}"))
        })
    }

    /// Ends the guard, which leaves everything as it is.
    pub fn end(mut self) {
        let _ = self.link.write_all(&[OVER]);
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() > TIME_MAX {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Collects a guard that has ended.
    pub fn bury(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The guard's process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }
}

/// Readable when the guard has ended.
impl AsFd for Guard {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }
}

/// The life of a guard, in a process that does nothing else. Its standard input is the connection
/// to its pager.
///
/// # Errors
/// When it is not started by a pager.
pub fn guard() -> io::Result<()> {
    trace::block_signals(&trace::SYNCHRONOUS)?;
    // A signal to the pager's group or session is not meant for it.
    let _ = rustix::process::setsid();
    let mut link = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (ward, faults, lock) = receive(&link)?;
    let vmm = Vmm::open(ward.process).ok().filter(|vmm| vmm.start_ticks() == ward.start_ticks);
    let vmm = vmm.ok_or(io::ErrorKind::NotFound)?;
    // A pager that has died meanwhile is noticed by the next read.
    let _ = link.write_all(&[READY]);
    let mut away = None;
    let mut word = [0];
    while link.read_exact(&mut word).is_ok() {
        match word[0] {
            OVER => return Ok(()),
            STORE => {
                let opened = read_store(&mut link)
                    .and_then(|place| place.open(&vmm, &ward.memory).ok().map(Box::new));
                let answer = if opened.is_some() { READY } else { FAILED };
                away = opened.or(away);
                let _ = link.write_all(&[answer]);
            }
            _ => {}
        }
    }
    // The pager has died. Enough others may wait for their turn already.
    let place = record::take_spare_place(&ward.record);
    if matches!(place, Ok(None)) {
        return Ok(());
    }
    loop {
        // Another guard may serve still, or a pager that has come since.
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
        match current_store(&vmm, &ward, away.take()) {
            Ok(pages) => {
                match serve(&vmm, &ward, &faults, pages) {
                    GuardEnd::Wished(pages) => away = pages,
                    GuardEnd::Over(None) => return Ok(()),
                    GuardEnd::Over(Some(pages)) => {
                        // What a later machine with the same number needs, before what may hang.
                        drop((lock, place, faults, vmm));
                        let leases = pages.leases().to_owned();
                        pages.end(true);
                        clean(&leases, None);
                        return Ok(());
                    }
                }
            }
            Err(_) if vmm.has_ended() => return Ok(()),
            // Another guard may be able to. If not, it is tried again.
            Err(_) => {}
        }
        // Not its end: the pager that wants to serve may die before it does. Then it is this
        // guard's turn, or that of the pager's own.
        rustix::fs::flock(&lock, FlockOperation::Unlock)?;
        let _ = record::await_wish(&ward.wish);
        std::thread::sleep(RETRY_PAUSE);
    }
}

/// The store that the record names: another pager may have made another since this guard was told.
/// Who has the lock is the only one that writes the record.
///
/// # Errors
/// When pages may be away and it cannot be opened. This process must not serve then.
fn current_store(
    vmm: &Vmm,
    ward: &Ward,
    told: Option<Box<AwayPages>>,
) -> io::Result<Option<Box<AwayPages>>> {
    let found = record::read(&ward.record);
    let named = found.as_ref().and_then(StorePlace::of);
    let mut pages = match (named, told) {
        // After an orderly end nothing is away. Somebody may also have removed the record: what
        // this guard was told is the best that there is.
        (None, told) => told,
        // Its file may have been removed: this guard has it open.
        (Some(place), Some(told))
            if told.store().path() == place.store && !told.store().is_other() =>
        {
            Some(told)
        }
        (Some(place), _) => {
            let opened = place.open(vmm, &ward.memory);
            Some(Box::new(opened.map_err(|failure| io::Error::other(failure.to_string()))?))
        }
    };
    if let Some(pages) = &mut pages {
        pages.recover();
        // Without it, it looks what is asked for each time that it wakes.
        let _ = pages.listen();
    }
    Ok(pages)
}

/// Why a guard does not serve any more.
enum GuardEnd {
    /// A pager wants to. The pages that are away.
    Wished(Option<Box<AwayPages>>),
    /// Nothing is away any more, or the VMM has ended: what is left of it.
    Over(Option<Box<AwayPages>>),
}

/// Serves until the next pager wants to, nothing is away any more, or the VMM has ended.
fn serve(vmm: &Vmm, ward: &Ward, faults: &UserFault, mut away: Option<Box<AwayPages>>) -> GuardEnd {
    // Threads whose fault was read, and not served, try again.
    for part in &ward.memory {
        let _ = faults.wake(&part.range());
    }
    loop {
        if record::is_wished(&ward.wish) {
            if let Some(pages) = &mut away {
                pages.stop_listening();
            }
            return GuardEnd::Wished(away);
        }
        let mut polled = vec![PollFd::new(vmm, PollFlags::IN)];
        let has_pages = away.as_ref().is_some_and(|pages| pages.count() > 0);
        if let Some(pages) = away.as_ref().filter(|_| has_pages) {
            polled.push(PollFd::new(faults, PollFlags::IN));
            let swap = pages.store().swap_bell();
            polled.extend(swap.map(|bell| PollFd::from_borrowed_fd(bell, PollFlags::IN)));
            polled.extend(pages.wanted().iter().map(|wanted| PollFd::new(wanted, PollFlags::IN)));
        }
        let pause = if has_pages { LOOK_PAUSE } else { Timespec { tv_sec: 0, tv_nsec: 0 } };
        // After an error, as after a signal, it looks anew.
        let _ = poll(&mut polled, Some(&pause));
        let ready: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
        if ready[0] {
            return GuardEnd::Over(away);
        }
        let Some(pages) = away.as_mut().filter(|_| has_pages) else {
            // The dead pager's last figures say that pages are away.
            let figures = PagerFigures {
                process: std::process::id(),
                published_ns: published_now_ns(),
                phase: PagerPhase::Detached,
                ..PagerFigures::default()
            };
            away.iter().flat_map(|pages| pages.tables()).for_each(|table| table.publish(&figures));
            release(faults, &ward.memory);
            return GuardEnd::Over(None);
        };
        // Also when nothing has been done: what has failed is tried again.
        pages.progress(faults);
        if ready[2..].contains(&true) || pages.wanted().is_empty() {
            pages.serve_wanted(faults);
        }
        if ready[1] {
            let mut found = Vec::new();
            let _ = faults.faults(|fault| found.push(fault));
            for fault in found {
                if fault.is_protection {
                    serve_protected(faults, Some(pages), fault.address);
                } else {
                    serve_missing(faults, &ward.memory, Some(pages), fault.address);
                }
            }
        }
    }
}

fn read_store(link: &mut UnixStream) -> Option<StorePlace> {
    let mut length = [0; 2];
    link.read_exact(&mut length).ok()?;
    let mut bytes = vec![0; usize::from(u16::from_be_bytes(length))];
    link.read_exact(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

fn receive(link: &UnixStream) -> io::Result<(Ward, UserFault, OwnedFd)> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let length = recvmsg(link, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    let mut files = files.into_iter();
    match (files.next(), files.next()) {
        (Some(faults), Some(lock)) => {
            let ward = serde_json::from_slice(&bytes[..length])?;
            Ok((ward, UserFault::adopt(faults, MISSING_SHMEM)?, lock))
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Leaves the faults of all memory to the kernel, and lets waiting threads go on. A part that is
/// not mapped any more has none.
pub(crate) fn release(faults: &UserFault, memory: &[MappedMemory]) {
    for part in memory {
        let _ = faults.unregister(&part.range());
    }
}
