//! The daemon's end of the connection to the process `fathom keep`, and the messages between them.
//!
//! Each message is one packet, with at most one descriptor:
//!
//! | message | descriptor | meaning |
//! |---|---|---|
//! | `watch` | one of a pair of sockets | it is closed when the process ends, or gets another connection |
//! | `keep NAME` | the keepsake | hold it |
//! | `release NAME` | | drop it |
//! | `life` | the file with the daemon's life | note its end when the connection ends |
//! | `list` | | answered with `held NAME` and the keepsake for each, then `end` |
//! | `end` | | answered with `end` or, if it still holds something, `held`, when all before it has been carried out |

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use fathom_backend::Left;
use parking_lot::Mutex;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg,
};

use super::{Held, NAME_LENGTH_MAX, descriptors};
use crate::process::packets;

/// The longest time that the other side may take, for each message.
pub(super) const TIME_MAX: Duration = Duration::from_secs(2);
/// The longest message, in bytes.
const LENGTH_MAX: usize = NAME_LENGTH_MAX + 32;
/// The most keepsakes that one process holds.
pub(super) const HELD_MAX: usize = 16_384;
/// The pause before a process that has ended is replaced, and how often that is done.
const PAUSE: Duration = Duration::from_secs(1);
const RENEWALS_MAX: u32 = 10;

/// A message with its descriptor.
pub(super) type Message = (String, Option<OwnedFd>);

