//! Carries the load of disks elsewhere: by hand, and when a model foresees a peak of their device.
//!
//! A thread follows the devices beneath disks whose layer `offload` has `auto`. It sleeps while
//! there is no such disk, and looks seldom while nothing happens. What was started by hand is only
//! stopped by hand.

pub(crate) mod feature;
pub(crate) mod history;
pub(crate) mod metrics;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use fathom_block::Clock;
use fathom_control::{
    Done, ErrorBody, ErrorCode, OffloadAction, OffloadAnswer, OffloadDisk, OffloadForecast,
    OffloadHistory, OffloadReport, OffloadRequest, OffloadState,
};
use fathom_devices::contention::forecast::default_forecast;
use fathom_devices::contention::{
    Batch, Carriable, Contention, ContentionOptions, Times, Verdict, VerdictBasis,
};
use fathom_layers::Offload;
use fathom_layers::offload::{CarryKind, OffloadState as LayerState};
use fathom_layers::wal::RECOVERY_PAUSE_MAX;
use parking_lot::Mutex;

use super::offload::history::History;
use crate::configuration::layers;
use crate::daemon::stack::refusal;
use crate::daemon::status::unix_time_ns;
use crate::daemon::view::View;
use crate::daemon::{Daemon, Served};
use crate::features::background::Scheduled;
use crate::features::log::{AutoKind, DiskLog, LogVolumes, OffloadDefinition};
use crate::stores::clusters::{ClusterPlace, Clusters};

/// The interval between two looks at a device while its disks are used.
const STEP: Duration = Duration::from_millis(100);
/// The same while they are not.
const STEP_IDLE: Duration = Duration::from_secs(1);
/// The time without requests after which disks count as not used.
const IDLE_TIME: Duration = Duration::from_secs(10);
/// How long a disk that an operator has stopped is not carried again by a forecast.
const REST: Duration = Duration::from_secs(60);
/// A disk is carried at least this long, because each change has a cost.
const CARRY_TIME_MIN: Duration = Duration::from_secs(5);
/// How long a start by hand waits until the log has been tried out, and the interval at which it
/// looks.
const TRIAL_TIME_MAX: Duration = Duration::from_secs(5);
const TRIAL_INTERVAL: Duration = Duration::from_millis(2);

/// Who has started to carry a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Starter {
    Hand,
    Forecast,
}

impl Starter {
    fn name(self) -> &'static str {
        match self {
            Self::Hand => "hand",
            Self::Forecast => "forecast",
        }
    }
}

/// What is known of a disk beside its layer's state.
#[derive(Clone, Debug, Default)]
struct Known {
    starter: Option<Starter>,
    starts: u64,
    /// When it was last started or stopped.
    since: Option<Instant>,
    since_unix_time_ns: u64,
    /// When it was last stopped by hand, or its log was not fit.
    stopped: Option<Instant>,
    /// Whether it was reported that it would be carried.
    is_reported: bool,
    forecast: Option<OffloadForecast>,
    history: History,
}

impl Known {
    fn start(&mut self, starter: Starter) {
        self.starter = Some(starter);
        self.starts += 1;
        self.since = Some(Instant::now());
        self.since_unix_time_ns = unix_time_ns();
    }

    fn stop(&mut self, starter: Starter) {
        self.starter = None;
        let now = Instant::now();
        self.since = Some(now);
        self.since_unix_time_ns = unix_time_ns();
        if starter == Starter::Hand {
            self.stopped = Some(now);
        }
    }

    /// Whether a forecast may start it now.
    fn may_start(&self) -> bool {
        self.starter.is_none() && self.stopped.is_none_or(|at| at.elapsed() >= REST)
    }

    /// Whether a forecast may stop it now.
    fn may_stop(&self) -> bool {
        self.starter == Some(Starter::Forecast)
            && self.since.is_none_or(|at| at.elapsed() >= CARRY_TIME_MIN)
    }
}

/// The offloads of the daemon.
#[derive(Default)]
pub(crate) struct Offloads {
    daemon: OnceLock<Weak<Daemon>>,
    known: Mutex<BTreeMap<String, Known>>,
    thread: OnceLock<Option<Thread>>,
}

/// A disk with the layer `offload`.
struct Carried {
    served: Arc<Served>,
    offload: Offload,
    options: OffloadDefinition,
}

