//! The exports: names, their disks, and who is connected to them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::Duration;

use fathom_block::{Disk, DiskChange, REQUEST_LENGTH_MAX};

use super::control::Control;
use super::negotiation::{Catalogue, Description};
use super::threads::Threads;
use super::wire::{STRING_LENGTH_MAX, transmission};

/// How long the removal of an export waits for its connections.
const REMOVAL_TIME_MAX: Duration = Duration::from_secs(15);

/// Why an export could not be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameError {
    /// There is an export of this name.
    Taken,
    /// The name is longer than the protocol allows, or contains a NUL.
    Invalid,
}

impl fmt::Display for NameError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Taken => "an export of this name exists already",
            Self::Invalid => "an export's name has 4096 bytes at most and no NUL among them",
        })
    }
}

impl std::error::Error for NameError {}

/// The disks that NBD clients can reach, under their names. Shared by listeners, and changed while
/// they run.
pub struct Exports {
    table: RwLock<Table>,
    threads_max: usize,
}

impl Default for Exports {
    /// No exports, and as many threads for each as the process may use processors.
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

    /// No exports yet. At most `threads_max` threads serve the connections of each.
    pub fn with_threads(threads_max: usize) -> Self {
        Self { table: RwLock::default(), threads_max }
    }

    /// Offers `disk` as `name`, with a text for people that may be empty.
    ///
    /// # Errors
    /// When the name is taken or cannot be an export's.
    pub fn add(&self, name: &str, text: &str, disk: Arc<Disk>) -> Result<(), NameError> {
        if name.len() > STRING_LENGTH_MAX || text.len() > STRING_LENGTH_MAX || name.contains('\0') {
            return Err(NameError::Invalid);
        }
        let export = Arc::new(Export {
            name: name.to_owned(),
            text: text.to_owned(),
            disk,
            guests: Mutex::default(),
            borrowed: AtomicU64::new(0),
            left: Condvar::new(),
            threads: Threads::new(self.threads_max),
        });
        {
            let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
            if table.exports.contains_key(name) {
                return Err(NameError::Taken);
            }
            table.exports.insert(name.to_owned(), Arc::clone(&export));
        }
        let weak = Arc::downgrade(&export);
        export.disk.listen(Box::new(move |change| {
            let Some(export) = weak.upgrade() else { return false };
            match change {
                // Told to new connections: the protocol has no way to tell the others.
                DiskChange::Resized => {}
                DiskChange::Restacked => export.each(Control::wake),
            }
            true
        }));
        Ok(())
    }

    /// Takes an export away: no new connection finds it, and those that are there end after the
    /// requests that they have in flight. Returns its disk once they have ended, or once a slow
    /// end has been waited for long enough (15 s); `None` where there is no such export.
    pub fn remove(&self, name: &str) -> Option<Arc<Disk>> {
        let leaving = self.withdraw(name)?;
        leaving.wait(REMOVAL_TIME_MAX);
        Some(Arc::clone(&leaving.0.disk))
    }

    /// Takes an export away without waiting: no new connection finds it, and those that are there
    /// end after the requests that they have in flight. `None` where there is no such export.
    pub fn withdraw(&self, name: &str) -> Option<Leaving> {
        let export = {
            let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
            if table.default.as_deref() == Some(name) {
                table.default = None;
            }
            table.exports.remove(name)?
        };
        let mut guests = export.guests.lock().unwrap_or_else(PoisonError::into_inner);
        guests.closed = true;
        for control in &guests.controls {
            control.stop();
        }
        drop(guests);
        Some(Leaving(export))
    }

    /// The export that the empty name means. Where none is chosen, an only export is the default.
    pub fn set_default(&self, name: Option<&str>) {
        self.table.write().unwrap_or_else(PoisonError::into_inner).default =
            name.map(str::to_owned);
    }

    /// Names and disks, in order of names.
    pub fn list(&self) -> Vec<(String, Arc<Disk>)> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let pair = |export: &Arc<Export>| (export.name.clone(), Arc::clone(&export.disk));
        table.exports.values().map(pair).collect()
    }

    fn get(&self, name: &str) -> Option<Arc<Export>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
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

/// An export that has been taken away, whose connections may still have requests in flight.
pub struct Leaving(Arc<Export>);

impl Leaving {
    /// Waits until the last connection has ended, for `limit` at most. Returns whether it has.
    pub fn wait(&self, limit: Duration) -> bool {
        let guests = self.0.guests.lock().unwrap_or_else(PoisonError::into_inner);
        let waited =
            self.0.left.wait_timeout_while(guests, limit, |guests| !guests.controls.is_empty());
        waited.unwrap_or_else(PoisonError::into_inner).0.controls.is_empty()
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
            let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
            table.exports.values().cloned().collect()
        };
        for export in exports {
            visit(&export.name, &export.text);
        }
    }
}

/// One disk under one name.
pub struct Export {
    name: String,
    text: String,
    disk: Arc<Disk>,
    guests: Mutex<Guests>,
    /// What its connections have taken of the budget, in bytes.
    borrowed: AtomicU64,
    /// Signalled when a connection has left.
    left: Condvar,
    threads: Arc<Threads>,
}

#[derive(Default)]
struct Guests {
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

    /// The threads that serve its connections.
    pub(super) fn threads(&self) -> &Arc<Threads> {
        &self.threads
    }

    /// What its connections have taken of the budget, in bytes.
    pub(super) fn borrowed(&self) -> &AtomicU64 {
        &self.borrowed
    }

    /// Enters a connection, to be told of changes. False when the export has been removed.
    pub(super) fn enter(&self, control: &Arc<Control>) -> bool {
        let mut guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        if guests.closed {
            return false;
        }
        guests.controls.push(Arc::clone(control));
        true
    }

    /// Strikes a connection out.
    pub(super) fn leave(&self, control: &Arc<Control>) {
        let mut guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        guests.controls.retain(|other| !Arc::ptr_eq(other, control));
        drop(guests);
        self.left.notify_all();
    }

    fn each(&self, visit: impl Fn(&Control)) {
        let guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        for control in &guests.controls {
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
        // Where writes cannot be durable by themselves, a flush behind them makes them so.
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
            // A power of two by the protocol, no larger than the maximum.
            block_preferred: preferred
                .checked_next_power_of_two()
                .unwrap_or(4096)
                .clamp(minimum, REQUEST_LENGTH_MAX as u32),
            block_maximum: REQUEST_LENGTH_MAX as u32,
        }
    }
}
