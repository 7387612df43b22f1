//! Who holds the keepsakes of files ([`fathom_backend::Keeper`]): descriptions that tell the next
//! daemon of lost writes whose report a killed one has taken, or never got.
//!
//! - Under systemd, its store of file descriptors: the manager passes what it holds to the next
//!   daemon.
//! - Elsewhere, a small process, `fathom keep`, in a session of its own: `holder`. `link` is the
//!   daemon's end.
//!
//! `connections` has those to servers of exports, which tell whether the server has ended.
//! `descriptors` has the system calls that `rustix` does not offer safely.

pub(crate) mod connections;
mod descriptors;
mod holder;
mod link;
pub(crate) mod lives;
mod manager;
mod release;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use fathom_backend::{
    Keeper, Left, count_syncs_in_flight, read_syncs_in_flight, report_of_keepsake, set_keeper,
};
use fathom_image::{LossRecord, is_same_file};
use parking_lot::Mutex;

pub(crate) use descriptors::close_others;
pub use holder::{Keep, keep};
use link::Link;
use manager::Manager;

/// The beginning of the names of keepsakes, among other descriptors of the service manager.
const PREFIX: &str = "keep-";
/// The longest name of a keepsake, in bytes.
const NAME_LENGTH_MAX: usize = 128;

/// The keepsakes that are held for this process, by name.
type Held = Arc<Mutex<BTreeMap<String, Arc<File>>>>;

/// Where the keepsakes are.
enum Place {
    Manager(Manager),
    Process(Arc<Link>),
}

/// The keepsakes of this process, and those that earlier ones have left.
struct Keepsakes {
    place: Place,
    held: Held,
    /// The names of those whose reports are recorded.
    recorded: Mutex<BTreeSet<String>>,
    left: Mutex<Vec<Left>>,
    count: AtomicU64,
}

static KEEPSAKES: OnceLock<Arc<Keepsakes>> = OnceLock::new();

/// Where the syncs in flight are counted, without keepsakes.
static SYNCS: OnceLock<PathBuf> = OnceLock::new();

/// Without keepsakes: counts the syncs in flight in a file beside the control socket.
fn count_syncs(path: PathBuf) {
    match count_syncs_in_flight(&path) {
        Ok(()) => drop(SYNCS.set(path)),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "syncs in flight are not counted");
        }
    }
}

