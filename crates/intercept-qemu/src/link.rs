//! The connection to the daemon.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use fathom_intercept::{Calls, Hello, PLACES_LENGTH, Places, Slots, Writers, receive, send};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::calls::Noting;
use crate::guest::{GuestMemory, shared_files};
use crate::{Active, Plugin, now_ns};

/// The pause between attempts to reach the daemon.
const PAUSE: Duration = Duration::from_secs(1);

/// Begins to follow the daemon, on a thread of its own.
pub fn begin(plugin: &'static Plugin) {
    let begun = std::thread::Builder::new().name("fathom-intercept".into()).spawn(move || {
        loop {
            // Without a daemon, nobody reads what is noted.
            let _ = follow(plugin);
            plugin.set(None);
            std::thread::sleep(PAUSE);
        }
    });
    if let Err(error) = begun {
        eprintln!("fathom: nothing is intercepted: no thread: {error}");
    }
}

/// Follows the daemon until the connection ends.
fn follow(plugin: &Plugin) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(&plugin.socket)?)?;
    send(socket.as_fd(), &Hello { files: shared_files() }.to_bytes(), &[])?;
    let mut writers: Option<Arc<Writers>> = None;
    loop {
        if !wait(plugin, &socket) {
            plugin.put_back();
            continue;
        }
        let Some((bytes, files)) = receive::<PLACES_LENGTH>(socket.as_fd())? else { return Ok(()) };
        let places = Places::from_bytes(&bytes).map_err(io::Error::other)?;
        if let Some(file) = files.first() {
            writers = Some(Arc::new(Writers::open(file)?));
        }
        let calls = files.get(1).map(Calls::open).transpose()?;
        let Some(writers) = &writers else { continue };
        let is_sound = places.page_size != 0 && places.epoch != 0;
        plugin.set(is_sound.then(|| Active {
            memory: GuestMemory::map(&places.regions, places.direct),
            writers: Arc::clone(writers),
            slots: Mutex::<Slots>::default(),
            noting: calls.map(|calls| Noting::new(&places, calls)),
            translation: AtomicU64::new(0),
            places,
        }));
    }
}

/// Waits for the daemon, or until a hook is to be put back. Returns whether the daemon has said
/// something.
fn wait(plugin: &Plugin, socket: &OwnedFd) -> bool {
    let mut waited = [PollFd::new(socket, PollFlags::IN), PollFd::new(&plugin.wake, PollFlags::IN)];
    let limit = plugin.return_ns().map(|return_ns| {
        let time = Duration::from_nanos(return_ns.saturating_sub(now_ns()));
        Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
    });
    let _ = poll(&mut waited, limit.as_ref());
    let is_ready = !waited[0].revents().is_empty();
    let mut buffer = [0; 8];
    let _ = rustix::io::read(&plugin.wake, &mut buffer);
    is_ready
}
