//! The exports: their names, their disks, and their connections.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use fathom_block::{Disk, DiskChange, REQUEST_LENGTH_MAX};
use parking_lot::{Condvar, Mutex, RwLock};

use super::bitmaps::{BitmapRefusal, Bitmaps};
use super::control::Control;
use super::negotiation::{Catalogue, Description};
use super::threads::Threads;
use super::wire::{STRING_LENGTH_MAX, transmission};

/// The longest time that the removal of an export waits for its connections.
const REMOVAL_TIME_MAX: Duration = Duration::from_secs(15);

/// How long a new connection waits for the threads of connections whose clients have gone, and how
/// often it looks. A thread notices that within microseconds, unless its disk hangs.
const NOTICE_TIME_MAX: Duration = Duration::from_secs(10);
const NOTICE_INTERVAL: Duration = Duration::from_millis(1);

/// Why an export could not be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameError {
    /// Another export has this name.
    Taken,
    /// The name is longer than the protocol allows, or contains a NUL.
    Invalid,
}

impl fmt::Display for NameError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Taken => "another export has this name",
            Self::Invalid => "an export's name has at most 4096 bytes, none of them NUL",
        })
    }
}

impl std::error::Error for NameError {}

/// The disks that NBD clients can reach, by name. Listeners share it; it can change while they run.
pub struct Exports {
    table: RwLock<Table>,
    threads_max: usize,
}

impl Default for Exports {
    /// No exports, and for each at most as many threads as there are available processors.
    fn default() -> Self {
        Self::with_threads(std::thread::available_parallelism().map_or(1, usize::from))
    }
}

#[derive(Default)]
struct Table {
    exports: BTreeMap<String, Arc<Export>>,
    default: Option<String>,
}

impl Exports {
    /// No exports yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// No exports yet. At most `threads_max` threads serve the connections of each export.
    pub fn with_threads(threads_max: usize) -> Self {
        Self { table: RwLock::default(), threads_max }
    }

    /// Exports `disk` as `name`, with a description for people that may be empty.
    ///
    /// # Errors
    /// When the name is taken or invalid.
    pub fn add(&self, name: &str, text: &str, disk: Arc<Disk>) -> Result<(), NameError> {
        self.add_with_bitmaps(name, text, disk, None)
    }

    /// Exports `disk`, which can be compared with earlier states.
    ///
    /// # Errors
    /// As for [`add`](Self::add).
    pub fn add_with_bitmaps(
        &self,
        name: &str,
        text: &str,
        disk: Arc<Disk>,
        bitmaps: Option<Arc<dyn Bitmaps>>,
    ) -> Result<(), NameError> {
        if name.len() > STRING_LENGTH_MAX || text.len() > STRING_LENGTH_MAX || name.contains('\0') {
            return Err(NameError::Invalid);
        }
        let export = Arc::new(Export {
            name: name.to_owned(),
            text: text.to_owned(),
            disk,
            bitmaps,
            connections: Mutex::default(),
            borrowed: AtomicU64::new(0),
            left: Condvar::new(),
            threads: Threads::new(self.threads_max),
        });
        {
            let mut table = self.table.write();
            if table.exports.contains_key(name) {
                return Err(NameError::Taken);
            }
            table.exports.insert(name.to_owned(), Arc::clone(&export));
        }
        let weak = Arc::downgrade(&export);
        export.disk.listen(Box::new(move |change| {
            let Some(export) = weak.upgrade() else { return false };
            match change {
                // Only new connections see the new size: the protocol cannot announce it to others.
                DiskChange::Resized => {}
                DiskChange::Restacked => export.each(Control::wake),
            }
            true
        }));
        Ok(())
    }

    /// Removes an export: new connections do not find it, and its current ones end after their
    /// requests in flight. Returns its disk once they have ended, or after 15 s; `None` if there is
    /// no such export.
    pub fn remove(&self, name: &str) -> Option<Arc<Disk>> {
        let withdrawn = self.withdraw(name)?;
        withdrawn.wait(REMOVAL_TIME_MAX);
        Some(Arc::clone(&withdrawn.0.disk))
    }

    /// Removes an export without waiting: new connections do not find it, and its current ones end
    /// after their requests in flight. `None` if there is no such export.
    pub fn withdraw(&self, name: &str) -> Option<WithdrawnExport> {
        let export = {
            let mut table = self.table.write();
            if table.default.as_deref() == Some(name) {
                table.default = None;
            }
            table.exports.remove(name)?
        };
        let mut connections = export.connections.lock();
        connections.closed = true;
        for control in &connections.controls {
            control.stop();
        }
        drop(connections);
        Some(WithdrawnExport(export))
    }

    /// Sets the export that the empty name denotes. If none is set, a sole export is the default.
    pub fn set_default(&self, name: Option<&str>) {
        self.table.write().default = name.map(str::to_owned);
    }

    /// The names and the disks, in order of names.
    pub fn list(&self) -> Vec<(String, Arc<Disk>)> {
        let table = self.table.read();
        let pair = |export: &Arc<Export>| (export.name.clone(), Arc::clone(&export.disk));
        table.exports.values().map(pair).collect()
    }

    fn get(&self, name: &str) -> Option<Arc<Export>> {
        let table = self.table.read();
        if let Some(export) = table.exports.get(name) {
            return Some(Arc::clone(export));
        }
        if !name.is_empty() {
            return None;
        }
        match &table.default {
            Some(default) => table.exports.get(default).cloned(),
            None if table.exports.len() == 1 => table.exports.values().next().cloned(),
            None => None,
        }
    }
}

/// A removed export, whose connections may still have requests in flight.
pub struct WithdrawnExport(Arc<Export>);

