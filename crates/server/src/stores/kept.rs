//! What of an export outlives the daemon, for disks at NBD servers and images that QEMU serves.
//!
//! - The **note** says whether there are acknowledged changes that no flush covers, and over which
//!   connection they were acknowledged. It is a file beside the control socket: it has to survive
//!   the daemon, but not the host, because guests end with that. A daemon that finds such a note
//!   has to know whether the server has ended since ([`Life`]).
//! - The **record** of lost changes is where those of files are: with the image, or in the daemon's
//!   folder.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use fathom_backend::Left;
use fathom_image::LossRecord;
use fathom_nbd::{Earlier, ExportRecord};
use parking_lot::Mutex;

use super::qemu::PidFiles;
use crate::configuration::image_identity;
use crate::features::keep::connections::{self, SocketNumber};
use crate::features::keep::lives::boot_identity;

/// The longest note or record, in bytes.
const LENGTH_MAX: u64 = 8192;
/// The longest part of a file's name that is made of an export's place.
const PLACE_LENGTH_MAX: usize = 120;
/// The `errno` of changes that a server has taken with it.
const LOSS_ERRNO: i32 = libc::EIO;

/// The folder of the notes, which the control socket determines.
#[derive(Clone, Default)]
pub(crate) struct NotesFolder(Arc<OnceLock<PathBuf>>);

impl NotesFolder {
    /// The daemon with this control socket begins.
    pub(crate) fn begin(&self, control: &Path) {
        let _ = self.0.set(control.with_extension("unflushed"));
    }

    /// The folder; that of the records for a command without a daemon.
    fn get(&self, records: &Path) -> PathBuf {
        self.0.get().map_or_else(|| records.join("unflushed"), PathBuf::clone)
    }
}

/// How a later daemon knows whether the server has ended.
enum Life {
    /// By the connection: the kernel closes it when the server ends. A keepsake holds it.
    Connection,
    /// By what the storage daemon of an image removes when it ends in good order. It ends with this
    /// daemon.
    Program(Arc<PidFiles>),
}

/// Where lost changes are recorded.
enum LossPlace {
    File(PathBuf),
    /// With the image at this path, or in this folder.
    Image(PathBuf, PathBuf),
}

/// The record of an export.
pub(crate) struct KeptExport {
    disk: String,
    /// What tells the export from others.
    place: String,
    note: PathBuf,
    loss: LossPlace,
    life: Life,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    note: Option<File>,
    is_unflushed: bool,
    /// Whether all changes that are not flushed are in a log, too, which writes them again.
    is_in_log: bool,
    number: SocketNumber,
    /// The present connection.
    connection: Option<Left>,
    /// That of an earlier daemon.
    left: Option<Left>,
    /// The files of storage daemons that had ended when the server agreed on a connection.
    ended: Vec<PathBuf>,
}

/// What a note says.
struct Noted {
    is_unflushed: bool,
    is_in_log: bool,
    number: SocketNumber,
}

impl KeptExport {
    /// The record of the export at `place` (`NbdUri::place`). `records` is the daemon's folder.
    pub(crate) fn of_export(
        disk: &str,
        place: String,
        folder: &NotesFolder,
        records: &Path,
    ) -> Arc<Self> {
        let name = file_name(&place);
        let loss = LossPlace::File(records.join(format!("export-{name}.fathom-writes-lost")));
        Arc::new(Self {
            disk: disk.to_owned(),
            note: folder.get(records).join(name),
            place,
            loss,
            life: Life::Connection,
            state: Mutex::default(),
        })
    }

    /// The record of an image that a storage daemon serves. `is_in_log` is whether all changes of
    /// the disk go through a log.
    pub(super) fn of_image(
        (disk, image): (&str, &Path),
        is_in_log: bool,
        files: Arc<PidFiles>,
        folder: &NotesFolder,
        records: &Path,
    ) -> Arc<Self> {
        let (device, number) = image_identity(image).unwrap_or_default();
        let place = format!("image {device:x}-{number:x}");
        Arc::new(Self {
            disk: disk.to_owned(),
            note: folder.get(records).join(file_name(&place)),
            place,
            loss: LossPlace::Image(image.to_owned(), records.to_owned()),
            life: Life::Program(files),
            state: Mutex::new(State { is_in_log, ..State::default() }),
        })
    }

