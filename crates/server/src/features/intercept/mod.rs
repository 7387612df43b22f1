//! Interceptors of guests: the daemon tells each where its guest's kernel has what it needs, and
//! gives it a table for the writers of pages.
//!
//! One thread follows all interceptors. It sleeps until one connects or leaves, or a kernel is
//! found or lost.

mod choice;
pub(crate) mod feature;
mod hooks;
pub(crate) mod options;
pub(crate) mod reading;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fathom_intercept::{
    CallPlaces, Calls, HELLO_LENGTH, Hello, MemoryFile, Places, Writers, receive, send,
};
use fathom_introspect::{Guest, GuestState};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{SocketFlags, accept_with};

use choice::Choice;

use crate::features::guests::Introspection;
use crate::features::intercept::options::InterceptOptions;
use crate::process::packets;

/// The most interceptors at a time.
const INTERCEPTORS_MAX: usize = 1024;
/// The time in which an interceptor has to say whose it is.
const HELLO_TIME_MAX: Duration = Duration::from_secs(5);

/// The listener for interceptors, and its thread.
pub(crate) struct Interceptors {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    path: PathBuf,
}

struct Shared {
    /// Wakes the thread.
    wake: OwnedFd,
    ending: AtomicBool,
    /// The processes whose system calls are noted.
    choice: Arc<Choice>,
    /// The most stops at a hook in a second.
    stops_max: u64,
    /// The guests whose system calls are noted.
    noted: Mutex<Vec<NotedCalls>>,
}

/// A guest whose system calls are noted.
#[derive(Clone)]
pub(crate) struct NotedCalls {
    /// A number that no other kernel's calls have.
    pub number: u64,
    /// The virtual machine, once somebody listens; may be empty.
    pub vm: String,
    pub guest: Arc<Guest>,
    pub writers: Arc<Writers>,
    pub calls: Arc<Calls>,
    pub choice: Arc<Choice>,
}

