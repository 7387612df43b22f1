//! The write-back of a log while nobody uses its disk: after a VM has ended or the last NBD client
//! has gone, what the log has would else stay there until a next one comes, and the image would be
//! out of date.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use fathom_block::{Attendance, Attended, Disk};
use fathom_layers::Wal;

use super::DiskLog;

/// The interval between attempts while the thread of an earlier queue ends.
const RETRY: Duration = Duration::from_millis(50);

impl DiskLog {
    /// Lets the log be written back by its rules even while no front end of `disk` has a queue,
    /// until [`leave`](Self::leave).
    pub(crate) fn attend(&self, disk: &Arc<Disk>) {
        let (attendance, weak) = (Arc::clone(&self.attendance), Arc::downgrade(disk));
        self.wal.on_unattended(move |wal| begin(&attendance, &weak, wal));
        if self.wal.is_unattended() {
            begin(&self.attendance, &Arc::downgrade(disk), &self.wal);
        }
    }

    /// The disk will be withdrawn: from now on, no queue is opened for its log.
    pub(crate) fn forbid_attendance(&self) {
        self.attendance.forbid();
    }

    /// Ends the queue that was opened for the log, and waits for its end.
    pub(crate) fn end_attendance(&self) {
        self.attendance.end();
    }
}

/// Opens a queue of the disk, on another thread, until its log has no more work. Does not block.
fn begin(attendance: &Arc<Attendance>, disk: &Weak<Disk>, wal: &Wal) {
    let Some(name) = disk.upgrade().map(|disk| disk.name().to_owned()) else { return };
    let (attendance, disk, wal) = (Arc::clone(attendance), disk.clone(), wal.clone());
    let attempt = {
        let name = name.clone();
        move || open(&attendance, &disk, &wal).unwrap_or_else(|error| warn(&name, &error))
    };
    if let Err(error) = std::thread::Builder::new().name("attend".into()).spawn(attempt) {
        warn(&name, &error);
    }
}

/// Opens the queue. An earlier one may be about to end.
fn open(attendance: &Arc<Attendance>, disk: &Weak<Disk>, wal: &Wal) -> io::Result<()> {
    while wal.is_unattended() {
        // While it waits, it does not keep a disk that is withdrawn.
        let Some(disk) = disk.upgrade().filter(|disk| disk.capabilities().write) else { break };
        let (watched, name) = (wal.clone(), disk.name().to_owned());
        let is_done = move || !watched.has_work();
        let failed = move || {
            let problem =
                "a thread failed because of a bug; the log is written back when the disk is used";
            tracing::error!(disk = name, "{problem}");
        };
        if attendance.begin(&disk, is_done, failed)? != Attended::Already {
            break;
        }
        drop(disk);
        std::thread::sleep(RETRY);
    }
    Ok(())
}

fn warn(disk: &str, error: &io::Error) {
    tracing::warn!(disk, %error, "its log is written back only when the disk is used");
}
