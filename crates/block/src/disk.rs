//! A disk: layers over a back end, under a name.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use fathom_reactor::Reactor;

use crate::backend::Backend;
use crate::clock::Clock;
use crate::failures::Failures;
use crate::geometry::{Capabilities, Geometry};
use crate::layer::{LAYERS_MAX, Layer};
use crate::request::{ErrorKind, SERIAL_LENGTH};
use crate::stack::{Stack, StackCounters};

/// What a front end may want to know about at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskChange {
    /// The capacity has another value.
    Resized,
    /// The layers are others: open the queues anew, once nothing is in flight.
    Restacked,
}

/// Called, from whatever thread makes the change, each time a disk changes. It must not block.
pub type ChangeListener = Box<dyn Fn(DiskChange) -> bool + Send + Sync>;

/// How a disk presents itself.
#[derive(Clone, Debug, Default)]
pub struct DiskOptions {
    /// The disk's name: unique within the daemon.
    pub name: String,
    /// The virtual machine that it belongs to, for events and metrics; may be empty.
    pub vm: String,
    /// The serial that guests see, at most [`SERIAL_LENGTH`] bytes; the rest is cut off.
    pub serial: String,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// A disk: what its queues share.
pub struct Disk {
    options: DiskOptions,
    serial: [u8; SERIAL_LENGTH],
    capacity: AtomicU64,
    geometry: Geometry,
    backend: Arc<dyn Backend>,
    layers: RwLock<Vec<Arc<dyn Layer>>>,
    /// How often the layers have changed.
    layers_version: AtomicU64,
    listeners: Mutex<Vec<ChangeListener>>,
    counters: StackCounters,
    failures: Failures,
    queues: AtomicU64,
}

impl Disk {
    /// A disk over `backend` with `layers`, the one nearest the front end first.
    ///
    /// # Errors
    /// [`ErrorKind::TooLong`] when there are more than [`LAYERS_MAX`] layers.
    pub fn new(
        options: DiskOptions,
        layers: Vec<Arc<dyn Layer>>,
        backend: Arc<dyn Backend>,
    ) -> Result<Arc<Self>, ErrorKind> {
        if layers.len() > LAYERS_MAX {
            return Err(ErrorKind::TooLong);
        }
        let mut serial = [0; SERIAL_LENGTH];
        for (target, source) in serial.iter_mut().zip(options.serial.bytes()) {
            *target = source;
        }
        Ok(Arc::new(Self {
            options,
            serial,
            capacity: AtomicU64::new(backend.capacity()),
            geometry: backend.geometry(),
            backend,
            layers: RwLock::new(layers),
            layers_version: AtomicU64::new(0),
            listeners: Mutex::new(Vec::new()),
            counters: StackCounters::default(),
            failures: Failures::default(),
            queues: AtomicU64::new(0),
        }))
    }

    /// The disk's name.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// The name of the virtual machine that the disk belongs to; may be empty.
    pub fn vm(&self) -> &str {
        &self.options.vm
    }

    /// The serial, zero-padded.
    pub fn serial(&self) -> &[u8; SERIAL_LENGTH] {
        &self.serial
    }

    /// The size, in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// The sizes that do not change.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The back end beneath.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The layers, the one nearest the front end first.
    pub fn layers(&self) -> Vec<Arc<dyn Layer>> {
        self.layers.read().expect("no holder of this lock panics").clone()
    }

    /// What the disk offers to its front ends.
    pub fn capabilities(&self) -> Capabilities {
        self.ladder(&self.layers())[0]
    }

    /// What the crossings refused.
    pub fn counters(&self) -> &StackCounters {
        &self.counters
    }

    /// The failures of its requests, as front ends saw them.
    pub fn failures(&self) -> &Failures {
        &self.failures
    }

    /// Opens the disk for one queue, served by the thread that owns `reactor`.
    ///
    /// # Errors
    /// When the back end cannot open a queue.
    pub fn open_queue(self: &Arc<Self>, reactor: &mut Reactor, clock: Clock) -> io::Result<Stack> {
        let queue = self.queues.fetch_add(1, Ordering::Relaxed);
        let layers = self.layers();
        let backend = self.backend.open_queue(reactor)?;
        let opened = layers.iter().map(|layer| layer.open_queue(queue)).collect();
        Ok(Stack::new(Arc::clone(self), queue, opened, backend, self.ladder(&layers), clock))
    }

    /// Gives the disk another size and tells the front ends.
    ///
    /// # Errors
    /// What the back end says. [`capacity`](Self::capacity) says which size holds then: it may be
    /// the new one, where it could not be made durable.
    pub fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        let before = self.capacity();
        if capacity < before {
            // First, so that the crossings refuse what reaches behind the new end.
            self.capacity.store(capacity, Ordering::Relaxed);
        }
        let resized = self.backend.resize(capacity);
        let after = self.backend.capacity();
        self.capacity.store(after, Ordering::Relaxed);
        if resized.is_ok() || after != before {
            self.tell(DiskChange::Resized);
        }
        resized
    }

    /// Gives the disk other layers and tells the front ends, which open their queues anew as soon
    /// as nothing is in flight.
    ///
    /// # Errors
    /// [`ErrorKind::TooLong`] when there are more than [`LAYERS_MAX`] layers.
    pub fn restack(&self, layers: Vec<Arc<dyn Layer>>) -> Result<(), ErrorKind> {
        if layers.len() > LAYERS_MAX {
            return Err(ErrorKind::TooLong);
        }
        *self.layers.write().expect("no holder of this lock panics") = layers;
        self.layers_version.fetch_add(1, Ordering::SeqCst);
        self.tell(DiskChange::Restacked);
        Ok(())
    }

    /// How often the layers have changed. Whoever opens a queue and tells the disk's listeners of it
    /// only later looks here before and after, lest a change between the two be lost.
    pub fn layers_version(&self) -> u64 {
        self.layers_version.load(Ordering::SeqCst)
    }

    /// Calls `listener` at each change from now on, until it returns false.
    pub fn listen(&self, listener: ChangeListener) {
        self.listeners.lock().expect("no listener panics").push(listener);
    }

    fn tell(&self, change: DiskChange) {
        self.listeners.lock().expect("no listener panics").retain(|listener| listener(change));
    }

    /// What each level offers to the one above it: the layers from the top, then the back end.
    fn ladder(&self, layers: &[Arc<dyn Layer>]) -> Vec<Capabilities> {
        let mut below = self.backend.capabilities();
        if self.options.read_only {
            below = below.read_only();
        }
        let mut ladder = vec![below];
        for layer in layers.iter().rev() {
            below = layer.capabilities(below);
            ladder.push(below);
        }
        ladder.reverse();
        ladder
    }
}
