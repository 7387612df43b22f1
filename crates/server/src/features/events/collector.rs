//! The thread that collects events while there are listeners.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use fathom_block::Clock;
use fathom_monitor::give_way;
use fathom_monitor::recording::{BlockBuilder, Header, moment_block};

use super::State;
use super::columns::Texts;
use super::listener::Listener;
use super::producer::{Attached, PRODUCERS, Source};
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

/// The longest pause while all sources wake the collector.
const WOKEN_PAUSE: Duration = DISKS_INTERVAL;

/// Collects the events of all sources that have listeners.
pub(super) struct Collector {
    daemon: Arc<Daemon>,
    /// The header of all blocks: it has all streams.
    header: Header,
    texts: Texts,
    /// The sources, by the positions of their streams and their keys.
    sources: BTreeMap<(usize, u64), Collected>,
}

/// A source whose events are collected.
struct Collected {
    reader: Box<dyn Attached>,
    /// Dropped events that were reported to the listeners.
    dropped: u64,
    open: OpenBlock,
}

/// The events of a source that have not been sent yet.
struct OpenBlock {
    stream: usize,
    /// The disk to which they belong; empty if they belong to none.
    disk: String,
    block: BlockBuilder,
    begun: Instant,
}

/// A source's way to the listeners.
pub(super) struct Outgoing<'a> {
    open: &'a mut OpenBlock,
    listeners: &'a [Arc<Listener>],
    /// The time at which the events are collected, in nanoseconds.
    collected_ns: i64,
}

impl Outgoing<'_> {
    /// The events that follow belong to this disk; an empty name is none.
    pub fn set_disk(&mut self, disk: &str) {
        if self.open.disk != disk {
            self.open.send(self.listeners);
            disk.clone_into(&mut self.open.disk);
        }
    }

    /// Adds an event: `append` gets the time at which it is collected, and the block.
    pub fn add(&mut self, append: impl FnOnce(i64, &mut BlockBuilder)) {
        let open = &mut *self.open;
        if open.block.is_empty() {
            open.begun = Instant::now();
        }
        append(self.collected_ns, &mut open.block);
        if open.block.len() >= BLOCK_EVENTS {
            open.send(self.listeners);
        }
    }
}

impl Collector {
    pub fn new(daemon: Arc<Daemon>, header: Header) -> Self {
        let texts = Texts::new(Arc::clone(daemon.names()));
        Self { daemon, header, texts, sources: BTreeMap::new() }
    }

