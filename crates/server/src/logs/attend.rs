//! The write-back of a log while nobody uses its disk: after a VM has ended or the last NBD client has gone, what the
//! log has would else stay there until a next one comes, and the image would be out of date.

use std::sync::{Arc, Weak};
use std::time::Duration;

use fathom_block::{Attendance, Attended, Disk};
use fathom_layers::Wal;

use super::DiskLog;

/// The interval between attempts while the thread of an earlier queue ends.
const RETRY: Duration = Duration::from_millis(50);

impl DiskLog {
    /// Lets the log be written back by its rules even while no front end of `disk` has a queue, until
    /// [`leave`](Self::leave).
    pub(crate) fn attend(&self, disk: &Arc<Disk>) {
        let (attendance, weak) = (Arc::clone(&self.attendance), Arc::downgrade(disk));
        self.wal.on_unattended(move |wal| begin(&attendance, &weak, wal));
        if self.wal.is_unattended() {
            begin(&self.attendance, &Arc::downgrade(disk), &self.wal);
        }
    }

    /// The disk will be withdrawn: from now on, no queue is opened for its log.
    pub(crate) fn leave(&self) {
        self.attendance.forbid();
    }

    /// Ends the queue that was opened for the log, and waits for its end.
    pub(crate) fn end_attendance(&self) {
        self.attendance.end();
    }
}

/// Opens a queue of the disk until its log has no more work. Does not block.
fn begin(attendance: &Arc<Attendance>, disk: &Weak<Disk>, wal: &Wal) {
    let Some(name) = disk.upgrade().map(|disk| disk.name().to_owned()) else { return };
    let (attendance, disk, wal) = (Arc::clone(attendance), disk.clone(), wal.clone());
    let open = {
        let name = name.clone();
        move || {
            while wal.is_unattended() {
                let Some(disk) = disk.upgrade().filter(|disk| disk.capabilities().write) else {
                    return;
                };
                let (watched, failing) = (wal.clone(), name.clone());
                let is_done = move || !watched.has_work();
                let failed = move || {
                    let problem = "a thread failed because of a bug; the log is written back when the disk is used";
                    tracing::error!(disk = failing, "{problem}");
                };
                match attendance.begin(&disk, is_done, failed) {
                    Ok(Attended::Begun | Attended::Over) => return,
                    Ok(Attended::Already) => {}
                    Err(error) => {
                        let problem = "its log is written back only when the disk is used";
                        tracing::warn!(disk = name, %error, "{problem}");
                        return;
                    }
                }
                drop(disk);
                std::thread::sleep(RETRY);
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("attend".into()).spawn(open) {
        tracing::warn!(disk = name, %error, "its log is written back only when the disk is used");
    }
}