    /// What the note of an earlier daemon says; `None` if there is none of this export and this
    /// start of the host.
    fn read_note(&self) -> Option<Noted> {
        let text = read(&self.note)?;
        // What follows the first line is the rest of a longer one.
        let mut words = text.lines().next()?.splitn(4, ' ');
        let (state, boot, number) = (words.next()?, words.next()?, words.next()?);
        let (device, inode) = number.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let number = (number(device)?, number(inode)?);
        let is_own = words.next()? == self.place && Some(boot) == boot_identity().as_deref();
        let (is_unflushed, is_in_log) = (state != "F", state == "L");
        is_own.then_some(Noted { is_unflushed, is_in_log, number })
    }

    /// Writes the note anew.
    fn write_note(&self, state: &mut State) {
        let written = || -> io::Result<File> {
            let folder = self.note.parent().unwrap_or(Path::new("/"));
            match DirBuilder::new().mode(0o700).create(folder) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            let mut options = OpenOptions::new();
            options.create(true).truncate(false).write(true).mode(0o600);
            let file =
                options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&self.note)?;
            let (is, boot) = (state.letter(), boot_identity().unwrap_or_default());
            let (device, number) = state.number;
            let text = format!("{is} {boot} {device:x}-{number:x} {}\n", self.place);
            file.write_all_at(text.as_bytes(), 0)?;
            file.set_len(text.len() as u64)?;
            Ok(file)
        };
        state.note = written().inspect_err(|error| self.warn(error)).ok();
    }

    /// Writes the state into the note.
    fn renote(&self, state: &State) {
        let Some(note) = &state.note else { return };
        if let Err(error) = note.write_all_at(state.letter().as_bytes(), 0) {
            self.warn(&error);
        }
    }

    /// From now on, changes do not go through a log any more.
    pub(super) fn leave_log(&self) {
        let mut state = self.state.lock();
        if std::mem::take(&mut state.is_in_log) {
            self.renote(&state);
        }
    }

    fn warn(&self, error: &io::Error) {
        let (disk, note) = (&*self.disk, self.note.display());
        tracing::warn!(
            disk,
            %error,
            %note,
            "it is not noted what the server may still lose: if it and the daemon are killed, the next \
             daemon may not see that writes were lost"
        );
    }

    /// The image, and the places of its record.
    fn image_record(path: &Path, records: &Path) -> io::Result<(LossRecord, File)> {
        let flags = libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        Ok((LossRecord::new(&file, path, &[records.to_owned()])?, file))
    }

    /// The loss that is recorded.
    fn recorded(&self) -> Option<i32> {
        match &self.loss {
            LossPlace::File(path) => {
                let text = read(path)?;
                let (errno, place) = text.trim_end().split_once(' ')?;
                if place == self.place { errno.parse().ok() } else { None }
            }
            LossPlace::Image(path, records) => {
                let (record, file) = Self::image_record(path, records).ok()?;
                Some(record.read(&file)?.errno)
            }
        }
    }

    /// Whether the server that has acknowledged unflushed changes still has them.
    fn has_server_lived(&self, left: Option<&Left>) -> bool {
        match &self.life {
            Life::Connection => left.is_some_and(|left| connections::is_alive(&left.file)),
            Life::Program(files) => files.have_others_ended_well(),
        }
    }

    fn lose(&self, state: &mut State) -> Earlier {
        let disk = &*self.disk;
        tracing::error!(
            disk,
            "the server has ended with writes that it had acknowledged and not made durable"
        );
        match self.record_loss(LOSS_ERRNO) {
            Ok(()) => {
                state.is_unflushed = false;
                self.write_note(state);
            }
            // The note stays.
            Err(error) => {
                tracing::error!(disk, %error, "the record of lost writes cannot be stored");
            }
        }
        Earlier::Lost(LOSS_ERRNO)
    }
}