/// The disk's layer and its options, if it has the layer.
fn carried(served: Arc<Served>) -> Option<Carried> {
    let (offload, options) = {
        let live = served.live();
        let offload = live.parts.get::<DiskLog>()?.offload.clone()?;
        (offload, layers::offload(&live.definition)?)
    };
    Some(Carried { served, offload, options })
}

impl Carried {
    fn name(&self) -> &str {
        self.served.disk.name()
    }

    /// The shares of its requests that can be carried. Which reads would hit is not known; those of
    /// late do.
    fn carriable(&self) -> Carriable {
        let carry = self.options.carry;
        let (reads, writes) = (carry.has_reads(), carry.has_writes());
        let share = |is: bool, share: f64| if is { share } else { 0.0 };
        Carriable { reads: share(reads, self.offload.warmth()), writes: share(writes, 1.0) }
    }

    /// Waits for a moment until the log has been tried out.
    fn wait_for_trial(&self) {
        let begun = Instant::now();
        while self.offload.is_tried_out() && begun.elapsed() < TRIAL_TIME_MAX {
            thread::sleep(TRIAL_INTERVAL);
        }
    }

    fn report(&self, known: &Known) -> OffloadDisk {
        let status = self.offload.status();
        OffloadDisk {
            disk: self.name().to_owned(),
            vm: self.served.disk.vm().to_owned(),
            state: match status.state {
                LayerState::Resting => OffloadState::Resting,
                LayerState::Carrying => OffloadState::Carrying,
                LayerState::Returning => OffloadState::Returning,
            },
            carries: self.options.carry.name().to_owned(),
            // Its log may have failed since it was started.
            by: match (known.starter, status.state) {
                (Some(starter), LayerState::Carrying) => starter.name().to_owned(),
                (Some(starter), _) if self.offload.is_tried_out() => starter.name().to_owned(),
                _ => String::new(),
            },
            since_unix_time_ns: known.since_unix_time_ns,
            starts: known.starts,
            log_used_bytes: status.used,
            log_size_bytes: status.size,
            copies_used_bytes: status.copies * status.copy_length,
            copies_size_bytes: status.copies_max * status.copy_length,
            carried: status.carried,
            hits: status.hits,
            bypassed: status.bypassed,
            damaged: status.copies_failed,
            failure: status.log_failed.map(|kind| kind.to_string()).unwrap_or_default(),
            forecast: known.forecast.clone(),
        }
    }
}

/// The disk `name`, if it has the layer.
fn carried_named(view: View<'_>, name: &str) -> Result<Carried, ErrorBody> {
    carried(view.find(name)?).ok_or_else(|| {
        refusal(
            ErrorCode::Conflict,
            format!("the disk {name:?} has no layer `offload`"),
            format!("add one: fathom disk layer {name} offload,log=PATH"),
        )
    })
}

impl View<'_> {
    /// The disks with a layer `offload`, or only the disk `disk`.
    pub(crate) fn offload_report(self, disk: Option<&str>) -> Result<OffloadReport, ErrorBody> {
        let selected = match disk {
            Some(name) => vec![carried_named(self, name)?],
            None => self.served().into_iter().filter_map(carried).collect(),
        };
        let known = self.part::<Offloads>().known.lock();
        let none = Known::default();
        let disks =
            selected.iter().map(|disk| disk.report(known.get(disk.name()).unwrap_or(&none)));
        Ok(OffloadReport {
            time_ns: Clock::System.now_ns(),
            unix_time_ns: unix_time_ns(),
            disks: disks.collect(),
        })
    }

    /// The last minutes of a disk's forecast.
    pub(crate) fn offload_history(self, name: &str) -> Result<OffloadHistory, ErrorBody> {
        carried_named(self, name)?;
        let known = self.part::<Offloads>().known.lock();
        let (devices, samples) = known.get(name).map_or_else(Default::default, |known| {
            let devices = known.forecast.as_ref().map(|forecast| forecast.devices.clone());
            (devices.unwrap_or_default(), known.history.samples())
        });
        Ok(OffloadHistory { disk: name.to_owned(), devices, samples })
    }
}

