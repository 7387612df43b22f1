//! Copies that system calls of guests make, for the layers `patterns` of their disks.
//!
//! A thread collects the calls ten times a second, while an interceptor notes calls of a guest that
//! has a disk with the layer. There is no such thread before a disk has the layer, or without
//! calls in `[intercept]`.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::Duration;

use fathom_block::Clock;
use fathom_insight::Facts;
use fathom_insight::syscall::error_of;
use fathom_intercept::{Call, CallReaders};
use fathom_introspect::{DiskObject, Guest};
use fathom_layers::Patterns;
use fathom_layers::patterns::CopyCall;

use super::of;
use crate::daemon::Daemon;
use crate::features::guests::{DiskGuest, Introspection};
use crate::features::intercept::feature::{is_noting, noted_calls};
use crate::features::intercept::reading::{Caller, NotedReader};

/// The interval between two collections.
const INTERVAL: Duration = Duration::from_millis(100);
/// The same while there are no calls to collect.
const INTERVAL_IDLE: Duration = Duration::from_secs(1);
/// The call for anything else, and two of its requests (`FICLONE`, `FICLONERANGE`).
const CONTROL: u64 = 16;
const CLONE: u64 = 0x4004_9409;
const CLONE_RANGE: u64 = 0x4020_940d;

/// The thread that collects copies by calls.
#[derive(Default)]
pub(super) struct Collector {
    daemon: OnceLock<Weak<Daemon>>,
    has_thread: OnceLock<()>,
}

impl Collector {
    /// The daemon, once it exists.
    pub(super) fn set(&self, daemon: &Arc<Daemon>) {
        let _ = self.daemon.set(Arc::downgrade(daemon));
    }

    /// Begins, if the daemon notes calls.
    pub(super) fn begin(&self, daemon: &Daemon) {
        let Some(own) = self.daemon.get().filter(|_| is_noting(daemon)) else { return };
        self.has_thread.get_or_init(|| {
            let daemon = Weak::clone(own);
            let begun = thread::Builder::new().name("call-copies".into()).spawn(move || run(&daemon));
            if let Err(error) = begun {
                tracing::error!(%error, "copies by calls are not noticed: a thread cannot be started");
            }
        });
    }
}

fn run(daemon: &Weak<Daemon>) {
    let mut readers: Vec<NotedReader> = Vec::new();
    loop {
        let Some(strong) = daemon.upgrade().filter(|daemon| !daemon.is_stopping()) else { return };
        let mut noted = noted_calls(&strong);
        readers.retain(|reader| noted.iter().any(|noted| noted.number == reader.noted.number));
        noted.retain(|noted| readers.iter().all(|reader| noted.number != reader.noted.number));
        // A reader without disks costs the guest time.
        let has_disks = |guest: &Arc<Guest>| !disks_of(&strong, guest).is_empty();
        readers.retain(|reader| has_disks(&reader.noted.guest));
        noted.retain(|noted| has_disks(&noted.guest));
        let new = noted.into_iter().map(|noted| NotedReader::new(noted, CallReaders::Copies));
        readers.extend(new);
        for reader in &mut readers {
            let disks = disks_of(&strong, &reader.noted.guest);
            collect(reader, &disks, Clock::System.now_ns());
        }
        drop(strong);
        thread::sleep(if readers.is_empty() { INTERVAL_IDLE } else { INTERVAL });
    }
}

/// The disks of a guest with the layer.
fn disks_of(daemon: &Daemon, guest: &Arc<Guest>) -> Vec<(Arc<DiskObject>, Patterns)> {
    let names = daemon.part::<Arc<Introspection>>().disks_of(guest);
    let served = daemon
        .served()
        .into_iter()
        .filter(|served| names.iter().any(|name| name == served.disk.name()));
    let with_layer = served.filter_map(|served| {
        let object = Arc::clone(served.part::<Arc<DiskGuest>>()?.slot().object());
        Some((object, of(&served)?))
    });
    with_layer.collect()
}

/// Notes the copies since the last time. Calls with the same files are one copy.
fn collect(reader: &mut NotedReader, disks: &[(Arc<DiskObject>, Patterns)], now_ns: u64) {
    let mut calls = Vec::new();
    reader.read(&mut calls);
    let mut copies: HashMap<(u64, u64, u32), (Call, u64)> = HashMap::new();
    for call in calls {
        if call.file.address == 0 || call.source.address == 0 || error_of(call.result).is_some() {
            continue;
        }
        let Some(bytes) = bytes_of(&call) else { continue };
        let key = (call.file.address, call.source.address, call.process);
        let (_, sum) = copies.entry(key).or_insert((call, 0));
        *sum = sum.saturating_add(bytes);
    }
    let Some(kernel) = reader.noted.guest.kernel().filter(|_| !copies.is_empty()) else { return };
    let objects: Vec<Arc<DiskObject>> =
        disks.iter().map(|(object, _)| Arc::clone(object)).collect();
    for (call, bytes) in copies.into_values() {
        let Some(Caller { process, command, cgroup }) = reader.caller(&call, now_ns) else {
            continue;
        };
        let (source, target) = (reader.file(call.source, now_ns), reader.file(call.file, now_ns));
        // Pipes, sockets and devices have no path on a disk.
        let Some((source, target)) = source
            .zip(target)
            .filter(|(source, target)| source.path.is_some() && target.path.is_some())
        else {
            continue;
        };
        let target = Facts {
            cgroup,
            process: command,
            process_id: process.process_id,
            process_start: (process.start_ns / 10_000_000) as u32,
            ..target
        };
        // Of a file system on several disks, the first one has it.
        let place = kernel.disks_of_file(call.file.address, &objects).first().copied();
        if let Some((_, layer)) = place.and_then(|place| disks.get(place)) {
            let bytes = bytes.min(source.file_size.max(target.file_size));
            layer.note_call(&CopyCall { target: &target, source: &source, bytes }, now_ns);
        }
    }
}

/// The bytes that a call has copied; of a clone of all of a file, or of all from a place on, more
/// than a file can have.
fn bytes_of(call: &Call) -> Option<u64> {
    match (call.number, call.arguments[1] & 0xffff_ffff, call.arguments[4]) {
        (CONTROL, CLONE, _) | (CONTROL, CLONE_RANGE, 0) => Some(i64::MAX as u64),
        (CONTROL, CLONE_RANGE, length) => Some(length),
        (CONTROL, _, _) => None,
        _ => Some(call.result),
    }
    .filter(|bytes| *bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_bytes() {
        let bytes = |number, request, length, result| {
            let arguments = [3, request, 4, 0, length, 0];
            bytes_of(&Call { number, arguments, result, ..Call::default() })
        };
        assert_eq!(bytes(326, 0, 4096, 100), Some(100));
        assert_eq!(bytes(40, 4, 4096, 0), None);
        assert_eq!(bytes(CONTROL, CLONE, 7, 0), Some(i64::MAX as u64));
        assert_eq!(bytes(CONTROL, CLONE_RANGE | 1 << 40, 8192, 0), Some(8192));
        assert_eq!(bytes(CONTROL, CLONE_RANGE, 0, 0), Some(i64::MAX as u64));
        assert_eq!(bytes(CONTROL, 0x1234, 5, 6), None);
    }
}
