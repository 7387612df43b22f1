//! The current problems: found, compared with the known ones, and logged once when they begin and
//! once when they end.
//!
//! The first failure of a request wakes the watch, which then checks every few seconds until there
//! are no problems. While there are none it checks once a minute, because a deleted image fails no
//! request. A separate thread inspects image files, because a hanging file system would block its
//! caller.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::{Backend, BackendProblem, FailureCounts, Layer};
use fathom_control::{ErrorBody, Problem, ProblemKind, WhenFull, count};
use fathom_frontend::vhost_user::{Refusal, Server, VhostUserStatus};
use fathom_insight::change::ChangeKind;
use fathom_layers::{Cache, Tap, WaitForRoom};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::{Daemon, Served, unix_time_ns};
use crate::daemon::overlay::Strange;
use crate::daemon::stack::KeyedLayer;
use crate::features::FEATURES;
use crate::features::log::DiskLog;

/// The interval between checks while there are problems.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The interval between checks while there are no problems.
const CHECK_INTERVAL_SOUND: Duration = Duration::from_secs(60);
/// The shortest interval between checks, however many requests fail.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(500);
/// How long a check waits for the inspection of the image files.
const INSPECTION_WAIT_MAX: Duration = Duration::from_millis(200);
/// The time after which an unfinished inspection means that the file system does not respond.
const INSPECTION_TIME_MAX: Duration = Duration::from_secs(5);
/// The time without a completion after which requests in flight mean the same.
const STALL_TIME_MAX: Duration = Duration::from_secs(10);
/// The time after which an unfinished removal is a problem.
const REMOVAL_TIME_MAX: Duration = Duration::from_secs(5);
/// The time after which the search for the devices that disks lack begins again although the last
/// one has not ended.
const DEVICE_SEARCH_TIME_MAX: Duration = Duration::from_secs(300);
/// The time after which it begins again if a disk could not get the devices that were found.
const DEVICE_RETRY_TIME: Duration = Duration::from_secs(60);
/// How long failures remain a problem after the last of them.
const FAILURES_TIME: Duration = Duration::from_secs(30);
/// The problems of the whole daemon.
#[derive(Default)]
pub(crate) struct Problems {
    known: Mutex<Vec<Known>>,
    /// When the search for the devices that disks lack may begin again.
    device_search: Mutex<Option<Instant>>,
    wake: Arc<Notify>,
}

/// A problem that has been logged.
#[derive(Clone)]
struct Known {
    disk: Option<String>,
    problem: Problem,
}

impl Known {
    /// Whether a check of the disk `disk` has found this problem again. Its text may have changed.
    fn is(&self, disk: Option<&String>, found: &FoundProblem) -> bool {
        let Problem { kind, layer, cause, .. } = &self.problem;
        self.disk.as_ref() == disk
            && (*kind, layer, cause) == (found.kind, &found.layer, &found.cause)
    }

    /// What has ended, for the log.
    fn name(&self) -> String {
        let Problem { kind, layer, cause, .. } = &self.problem;
        let parts = [layer.as_str(), cause.as_str()].into_iter().filter(|part| !part.is_empty());
        let parts: Vec<&str> = parts.collect();
        let more =
            if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) };
        format!("{}{more}", kind.name())
    }
}

/// A problem that a check has found. Kind, layer and cause tell it from the others of its disk.
pub(crate) struct FoundProblem {
    pub kind: ProblemKind,
    pub layer: String,
    pub cause: String,
    pub message: String,
    pub remedy: String,
}

impl FoundProblem {
    /// A problem of which a disk has one of this kind at most.
    pub(crate) fn new(kind: ProblemKind, message: String, remedy: String) -> Self {
        Self { kind, layer: String::new(), cause: String::new(), message, remedy }
    }
}

/// The state of a disk's health between two checks.
#[derive(Default)]
pub(crate) struct Health {
    /// When the inspection in progress began.
    inspecting: Option<Instant>,
    /// The store of a layer that is being inspected; `None` for the image.
    inspected: Option<String>,
    counts: FailureCounts,
    no_space_at: Option<Instant>,
    io_at: Option<Instant>,
    /// The number of completed requests, and since when it has not changed although others are in
    /// flight.
    completed: u64,
    stalled: Option<Instant>,
}

