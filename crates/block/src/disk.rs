//! A disk: layers over a back end, under a name.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use fathom_reactor::Reactor;

use crate::backend::Backend;
use crate::change::Life;
use crate::clock::Clock;
use crate::failures::Failures;
use crate::geometry::{Capabilities, Geometry};
use crate::layer::{LAYERS_MAX, Layer};
use crate::open::Offer;
use crate::request::{ErrorKind, SERIAL_LENGTH};
use crate::stack::{Stack, StackCounters};

/// What a front end may want to know about at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskChange {
    /// The capacity has another value.
    Resized,
    /// The layers change: each queue's thread is to make a round ([`Stack::advance`]), also where
    /// nothing comes in. It takes no requests while the stack [is closing](Stack::is_closing).
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
    /// The size that front ends see, and that of the back end.
    capacity: AtomicU64,
    store_capacity: AtomicU64,
    geometry: Geometry,
    backend: Arc<dyn Backend>,
    layers: RwLock<Vec<Arc<dyn Layer>>>,
    life: Life,
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
        let store_capacity = backend.capacity();
        let mut disk = Self {
            options,
            serial,
            capacity: AtomicU64::new(store_capacity),
            store_capacity: AtomicU64::new(store_capacity),
            geometry: backend.geometry(),
            backend,
            layers: RwLock::default(),
            life: Life::default(),
            listeners: Mutex::new(Vec::new()),
            counters: StackCounters::default(),
            failures: Failures::default(),
            queues: AtomicU64::new(0),
        };
        let top = disk.ladder(&layers)[0];
        disk.capacity = AtomicU64::new(top.capacity);
        disk.geometry = top.geometry;
        disk.layers = RwLock::new(layers);
        Ok(Arc::new(disk))
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

    /// The size of the back end, in bytes, as the crossings are to honour it.
    pub(crate) fn store_capacity(&self) -> u64 {
        self.store_capacity.load(Ordering::Relaxed)
    }

    /// Takes up the back end's capacity. Whether front ends see another one than before.
    fn measure(&self, store_capacity: u64) -> bool {
        self.store_capacity.store(store_capacity, Ordering::Relaxed);
        let top = self.ladder(&self.layers())[0].capacity;
        self.capacity.swap(top, Ordering::Relaxed) != top
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
        self.ladder(&self.layers())[0].capabilities
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
    /// When the back end, a layer, or a further store of a layer cannot open a queue.
    pub fn open_queue(self: &Arc<Self>, reactor: &mut Reactor, clock: Clock) -> io::Result<Stack> {
        let queue = self.queues.fetch_add(1, Ordering::Relaxed);
        let registered = self.register(queue);
        Stack::open(self, queue, self.layers(), Some(registered), reactor, clock)
    }

    /// Opens the disk for a layer's own work while the layers [change](Self::restack): all other
    /// queues stand still.
    ///
    /// # Errors
    /// As for [`open_queue`](Self::open_queue).
    pub fn open_aside(self: &Arc<Self>, reactor: &mut Reactor, clock: Clock) -> io::Result<Stack> {
        let queue = self.queues.fetch_add(1, Ordering::Relaxed);
        Stack::open(self, queue, self.layers(), None, reactor, clock)
    }

    /// The number of a queue that takes another one's place.
    pub(crate) fn next_queue(&self) -> u64 {
        self.queues.fetch_add(1, Ordering::Relaxed)
    }

    /// Gives the back end another size and tells the front ends. `capacity` is in bytes of the back
    /// end; layers may show another size.
    ///
    /// # Errors
    /// What a layer says that has to refuse, and what the back end says.
    /// [`capacity`](Self::capacity) says which size holds then: it may be
    /// the new one, where it could not be made durable.
    pub fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        let (mut from, mut to) = (self.store_capacity(), capacity);
        for layer in self.layers().iter().rev() {
            layer.resizing(from, to)?;
            (from, to) = (layer.capacity(from), layer.capacity(to));
        }
        let before = self.capacity();
        if capacity < self.store_capacity() {
            // First, so that the crossings refuse what reaches behind the new end.
            self.measure(capacity);
        }
        let resized = self.backend.resize(capacity);
        self.measure(self.backend.capacity());
        if resized.is_ok() || self.capacity() != before {
            self.tell(DiskChange::Resized);
        }
        resized
    }

    /// What the queues and a change of the layers share.
    pub(crate) fn life(&self) -> &Life {
        &self.life
    }

    pub(crate) fn set_layers(&self, layers: Vec<Arc<dyn Layer>>) {
        *self.layers.write().expect("no holder of this lock panics") = layers;
    }

    /// Shows the size that the layers show now.
    pub(crate) fn remeasure(&self) {
        if self.measure(self.store_capacity()) {
            self.tell(DiskChange::Resized);
        }
    }

    /// Calls `listener` at each change from now on, until it returns false.
    pub fn listen(&self, listener: ChangeListener) {
        self.listeners.lock().expect("no listener panics").push(listener);
    }

    pub(crate) fn tell(&self, change: DiskChange) {
        self.listeners.lock().expect("no listener panics").retain(|listener| listener(change));
    }

    /// What each level offers to the one above it: the layers from the top, then the back end.
    pub(crate) fn ladder(&self, layers: &[Arc<dyn Layer>]) -> Vec<Offer> {
        let mut below = Offer {
            capabilities: self.backend.capabilities(),
            geometry: self.backend.geometry(),
            capacity: self.store_capacity(),
        };
        if self.options.read_only {
            below.capabilities = below.capabilities.read_only();
        }
        let mut ladder = vec![below];
        for layer in layers.iter().rev() {
            below = Offer {
                capabilities: layer.capabilities(below.capabilities),
                geometry: layer.geometry(below.geometry),
                capacity: layer.capacity(below.capacity),
            };
            ladder.push(below);
        }
        ladder.reverse();
        ladder
    }
}