fn beside(control: &Path, suffix: &str) -> PathBuf {
    let mut path = control.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

/// Looks for the keepsakes that an earlier daemon with this control socket has left. From now on,
/// each file that is opened for writing has one, unless `are_kept` is false.
pub(crate) fn begin(control: &Path, are_kept: bool) {
    let syncs = beside(control, ".syncs");
    if let Err(error) = read_syncs_in_flight(&syncs) {
        tracing::warn!(path = %syncs.display(), %error, "it is unknown whether a sync was in flight");
    }
    if !are_kept {
        return count_syncs(syncs);
    }
    // This daemon knows it now.
    let _ = std::fs::remove_file(&syncs);
    let held = Held::default();
    let (place, left) = if let Some(manager) = Manager::new() {
        (Place::Manager(manager), descriptors::inherited())
    } else {
        let link = Link::new(beside(control, ".keep"), Arc::clone(&held));
        let left = link.list();
        (Place::Process(link), left)
    };
    let keepsakes = Keepsakes {
        place,
        held,
        recorded: Mutex::default(),
        left: Mutex::new(left),
        count: AtomicU64::new(0),
    };
    let keepsakes = Arc::new(keepsakes);
    if KEEPSAKES.set(Arc::clone(&keepsakes)).is_ok() {
        set_keeper(keepsakes);
    }
}

/// All disks are served: releases the keepsakes of files that none of them has. What such a one
/// reports is recorded with its file, or in the folder `records`. May block.
pub(crate) fn release_unused(records: &Path) {
    let Some(keepsakes) = KEEPSAKES.get() else { return };
    let left = std::mem::take(&mut *keepsakes.left.lock());
    for Left { name, file } in left {
        if let Some(errno) = report_of_keepsake(&file) {
            record(&file, errno, records);
        }
        keepsakes.release(&name);
    }
}

/// Releases the keepsakes of this process: all is durable, or nothing was written. Those that
/// earlier ones have left for disks that are not served stay. May wait for a moment.
pub(crate) fn end() {
    if let Some(path) = SYNCS.get() {
        let _ = std::fs::remove_file(path);
    }
    end_those(|_, _| true);
}

/// As [`end`], after a shutdown that was not clean: releases only the keepsakes whose reports are
/// recorded. Accesses no file, because one may hang.
pub(crate) fn end_recorded() {
    end_those(|keepsakes, name| keepsakes.recorded.lock().contains(name));
}

fn end_those(is_over: impl Fn(&Keepsakes, &str) -> bool) {
    let Some(keepsakes) = KEEPSAKES.get() else { return };
    let names: Vec<String> = keepsakes.held.lock().keys().cloned().collect();
    for name in names {
        if is_over(keepsakes, &name) {
            keepsakes.release(&name);
        }
    }
    if let Place::Process(link) = &keepsakes.place {
        link.end();
    }
}

/// The end of this process is noted in `life`, if a process holds keepsakes.
pub(crate) fn note_end(life: &File) {
    if let Some(Place::Process(link)) = KEEPSAKES.get().map(|keepsakes| &keepsakes.place) {
        if let Err(error) = link.note_end(life) {
            tracing::warn!(%error, "the end of this process will not be noted");
        }
    }
}

/// The path of an open file.
fn path_of(file: &File) -> PathBuf {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default()
}

/// Records that a file that no disk has any more has lost writes.
fn record(file: &File, errno: i32, records: &Path) {
    let path = path_of(file);
    let error = io::Error::from_raw_os_error(errno);
    tracing::error!(path = %path.display(), %error, "acknowledged writes may be lost");
    let recorded = LossRecord::new(file, &path, &[records.to_owned()])
        .and_then(|record| record.write(file, errno));
    if let Err(error) = recorded {
        tracing::error!(path = %path.display(), %error, "the loss cannot be recorded");
    }
}

impl Keeper for Keepsakes {
    fn left(&self, file: &File) -> Vec<Left> {
        let mut left = self.left.lock();
        let is_of = |left: &Left| is_same_file(&left.file, file).unwrap_or(false);
        let (found, others) = std::mem::take(&mut *left).into_iter().partition(is_of);
        *left = others;
        found
    }

    fn keep(&self, keepsake: File) -> io::Result<String> {
        let metadata = keepsake.metadata()?;
        // The number is unique among the processes whose keepsakes there can be.
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let file = if metadata.file_type().is_block_device() {
            format!("device-{:x}", metadata.rdev())
        } else {
            format!("{:x}-{:x}", metadata.dev(), metadata.ino())
        };
        let name = format!("{PREFIX}{file}-{}-{number}", descriptors::instance());
        let keepsake = Arc::new(keepsake);
        self.held.lock().insert(name.clone(), Arc::clone(&keepsake));
        let handed_over = match &self.place {
            Place::Manager(manager) => manager.keep(&name, &keepsake),
            Place::Process(link) => link.keep(&name, &keepsake),
        };
        handed_over.map(|()| name.clone()).inspect_err(|_| {
            self.held.lock().remove(&name);
        })
    }

    fn note_recorded(&self, name: &str) {
        self.recorded.lock().insert(name.to_owned());
    }

    fn release(&self, name: &str) {
        self.held.lock().remove(name);
        self.recorded.lock().remove(name);
        match &self.place {
            Place::Manager(manager) => manager.release(name),
            Place::Process(link) => link.release(name),
        }
    }
}