impl Problems {
    fn known(&self) -> MutexGuard<'_, Vec<Known>> {
        self.known.lock()
    }

    /// The problems of the disk `name`; for `None` those of the daemon and of disks that are not
    /// served.
    pub(crate) fn of(&self, name: Option<&str>) -> Vec<Problem> {
        let known = self.known();
        let mine = known.iter().filter(|known| match known.problem.disk {
            Some(_) => name.is_none(),
            None => known.disk.as_deref() == name,
        });
        mine.map(|known| known.problem.clone()).collect()
    }

    /// Whether the search for the devices that disks lack begins now.
    fn begin_device_search(&self) -> bool {
        let (mut again, now) = (self.device_search.lock(), Instant::now());
        let begins = again.is_none_or(|again| now >= again);
        if begins {
            *again = Some(now + DEVICE_SEARCH_TIME_MAX);
        }
        begins
    }

    /// The search has ended. `has_failed` is whether a disk could not get its devices.
    fn end_device_search(&self, has_failed: bool) {
        let again = has_failed.then(|| Instant::now() + DEVICE_RETRY_TIME);
        *self.device_search.lock() = again;
    }

    /// Compares the current problems with the known ones, and logs the differences. Returns those
    /// that have ended, then those that have begun.
    fn compare(&self, found: Vec<(Option<String>, FoundProblem)>) -> Vec<(ChangeKind, Known)> {
        let mut known = self.known();
        let is_found = |old: &Known| found.iter().any(|(disk, new)| old.is(disk.as_ref(), new));
        let (stay, ended): (Vec<_>, Vec<_>) = known.drain(..).partition(is_found);
        *known = stay;
        for old in &ended {
            let name = old.name();
            if let Some(disk) = &old.disk {
                tracing::info!(disk = disk.as_str(), "problem ended: {name}");
            } else {
                tracing::info!("problem ended: {name}");
            }
        }
        let ended = ended.into_iter().map(|old| (ChangeKind::ProblemEnded, old));
        let mut differences: Vec<_> = ended.collect();
        for (disk, new) in found {
            let unserved = disk.clone().filter(|_| new.kind == ProblemKind::NotServed);
            if let Some(old) = known.iter_mut().find(|old| old.is(disk.as_ref(), &new)) {
                old.problem.message = new.message;
                old.problem.remedy = new.remedy;
                continue;
            }
            let FoundProblem { kind, layer, cause, message, remedy } = new;
            // The back end logged these when they occurred.
            let is_logged = matches!(kind, ProblemKind::WritesLost | ProblemKind::LossNotRecorded);
            if !is_logged {
                let name = kind.name();
                let advice = if remedy.is_empty() { String::new() } else { format!(": {remedy}") };
                if let Some(disk) = &disk {
                    tracing::error!(disk = disk.as_str(), "problem {name}: {message}{advice}");
                } else {
                    tracing::error!("problem {name}: {message}{advice}");
                }
            }
            let since_unix_time_ns = unix_time_ns();
            let problem =
                Problem { kind, message, remedy, layer, cause, disk: unserved, since_unix_time_ns };
            let new = Known { disk, problem };
            differences.push((ChangeKind::ProblemBegan, new.clone()));
            known.push(new);
        }
        differences
    }
}

impl Daemon {
    /// Checks for problems when a request has failed, every few seconds while there are problems,
    /// and once a minute otherwise.
    pub(crate) async fn watch_problems(self: Arc<Self>) {
        loop {
            // A failure of the link to a centre does not wake the watch.
            let sound = self.problems.known().is_empty()
                && !FEATURES.iter().any(|feature| feature.is_watched(&self));
            let interval = if sound { CHECK_INTERVAL_SOUND } else { CHECK_INTERVAL };
            let _ = tokio::time::timeout(interval, self.problems.wake.notified()).await;
            self.check_problems().await;
            self.begin_device_search();
            tokio::time::sleep(CHECK_INTERVAL_MIN).await;
        }
    }

    /// Looks for the devices of disks that lack them, in a thread of its own. Each wait for a disk
    /// is bounded.
    fn begin_device_search(self: &Arc<Self>) {
        let lacking: Vec<_> = self.served().into_iter().filter(|it| it.lacks_device()).collect();
        if lacking.is_empty() || !self.problems.begin_device_search() {
            return;
        }
        let daemon = Arc::clone(self);
        let search = move || {
            let failed = lacking.iter().filter(|served| !daemon.place(served)).count();
            daemon.problems.end_device_search(failed > 0);
            daemon.wake_watch();
        };
        if let Err(error) = std::thread::Builder::new().name("devices".into()).spawn(search) {
            tracing::warn!(%error, "the devices of some disks are not looked for");
        }
    }

    /// Wakes the watch for a check.
    pub(crate) fn wake_watch(&self) {
        self.problems.wake.notify_one();
    }