impl Daemon {
    /// Starts or stops the offload of a disk by hand.
    pub(crate) fn change_offload(
        &self,
        name: &str,
        request: OffloadRequest,
    ) -> Result<OffloadAnswer, ErrorBody> {
        let disk = carried_named(self.view(), name)?;
        let mut guard = self.part::<Offloads>().known.lock();
        let known = guard.entry(name.to_owned()).or_default();
        let is_tried_out = disk.offload.is_tried_out();
        let is_carrying = is_tried_out || disk.offload.status().state == LayerState::Carrying;
        if !is_carrying {
            // The log of a disk that was started has failed since.
            known.starter = None;
        }
        let is_start = request.action == OffloadAction::Start;
        // What a forecast has started stays from now on.
        let is_changed = is_start != is_carrying || known.starter == Some(Starter::Forecast);
        if is_start && disk.options.carry == CarryKind::Off {
            return Err(refusal(
                ErrorCode::Conflict,
                format!("the layer `offload` of the disk {name:?} carries nothing"),
                format!("set what it carries: fathom disk layer {name} offload,carry=both"),
            ));
        }
        if is_changed && !request.dry_run {
            if is_start {
                start(&disk, known, Starter::Hand)?;
                drop(guard);
                disk.wait_for_trial();
                guard = self.part::<Offloads>().known.lock();
            } else {
                stop(&disk, known, Starter::Hand);
            }
        }
        let known = guard.entry(name.to_owned()).or_default();
        if let (true, false, Some(problem)) = (is_start, request.dry_run, disk.offload.unfit()) {
            if known.starter == Some(Starter::Hand) {
                stop(&disk, known, Starter::Hand);
            }
            return Err(unfit(&disk, &problem));
        }
        Ok(OffloadAnswer { disk: disk.report(known), is_changed, dry_run: request.dry_run })
    }

    /// Removes a volume, which no disk of this daemon uses, from a cluster. This function blocks.
    pub(crate) fn forget_volume(&self, cluster: String, volume: String) -> Result<Done, ErrorBody> {
        let place = ClusterPlace { cluster, volume };
        let path = place.path();
        if self.part::<LogVolumes>().is_open(&place) {
            let message = format!("a disk has its log in {path}");
            return Err(refusal(ErrorCode::Conflict, message, "remove its layer `offload` first"));
        }
        let removed = self.part::<Clusters>().forget(&place);
        let removed = removed.map_err(|failure| failure.about(&path))?;
        if removed == 0 {
            let message = format!("there is no volume at {path}");
            let remedy = "`fathom offload status` shows the volumes of the disks that are served";
            return Err(refusal(ErrorCode::NotFound, message, remedy));
        }
        let keys = fathom_control::count(removed, "key");
        Ok(Done { message: format!("the volume at {path} was removed, with {keys}") })
    }

    /// The disks whose devices are observed.
    fn observed(&self) -> Vec<(Carried, Arc<Scheduled>)> {
        let carried = self.served().into_iter().filter_map(carried);
        let observed = carried.filter(|disk| disk.options.auto != AutoKind::Off);
        let on_device = observed.filter_map(|disk| {
            let device = disk.served.part::<Arc<Scheduled>>()?;
            Some((disk, device))
        });
        on_device.collect()
    }

    /// Allows the thread to start.
    pub(crate) fn allow_offloads(self: &Arc<Self>) {
        let _ = self.part::<Offloads>().daemon.set(Arc::downgrade(self));
        self.begin_offloads();
    }

    /// Starts the thread if a device is to be observed, and wakes it.
    pub(crate) fn begin_offloads(&self) {
        let Some(daemon) = self.part::<Offloads>().daemon.get() else { return };
        if self.part::<Offloads>().thread.get().is_none() && self.observed().is_empty() {
            return;
        }
        let thread = self.part::<Offloads>().thread.get_or_init(|| {
            let daemon = daemon.clone();
            match thread::Builder::new().name("offload".into()).spawn(move || run(&daemon)) {
                Ok(handle) => Some(handle.thread().clone()),
                Err(error) => {
                    tracing::error!(%error, "no peaks are foreseen: a thread cannot be started");
                    None
                }
            }
        });
        thread.iter().for_each(Thread::unpark);
    }
}

