//! `fathom keep`: the process that holds keepsakes while there is no daemon.
//!
//! It sleeps until it gets a message. It ends by itself when it has no connection and
//! - holds nothing: after an orderly end of the daemon, or when all its files have been deleted and
//!   its connections closed;
//! - its socket has been removed, so that no daemon can find it;
//! - no daemon has come back for a day.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, StatxFlags, statx};
use rustix::net::SocketFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::link::{HELD_MAX, TIME_MAX, receive, send};
use super::{NAME_LENGTH_MAX, PREFIX, connections, descriptors, lives};

/// The highest priority; only root gets it.
const PRIORITY: i32 = -20;
/// How long a process without a daemon holds keepsakes.
const ABSENCE_MAX: Duration = Duration::from_secs(24 * 3600);
/// How long it waits for its first connection.
const FIRST_TIME_MAX: Duration = Duration::from_secs(10);
/// The first and the longest pause between two looks at its files while there is no daemon.
const PAUSE_MIN: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Hold keepsakes: the daemon starts this by itself
#[derive(Args, Clone, Debug)]
pub struct Keep {
    /// The socket, at which standard input listens
    socket: PathBuf,
}

/// Holds keepsakes until it is not needed any more.
pub fn keep(options: &Keep) -> ExitCode {
    descriptors::close_others();
    // It was started by the name of a link.
    let _ = rustix::thread::set_name(c"fathom-keep");
    // What ends the daemon's terminal or process group does not end this process.
    let _ = rustix::process::setsid();
    // It sleeps until the daemon has ended, and then has to note the time before anybody changes an
    // image.
    let _ = rustix::process::setpriority_process(None, PRIORITY);
    let standard_input = io::stdin();
    let mut holder = Holder {
        options,
        number: socket_number(options),
        held: BTreeMap::new(),
        connection: None,
        life: None,
        alone: Instant::now(),
        pause: PAUSE_MIN,
        is_first: true,
    };
    if !descriptors::is_socket(standard_input.as_fd()) {
        eprintln!("the daemon starts this by itself");
        return ExitCode::FAILURE;
    }
    while !holder.is_over() {
        holder.wait(standard_input.as_fd());
    }
    ExitCode::SUCCESS
}

struct Holder<'o> {
    options: &'o Keep,
    /// The device and the number of the socket's file.
    number: Option<(u64, u64)>,
    held: BTreeMap<String, OwnedFd>,
    /// The daemon, and one of a pair of sockets, of which it watches the other.
    connection: Option<(OwnedFd, Option<OwnedFd>)>,
    /// The file with the life of the daemon.
    life: Option<File>,
    /// Since when there is no daemon.
    alone: Instant,
    pause: Duration,
    /// Whether there was no connection yet.
    is_first: bool,
}

fn socket_number(options: &Keep) -> Option<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(&options.socket).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

