//! Who has changed what: each request that changes something, with the user who sent it and what
//! came of it, and the starts and ends of the daemon.
//!
//! The entries are lines of JSON in a file of the state folder, which is replaced when it has
//! [`FILE_LENGTH_MAX`](file::FILE_LENGTH_MAX) bytes; one older file stays. A thread writes them, so
//! that a folder that hangs delays no request: what does not fit into its queue is counted as lost.
//! Each entry is also a line of the log.
//!
//! `file` is the file, and what is read of it.

pub(crate) mod feature;
mod file;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fathom_control::{
    AUDIT_ENTRIES_MAX, AuditEntry, AuditQuery, AuditReport, ErrorBody, ErrorCode, ProblemKind,
};
use parking_lot::Mutex;

use self::file::AuditFile;
use crate::daemon::Daemon;
use crate::daemon::problems::FoundProblem;
use crate::daemon::stack::refusal;
use crate::daemon::status::unix_time_ns;
use crate::process::group::user_name;

/// The most entries that wait to be written.
const QUEUE_MAX: usize = 1024;
/// How long the end of the daemon waits for the last entries.
const END_TIME_MAX: Duration = Duration::from_secs(2);
/// The names of the files: this, and what the folder of the daemon's records has behind its own.
const PREFIX: &str = "audit-";
const SUFFIX: &str = ".jsonl";

/// What a thread gets to do.
enum Work {
    Write(Box<AuditEntry>),
    /// The entries before it are durable when the sender is dropped.
    Finish(SyncSender<()>),
}

/// The audit log of the daemon.
#[derive(Default)]
pub(crate) struct Audit {
    path: OnceLock<PathBuf>,
    /// The queue of the thread, which begins with the first entry.
    queue: Mutex<Option<SyncSender<Work>>>,
    lost: AtomicU64,
    /// Whether the last attempt to write has failed, and why.
    problem: Mutex<String>,
    is_failing: AtomicBool,
}

impl Audit {
    fn path(&self) -> &Path {
        self.path.get().map_or(Path::new(""), PathBuf::as_path)
    }

    fn set_path(&self, records: &Path) {
        let name = records.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        let name = name.strip_prefix("live-").unwrap_or(&name);
        let _ = self.path.set(records.with_file_name(format!("{PREFIX}{name}{SUFFIX}")));
    }

    /// Gives an entry to the thread, which `start` starts.
    fn push(&self, entry: AuditEntry, start: impl FnOnce(Receiver<Work>) -> std::io::Result<()>) {
        let mut queue = self.queue.lock();
        if queue.is_none() {
            let (sender, receiver) = sync_channel(QUEUE_MAX);
            match start(receiver) {
                Ok(()) => *queue = Some(sender),
                Err(error) => self.lose(&format!("its thread cannot be started: {error}")),
            }
        }
        let sent = queue.as_ref().map(|queue| queue.try_send(Work::Write(Box::new(entry))));
        if let Some(Err(_)) = sent {
            self.lose("its folder does not answer");
        }
    }

    /// An entry is lost. That is logged once until entries are written again.
    fn lose(&self, why: &str) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        why.clone_into(&mut self.problem.lock());
        if !self.is_failing.swap(true, Ordering::Relaxed) {
            tracing::error!("{} gets no entries: {why}", self.path().display());
        }
    }

    /// The problem that entries are missing from now on, until entries are written again.
    fn problem(&self) -> Option<FoundProblem> {
        let problem = self.problem.lock().clone();
        if problem.is_empty() {
            return None;
        }
        let message =
            format!("changes are not in the audit log {}: {problem}", self.path().display());
        let remedy = "let the daemon write to that file, and make space; the log of the daemon has \
                      the changes too";
        Some(FoundProblem::new(ProblemKind::AuditLost, message, remedy.into()))
    }

    /// Writes what comes, until the daemon ends.
    fn write_all(&self, work: &Receiver<Work>) {
        let mut file = AuditFile::new(self.path());
        let mut batch = Vec::new();
        while let Ok(first) = work.recv() {
            batch.push(first);
            batch.extend(work.try_iter().take(QUEUE_MAX));
            let (mut entries, mut waiting) = (Vec::new(), Vec::new());
            for work in batch.drain(..) {
                match work {
                    Work::Write(mut entry) => {
                        entry.user = entry.user_id.and_then(user_name).unwrap_or_default();
                        entries.push(*entry);
                    }
                    Work::Finish(sender) => waiting.push(sender),
                }
            }
            match file.append(&entries) {
                Ok(()) if !entries.is_empty() => {
                    self.is_failing.store(false, Ordering::Relaxed);
                    self.problem.lock().clear();
                }
                Ok(()) => {}
                Err(error) => entries.iter().for_each(|_| self.lose(&error.to_string())),
            }
            drop(waiting);
        }
    }

    /// Waits for a short time until all entries are durable.
    fn finish(&self) -> Result<(), String> {
        let Some(queue) = self.queue.lock().clone() else { return Ok(()) };
        let (sender, receiver) = sync_channel(0);
        let sent = queue.try_send(Work::Finish(sender));
        let finished =
            sent.is_ok() && receiver.recv_timeout(END_TIME_MAX) != Err(RecvTimeoutError::Timeout);
        if finished { Ok(()) } else { Err(format!("{} hangs", self.path().display())) }
    }

    fn report(&self, query: AuditQuery) -> Result<AuditReport, ErrorBody> {
        let count = query.count.min(AUDIT_ENTRIES_MAX) as usize;
        let path = self.path();
        let found = file::read(path, count, query.after.unwrap_or(0)).map_err(|error| {
            let message = format!("{} cannot be read: {error}", path.display());
            refusal(ErrorCode::Failed, message, "let the daemon's user read that file")
        })?;
        Ok(AuditReport {
            path: path.display().to_string(),
            problem: self.problem.lock().clone(),
            lost: self.lost.load(Ordering::Relaxed),
            unreadable: found.unreadable,
            entries: found.entries,
        })
    }
}

impl Daemon {
    /// Notes a request that has ended, in the log and in the audit log.
    fn audit(&self, entry: AuditEntry) {
        let AuditEntry { user_id, process_id, command, request, status, error, .. } = &entry;
        // Signals, starts and ends have lines of their own.
        if user_id.is_some() {
            tracing::info!(user_id, process_id, command, status, error, "audit: {request}");
        }
        let audit = self.part::<Arc<Audit>>();
        let writer = Arc::clone(audit);
        audit.push(entry, |work| {
            let thread = std::thread::Builder::new().name("audit".into());
            thread.spawn(move || writer.write_all(&work)).map(drop)
        });
    }

    /// Notes something that is no request: a signal, the start or the end.
    pub(crate) fn audit_own(&self, request: &str) {
        let request = request.to_owned();
        self.audit(AuditEntry { unix_time_ns: unix_time_ns(), request, ..AuditEntry::default() });
    }
}
