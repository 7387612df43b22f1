//! The devices beneath the disks.

pub(crate) mod feature;
pub(crate) mod metrics;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use fathom_block::Clock;
use fathom_control::{DeviceActivity, DeviceList, DeviceStatus};
use fathom_devices::{Medium, MediumKind, Placement, SysDevices};
use fathom_insight::change::{Author, ChangeKind};
use fathom_layers::Tap;
use parking_lot::{Mutex, MutexGuard};

use crate::daemon::change_log::Note;
use crate::daemon::{Daemon, Served, stack};
use crate::features::background::BackgroundWork;
use crate::stores::location::locations;

/// How long a report waits for the search for devices. Searches that take longer continue.
const SEARCH_TIME_MAX: Duration = Duration::from_millis(500);
/// The time after which another thread continues a search with the next disk.
const SEARCH_STEP: Duration = Duration::from_millis(100);

/// What a disk lies on, as far as it is known.
#[derive(Default)]
pub(crate) struct Beneath {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    image: Option<Placement>,
    log: Option<Placement>,
    is_searching: bool,
}

impl Beneath {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }
}

impl Served {
    /// What is known of what it lies on.
    fn beneath(&self) -> Arc<Beneath> {
        self.part().unwrap_or_default()
    }

    /// Finds out what the disk lies on. May hang with its file system.
    fn find_devices(&self) {
        let definition = self.live().definition.clone();
        let (image, log) = locations(&definition);
        let (image, log) = (image.find(), log.map(|log| log.find()));
        let beneath = self.beneath();
        let mut known = beneath.known();
        *known = Known { image: Some(image), log, is_searching: false };
    }

    /// Whether a layer of the disk lacks the devices beneath it.
    pub(crate) fn lacks_device(&self) -> bool {
        self.live().layers.iter().any(|(_, layer)| stack::lacks_device(&**layer))
    }

    /// Marks a search as begun. Returns false if there is one already.
    fn begin_search(&self) -> bool {
        let beneath = self.beneath();
        let mut known = beneath.known();
        !std::mem::replace(&mut known.is_searching, true)
    }

    /// Whether the image lies on `medium`, as far as it is known.
    pub(crate) fn lies_on(&self, medium: &Medium) -> bool {
        let beneath = self.beneath();
        let known = beneath.known();
        known.image.as_ref().is_some_and(|image| image.media.contains(medium))
    }

    /// The placements of the image and of the log.
    pub(crate) fn placements(&self) -> (Placement, Option<Placement>) {
        let beneath = self.beneath();
        let known = beneath.known();
        let hangs = || Placement::unknown("its file system does not answer");
        (known.image.clone().unwrap_or_else(hangs), known.log.clone())
    }
}

impl Daemon {
    /// Finds out what all disks lie on. Waits for a limited time; a file system that hangs delays
    /// only its own disks.
    pub(crate) fn find_devices(&self) {
        let end = Instant::now() + SEARCH_TIME_MAX;
        let disks: VecDeque<Arc<Served>> = self.served().into();
        let waiting = Arc::new(Mutex::new(disks));
        while Instant::now() < end {
            let (sender, found) = sync_channel::<()>(1);
            let for_thread = Arc::clone(&waiting);
            let search = move || {
                loop {
                    // The lock is held only for this line.
                    let next = for_thread.lock().pop_front();
                    let Some(served) = next else { break };
                    if served.begin_search() {
                        served.find_devices();
                    }
                }
                let _ = sender.send(());
            };
            if std::thread::Builder::new().name("devices".into()).spawn(search).is_err() {
                return;
            }
            let begun = Instant::now();
            loop {
                if found.recv_timeout(SEARCH_STEP).is_ok() {
                    return;
                }
                let is_rest_empty = waiting.lock().is_empty();
                let now = Instant::now();
                if now >= end {
                    return;
                }
                if !is_rest_empty && now - begun >= SEARCH_STEP {
                    break;
                }
            }
        }
    }

    /// Gives a disk that lacks the devices beneath it a layer with these devices, if they are
    /// found. Returns false if they are found but the layer could not be replaced.
    pub(crate) fn place(&self, served: &Arc<Served>) -> bool {
        let name = served.disk.name();
        let definition = served.live().definition.clone();
        if !stack::finds_device(&definition) {
            return true;
        }
        // Another change may replace the layer or the disk meanwhile.
        let Ok(_change) = self.change(name) else { return true };
        let Ok(found) = self.find(name) else { return true };
        let is_left = !Arc::ptr_eq(&found, served) || served.withdrawal().is_some();
        if is_left || !served.lacks_device() {
            return true;
        }
        let definition = served.live().definition.clone();
        match self.restack(served, definition) {
            Ok(()) => {
                tracing::info!(disk = name, "the devices beneath it have been found");
                let definition = served.live().definition.clone();
                let found = Note::new(ChangeKind::DiskChanged, Author::Daemon).of(&definition);
                self.note_change(&found.with_text("the devices beneath it have been found"));
                true
            }
            Err(refused) => {
                let reason = refused.message;
                tracing::warn!(disk = name, "does not get the devices beneath it: {reason}");
                false
            }
        }
    }

    /// The devices beneath all disks now. Waits for a limited time for file systems.
    pub(crate) fn devices(&self) -> DeviceList {
        self.find_devices();
        let mut found: BTreeMap<Medium, DeviceStatus> = BTreeMap::new();
        let time_ns = Clock::System.now_ns();
        for served in self.served() {
            let name = served.disk.name();
            let (image, log) = served.placements();
            let tap = served.part::<Tap>();
            let in_flight = tap.map_or(0, |tap| tap.counts().in_flight);
            for medium in &image.media {
                let device = found.entry(medium.clone()).or_default();
                device.disks.push(name.to_owned());
                device.in_flight += in_flight;
                if in_flight > 0 {
                    device.in_flight_of.insert(name.to_owned(), in_flight);
                }
                extend(device, &image, name);
            }
            if let Some(log) = log {
                for medium in &log.media {
                    let device = found.entry(medium.clone()).or_default();
                    device.logs.push(name.to_owned());
                    extend(device, &log, name);
                }
            }
        }
        let sys = SysDevices::default();
        let devices = found.into_iter().map(|(medium, mut device)| {
            device.idle_time = self.part::<BackgroundWork>().idle_time(&medium);
            if medium.kind == MediumKind::Device {
                let facts = sys.facts(&medium.name);
                (device.size_bytes, device.rotational) = (facts.size_bytes, facts.rotational);
                device.host = sys.activity(&medium.name).map(activity);
            }
            DeviceStatus { kind: medium.kind.name().into(), name: medium.name, ..device }
        });
        DeviceList {
            time_ns,
            unix_time_ns: crate::daemon::unix_time_ns(),
            devices: devices.collect(),
        }
    }
}

/// Adds the facts of one store to a device's.
fn extend(device: &mut DeviceStatus, placement: &Placement, disk: &str) {
    for through in &placement.through {
        if !device.through.contains(through) {
            device.through.push(through.clone());
        }
    }
    device.problems.extend(placement.problem.as_ref().map(|problem| format!("{disk}: {problem}")));
}

fn activity(host: fathom_devices::HostActivity) -> DeviceActivity {
    DeviceActivity {
        in_flight: host.in_flight,
        reads: host.reads,
        read_bytes: host.read_bytes,
        writes: host.writes,
        written_bytes: host.written_bytes,
        discards: host.discards,
        flushes: host.flushes,
        busy_ms: host.busy_ms,
        depth_ms: host.depth_ms,
    }
}
