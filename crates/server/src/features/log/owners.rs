//! The logs that the configuration names, and whose changes they have. A block device has its mark
//! in another place, which may be lost, and an image loses its mark when it is copied without
//! attributes; but the log knows its device or image.
//!
//! All known logs are asked side by side, each by a thread of its own, for a limited time: a log on
//! a device or a server that hangs delays the opening of a device by that time, and a log has one
//! such thread at most. A log that does not answer is a doubt of the disk: it is served, because a
//! mark is rarely lost and one log must not keep all devices of the host from their guests, but the
//! doubt is a problem of it, and the log is asked again until it has answered.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode};
use fathom_layers::wal::{Owner, owner_in, owner_of_changes};
use parking_lot::{Condvar, Mutex};

use super::volumes::{OpenVolume, export_volume};
use super::{WalDefinition, in_cache};
use crate::configuration::layers;
use crate::daemon::stack::refusal;

/// How long a log may take to answer while a device is opened.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// The time between two questions to a log that has not answered.
const AGAIN: Duration = Duration::from_secs(3);
/// How long a log in a cluster is awaited that its own disk is about to open: not longer than its
/// answer.
const OPEN_TIME_MAX: Duration = Duration::from_millis(4500);
/// The interval at which it is looked for.
const OPEN_INTERVAL: Duration = Duration::from_millis(50);

/// The place of a log: its volume, and its offset in bytes.
type LogPlace = (PathBuf, u64);
/// The owners of the changes in a log, or why they are not known.
type Owners = Result<Vec<Owner>, String>;

/// The known logs.
#[derive(Default)]
pub(super) struct KnownLogs {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    logs: Mutex<BTreeMap<LogPlace, Known>>,
    /// The doubts of disks, by their names.
    doubts: Mutex<BTreeMap<String, Doubt>>,
    /// Whether a thread asks again the logs that have not answered.
    is_asking: AtomicBool,
}

/// A log.
#[derive(Clone)]
struct Known {
    wal: WalDefinition,
    /// Its open volume, if it is not a file that is read anew.
    volume: Arc<Mutex<OpenVolume>>,
    /// The question that is being answered.
    question: Option<Arc<Question>>,
}

impl Known {
    fn new(wal: WalDefinition, place: impl FnOnce(PathBuf) -> Arc<Mutex<OpenVolume>>) -> Self {
        let volume = if wal.server().is_some() { place(wal.log.clone()) } else { Arc::default() };
        Self { wal, volume, question: None }
    }
}

/// A question to a log.
#[derive(Default)]
struct Question {
    owners: Mutex<Option<Owners>>,
    answered: Condvar,
}

/// A disk on a device or image without a mark, for which logs have not answered.
struct Doubt {
    image: PathBuf,
    /// The name of the device or image in the superblocks of logs.
    home: String,
    /// The logs, each with the reason.
    silent: BTreeMap<LogPlace, String>,
    /// The answer of a log that has changes of the device: the disk should not be served.
    refused: Option<ErrorBody>,
}

impl KnownLogs {
    /// Remembers the log of a disk. `place` is that of the log's volume.
    pub(super) fn add(
        &self,
        definition: &DiskDefinition,
        place: impl FnOnce(PathBuf) -> Arc<Mutex<OpenVolume>>,
    ) {
        let Some(wal) = layers::wal(definition) else { return };
        let at = (wal.log.clone(), wal.offset.0);
        let mut logs = self.inner.logs.lock();
        if let Some(known) = logs.get_mut(&at) {
            known.wal = wal;
            return;
        }
        logs.insert(at, Known::new(wal, place));
    }

    /// Refuses a device without a mark whose changes are in a log. `home` is the device's name in
    /// logs.
    pub(super) fn check(&self, disk: &str, image: &Path, home: &str) -> Result<(), ErrorBody> {
        let end = Instant::now() + ANSWER_TIME_MAX;
        let places: Vec<LogPlace> = self.inner.logs.lock().keys().cloned().collect();
        let questions: Vec<_> = places.iter().map(|place| self.inner.ask(place)).collect();
        let mut doubt = Doubt::new(image, home);
        for (place, question) in places.into_iter().zip(questions) {
            doubt.note(place, question.wait(end));
        }
        if let Some(refused) = doubt.refused {
            return Err(refused);
        }
        if doubt.silent.is_empty() {
            self.inner.doubts.lock().remove(disk);
        } else {
            self.inner.doubts.lock().insert(disk.to_owned(), doubt);
            self.ask_again();
        }
        Ok(())
    }