    /// Collects events until there are no listeners.
    pub fn run(mut self) {
        give_way();
        let daemon = Arc::clone(&self.daemon);
        // Even after a panic, the next listener starts a new collector.
        let _ended = Ended(Arc::clone(&daemon));
        let events = daemon.events();
        let mut updated: Option<Instant> = None;
        let mut listeners: Vec<Arc<Listener>> = Vec::new();
        let mut streams = 0;
        let mut before_ns = 0;
        let mut pulsed = Instant::now();
        loop {
            let ending = {
                let mut state = events.state();
                let before = state.listeners.len();
                state.listeners.retain(|listener| !listener.has_left());
                if state.listeners.is_empty() {
                    // The next collector can attach its readers only after these are dropped.
                    self.sources.clear();
                    state.collecting = false;
                    return;
                }
                let wanted = state.listeners.iter().map(|listener| listener.streams().0);
                let wanted = wanted.fold(0, |all, of| all | of);
                if before != state.listeners.len() || listeners.len() != before || streams != wanted
                {
                    updated = None;
                }
                streams = wanted;
                listeners.clone_from(&state.listeners);
                state.ending
            };
            let now_ns = Clock::System.now_ns() as i64;
            if ending || updated.is_none_or(|at| at.elapsed() >= DISKS_INTERVAL) {
                self.update_sources(&listeners);
                updated = Some(Instant::now());
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
            let pause = self.pause(collected, pulse);
            let mut state = events.state();
            if !state.ending && state.listeners.len() == listeners.len() {
                events.woken.wait_for(&mut state, pause);
            }
        }
    }

    /// The pause after a round that has collected a number of events.
    fn pause(&self, collected: usize, pulse: Option<Duration>) -> Duration {
        let open = self.sources.values().any(|source| !source.open.block.is_empty());
        if collected >= BUSY_EVENTS || open {
            return POLL_MIN;
        }
        if self.sources.values().all(|source| source.reader.wakes()) {
            return pulse.map_or(WOKEN_PAUSE, |pulse| pulse.clamp(POLL_MIN, WOKEN_PAUSE));
        }
        POLL_MAX
    }

    /// Attaches to sources that have listeners, and detaches from the others.
    fn update_sources(&mut self, listeners: &[Arc<Listener>]) {
        let mut wanted: BTreeMap<(usize, u64), Box<dyn Source>> = BTreeMap::new();
        for producer in PRODUCERS {
            let stream = producer.stream();
            // The disks are not looked at for a stream that nobody receives.
            if !listeners.iter().any(|listener| listener.streams().contains(stream)) {
                continue;
            }
            for source in producer.sources(&self.daemon) {
                if listeners.iter().any(|listener| listener.receives(stream, source.disk())) {
                    wanted.insert((stream, source.key()), source);
                }
            }
        }
        let mut removed: Vec<(usize, u64)> = self.sources.keys().copied().collect();
        removed.retain(|key| !wanted.contains_key(key));
        for key in removed {
            if let Some(mut source) = self.sources.remove(&key) {
                source.collect(&mut self.texts, listeners);
                source.open.send(listeners);
            }
        }
        for (key, source) in wanted {
            if self.sources.contains_key(&key) {
                continue;
            }
            if let Some(reader) = source.attach() {
                let open = OpenBlock {
                    stream: key.0,
                    disk: source.disk().to_owned(),
                    block: BlockBuilder::of_stream(&self.header, key.0),
                    begun: Instant::now(),
                };
                self.sources.insert(key, Collected { reader, dropped: 0, open });
            }
        }
        let is_over = |listener: &Arc<Listener>| {
            let disks = &listener.request.disks;
            // A disk without a tap may get a tap again.
            !disks.is_empty() && !disks.iter().any(|name| self.daemon.tap_of(name).is_ok())
        };
        let over: Vec<bool> = listeners.iter().map(is_over).collect();
        if over.contains(&true) {
            // Such as the removal of the listener's disk, which was noted before.
            self.round(listeners, true);
        }
        for (listener, is_over) in listeners.iter().zip(over) {
            if is_over {
                listener.end();
            }
            listener.begin();
        }
    }

    /// Empties all rings. Returns the number of events.
    fn round(&mut self, listeners: &[Arc<Listener>], ending: bool) -> usize {
        let mut count = 0;
        for source in self.sources.values_mut() {
            count += source.collect(&mut self.texts, listeners);
            if ending || source.open.begun.elapsed() >= BLOCK_AGE {
                source.open.send(listeners);
            }
        }
        count
    }

    fn flush(&mut self, listeners: &[Arc<Listener>]) {
        self.sources.values_mut().for_each(|source| source.open.send(listeners));
    }
}

impl Collected {
    /// Moves the events of the rings into the block. Returns their number.
    fn collect(&mut self, texts: &mut Texts, listeners: &[Arc<Listener>]) -> usize {
        let collected_ns = Clock::System.now_ns() as i64;
        let mut out = Outgoing { open: &mut self.open, listeners, collected_ns };
        let count = self.reader.collect(texts, &mut out);
        let dropped = self.reader.dropped();
        // The dropped events are newer than the collected ones.
        if dropped > self.dropped {
            self.open.send(listeners);
            let disk = &self.open.disk;
            for listener in self.open.receivers(listeners) {
                listener.note_dropped(dropped - self.dropped, disk);
            }
            self.dropped = dropped;
        }
        count
    }
}

impl OpenBlock {
    /// The listeners that receive the block.
    fn receivers<'l>(
        &self,
        listeners: &'l [Arc<Listener>],
    ) -> impl Iterator<Item = &'l Arc<Listener>> {
        let (stream, disk) = (self.stream, self.disk.clone());
        listeners.iter().filter(move |listener| listener.receives(stream, &disk))
    }

    /// Sends the block to its listeners.
    fn send(&mut self, listeners: &[Arc<Listener>]) {
        let count = self.block.len() as u64;
        let Some(block) = self.block.take() else { return };
        let block = Bytes::from(block);
        for listener in self.receivers(listeners) {
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