impl ExportRecord for KeptExport {
    fn examine(&self) -> Earlier {
        let (mut state, noted) = (self.state.lock(), self.read_note());
        let is_unflushed = noted.as_ref().is_some_and(|noted| noted.is_unflushed);
        if state.left.is_none() {
            state.left = noted.as_ref().and_then(|noted| connections::left(noted.number));
        }
        state.number = noted.as_ref().map_or((0, 0), |noted| noted.number);
        let is_in_log = noted.as_ref().is_some_and(|noted| noted.is_in_log);
        state.is_unflushed = is_unflushed;
        let found = if let Some(errno) = self.recorded() {
            state.is_unflushed = false;
            Earlier::Lost(errno)
        } else if !is_unflushed {
            Earlier::Nothing
        } else if self.has_server_lived(state.left.as_ref()) {
            // What is not in the log now was not written through it.
            state.is_in_log &= is_in_log;
            return Earlier::Unflushed;
        } else if is_in_log {
            state.is_unflushed = false;
            Earlier::Nothing
        } else {
            self.lose(&mut state)
        };
        connections::end(state.left.take());
        if let Life::Program(files) = &self.life {
            // A loss that could not be recorded is found again.
            if !state.is_unflushed {
                files.remove_others();
            }
        }
        found
    }

    fn let_go(&self) {
        let left = self.state.lock().left.take();
        connections::end(left);
    }

    fn agreed(&self) {
        if let Life::Program(files) = &self.life {
            self.state.lock().ended = files.ended();
        }
    }

    fn connected(&self, connection: BorrowedFd<'_>) {
        let mut state = self.state.lock();
        // Before anything is asked over the new one.
        connections::end(state.left.take());
        match &self.life {
            Life::Connection => {
                let socket = connection.try_clone_to_owned().map(File::from);
                let number = socket.as_ref().ok().and_then(|it| connections::number(it).ok());
                let copy = socket.and_then(|socket| Ok((socket.try_clone()?, socket)));
                let kept = copy.ok().and_then(|(copy, file)| {
                    Some(Left { name: connections::keep(copy, &self.disk)?, file })
                });
                state.number = number.filter(|_| kept.is_some()).unwrap_or_default();
                let before = std::mem::replace(&mut state.connection, kept);
                connections::close(before);
            }
            Life::Program(_) => PidFiles::remove(&std::mem::take(&mut state.ended)),
        }
        self.write_note(&mut state);
    }

    fn disconnected(&self) {
        let connection = self.state.lock().connection.take();
        connections::close(connection);
    }

    fn note_unflushed(&self, is_so: bool) {
        let mut state = self.state.lock();
        state.is_unflushed = is_so;
        self.renote(&state);
    }

    fn record_loss(&self, errno: i32) -> io::Result<()> {
        match &self.loss {
            LossPlace::File(path) => {
                let mut draft = path.clone().into_os_string();
                draft.push(".new");
                let text = format!("{errno} {}\n", self.place);
                fathom_image::replace_file(path, Path::new(&draft), text.as_bytes(), false)
            }
            LossPlace::Image(path, records) => {
                let (record, file) = Self::image_record(path, records)?;
                record.write(&file, errno)
            }
        }
    }

    fn clear_loss(&self) -> io::Result<()> {
        match &self.loss {
            LossPlace::File(path) => match std::fs::remove_file(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                removed => removed,
            },
            LossPlace::Image(path, records) => {
                let (record, file) = Self::image_record(path, records)?;
                record.clear(&file)
            }
        }
    }
}

impl Drop for KeptExport {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let held = [state.connection.take(), state.left.take()];
        if state.is_unflushed {
            // The export could not be opened: the next attempt asks again.
            held.into_iter().flatten().for_each(connections::leave);
            return;
        }
        held.into_iter().for_each(connections::close);
        if state.note.is_some() {
            let _ = std::fs::remove_file(&self.note);
            let _ = self.note.parent().map(std::fs::remove_dir);
        }
    }
}

impl State {
    /// The beginning of a note.
    fn letter(&self) -> &'static str {
        match (self.is_unflushed, self.is_in_log) {
            (false, _) => "F",
            (true, false) => "U",
            (true, true) => "L",
        }
    }
}

/// The content of a file of ours; `None` if there is none that can be read.
fn read(path: &Path) -> Option<String> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let mut text = String::new();
    options.open(path).ok()?.take(LENGTH_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// The name of a file for a place: what can be in a name of it, and a number that tells it from
/// others of the same beginning. The file itself has the whole place.
fn file_name(place: &str) -> String {
    // FNV-1a: the name has to be the same in later versions.
    let step = |sum: u64, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let number = place.bytes().fold(0xcbf2_9ce4_8422_2325, step);
    let plain = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '-' };
    let shown: String = place.chars().map(plain).take(PLACE_LENGTH_MAX).collect();
    format!("{shown}-{number:016x}")
}
