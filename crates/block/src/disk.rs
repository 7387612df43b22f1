//! A disk: layers over a back end, under a name.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_reactor::Reactor;
use parking_lot::{Mutex, RwLock};

use crate::backend::Backend;
use crate::background::BackgroundScheduler;
use crate::change::{Composition, Life};
use crate::clock::Clock;
use crate::failures::Failures;
use crate::geometry::{Capabilities, Geometry};
use crate::layer::{LAYERS_MAX, Layer};
use crate::leftovers::Leftovers;
use crate::open::Offer;
use crate::request::{ErrorKind, SERIAL_LENGTH};
use crate::stack::{Stack, StackCounters};

/// A change of a disk that front ends are notified of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskChange {
    /// The capacity has changed.
    Resized,
    /// The layers are changing: each queue's thread has to make a round ([`Stack::advance`]), even
    /// without new requests. It takes no requests while the stack [is closing](Stack::is_closing).
    Restacked,
}

/// Called at each change of a disk, on the thread that makes the change. It must not block. If it
/// returns false, it is not called again.
pub type ChangeListener = Box<dyn Fn(DiskChange) -> bool + Send + Sync>;

/// A disk's names and access mode.
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

/// A disk: the state that its queues share.
pub struct Disk {
    options: DiskOptions,
    serial: [u8; SERIAL_LENGTH],
    /// The size that front ends see, in bytes.
    capacity: AtomicU64,
    store_capacity: AtomicU64,
    geometry: Geometry,
    /// The geometry of the first back end. A later one is used as if it had the same.
    store_geometry: Geometry,
    composition: RwLock<Composition>,
    life: Life,
    listeners: Mutex<Vec<ChangeListener>>,
    counters: StackCounters,
    failures: Failures,
    leftovers: Leftovers,
    queues: AtomicU64,
    /// Decides when the layers' background work is done.
    scheduler: RwLock<Option<Arc<dyn BackgroundScheduler>>>,
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
        let (store_capacity, store_geometry) = (backend.capacity(), backend.geometry());
        let mut disk = Self {
            options,
            serial,
            capacity: AtomicU64::new(store_capacity),
            store_capacity: AtomicU64::new(store_capacity),
            geometry: store_geometry,
            store_geometry,
            composition: RwLock::new(Composition { layers, home: backend }),
            life: Life::default(),
            listeners: Mutex::new(Vec::new()),
            counters: StackCounters::default(),
            failures: Failures::default(),
            leftovers: Leftovers::default(),
            queues: AtomicU64::new(0),
            scheduler: RwLock::default(),
        };
        let top = disk.ladder(&disk.layers(), &*disk.backend())[0];
        disk.capacity = AtomicU64::new(top.capacity);
        disk.geometry = top.geometry;
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

    /// The size of the back end, in bytes, that the crossings enforce.
    pub(crate) fn store_capacity(&self) -> u64 {
        self.store_capacity.load(Ordering::Relaxed)
    }

    /// Sets the back end's capacity. Returns whether the capacity that front ends see has changed.
    fn measure(&self, store_capacity: u64) -> bool {
        self.store_capacity.store(store_capacity, Ordering::Relaxed);
        let top = self.ladder(&self.layers(), &*self.backend())[0].capacity;
        self.capacity.swap(top, Ordering::Relaxed) != top
    }

    /// The fixed sizes.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The geometry of the first back end.
    pub(crate) fn store_geometry(&self) -> Geometry {
        self.store_geometry
    }

    /// The back end. A [change](Self::rehome) may give the disk another one.
    pub fn backend(&self) -> Arc<dyn Backend> {
        Arc::clone(&self.composition.read().home)
    }

    /// The layers, the one nearest the front end first.
    pub fn layers(&self) -> Vec<Arc<dyn Layer>> {
        self.composition.read().layers.clone()
    }

    /// The layers and the back end at one instant.
    pub(crate) fn composition(&self) -> Composition {
        self.composition.read().clone()
    }

    /// The capabilities that front ends see.
    pub fn capabilities(&self) -> Capabilities {
        let now = self.composition();
        self.ladder(&now.layers, &*now.home)[0].capabilities
    }

