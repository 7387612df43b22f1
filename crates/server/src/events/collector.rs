//! The thread that collects events while somebody listens.

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

/// How often rings are emptied while there are many events, and while there are none: a ring has room
/// for a burst in between.
const POLL_MIN: Duration = Duration::from_millis(2);
const POLL_MAX: Duration = Duration::from_millis(8);
/// A round that collects this many events is followed by the shorter pause.
const BUSY_EVENTS: usize = 256;
/// A block is sent when it has this many events or is this old.
const BLOCK_EVENTS: usize = 8192;
const BLOCK_AGE: Duration = Duration::from_millis(10);
/// How long after its instant an event is in its ring at the latest, in nanoseconds, unless the
/// queue's thread is not scheduled for longer.
const SETTLED_NS: i64 = 15_000_000;
/// How often it is looked which disks there are.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// See the module.
pub(super) struct Collector {
    daemon: Arc<Daemon>,
    header: Header,
    texts: Texts,
    /// By the number of the tap.
    disks: BTreeMap<u32, Collected>,
    drained: Vec<Event>,
}

/// A disk whose events are collected.
struct Collected {
    name: String,
    labels: LabelTexts,
    reader: TapReader,
    /// Drops that have been told.
    dropped: u64,
    block: BlockBuilder,
    begun: Instant,
}

impl Collector {
    pub fn new(daemon: Arc<Daemon>, header: Header) -> Self {
        let texts = Texts::new(Arc::clone(daemon.names()));
        Self { daemon, header, texts, disks: BTreeMap::new(), drained: Vec::new() }
    }

    /// Collects until nobody listens any more.
    pub fn run(mut self) {
        give_way();
        let daemon = Arc::clone(&self.daemon);
        // Whatever happens, the next listener gets a collector.
        let _ended = Ended(Arc::clone(&daemon));
        let events = daemon.events();
        let mut looked: Option<Instant> = None;
        let mut listeners: Vec<Arc<Listener>> = Vec::new();
        let mut before_ns = 0;
        let mut pulsed = Instant::now();
        loop {
            let ending = {
                let mut state = events.state();
                let before = state.listeners.len();
                state.listeners.retain(|listener| !listener.is_gone());
                if state.listeners.is_empty() {
                    // The next collector finds taps without a reader.
                    self.disks.clear();
                    state.collecting = false;
                    return;
                }
                if before != state.listeners.len() || listeners.len() != before {
                    looked = None;
                }
                listeners.clone_from(&state.listeners);
                state.ending
            };
            let now_ns = Clock::System.now_ns() as i64;
            if ending || looked.is_none_or(|at| at.elapsed() >= LOOK_INTERVAL) {
                self.look(&listeners);
                looked = Some(Instant::now());
            }
            let collected = self.round(&listeners, ending);
            if ending {
                for listener in &listeners {
                    listener.end();
                }
                finish(&mut events.state());
                return;
            }
            // What was put into a ring before the round before this one is here.
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

    /// Finds the disks that are to be collected, and lets go of the others.
    fn look(&mut self, listeners: &[Arc<Listener>]) {
        let wanted = |name: &str| listeners.iter().any(|listener| listener.wants(name));
        let sources: Vec<Source> =
            self.daemon.taps().into_iter().filter(|source| wanted(&source.name)).collect();
        let mut gone: Vec<u32> = self.disks.keys().copied().collect();
        gone.retain(|number| !sources.iter().any(|source| source.tap.disk() == *number));
        for number in gone {
            if let Some(mut disk) = self.disks.remove(&number) {
                self.drained.clear();
                disk.collect(&mut self.texts, &mut self.drained, listeners);
                disk.give(listeners);
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
            // A disk that has no tap for now may get one again.
            if !request.is_empty() && !request.iter().any(|name| self.daemon.tap_of(name).is_ok()) {
                listener.end();
            }
            listener.begin();
        }
    }

    /// Empties all rings. Says how many events there were.
    fn round(&mut self, listeners: &[Arc<Listener>], ending: bool) -> usize {
        let mut count = 0;
        for disk in self.disks.values_mut() {
            self.drained.clear();
            disk.collect(&mut self.texts, &mut self.drained, listeners);
            count += self.drained.len();
            if ending || disk.begun.elapsed() >= BLOCK_AGE {
                disk.give(listeners);
            }
        }
        count
    }

    fn flush(&mut self, listeners: &[Arc<Listener>]) {
        self.disks.values_mut().for_each(|disk| disk.give(listeners));
    }
}

impl Collected {
    /// Moves what is in the rings into the block.
    fn collect(
        &mut self,
        texts: &mut Texts,
        drained: &mut Vec<Event>,
        listeners: &[Arc<Listener>],
    ) {
        self.reader.drain(drained);
        let dropped = self.reader.dropped();
        // Queues come one after the other.
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
                self.give(listeners);
            }
        }
        // What was dropped is the newest.
        if dropped > self.dropped {
            self.give(listeners);
            for listener in listeners.iter().filter(|listener| listener.wants(&self.name)) {
                listener.note_dropped(dropped - self.dropped, &self.name);
            }
            self.dropped = dropped;
        }
    }

    /// Gives the block to those who want it.
    fn give(&mut self, listeners: &[Arc<Listener>]) {
        let count = self.block.len() as u64;
        let Some(block) = self.block.take() else { return };
        let block = Bytes::from(block);
        for listener in listeners.iter().filter(|listener| listener.wants(&self.name)) {
            listener.offer(&block, count);
        }
    }
}

/// Says at the end of the thread, however it comes, that it ends.
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