impl Shared {
    fn wake(&self) {
        // It fails only if it is about to wake anyway.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

impl Interceptors {
    /// Listens at the socket of the options.
    ///
    /// # Errors
    /// When that is not possible.
    fn listen(options: &InterceptOptions, guests: Arc<Introspection>) -> io::Result<Self> {
        let (path, stops_max) = (&options.socket, options.stops_max);
        let choice = Arc::new(options.choice());
        let socket = packets::listen(path)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (ending, noted) = (AtomicBool::new(false), Mutex::default());
        let shared = Arc::new(Shared { wake, ending, choice, stops_max, noted });
        let woken = Arc::downgrade(&shared);
        guests.on_change(move || {
            if let Some(shared) = woken.upgrade() {
                shared.wake();
            }
        });
        let thread =
            Thread { shared: Arc::clone(&shared), socket, guests, links: Vec::new(), epochs: 0 };
        let thread =
            std::thread::Builder::new().name("interceptors".into()).spawn(move || thread.run())?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), path: path.clone() })
    }

    /// The guests whose system calls are noted.
    pub(crate) fn noted(&self) -> Vec<NotedCalls> {
        self.shared.noted.lock().clone()
    }

    /// Ends the thread, and with it all connections.
    fn end(&self) {
        self.shared.ending.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The connection of an interceptor.
struct Link {
    socket: OwnedFd,
    since: Instant,
    /// The files with its guest's memory, once it has named them.
    files: Option<Vec<MemoryFile>>,
    /// The guest and the number of its kernel that it follows, and their table, if there is one.
    of: Option<(Arc<Guest>, u64)>,
    writers: Option<Arc<Writers>>,
    /// The number of its calls among those that are noted; 0 if it has none.
    noted: u64,
    shared: Arc<Shared>,
}

impl Link {
    /// Follows nothing any more.
    fn leave(&mut self) {
        let number = std::mem::take(&mut self.noted);
        if number != 0 {
            self.shared.noted.lock().retain(|noted| noted.number != number);
        }
        if let Some(((guest, _), writers)) = self.of.take().zip(self.writers.take()) {
            guest.remove_writers(&writers);
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.leave();
    }
}

struct Thread {
    shared: Arc<Shared>,
    socket: OwnedFd,
    guests: Arc<Introspection>,
    links: Vec<Link>,
    /// The tables so far.
    epochs: u64,
}

impl Thread {
    fn run(mut self) {
        while !self.shared.ending.load(Ordering::Acquire) {
            let (is_called, ready) = self.wait();
            let mut buffer = [0; 8];
            let _ = rustix::io::read(&self.shared.wake, &mut buffer);
            // The last ones first: their places do not change then.
            for place in ready.into_iter().rev() {
                if !self.links[place].hears() {
                    self.links.swap_remove(place);
                }
            }
            self.links.retain(|link| link.files.is_some() || link.since.elapsed() < HELLO_TIME_MAX);
            if is_called {
                self.accept();
            }
            let Self { links, guests, epochs, .. } = &mut self;
            links.retain_mut(|link| match link.follow(guests, epochs) {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(%error, "an interceptor is disconnected");
                    false
                }
            });
        }
    }

    /// Waits until there is something to do. Returns whether an interceptor wants to connect, and
    /// the places of those that have said something or left.
    fn wait(&self) -> (bool, Vec<usize>) {
        let is_full = self.links.len() >= INTERCEPTORS_MAX;
        let listens = if is_full { PollFlags::empty() } else { PollFlags::IN };
        let mut waited =
            vec![PollFd::new(&self.shared.wake, PollFlags::IN), PollFd::new(&self.socket, listens)];
        waited.extend(self.links.iter().map(|link| PollFd::new(&link.socket, PollFlags::IN)));
        let is_waiting = self.links.iter().any(|link| link.files.is_none());
        let limit = Timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = poll(&mut waited, is_waiting.then_some(&limit));
        let is_ready = |place: usize| !waited[place].revents().is_empty();
        (is_ready(1), (0..self.links.len()).filter(|place| is_ready(place + 2)).collect())
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        while self.links.len() < INTERCEPTORS_MAX {
            let Ok(socket) = accept_with(&self.socket, flags) else { return };
            self.links.push(Link {
                socket,
                since: Instant::now(),
                files: None,
                of: None,
                writers: None,
                noted: 0,
                shared: Arc::clone(&self.shared),
            });
        }
    }
}

impl Link {
    /// Reads what the interceptor has said. Returns whether it stays.
    fn hears(&mut self) -> bool {
        // After its first message, an interceptor says nothing.
        if self.files.is_some() {
            return false;
        }
        let hello = match receive::<HELLO_LENGTH>(self.socket.as_fd()) {
            Ok(Some((bytes, _))) => Hello::from_bytes(&bytes),
            Ok(None) => return false,
            Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
        };
        match hello {
            Ok(hello) => self.files = Some(hello.files),
            Err(error) => {
                tracing::warn!("the message of an interceptor is not understood: {error}");
            }
        }
        self.files.is_some()
    }

    /// Follows the kernel of the guest.
    ///
    /// # Errors
    /// When the interceptor cannot be told.
    fn follow(&mut self, guests: &Introspection, epochs: &mut u64) -> io::Result<()> {
        let Some(files) = &self.files else { return Ok(()) };
        let found = guests.guest_in(files).and_then(|guest| {
            let status = guest.status();
            (status.state == GuestState::Attached).then_some((guest, status.kernels))
        });
        let is_same = match (&self.of, &found) {
            (None, None) => true,
            (Some((guest, kernel)), Some((other, number))) => {
                Arc::ptr_eq(guest, other) && kernel == number
            }
            _ => false,
        };
        if is_same {
            return Ok(());
        }
        self.leave();
        *epochs += 1;
        let Some((guest, kernel)) = found else {
            // Nothing is intercepted until there is a kernel again.
            return send(
                self.socket.as_fd(),
                &Places { epoch: *epochs, page_size: 1, ..Places::default() }.to_bytes(),
                &[],
            );
        };
        let places = guest.kernel().and_then(|kernel| kernel.interception());
        let Some(places) = places else {
            let release = guest.status().release;
            tracing::warn!(
                "the pages of {release} have no known writers: its functions are unknown"
            );
            self.of = Some((guest, kernel));
            return Ok(());
        };
        let (writers, file) = Writers::create(guest.memory().end())?;
        let writers = Arc::new(writers);
        if !guest.set_writers(kernel, Arc::clone(&writers)) {
            return Ok(());
        }
        let choice = Arc::clone(&self.shared.choice);
        let calls = match (choice.is_empty(), places.calls.entry) {
            (true, _) => None,
            (false, 0) => {
                tracing::warn!("the system calls of a guest are not noted: its kernel is unknown");
                None
            }
            (false, _) => Some(Calls::create()?),
        };
        let places = Places { epoch: *epochs, stops_max: self.shared.stops_max, ..places };
        let message = match &calls {
            Some(_) => {
                let (commands, others) = (choice.commands.clone(), choice.has_others());
                Places { commands, others, ..places }
            }
            None => Places { calls: CallPlaces::default(), ..places },
        };
        let mut files = vec![file.as_fd()];
        files.extend(calls.as_ref().map(|(_, file)| file.as_fd()));
        send(self.socket.as_fd(), &message.to_bytes(), &files)?;
        tracing::info!("the writers of a guest's pages are noted");
        if let Some((calls, _)) = calls {
            self.noted = *epochs;
            let vm = String::new();
            let (guest, writers) = (Arc::clone(&guest), Arc::clone(&writers));
            let (number, calls) = (*epochs, Arc::new(calls));
            let noted = NotedCalls { number, vm, guest, writers, calls, choice };
            self.shared.noted.lock().push(noted);
            tracing::info!("the system calls of processes of a guest are noted");
        }
        (self.of, self.writers) = (Some((guest, kernel)), Some(writers));
        Ok(())
    }
}