    /// The counters of refused requests.
    pub fn counters(&self) -> &StackCounters {
        &self.counters
    }

    /// The failures of the disk's requests, as front ends see them.
    pub fn failures(&self) -> &Failures {
        &self.failures
    }

    /// The changes in flight whose clients have gone.
    pub fn leftovers(&self) -> &Leftovers {
        &self.leftovers
    }

    /// Opens the disk for one queue, served by the thread that owns `reactor`.
    ///
    /// # Errors
    /// When the back end, a layer, or a further store of a layer cannot open a queue.
    pub fn open_queue(self: &Arc<Self>, reactor: &mut Reactor, clock: Clock) -> io::Result<Stack> {
        let queue = self.queues.fetch_add(1, Ordering::Relaxed);
        let registered = self.register(queue);
        Stack::open(self, queue, self.composition(), Some(registered), reactor, clock)
    }

    /// Opens a queue for a layer's own work while the layers [change](Self::restack) and all other
    /// queues serve no requests.
    ///
    /// # Errors
    /// As for [`open_queue`](Self::open_queue).
    pub fn open_aside(self: &Arc<Self>, reactor: &mut Reactor, clock: Clock) -> io::Result<Stack> {
        let queue = self.queues.fetch_add(1, Ordering::Relaxed);
        Stack::open(self, queue, self.composition(), None, reactor, clock)
    }

    /// The number of a queue that replaces another one.
    pub(crate) fn next_queue(&self) -> u64 {
        self.queues.fetch_add(1, Ordering::Relaxed)
    }

    /// Changes the size of the back end and notifies the front ends. `capacity` is the back end's,
    /// in bytes; layers may show another size.
    ///
    /// # Errors
    /// The error of a layer that refuses, or of the back end. [`capacity`](Self::capacity) then
    /// returns the valid size: this may be the new size, if it could not be made durable.
    pub fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        let (mut from, mut to) = (self.store_capacity(), capacity);
        for layer in self.layers().iter().rev() {
            layer.resizing(from, to)?;
            (from, to) = (layer.capacity(from), layer.capacity(to));
        }
        let before = self.capacity();
        if capacity < self.store_capacity() {
            // The capacity is lowered first, so that the crossings refuse requests beyond the new
            // end.
            self.measure(capacity);
        }
        let backend = self.backend();
        let resized = backend.resize(capacity);
        self.measure(backend.capacity());
        if resized.is_ok() || self.capacity() != before {
            self.announce(DiskChange::Resized);
        }
        resized
    }

    /// Sets the scheduler of the background work of the queues that are opened from now on.
    pub fn schedule_background(&self, scheduler: Arc<dyn BackgroundScheduler>) {
        *self.scheduler.write() = Some(scheduler);
    }

    /// From now on, background work of new queues begins at once.
    pub fn unschedule_background(&self) {
        *self.scheduler.write() = None;
    }

    pub(crate) fn scheduler(&self) -> Option<Arc<dyn BackgroundScheduler>> {
        self.scheduler.read().clone()
    }

    /// State that the queues share with a change of the layers.
    pub(crate) fn life(&self) -> &Life {
        &self.life
    }

    pub(crate) fn set_composition(&self, composition: Composition) {
        *self.composition.write() = composition;
    }

    /// Updates the capacity after a change of the layers or of the back end, which has
    /// `store_capacity` bytes, and announces a difference.
    pub(crate) fn remeasure(&self, store_capacity: u64) {
        if self.measure(store_capacity) {
            self.announce(DiskChange::Resized);
        }
    }

    /// Calls `listener` at each change, until it returns false.
    pub fn listen(&self, listener: ChangeListener) {
        self.listeners.lock().push(listener);
    }

    pub(crate) fn announce(&self, change: DiskChange) {
        self.listeners.lock().retain(|listener| listener(change));
    }

    /// The offer of each level to the level above: first the layers from the top, then the back
    /// end `home`.
    pub(crate) fn ladder(&self, layers: &[Arc<dyn Layer>], home: &dyn Backend) -> Vec<Offer> {
        let mut below = Offer {
            capabilities: home.capabilities(),
            geometry: self.store_geometry,
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