    /// What wakes the watch for a check.
    pub(crate) fn problem_waker(&self) -> impl Fn() + Send + Sync + 'static {
        let wake = Arc::clone(&self.problems.wake);
        move || wake.notify_one()
    }

    /// Wakes the watch when requests of a disk fail.
    pub(crate) fn watch_disk(&self, served: &Served) {
        served.disk.failures().watch(self.problem_waker());
    }

    /// Checks for problems now, and stores the result.
    pub(crate) async fn check_problems(&self) {
        let has_image = |served: &Arc<Served>| served.live().definition.image.is_some();
        let images: Vec<_> = self.served().into_iter().filter(has_image).collect();
        if !images.is_empty() {
            let (sender, inspected) = tokio::sync::oneshot::channel();
            let inspect = move || {
                for served in images {
                    // If an image hangs, this thread hangs; later checks skip the image.
                    if served.begin_inspection() {
                        served.disk.backend().inspect();
                        for layer in served.disk.layers() {
                            for store in layer.stores() {
                                served.health().inspected = Some(store_of(&*layer, &*store));
                                store.inspect();
                            }
                        }
                        let mut health = served.health();
                        (health.inspecting, health.inspected) = (None, None);
                    }
                }
                let _ = sender.send(());
            };
            if std::thread::Builder::new().name("inspect".into()).spawn(inspect).is_ok() {
                let _ = tokio::time::timeout(INSPECTION_WAIT_MAX, inspected).await;
            }
        }
        let mut found: Vec<(Option<String>, FoundProblem)> = Vec::new();
        for served in self.served() {
            let name = served.disk.name();
            found.extend(of_disk(&served).into_iter().map(|one| (Some(name.to_owned()), one)));
            let mut of_features = Vec::new();
            for feature in FEATURES {
                feature.disk_problems(self, &served, &mut of_features);
            }
            found.extend(of_features.into_iter().map(|one| (Some(name.to_owned()), one)));
        }
        found.extend(self.unserved.problems().into_iter().map(|(name, reason)| {
            let ErrorBody { message, remedy, .. } = reason;
            (Some(name), FoundProblem::new(ProblemKind::NotServed, message, remedy))
        }));
        found.extend(self.of_daemon().into_iter().map(|one| (None, one)));
        for (kind, Known { disk, problem }) in self.problems.compare(found) {
            self.note_problem(kind, disk, &problem);
        }
    }

    /// The problems of the disk `name` at the last check.
    pub(crate) fn problems_of(&self, name: &str) -> Vec<Problem> {
        self.problems.of(Some(name))
    }

    fn of_daemon(&self) -> Vec<FoundProblem> {
        let mut found = Vec::new();
        let threads = crate::process::run::failed_threads();
        if threads > 0 {
            let message =
                format!("the daemon has lost {} because of a bug", count(threads, "thread"));
            let remedy =
                "see the log, report the bug, and restart the daemon when convenient".to_owned();
            found.push(FoundProblem::new(ProblemKind::ThreadFailed, message, remedy));
        }
        found.extend(self.strange_folder());
        for feature in FEATURES {
            feature.problems(self, &mut found);
        }
        found
    }
}

impl Daemon {
    /// The folder of changes in use is not the one that the configuration had before.
    fn strange_folder(&self) -> Option<FoundProblem> {
        let folder = self.lasting.folder();
        let shown = folder.path().display();
        let message = match folder.strange()? {
            Strange::Missing(earlier) => {
                format!(
                    "the folder of changes in use, {earlier}, is gone: the disks are served as in the file"
                )
            }
            Strange::Other(earlier) => format!(
                "the folder of changes in use, {shown}, is not the one that this configuration had before, at {earlier}"
            ),
            Strange::Older => format!(
                "the folder of changes in use, {shown}, is an older copy: changes since then are missing"
            ),
        };
        let remedy = "end the daemon, restore the folder and start again. Or look at `fathom config diff`: the next change \
                      in use that lasts, or a reload, accepts what there is";
        Some(FoundProblem::new(ProblemKind::FolderReplaced, message, remedy.to_owned()))
    }
}

impl Served {
    pub(crate) fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock()
    }

    /// Marks the disk's image as being inspected. Returns false if an inspection is in progress.
    fn begin_inspection(&self) -> bool {
        let mut health = self.health();
        if health.inspecting.is_some() {
            return false;
        }
        health.inspecting = Some(Instant::now());
        true
    }
}