pub(super) fn send(
    socket: BorrowedFd<'_>,
    text: &str,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|descriptor| [descriptor]);
    if let Some(descriptors) = &descriptors {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let text = [IoSlice::new(text.as_bytes())];
    sendmsg(socket, &text, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The next message; `None` at the end of the connection.
pub(super) fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Message>> {
    let mut bytes = [0; LENGTH_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    // The kernel closes descriptors for which there is no room.
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let text = std::str::from_utf8(&bytes[..received.bytes.min(LENGTH_MAX)]);
    match text {
        Ok("") => Ok(None),
        Ok(text) => Ok(Some((text.to_owned(), descriptor))),
        Err(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(TIME_MAX))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(TIME_MAX))?;
    Ok(socket)
}

fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    if descriptors::is_trusted(socket.as_fd()) {
        return Ok(socket);
    }
    Err(io::Error::other(format!("{} belongs to another user", path.display())))
}

/// The connection.
struct Connection {
    socket: OwnedFd,
    number: u64,
}

#[derive(Default)]
struct State {
    connection: Option<Connection>,
    /// The connections so far.
    count: u64,
    renewals: u32,
    is_ended: bool,
    /// The file with the life of this process.
    life: Option<File>,
}

/// The connection to a process `fathom keep`, which is started for the first keepsake.
pub(super) struct Link {
    path: PathBuf,
    held: Held,
    state: Mutex<State>,
    weak: Weak<Self>,
}

impl Link {
    pub(super) fn new(path: PathBuf, held: Held) -> Arc<Self> {
        Arc::new_cyclic(|weak| Self {
            path,
            held,
            state: Mutex::default(),
            weak: Weak::clone(weak),
        })
    }

    /// The keepsakes that a process holds since an earlier daemon.
    pub(super) fn list(&self) -> Vec<Left> {
        let mut state = self.state.lock();
        let Ok(socket) = connect(&self.path) else { return Vec::new() };
        let mut left = Vec::new();
        let listed = self.adopt(&mut state, socket, None).and_then(|socket| {
            send(socket, "list", None)?;
            while let Some((text, descriptor)) = receive(socket)? {
                match (text.strip_prefix("held "), descriptor) {
                    (Some(name), Some(file)) if left.len() < HELD_MAX => {
                        left.push(Left { name: name.to_owned(), file: File::from(file) });
                    }
                    _ => return Ok(()),
                }
            }
            Err(io::ErrorKind::UnexpectedEof.into())
        });
        if let Err(error) = listed {
            tracing::warn!(%error, "the keepsakes of an earlier daemon are not complete");
            state.connection = None;
        }
        left
    }

    pub(super) fn keep(&self, name: &str, file: &File) -> io::Result<()> {
        let mut state = self.state.lock();
        if let Some(connection) = &state.connection {
            let sent = send(connection.socket.as_fd(), &format!("keep {name}"), Some(file.as_fd()));
            if sent.is_ok() {
                return sent;
            }
        }
        // This one is among those that are held.
        self.connect(&mut state)
    }

    /// The process notes the end of this one in a file.
    pub(super) fn note_end(&self, life: &File) -> io::Result<()> {
        let mut state = self.state.lock();
        let life = state.life.insert(life.try_clone()?);
        let life = life.try_clone()?;
        match &state.connection {
            Some(connection) => send(connection.socket.as_fd(), "life", Some(life.as_fd())),
            // The next connection begins with it.
            None => Ok(()),
        }
    }

    pub(super) fn release(&self, name: &str) {
        if let Some(connection) = &self.state.lock().connection {
            // If this fails, the process has ended, and holds nothing.
            let _ = send(connection.socket.as_fd(), &format!("release {name}"), None);
        }
    }

    /// Waits until the process has done all, and disconnects. It ends if it holds nothing.
    pub(super) fn end(&self) {
        let mut state = self.state.lock();
        state.is_ended = true;
        let Some(connection) = state.connection.take() else { return };
        let socket = connection.socket.as_fd();
        match send(socket, "end", None).and_then(|()| receive(socket)) {
            // The process ends with this connection.
            Ok(Some((text, _))) if text == "end" => drop(std::fs::remove_file(&self.path)),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "the process that holds keepsakes does not answer");
            }
        }
    }

    /// Connects to a process that holds keepsakes already, or starts one, and hands over all that
    /// it has to hold.
    fn connect(&self, state: &mut State) -> io::Result<()> {
        state.connection = None;
        let life = state.life.as_ref().map(File::try_clone).transpose()?;
        let connected = if let Ok(socket) = connect(&self.path) {
            self.adopt(state, socket, None)
        } else {
            let child = self.start()?;
            connect(&self.path).and_then(|socket| self.adopt(state, socket, Some(child)))
        };
        let handed_over = connected.and_then(|socket| {
            for (name, file) in &*self.held.lock() {
                send(socket, &format!("keep {name}"), Some(file.as_fd()))?;
            }
            life.map_or(Ok(()), |life| send(socket, "life", Some(life.as_fd())))
        });
        handed_over.inspect_err(|_| state.connection = None)
    }

    /// Starts the process. It has none of the daemon's descriptors, and neither its session nor its
    /// folder.
    fn start(&self) -> io::Result<Child> {
        let listener = packets::listen(&self.path)?;
        Command::new("/proc/self/exe")
            .arg0("fathom")
            .arg("keep")
            .arg(&self.path)
            .stdin(Stdio::from(listener))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .env_clear()
            .current_dir("/")
            .spawn()
    }

    /// Uses a connection, whose end a thread waits for.
    fn adopt<'s>(
        &self,
        state: &'s mut State,
        socket: OwnedFd,
        child: Option<Child>,
    ) -> io::Result<BorrowedFd<'s>> {
        let (watched, theirs) = UnixStream::pair()?;
        send(socket.as_fd(), "watch", Some(theirs.as_fd()))?;
        state.count += 1;
        let number = state.count;
        let link = Weak::clone(&self.weak);
        std::thread::Builder::new().name("keep".into()).stack_size(128 << 10).spawn(move || {
            watch(watched, child);
            if let Some(link) = link.upgrade() {
                link.renew(number);
            }
        })?;
        Ok(state.connection.insert(Connection { socket, number }).socket.as_fd())
    }

    /// A connection has ended. Replaces it, if it was the last one.
    fn renew(&self, number: u64) {
        let is_current = |state: &State| {
            let connection = state.connection.as_ref();
            !state.is_ended && connection.is_some_and(|connection| connection.number == number)
        };
        if !is_current(&self.state.lock()) {
            return;
        }
        std::thread::sleep(PAUSE);
        let mut state = self.state.lock();
        if !is_current(&state) {
            return;
        }
        state.renewals += 1;
        let renewed = if state.renewals > RENEWALS_MAX {
            state.connection = None;
            Err(io::Error::other("it ends again and again"))
        } else {
            self.connect(&mut state)
        };
        if let Err(error) = renewed {
            tracing::error!(
                %error,
                "there is no process that holds keepsakes: if the daemon is killed, the next one may not see \
                 that writes were lost"
            );
        } else {
            tracing::warn!("the process that holds keepsakes had ended: there is another");
        }
    }
}

/// Waits for the end of a connection, and of a process that this one has started.
fn watch(mut watched: UnixStream, child: Option<Child>) {
    let _ = watched.read(&mut [0]);
    let Some(mut child) = child else { return };
    let end = Instant::now() + PAUSE;
    // A process that has got another connection stays.
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
        std::thread::sleep(PAUSE / 50);
    }
}
