//! The thread that collects events while there are listeners.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use fathom_block::Clock;
use fathom_layers::tap::{Event, TapReader};
use fathom_monitor::give_way;
use fathom_monitor::recording::{BlockBuilder, Header, moment_block};

use super::columns::{LabelTexts, Texts};
use super::listener::Listener;
use super::{Source, State};
use crate::daemon::Daemon;

/// The shortest and longest pause between two rounds, with many events and with none. A ring has
/// space for the events of a pause.
const POLL_MIN: Duration = Duration::from_millis(2);
const POLL_MAX: Duration = Duration::from_millis(8);
/// The number of events of a round after which the pause is the shortest.
const BUSY_EVENTS: usize = 256;
/// The number of events, or the age, at which a block is sent.
const BLOCK_EVENTS: usize = 8192;
const BLOCK_AGE: Duration = Duration::from_millis(10);
/// The longest time from the instant of an event until it is in its ring, in nanoseconds, unless
/// the queue's thread is descheduled for longer.
const SETTLED_NS: i64 = 15_000_000;
/// The interval at which the list of disks is read.
const DISKS_INTERVAL: Duration = Duration::from_millis(100);

/// Collects the events of all disks that have listeners.
pub(super) struct Collector {
    daemon: Arc<Daemon>,
    header: Header,
    texts: Texts,
    /// The disks, by the numbers of their taps.
    disks: BTreeMap<u32, Collected>,
    drained: Vec<Event>,
}

/// A disk whose events are collected.
struct Collected {
    name: String,
    labels: LabelTexts,
    reader: TapReader,
    /// Dropped events that were reported to the listeners.
    dropped: u64,
    block: BlockBuilder,
    begun: Instant,
}

impl Collector {
    pub fn new(daemon: Arc<Daemon>, header: Header) -> Self {
        let texts = Texts::new(Arc::clone(daemon.names()));
        Self { daemon, header, texts, disks: BTreeMap::new(), drained: Vec::new() }
    }