    /// Whether a log has changes of a disk, whose image has no mark. `home` is the image's name in
    /// logs. `None` if the log does not answer, which is a doubt of the disk.
    pub(super) fn has_changes(
        &self,
        wal: &WalDefinition,
        place: impl FnOnce(PathBuf) -> Arc<Mutex<OpenVolume>>,
        (disk, image, home): (&str, &Path, &str),
    ) -> Option<bool> {
        let at = (wal.log.clone(), wal.offset.0);
        {
            let mut logs = self.inner.logs.lock();
            logs.entry(at.clone()).or_insert_with(|| Known::new(wal.clone(), place));
        }
        let owners = self.inner.ask(&at).wait(Instant::now() + ANSWER_TIME_MAX);
        if let Ok(owners) = &owners {
            return Some(owners.iter().any(|owner| owner.is_home(home)));
        }
        let mut doubts = self.inner.doubts.lock();
        let doubt = doubts.entry(disk.to_owned()).or_insert_with(|| Doubt::new(image, home));
        doubt.note(at, owners);
        drop(doubts);
        self.ask_again();
        None
    }

    /// The disk is served with this log, so that nothing is uncertain about it.
    pub(super) fn is_used(&self, disk: &str, wal: &WalDefinition) {
        let mut doubts = self.inner.doubts.lock();
        let Some(doubt) = doubts.get_mut(disk) else { return };
        doubt.refused = None;
        doubt.silent.remove(&(wal.log.clone(), wal.offset.0));
        if doubt.silent.is_empty() {
            doubts.remove(disk);
        }
    }

    /// Why it is not certain that a disk is served with all its changes: a message and a remedy.
    pub(super) fn doubt(&self, disk: &str) -> Option<(String, String)> {
        let doubts = self.inner.doubts.lock();
        let doubt = doubts.get(disk)?;
        if let Some(ErrorBody { message, remedy, .. }) = doubt.refused.clone() {
            let remedy = format!("end its guests, and remove the disk at once; then {remedy}");
            return Some((message, remedy));
        }
        let logs = doubt.silent.iter().map(|((path, _), why)| format!("{}: {why}", path.display()));
        let logs = logs.collect::<Vec<_>>().join("; ");
        let message = format!(
            "it is not known whether a log has changes of {}, which has no mark: {logs}",
            doubt.image.display()
        );
        let remedy = "make the log answer, or remove the disk with it from the configuration and restart: it is asked \
                      every few seconds";
        Some((message, remedy.into()))
    }

    /// Starts the thread that asks again until there is no doubt, unless it runs.
    fn ask_again(&self) {
        if self.inner.is_asking.swap(true, Ordering::AcqRel) {
            return;
        }
        let inner = Arc::downgrade(&self.inner);
        let spawned = thread::Builder::new().name("owners".into()).spawn(move || again(&inner));
        if let Err(error) = spawned {
            self.inner.is_asking.store(false, Ordering::Release);
            tracing::warn!(%error, "logs that do not answer are not asked again");
        }
    }
}

/// Asks logs that have not answered until all have.
fn again(inner: &Weak<Inner>) {
    loop {
        thread::sleep(AGAIN);
        let Some(inner) = inner.upgrade() else { return };
        let silent = |doubt: &Doubt| doubt.silent.keys().cloned().collect::<Vec<_>>();
        let mut places: Vec<LogPlace> = inner.doubts.lock().values().flat_map(silent).collect();
        places.sort();
        places.dedup();
        let end = Instant::now() + ANSWER_TIME_MAX;
        let questions: Vec<_> = places.iter().map(|place| inner.ask(place)).collect();
        for (place, question) in places.into_iter().zip(questions) {
            let owners = question.wait(end);
            for doubt in inner.doubts.lock().values_mut() {
                if doubt.silent.remove(&place).is_some() {
                    doubt.note(place.clone(), owners.clone());
                }
            }
        }
        let mut doubts = inner.doubts.lock();
        doubts.retain(|_, doubt| doubt.refused.is_some() || !doubt.silent.is_empty());
        if doubts.is_empty() {
            // Under the lock, so that a doubt that comes now starts another thread.
            inner.is_asking.store(false, Ordering::Release);
            return;
        }
    }
}