impl Holder<'_> {
    fn is_over(&self) -> bool {
        if self.connection.is_some() {
            return false;
        }
        let alone = self.alone.elapsed();
        if self.is_first {
            return alone > FIRST_TIME_MAX;
        }
        let is_found = self.number.is_some() && socket_number(self.options) == self.number;
        self.held.is_empty() || alone > ABSENCE_MAX || !is_found
    }

    /// Waits for a daemon, a message, or the time of the next look at the files.
    fn wait(&mut self, listener: BorrowedFd<'_>) {
        let daemon = self.connection.as_ref().map(|(socket, _)| socket.as_fd());
        let entry = |descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
        // Without a daemon, the listener fills both places.
        let mut polls = [entry(listener), entry(daemon.unwrap_or(listener))];
        let limit = daemon.is_none().then(|| Timespec::try_from(self.pause).ok()).flatten();
        let ready = poll(&mut polls, limit.as_ref()).unwrap_or(0);
        let is_ready = polls.map(|entry| !entry.revents().is_empty());
        if ready == 0 {
            self.pause = (2 * self.pause).min(PAUSE_MAX);
            // What has been deleted is not served again.
            self.held.retain(|_, file| !is_over(file));
        }
        if self.connection.is_some() && is_ready[1] && !self.answer().unwrap_or(false) {
            self.connection = None;
            self.note_end();
            (self.alone, self.pause) = (Instant::now(), PAUSE_MIN);
        }
        if is_ready[0] {
            // The last daemon has ended, or is about to. What it has sent still counts.
            while self.has_message() && self.answer().unwrap_or(false) {}
            match accept(listener) {
                Ok(Some(socket)) => {
                    self.note_end();
                    self.connection = Some((socket, None));
                    self.is_first = false;
                }
                Ok(None) => {}
                // A lack of descriptors or memory.
                Err(_) => std::thread::sleep(PAUSE_MIN),
            }
        }
    }

    /// The daemon has ended. If it only has another connection, it soon notes that it lives.
    fn note_end(&mut self) {
        if let Some(life) = self.life.take() {
            // Without it, the next daemon reckons with some seconds more.
            let _ = lives::end(&life);
        }
    }

    fn has_message(&self) -> bool {
        self.connection.as_ref().is_some_and(|(socket, _)| {
            let mut polls = [PollFd::new(socket, PollFlags::IN)];
            poll(&mut polls, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
        })
    }

    /// Carries out a message of the daemon. Returns whether there may be another one.
    fn answer(&mut self) -> io::Result<bool> {
        let Some((socket, watched)) = &mut self.connection else { return Ok(false) };
        let Some((text, descriptor)) = receive(socket.as_fd())? else { return Ok(false) };
        let (word, name) = text.split_once(' ').unwrap_or((&text, ""));
        match (word, descriptor) {
            ("watch", Some(end)) => *watched = Some(end),
            ("keep", Some(file)) if is_name(name) && is_keepsake(&file) => {
                if self.held.len() < HELD_MAX {
                    self.held.insert(name.to_owned(), file);
                }
            }
            // Of a later version: the next daemon does not find it, and takes what it stands for
            // as lost. All else is held on.
            ("keep", Some(_)) => {}
            ("life", Some(file)) if kind(&file) == Some(FileType::RegularFile) => {
                self.life = Some(File::from(file));
            }
            ("release", None) => drop(self.held.remove(name)),
            ("list", None) => {
                for (name, file) in &self.held {
                    send(socket.as_fd(), &format!("held {name}"), Some(file.as_fd()))?;
                }
                send(socket.as_fd(), "end", None)?;
            }
            ("end", None) => {
                let answer = if self.held.is_empty() { "end" } else { "held" };
                send(socket.as_fd(), answer, None)?;
            }
            // Not a daemon of this version.
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// The next client, if it is a daemon of this user.
fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    let socket = rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?;
    // A daemon that does not read its answers must not stop this process.
    set_socket_timeout(&socket, Timeout::Send, Some(TIME_MAX))?;
    let is_trusted = descriptors::is_trusted(socket.as_fd());
    Ok(is_trusted.then_some(socket))
}

fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    name.starts_with(PREFIX) && name.len() <= NAME_LENGTH_MAX && name.bytes().all(is_plain)
}

/// What is known of a file. Does not ask its server, which may hang.
fn known(file: &OwnedFd) -> Option<(FileType, u32)> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let known = statx(file, c"", flags, StatxFlags::TYPE | StatxFlags::NLINK).ok()?;
    Some((FileType::from_raw_mode(known.stx_mode.into()), known.stx_nlink))
}

fn kind(file: &OwnedFd) -> Option<FileType> {
    known(file).map(|(kind, _)| kind)
}

/// Whether it is a file, a block device or a connection.
fn is_keepsake(file: &OwnedFd) -> bool {
    let kinds = [FileType::RegularFile, FileType::BlockDevice, FileType::Socket];
    kind(file).is_some_and(|kind| kinds.contains(&kind))
}

/// Whether it is a file without a name, or a connection that the other side has closed.
fn is_over(file: &OwnedFd) -> bool {
    match known(file) {
        Some((FileType::RegularFile, links)) => links == 0,
        Some((FileType::Socket, _)) => connections::has_ended(file.as_fd(), Duration::ZERO),
        _ => false,
    }
}
