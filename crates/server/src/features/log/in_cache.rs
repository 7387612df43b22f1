//! The stores of caches, which may have an area for the logs of their disks. The caches on a store
//! and the logs on it share one open file, and so its lock and what it knows of failures.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use fathom_backend::FileBackend;
use fathom_block::{Backend, BackendProblem};
use fathom_failure::Failure;
use fathom_image::LossRecord;
use fathom_layers::Opened;
use fathom_layers::cache::format::{PAGE_LENGTH, Superblock};
use fathom_layers::wal::{LogPlaces, logs_in};
use fathom_persistence::{Identity, Superblock as _};

/// The bytes that are copied at a time.
const CHUNK: u64 = 1 << 20;

/// The open stores of caches, by path.
#[derive(Default)]
pub(crate) struct CacheStores {
    places: Opened<PathBuf, Weak<FileBackend>>,
}

impl CacheStores {
    /// Opens the store of a cache for `disk`, or finds it open. The path is canonical. If the store
    /// has lost writes before, it is restored first.
    pub(crate) fn open(
        &self,
        path: &Path,
        disk: &str,
        records: &Path,
    ) -> Result<Arc<dyn Backend>, Failure> {
        let place =
            self.places.place(super::volumes::volume_key(path), |store| store.strong_count() > 0);
        // Held while the store is opened, so that two disks do not open it separately.
        let mut place = place.lock();
        if let Some(store) = place.upgrade() {
            return Ok(store);
        }
        let store =
            Arc::new(super::volumes::open_shared(path, format!("the cache of {disk}"), records)?);
        if let Some(errno) = errno_of(&*store) {
            let shared: Arc<dyn Backend> = Arc::<FileBackend>::clone(&store);
            restore(path, &shared, errno, records)?;
        }
        *place = Arc::downgrade(&store);
        Ok(store)
    }
}

/// The `errno` with which a store has lost writes.
fn errno_of(store: &dyn Backend) -> Option<i32> {
    store.problems().iter().find_map(|problem| match problem {
        BackendProblem::WritesLost { errno, .. } => Some(*errno),
        _ => None,
    })
}

/// Makes a store usable that has lost writes. The kernel may return data that the store does not
/// hold and that no later flush writes. The blocks of the cache are dropped: home has what they
/// have. What the logs have is written again. But changes that were acknowledged and not flushed
/// may be missing in each log. So that is recorded for each of them first, and the disk with this
/// log takes no changes until the operator has confirmed that.
fn restore(
    path: &Path,
    store: &Arc<dyn Backend>,
    errno: i32,
    records: &Path,
) -> Result<(), Failure> {
    // A store without a superblock has nothing to lose: its cache is refused later.
    let Ok(format) = superblock(path) else { return Ok(()) };
    let has_logs = format.logs > 0;
    let again = if has_logs { ": its logs are written again" } else { "" };
    tracing::warn!(path = %path.display(), "the store has lost writes{again}");
    record(path, store, &format, errno, records).map_err(|error| {
        let what = "it has lost writes, and that cannot be recorded for the disks with a log in it";
        let remedy = format!("make {} writable", records.display());
        Failure::from(error).about(what).advise(remedy)
    })?;
    write_again(path, &format).and_then(|()| store.recover().map_err(io::Error::other)).map_err(
        |error| {
            let keep = if has_logs { ". The logs keep what is in them" } else { "" };
            let failure = Failure::from(error);
            let failure = failure.about("it has lost writes, and cannot be written again");
            failure.advise(format!("repair its device{keep}"))
        },
    )
}

/// Records for each log in the store that acknowledged changes may be missing in it.
fn record(
    path: &Path,
    store: &Arc<dyn Backend>,
    format: &Superblock,
    errno: i32,
    records: &Path,
) -> io::Result<()> {
    if format.logs == 0 {
        return Ok(());
    }
    for log in logs_in(store, &places_of(format))? {
        LogLoss::of(path, records, log)?.write(errno)?;
    }
    Ok(())
}

/// The record that acknowledged changes may be missing in a log, for the next daemon. It belongs to
/// the log, because each of several disks with a log in the store may have lost some. The operator
/// removes it, for each disk.
pub(super) struct LogLoss {
    store: File,
    record: LossRecord,
}

impl LogLoss {
    /// The record of the log with an identity, in the store at `path`.
    pub(super) fn of(path: &Path, records: &Path, log: Identity) -> io::Result<Self> {
        let store = File::open(path)?;
        let record = LossRecord::of_part(log, &store, path, &[records.to_owned()])?;
        Ok(Self { store, record })
    }

    /// The `errno` of the loss; `None` if none is recorded.
    pub(super) fn errno(&self) -> Option<i32> {
        self.record.read(&self.store).map(|loss| loss.errno)
    }

    pub(super) fn write(&self, errno: i32) -> io::Result<()> {
        self.record.write(&self.store, errno)
    }

    pub(super) fn clear(&self) -> io::Result<()> {
        self.record.clear(&self.store)
    }
}

fn write_again(path: &Path, format: &Superblock) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    // No image has a mark of this identity, and no page is sound with it. A crash between both
    // writes leaves the earlier identity, and the record of the loss, too.
    let other = Superblock { cache: Identity::draw()?, ..*format };
    for copy in [1, 0] {
        file.write_all_at(&other.encode(), copy * PAGE_LENGTH as u64)?;
        file.sync_data()?;
    }
    let mut bytes = vec![0; CHUNK as usize];
    let (mut at, end) = (format.log_offset(0), format.length());
    while at < end {
        let bytes = &mut bytes[..CHUNK.min(end - at) as usize];
        file.read_exact_at(bytes, at)?;
        file.write_all_at(bytes, at)?;
        at += bytes.len() as u64;
    }
    file.sync_data()
}

/// The superblock of the cache at `path`.
pub(super) fn superblock(path: &Path) -> Result<Superblock, Failure> {
    let mut copies = [0; 2 * PAGE_LENGTH];
    File::open(path)?.read_exact_at(&mut copies, 0)?;
    Superblock::select(&copies).map_err(|verdict| Failure::new(verdict.describe::<Superblock>()))
}

/// The places for logs of the cache at `path`, which has `capacity` bytes.
pub(super) fn places(path: &Path, capacity: u64) -> Result<LogPlaces, Failure> {
    let format = superblock(path).map_err(|failure| {
        failure.advise(
            "restore it if a disk has changes in its log, else make a cache with `fathom cache create \
             --log SIZE`",
        )
    })?;
    if format.logs == 0 {
        return Err(Failure::new("the cache has no place for logs").advise(
            "make it again with `fathom cache create --log SIZE`, or choose another `mode`",
        ));
    }
    if format.length() > capacity {
        let message = format!("the cache has {} bytes, and its store {capacity}", format.length());
        return Err(Failure::new(message).advise("make the store as large as it was"));
    }
    Ok(places_of(&format))
}

/// Where the logs in the cache at `path` begin, in bytes; none if there is no cache.
pub(super) fn log_offsets(path: &Path) -> io::Result<Vec<u64>> {
    let mut copies = [0; 2 * PAGE_LENGTH];
    File::open(path)?.read_exact_at(&mut copies, 0)?;
    let Ok(format) = Superblock::select(&copies) else { return Ok(Vec::new()) };
    Ok((0..format.logs).map(|number| format.log_offset(number)).collect())
}

fn places_of(format: &Superblock) -> LogPlaces {
    LogPlaces { offset: format.log_offset(0), length: format.log_length, count: format.logs }
}