/// The problems of a disk. Accesses no file system.
fn of_disk(served: &Served) -> Vec<FoundProblem> {
    let disk = &served.disk;
    let (definition, parts, layers, guest) = {
        let live = served.live();
        let guest = live.server.as_ref().map(Server::status);
        (live.definition.clone(), live.parts.clone(), live.layers.clone(), guest)
    };
    let (tap, room) = (parts.get::<Tap>(), parts.get::<WaitForRoom>());
    let image = definition.image.as_deref().map(|path| path.display().to_string());
    let image = image.or_else(|| definition.nbd.clone());
    let image = image.unwrap_or_else(|| disk.backend().name().to_owned());
    let mut problems = disk.backend().problems();
    if !disk.backend().has_lost_writes() {
        problems.extend(parts.get::<DiskLog>().and_then(|log| log.problem()));
    }
    let mut found: Vec<FoundProblem> = problems.iter().map(of_backend).collect();
    let is_backend_failed = !found.is_empty();
    let now = Instant::now();
    let mut health = served.health();

    let counts = disk.failures().counts();
    let waiting = room.map_or(0, |room| room.waiting());
    if counts.no_space > health.counts.no_space {
        health.no_space_at = Some(now);
    }
    if is_backend_failed {
        // The problem of the back end explains the errors.
        health.io_at = None;
    } else if counts.io > health.counts.io {
        health.io_at = Some(now);
    }
    health.counts = counts;
    let lately = |at: Option<Instant>| at.is_some_and(|at| now - at < FAILURES_TIME);
    if waiting > 0 || lately(health.no_space_at) {
        found.push(of_space(&image, waiting, definition.when_full));
    }
    let of_layers = of_layers(&layers);
    if lately(health.io_at) {
        let stores = if of_layers.is_empty() { "" } else { ", or from a store of its layers" };
        let message = format!("requests fail with I/O errors from {image}{stores}");
        let remedy = "see the kernel's log for errors of the storage beneath".to_owned();
        found.push(FoundProblem::new(ProblemKind::IoErrors, message, remedy));
    }

    found.extend(of_layers);
    let silent = health.inspecting.is_some_and(|since| now - since > INSPECTION_TIME_MAX);
    let stalled = tap.is_some_and(|tap| health.is_stalled(&tap, waiting > 0, now));
    let inspected = health.inspected.clone().filter(|_| silent);
    drop(health);
    if let (Some(store), false) = (&inspected, stalled) {
        let message = format!("{store} does not respond");
        let remedy =
            "check whether its device, or the file system or host beneath it, hangs".to_owned();
        found.push(FoundProblem::new(ProblemKind::NotAnswering, message, remedy));
    } else if silent || stalled {
        let is_image = silent && inspected.is_none();
        found.push(not_answering(&image, is_image, &layers));
    }
    if served.withdrawal().is_some_and(|withdrawal| withdrawal.age() > REMOVAL_TIME_MAX) {
        let message = "it is being removed, but its requests in flight do not complete".to_owned();
        let remedy = "it is removed as soon as they complete".to_owned();
        found.push(FoundProblem::new(ProblemKind::Leaving, message, remedy));
    }
    found.extend(guest.into_iter().flat_map(of_guest));
    found
}

impl Health {
    /// Whether requests are in flight and none completes, although none waits for space.
    fn is_stalled(&mut self, tap: &Tap, is_waiting: bool, now: Instant) -> bool {
        let snapshot = tap.snapshot(fathom_block::Clock::System.now_ns());
        let operations = fathom_block::Operation::ALL.into_iter();
        let completed = operations
            .map(|operation| snapshot.operation(operation))
            .map(|operation| operation.count() + operation.failed())
            .sum();
        if snapshot.in_flight == 0 || completed != self.completed || is_waiting {
            self.stalled = None;
        }
        self.completed = completed;
        snapshot.in_flight > 0
            && !is_waiting
            && now - *self.stalled.get_or_insert(now) > STALL_TIME_MAX
    }
}

/// The problem of a full file system: `waiting` writes wait for space, or writes have failed.
fn of_space(image: &str, waiting: u64, when_full: WhenFull) -> FoundProblem {
    if waiting > 0 {
        let message = format!(
            "the file system of {image} is full, and writes wait for space: {}",
            count(waiting, "write")
        );
        let remedy = "free some space: the writes then continue automatically".to_owned();
        return FoundProblem::new(ProblemKind::WaitingForRoom, message, remedy);
    }
    let message = format!("writes fail: the file system of {image} is full");
    let choice = match when_full {
        WhenFull::Wait => "",
        WhenFull::Fail => "; with `when_full = \"wait\"` writes would wait for it",
    };
    FoundProblem::new(ProblemKind::Full, message, format!("free some space{choice}"))
}