/// The refusal of a start because of the disk's log.
fn unfit(disk: &Carried, problem: &str) -> ErrorBody {
    let name = disk.name();
    let remedy = if disk.offload.status().emptied_after.is_some() {
        "wait until its content is home, and start again".to_owned()
    } else {
        format!("repair the log volume: it is tried again every {} s", RECOVERY_PAUSE_MAX.as_secs())
    };
    let message = format!("the log of the disk {name:?} takes no changes: {problem}");
    refusal(ErrorCode::Failed, message, remedy)
}

/// Begins to carry a disk.
fn start(disk: &Carried, known: &mut Known, starter: Starter) -> Result<(), ErrorBody> {
    let name = disk.name();
    if let Some(problem) = disk.offload.unfit() {
        return Err(unfit(disk, &problem));
    }
    disk.offload.begin().map_err(|error| unfit(disk, &error.to_string()))?;
    known.start(starter);
    let what = disk.options.carry.name();
    tracing::info!(disk = name, by = starter.name(), "its load is carried: {what}");
    Ok(())
}

/// Ends to carry a disk.
fn stop(disk: &Carried, known: &mut Known, starter: Starter) {
    disk.offload.stop();
    known.stop(starter);
    let (name, used) = (disk.name(), disk.offload.status().used);
    tracing::info!(
        disk = name,
        by = starter.name(),
        "its load is not carried any more; {used} bytes return"
    );
}

/// A device whose contention is foreseen.
struct Device {
    beneath: Arc<Scheduled>,
    contention: Contention,
    /// The numbers of the disks in the model.
    numbers: BTreeMap<String, u64>,
    next: u64,
    /// The requests that each disk's layer had carried at the last step.
    carried: BTreeMap<String, u64>,
    used: Instant,
}

impl Device {
    fn new(beneath: Arc<Scheduled>) -> Self {
        beneath.probes().set_on(true);
        Self {
            beneath,
            contention: Contention::new(ContentionOptions::default(), default_forecast()),
            numbers: BTreeMap::new(),
            next: 0,
            carried: BTreeMap::new(),
            used: Instant::now(),
        }
    }

    /// Takes what the disks have asked of the device, and makes a step of the model.
    fn step(&mut self, disks: &[&Carried]) {
        let probes = self.beneath.probes().list();
        let is_gone = |disk: &String| !probes.iter().any(|(other, _)| other == disk);
        let gone: Vec<String> = self.numbers.keys().filter(|disk| is_gone(disk)).cloned().collect();
        for disk in gone {
            if let Some(number) = self.numbers.remove(&disk) {
                self.contention.close(number);
            }
            self.carried.remove(&disk);
        }
        for (disk, probe) in probes {
            let number = *self.numbers.entry(disk.clone()).or_insert_with(|| {
                self.next += 1;
                self.next
            });
            self.contention.open(number);
            let mut batch = probe.take();
            if let Some(carried) = disks.iter().find(|carried| carried.name() == disk) {
                let status = carried.offload.status();
                let count = status.carried + status.hits;
                let before = self.carried.insert(disk, count).unwrap_or(count);
                batch.carried = count.saturating_sub(before);
            }
            if batch != Batch::default() {
                self.used = Instant::now();
            }
            self.contention.record(number, &batch);
        }
        self.contention.step(Clock::System.now_ns());
    }

    fn forecast(&self, disk: &str) -> Option<OffloadForecast> {
        let number = *self.numbers.get(disk)?;
        let verdict = self.contention.verdict(number)?;
        let arrivals = self.contention.arrivals(number);
        Some(forecast(verdict, arrivals, &self.beneath, self.contention.parallelism()))
    }

    /// The disk whose load is to be carried, of those that can be.
    fn choose<'d>(
        &self,
        disks: &[&'d Carried],
        known: &BTreeMap<String, Known>,
    ) -> Option<&'d Carried> {
        let may = |disk: &&&Carried| {
            let known = known.get(disk.name());
            disk.options.carry != CarryKind::Off && known.is_none_or(Known::may_start)
        };
        let candidates: Vec<(u64, &&Carried)> = disks
            .iter()
            .filter(may)
            .filter_map(|disk| Some((*self.numbers.get(disk.name())?, disk)))
            .collect();
        let of = |number: u64| candidates.iter().find(|(other, _)| *other == number);
        let choice = self.contention.choose(|number| {
            of(number).map_or_else(Carriable::default, |(_, disk)| disk.carriable())
        })?;
        of(choice.disk).map(|(_, disk)| **disk)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.beneath.probes().set_on(false);
    }
}