impl WithdrawnExport {
    /// Waits until the last connection has ended, for at most `limit`. Returns whether it has
    /// ended.
    pub fn wait(&self, limit: Duration) -> bool {
        let mut connections = self.0.connections.lock();
        let are_left = |connections: &mut Connections| !connections.controls.is_empty();
        !self.0.left.wait_while_for(&mut connections, are_left, limit).timed_out()
    }
}

impl Catalogue for Exports {
    type Export = Arc<Export>;

    fn find(&self, name: &str) -> Option<(Arc<Export>, Description)> {
        let export = self.get(name)?;
        let description = export.description();
        Some((export, description))
    }

    fn each(&self, visit: &mut dyn FnMut(&str, &str)) {
        let exports: Vec<Arc<Export>> = {
            let table = self.table.read();
            table.exports.values().cloned().collect()
        };
        for export in exports {
            visit(&export.name, &export.text);
        }
    }

    fn bitmaps(&self, export: &Arc<Export>, count: usize) -> Vec<String> {
        export.bitmaps.as_ref().map(|bitmaps| bitmaps.names(count)).unwrap_or_default()
    }

    fn find_bitmap(&self, export: &Arc<Export>, name: &str) -> Result<(), BitmapRefusal> {
        export.bitmaps.as_ref().ok_or(BitmapRefusal::Unknown)?.find(name)
    }
}

/// One disk under one name.
pub struct Export {
    name: String,
    text: String,
    disk: Arc<Disk>,
    bitmaps: Option<Arc<dyn Bitmaps>>,
    connections: Mutex<Connections>,
    /// The bytes that its connections have taken from the budget.
    borrowed: AtomicU64,
    /// Signalled when a connection has ended.
    left: Condvar,
    threads: Arc<Threads>,
}

#[derive(Default)]
struct Connections {
    closed: bool,
    controls: Vec<Arc<Control>>,
}

impl Export {
    /// The name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The disk.
    pub(super) fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// The earlier states with which the disk can be compared.
    pub(super) fn bitmaps(&self) -> Option<&Arc<dyn Bitmaps>> {
        self.bitmaps.as_ref()
    }

    /// The threads that serve its connections.
    pub(super) fn threads(&self) -> &Arc<Threads> {
        &self.threads
    }

    /// The bytes that its connections have taken from the budget.
    pub(super) fn borrowed(&self) -> &AtomicU64 {
        &self.borrowed
    }

    /// Adds a connection, so that it is notified of changes. Returns false if the export has been
    /// removed.
    pub(super) fn enter(&self, control: &Arc<Control>) -> bool {
        let mut connections = self.connections.lock();
        if connections.closed {
            return false;
        }
        connections.controls.push(Arc::clone(control));
        true
    }

    /// Waits until the threads of connections whose clients have gone have noticed that, so that
    /// what these clients have left in flight is ordered before what `control`'s client sends.
    /// Returns false if that takes longer than [`NOTICE_TIME_MAX`], or if `control`'s client has
    /// gone, too.
    pub(super) fn await_abandoned(&self, control: &Arc<Control>) -> bool {
        let end = Instant::now() + NOTICE_TIME_MAX;
        let others: Vec<_> = {
            let connections = self.connections.lock();
            let others = connections.controls.iter().filter(|other| !Arc::ptr_eq(other, control));
            others.cloned().collect()
        };
        for other in others {
            while other.is_abandoned() {
                if Instant::now() >= end || control.is_stopping() || control.is_abandoned() {
                    return false;
                }
                std::thread::sleep(NOTICE_INTERVAL);
            }
        }
        true
    }

    /// Removes a connection.
    pub(super) fn leave(&self, control: &Arc<Control>) {
        let mut connections = self.connections.lock();
        connections.controls.retain(|other| !Arc::ptr_eq(other, control));
        drop(connections);
        self.left.notify_all();
    }

    fn each(&self, visit: impl Fn(&Control)) {
        let connections = self.connections.lock();
        for control in &connections.controls {
            visit(control);
        }
    }

    fn description(&self) -> Description {
        let capabilities = self.disk.capabilities();
        let geometry = self.disk.geometry();
        let mut flags = transmission::HAS_FLAGS
            | transmission::SEND_DF
            | transmission::CAN_MULTI_CONN
            | transmission::SEND_CACHE;
        let mut offer = |offered: bool, flag: u16| flags |= if offered { flag } else { 0 };
        offer(!capabilities.write, transmission::READ_ONLY);
        offer(capabilities.flush, transmission::SEND_FLUSH);
        // If the disk has no forced unit access, a flush after each such write makes it durable.
        let durable = capabilities.force_unit_access || capabilities.flush;
        offer(capabilities.write && durable, transmission::SEND_FUA);
        offer(capabilities.rotational, transmission::ROTATIONAL);
        offer(capabilities.write && capabilities.discard, transmission::SEND_TRIM);
        let zeroes = capabilities.write && capabilities.write_zeroes;
        offer(zeroes, transmission::SEND_WRITE_ZEROES | transmission::SEND_FAST_ZERO);
        let minimum = geometry.alignment.max(1);
        let preferred = geometry.optimal_size.max(geometry.physical_block_size).max(4096);
        Description {
            name: self.name.clone(),
            text: self.text.clone(),
            capacity: self.disk.capacity(),
            flags,
            block_minimum: minimum,
            // The protocol requires a power of two that is not larger than the maximum.
            block_preferred: preferred
                .checked_next_power_of_two()
                .unwrap_or(4096)
                .clamp(minimum, REQUEST_LENGTH_MAX as u32),
            block_maximum: REQUEST_LENGTH_MAX as u32,
        }
    }
}