impl Doubt {
    fn new(image: &Path, home: &str) -> Self {
        let (image, home) = (image.to_owned(), home.to_owned());
        Self { image, home, silent: BTreeMap::new(), refused: None }
    }

    /// A log has answered, or has not.
    fn note(&mut self, place: LogPlace, owners: Owners) {
        let owners = match owners {
            Ok(owners) => owners,
            Err(reason) => {
                self.silent.insert(place, reason);
                return;
            }
        };
        let Some(owner) = owners.into_iter().find(|owner| owner.is_home(&self.home)) else {
            return;
        };
        let (shown, log, name) = (self.image.display(), place.0.display(), owner.name);
        self.refused = Some(refusal(
            ErrorCode::Failed,
            format!(
                "{shown} alone is out of date: the log at {log} has changes of it, for the disk {name:?}, although \
                 {shown} has no mark"
            ),
            format!(
                "serve it as the disk {name:?} with that log, and then remove the layer or shut down the daemon: both \
                 write the changes back"
            ),
        ));
    }
}

impl Inner {
    /// Asks a log, unless it is being asked.
    fn ask(&self, place: &LogPlace) -> Arc<Question> {
        let mut logs = self.logs.lock();
        let Some(known) = logs.get_mut(place) else { return Question::answered(Ok(Vec::new())) };
        let in_progress = known.question.clone().filter(|question| !question.is_answered());
        if let Some(question) = in_progress {
            return question;
        }
        let question = Arc::<Question>::default();
        let (ours, wal, volume) = (Arc::clone(&question), known.wal.clone(), known.volume.clone());
        let ask = move || ours.answer(read(&wal, &volume).map_err(|error| error.to_string()));
        match thread::Builder::new().name("owner".into()).spawn(ask) {
            Ok(_) => {
                known.question = Some(Arc::clone(&question));
                question
            }
            Err(error) => Question::answered(Err(format!("no thread could be started: {error}"))),
        }
    }
}

impl Question {
    fn answered(owners: Owners) -> Arc<Self> {
        Arc::new(Self { owners: Mutex::new(Some(owners)), answered: Condvar::new() })
    }

    fn is_answered(&self) -> bool {
        self.owners.lock().is_some()
    }

    fn answer(&self, owners: Owners) {
        *self.owners.lock() = Some(owners);
        self.answered.notify_all();
    }

    /// Waits for the answer until `end`.
    fn wait(&self, end: Instant) -> Owners {
        let left = end.saturating_duration_since(Instant::now());
        let mut owners = self.owners.lock();
        self.answered.wait_while_for(&mut owners, |owners| owners.is_none(), left);
        owners.clone().unwrap_or_else(|| Err("it does not answer".into()))
    }
}

/// The owners of the changes in a log. Blocks.
fn read(wal: &WalDefinition, volume: &Arc<Mutex<OpenVolume>>) -> io::Result<Vec<Owner>> {
    let offset = wal.offset.0;
    if let Some(export) = wal.export() {
        // A server may accept only one connection: the log's disk uses the same.
        let volume = export_volume(volume, export)?;
        return Ok(owner_in(volume.backend(), offset)?.into_iter().collect());
    }
    if wal.cluster.is_some() {
        // To open a volume takes it from whoever has it. That is left to the log's disk.
        let end = Instant::now() + OPEN_TIME_MAX;
        loop {
            let open = volume.lock().volume.upgrade();
            if let Some(volume) = open {
                return Ok(owner_in(volume.backend(), offset)?.into_iter().collect());
            }
            if Instant::now() > end {
                return Err(io::Error::other("it is not open"));
            }
            thread::sleep(OPEN_INTERVAL);
        }
    }
    let offsets = if wal.is_in_cache { in_cache::log_offsets(&wal.log) } else { Ok(vec![offset]) };
    let owners = offsets.and_then(|offsets| {
        let owners = offsets.into_iter().map(|offset| owner_of_changes(&wal.log, offset));
        Ok(owners.collect::<io::Result<Vec<_>>>()?.into_iter().flatten().collect())
    });
    match owners {
        // No log has been made yet, or its device is missing: then its own disk is not served.
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof) =>
        {
            Ok(Vec::new())
        }
        owners => owners,
    }
}