    /// Collects events until there are no listeners.
    pub fn run(mut self) {
        give_way();
        let daemon = Arc::clone(&self.daemon);
        // Even after a panic, the next listener starts a new collector.
        let _ended = Ended(Arc::clone(&daemon));
        let events = daemon.events();
        let mut disks_updated: Option<Instant> = None;
        let mut listeners: Vec<Arc<Listener>> = Vec::new();
        let mut before_ns = 0;
        let mut pulsed = Instant::now();
        loop {
            let ending = {
                let mut state = events.state();
                let before = state.listeners.len();
                state.listeners.retain(|listener| !listener.has_left());
                if state.listeners.is_empty() {
                    // The next collector can attach its readers only after these are dropped.
                    self.disks.clear();
                    state.collecting = false;
                    return;
                }
                if before != state.listeners.len() || listeners.len() != before {
                    disks_updated = None;
                }
                listeners.clone_from(&state.listeners);
                state.ending
            };
            let now_ns = Clock::System.now_ns() as i64;
            if ending || disks_updated.is_none_or(|at| at.elapsed() >= DISKS_INTERVAL) {
                self.update_disks(&listeners);
                disks_updated = Some(Instant::now());
            }
            let collected = self.round(&listeners, ending);
            if ending {
                for listener in &listeners {
                    listener.end();
                }
                finish(&mut events.state());
                return;
            }
            // Events put into a ring before the previous round have been collected.
            let pulse = listeners.iter().filter_map(|listener| listener.request.pulse).min();
            if pulse.is_some_and(|pulse| pulsed.elapsed() >= pulse) && before_ns > 0 {
                pulsed = Instant::now();
                self.flush(&listeners);
                let settled_ns = before_ns - SETTLED_NS;
                let moment = Bytes::from(moment_block(settled_ns));
                for listener in listeners.iter().filter(|listener| listener.request.pulse.is_some())
                {
                    listener.offer_moment(&moment, settled_ns);
                }
            }
            before_ns = now_ns;
            let open = self.disks.values().any(|disk| !disk.block.is_empty());
            let pause = if collected >= BUSY_EVENTS || open { POLL_MIN } else { POLL_MAX };
            let state = events.state();
            if !state.ending && state.listeners.len() == listeners.len() {
                drop(
                    events.woken.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner),
                );
            }
        }
    }

    /// Attaches to disks that have listeners, and detaches from the others.
    fn update_disks(&mut self, listeners: &[Arc<Listener>]) {
        let wanted = |name: &str| listeners.iter().any(|listener| listener.receives(name));
        let sources: Vec<Source> =
            self.daemon.taps().into_iter().filter(|source| wanted(&source.name)).collect();
        let mut removed: Vec<u32> = self.disks.keys().copied().collect();
        removed.retain(|number| !sources.iter().any(|source| source.tap.disk() == *number));
        for number in removed {
            if let Some(mut disk) = self.disks.remove(&number) {
                self.drained.clear();
                disk.collect(&mut self.texts, &mut self.drained, listeners);
                disk.send(listeners);
            }
        }
        for source in &sources {
            let number = source.tap.disk();
            if self.disks.contains_key(&number) {
                continue;
            }
            if let Some(reader) = source.tap.attach() {
                let disk = Collected {
                    name: source.name.clone(),
                    labels: LabelTexts::new(reader.labels()),
                    reader,
                    dropped: 0,
                    block: BlockBuilder::new(&self.header),
                    begun: Instant::now(),
                };
                self.disks.insert(number, disk);
            }
        }
        for listener in listeners {
            let request = &listener.request.disks;
            // A disk without a tap may get a tap again.
            if !request.is_empty() && !request.iter().any(|name| self.daemon.tap_of(name).is_ok()) {
                listener.end();
            }
            listener.begin();
        }
    }

    /// Empties all rings. Returns the number of events.
    fn round(&mut self, listeners: &[Arc<Listener>], ending: bool) -> usize {
        let mut count = 0;
        for disk in self.disks.values_mut() {
            self.drained.clear();
            disk.collect(&mut self.texts, &mut self.drained, listeners);
            count += self.drained.len();
            if ending || disk.begun.elapsed() >= BLOCK_AGE {
                disk.send(listeners);
            }
        }
        count
    }

    fn flush(&mut self, listeners: &[Arc<Listener>]) {
        self.disks.values_mut().for_each(|disk| disk.send(listeners));
    }
}

impl Collected {
    /// Moves the events of the rings into the block.
    fn collect(
        &mut self,
        texts: &mut Texts,
        drained: &mut Vec<Event>,
        listeners: &[Arc<Listener>],
    ) {
        self.reader.drain(drained);
        let dropped = self.reader.dropped();
        // The reader returns the events queue by queue.
        if !drained.is_sorted_by_key(|event| event.blktap_ts) {
            drained.sort_by_key(|event| event.blktap_ts);
        }
        let collected_ns = Clock::System.now_ns() as i64;
        for event in &*drained {
            if self.block.is_empty() {
                self.begun = Instant::now();
            }
            texts.append(event, &self.labels, collected_ns, &mut self.block);
            if self.block.len() >= BLOCK_EVENTS {
                self.send(listeners);
            }
        }
        // The dropped events are newer than the collected ones.
        if dropped > self.dropped {
            self.send(listeners);
            for listener in listeners.iter().filter(|listener| listener.receives(&self.name)) {
                listener.note_dropped(dropped - self.dropped, &self.name);
            }
            self.dropped = dropped;
        }
    }

    /// Sends the block to the listeners of the disk.
    fn send(&mut self, listeners: &[Arc<Listener>]) {
        let count = self.block.len() as u64;
        let Some(block) = self.block.take() else { return };
        let block = Bytes::from(block);
        for listener in listeners.iter().filter(|listener| listener.receives(&self.name)) {
            listener.offer(&block, count);
        }
    }
}

/// Ends all streams and the collection when the thread panics.
struct Ended(Arc<Daemon>);

impl Drop for Ended {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut state = self.0.events().state();
            state.listeners.drain(..).for_each(|listener| listener.end());
            finish(&mut state);
        }
    }
}

fn finish(state: &mut State) {
    state.collecting = false;
}