fn forecast(
    verdict: &Verdict,
    arrivals: f64,
    device: &Scheduled,
    parallelism: Option<f64>,
) -> OffloadForecast {
    let times = |times: Option<Times>| times.unwrap_or_default();
    let (observed, predicted, low) =
        (times(verdict.observed), times(verdict.predicted), times(verdict.low));
    OffloadForecast {
        devices: device.names(),
        state: verdict.state.name().to_owned(),
        arrivals_per_second: arrivals,
        parallelism: parallelism.unwrap_or(0.0),
        observed_mean_ns: observed.mean_ns,
        observed_p90_ns: observed.p90_ns,
        predicted_mean_ns: predicted.mean_ns,
        predicted_p90_ns: predicted.p90_ns,
        low_mean_ns: low.mean_ns,
        low_p90_ns: low.p90_ns,
        error: verdict.errors.p90,
        is_peak: verdict.state.is_peak(),
        source: match verdict.source {
            VerdictBasis::Model => "model",
            VerdictBasis::Observed => "observed",
        }
        .to_owned(),
    }
}

/// The thread.
fn run(daemon: &Weak<Daemon>) {
    let mut devices: Vec<Device> = Vec::new();
    loop {
        let Some(daemon) = daemon.upgrade().filter(|daemon| !daemon.is_stopping()) else { return };
        let observed = daemon.observed();
        devices.retain(|device| {
            observed.iter().any(|(_, beneath)| Arc::ptr_eq(beneath, &device.beneath))
        });
        if observed.is_empty() {
            daemon
                .part::<Offloads>()
                .known
                .lock()
                .values_mut()
                .for_each(|known| known.forecast = None);
            drop((observed, daemon));
            thread::park();
            continue;
        }
        for (_, beneath) in &observed {
            if !devices.iter().any(|device| Arc::ptr_eq(beneath, &device.beneath)) {
                devices.push(Device::new(Arc::clone(beneath)));
            }
        }
        for device in &mut devices {
            let on_device = observed.iter().filter(|(_, it)| Arc::ptr_eq(it, &device.beneath));
            let disks: Vec<&Carried> = on_device.map(|(disk, _)| disk).collect();
            device.step(&disks);
            decide(&daemon, device, &disks);
        }
        let is_used = devices.iter().any(|device| device.used.elapsed() < IDLE_TIME);
        drop((observed, daemon));
        thread::park_timeout(if is_used { STEP } else { STEP_IDLE });
    }
}

/// Starts or stops what the verdict on a device requires.
fn decide(daemon: &Daemon, device: &Device, disks: &[&Carried]) {
    let mut known = daemon.part::<Offloads>().known.lock();
    let now = Instant::now();
    for disk in disks {
        let known = known.entry(disk.name().to_owned()).or_default();
        known.forecast = device.forecast(disk.name());
        if let Some(forecast) = &known.forecast {
            known.history.note(now, unix_time_ns(), forecast, known.starter.is_some());
        }
    }
    let is_peak = device.contention.is_peak();
    for disk in disks {
        let Some(known) = known.get_mut(disk.name()) else { continue };
        known.is_reported &= is_peak;
        if known.may_stop() && !is_peak {
            stop(disk, known, Starter::Forecast);
        } else if known.starter == Some(Starter::Forecast) {
            // Changes go home again, but those of places that only the log has.
            if let Some(problem) = disk.offload.unfit() {
                tracing::warn!(disk = disk.name(), "its log is not fit: {problem}");
                stop(disk, known, Starter::Forecast);
                known.stopped = Some(Instant::now());
            }
        }
    }
    if !is_peak {
        return;
    }
    let Some(disk) = device.choose(disks, &known) else { return };
    let Some(known) = known.get_mut(disk.name()) else { return };
    match disk.options.auto {
        AutoKind::Act => {
            if let Err(refused) = start(disk, known, Starter::Forecast) {
                // It is not tried again at once.
                known.stopped = Some(Instant::now());
                tracing::warn!(disk = disk.name(), "its load is not carried: {}", refused.message);
            }
        }
        AutoKind::Report if !known.is_reported => {
            known.is_reported = true;
            tracing::info!(disk = disk.name(), "a peak is foreseen: its load would be carried now");
        }
        AutoKind::Report | AutoKind::Off => {}
    }
}