/// The problems of a disk's guest.
fn of_guest(guest: VhostUserStatus) -> Vec<FoundProblem> {
    let mut found = Vec::new();
    if guest.panics > 0 {
        let message =
            format!("it has lost {} because of a bug", count(guest.panics, "queue thread"));
        let remedy = "see the log, and restart the guest".to_owned();
        found.push(FoundProblem::new(ProblemKind::QueueFailed, message, remedy));
    }
    if guest.broken_now > 0 {
        let message = format!(
            "{} of its guest carry out no requests: what the guest wrote there was invalid",
            count(guest.broken_now, "queue")
        );
        let remedy =
            "see the log, and restart the guest: a reset of its device ends this".to_owned();
        found.push(FoundProblem::new(ProblemKind::QueueInvalid, message, remedy));
    }
    if guest.blind {
        let Refusal { message, remedy, .. } = Refusal::of_private_memory();
        found.push(FoundProblem::new(ProblemKind::MemoryNotShared, message, remedy));
    }
    if let Some(refusal) = guest.refusal {
        found.push(FoundProblem::new(ProblemKind::VmmRefused, refusal.message, refusal.remedy));
    }
    found
}

/// The problem of a disk whose requests do not complete. If it `is_image`, its image does not
/// respond; otherwise it may be a store of its layers, of which one with a known problem is named
/// alone.
fn not_answering(image: &str, is_image: bool, layers: &[KeyedLayer]) -> FoundProblem {
    let names = |is_chosen: &dyn Fn(&Arc<dyn Backend>) -> bool| {
        let mut names = Vec::new();
        for (_, layer) in layers {
            let stores = layer.stores().into_iter().filter(|store| is_chosen(store));
            names.extend(stores.map(|it| store_of(&**layer, &*it)));
        }
        names
    };
    let mut suspects = if is_image { Vec::new() } else { names(&|it| !it.problems().is_empty()) };
    if suspects.is_empty() {
        suspects.push(image.to_owned());
        if !is_image {
            suspects.extend(names(&|_| true));
        }
    }
    let remedy = if suspects.len() == 1 && suspects[0] == image {
        "check whether the file system or the device beneath hangs"
    } else {
        "check whether a device, a file system, a cluster or another host hangs"
    };
    let message =
        format!("{} does not respond: requests in flight do not complete", suspects.join(", or "));
    FoundProblem::new(ProblemKind::NotAnswering, message, remedy.to_owned())
}

/// A store of a layer, for people.
fn store_of(layer: &dyn Layer, store: &dyn Backend) -> String {
    let path = Cache::of(layer).map(Cache::shared_name).filter(|path| !path.is_empty());
    format!("the store of `{}`, {}", layer.name(), path.unwrap_or(store.name()))
}

/// The problems that the layers of a disk report, and those of their stores.
fn of_layers(layers: &[KeyedLayer]) -> Vec<FoundProblem> {
    let mut found = Vec::new();
    for (number, (_, layer)) in layers.iter().enumerate() {
        let name = layer.name();
        let earlier = layers[..number].iter().filter(|(_, other)| other.name() == name).count();
        // Several layers of a kind are numbered.
        let key = if earlier == 0 { name.to_owned() } else { format!("{name} {}", earlier + 1) };
        let mut add = |cause: &str, message: String, remedy: String| {
            let kind = ProblemKind::LayerFailed;
            let (layer, cause) = (key.clone(), cause.to_owned());
            found.push(FoundProblem { kind, layer, cause, message, remedy });
        };
        for problem in layer.status().problems {
            add(problem.cause.name(), problem.message, problem.remedy);
        }
        for store in layer.stores() {
            for problem in store.problems() {
                let message = format!("the store of `{name}`: {}", problem.message());
                add(problem.name(), message, problem.remedy());
            }
        }
    }
    found
}

fn of_backend(problem: &BackendProblem) -> FoundProblem {
    let kind = match problem {
        BackendProblem::WritesLost { .. } => ProblemKind::WritesLost,
        BackendProblem::LossNotRecorded => ProblemKind::LossNotRecorded,
        BackendProblem::Deleted { .. } => ProblemKind::Deleted,
        BackendProblem::CutShort { .. } => ProblemKind::CutShort,
        BackendProblem::TakenOver { .. }
        | BackendProblem::Unreachable { .. }
        | BackendProblem::ContentWrong { .. } => ProblemKind::IoErrors,
    };
    let cause = if problem.name() == kind.name() { "" } else { problem.name() };
    let cause = cause.to_owned();
    FoundProblem { cause, ..FoundProblem::new(kind, problem.message(), problem.remedy()) }
}
