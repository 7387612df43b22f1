//! The caches that disks share, in memory or on stores that outlive the daemon.
//!
//! A cache that cannot be used costs its content, never data. If its store is missing, damaged or
//! foreign when a disk is opened, the disk is served without the cache, and its status has the
//! problem. Before that, the mark of its image rejects what the store may have. A disk that is
//! served already does not get such a cache.

use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};

use fathom_block::{
    Backend, Capabilities, Layer, LayerCause, LayerPart, LayerProblem, LayerReport, OpenContext,
};
use fathom_cache::Policy;
use fathom_failure::Failure;
use fathom_persistence::Stamp;
use parking_lot::Mutex;

use super::index_memory::IndexMemory;
use super::open::{REGION_SHIFT, VolumeOptions};
use super::options::CacheOptions;
use super::save::certain_modified_ns;
use super::state::{CacheHost, CacheMark};
use super::{Cache, CacheDisk, CacheError, CacheTimes, CacheVolume, marking};
use crate::kind::LayerContext;
use crate::{Opened, Passthrough};

/// The caches, while disks use them.
#[derive(Default)]
pub struct Caches {
    places: Opened<String, Weak<CacheVolume>>,
    index_memory: IndexMemory,
}

/// A cache in memory ends with the daemon, so that no mark of an image names it.
#[derive(Clone, Copy, Debug)]
pub struct NoMark;

impl CacheMark for NoMark {
    fn read(&self) -> io::Result<Option<Stamp>> {
        Ok(None)
    }

    fn write(&self, _: &Stamp) -> io::Result<()> {
        Ok(())
    }

    fn reject(&self) -> io::Result<()> {
        Ok(())
    }

    fn modified_ns(&self) -> io::Result<u64> {
        Ok(0)
    }
}

impl Caches {
    /// Caches whose indexes take at most `memory_max` bytes together, if they are on stores: those
    /// say how large they are.
    pub fn with_index_memory(memory_max: u64) -> Self {
        Self { index_memory: IndexMemory::new(memory_max), ..Self::default() }
    }

    /// The place of the cache called `name`.
    fn place(&self, name: String) -> Arc<Mutex<Weak<CacheVolume>>> {
        self.places.place(name, |volume| volume.strong_count() > 0)
    }

    /// The cache in memory that `options` name for `disk`, made with `memory` if there is none.
    pub(super) fn in_memory(
        &self,
        disk: &str,
        options: &CacheOptions,
        memory: &dyn Fn(u64) -> io::Result<Arc<dyn Backend>>,
    ) -> Result<Arc<CacheVolume>, Failure> {
        // A name in the configuration is not empty, so that it is no disk's own cache.
        let name = if options.name.is_empty() {
            format!("disk /{disk}")
        } else {
            format!("name {}", options.name)
        };
        let place = self.place(name);
        let mut place = place.lock();
        if let Some(volume) = place.upgrade() {
            if !options.is_of(&volume) {
                let message = format!(
                    "the cache {:?} exists with another `size`, `block_size` or `policy`",
                    options.name
                );
                let remedy = "use the same for all its disks, or remove the layer from all of them \
                              first";
                return Err(Failure::new(message).advise(remedy));
            }
            return Ok(volume);
        }
        let store = memory(options.format().length())?;
        let (format, policy) = (options.format(), options.policy.into());
        let times = CacheTimes::default();
        let volume = CacheVolume::assemble(store, format, false, policy, times, Vec::new());
        let volume = Arc::new(volume);
        *place = Arc::downgrade(&volume);
        Ok(volume)
    }

    /// The cache on the store at `path`, which is canonical.
    fn kept(
        &self,
        path: &Path,
        options: &CacheOptions,
        host: &dyn CacheHost,
    ) -> Result<Arc<CacheVolume>, Unusable> {
        let place = self.place(format!("store {}", path.display()));
        // Held while this volume is opened, so that two disks do not open it separately.
        let mut place = place.lock();
        if let Some(volume) = place.upgrade() {
            if volume.policy != options.policy.into() {
                let failure = Failure::new("another disk uses this `store` with another `policy`");
                return Err(Unusable::Refused(failure.advise("use the same for both")));
            }
            if volume.is_silent() {
                let failure = Failure::new("it does not answer");
                return Err(Unusable::Lost(failure.advise("check the device beneath it")));
            }
            return check_size(options, &volume).map(|()| volume);
        }
        let backend = host.open(path).map_err(Unusable::Lost)?;
        let settings = settings(options.policy.into());
        let volume = CacheVolume::open_within(backend, &settings, &self.index_memory);
        let volume = Arc::new(volume.map_err(|error| Unusable::Lost(error.into()))?);
        check_size(options, &volume)?;
        *place = Arc::downgrade(&volume);
        Ok(volume)
    }

    /// Makes the cache on the store at `path`, which is canonical, forget a state of a disk's
    /// store: the mark of that store has it, and cannot be removed. No later start uses the blocks
    /// then. `open` opens the store. Blocks.
    ///
    /// # Errors
    /// If another cache is there, or it cannot be changed.
    pub fn give_up(
        &self,
        path: &Path,
        state: &Stamp,
        open: impl FnOnce() -> Result<Arc<dyn Backend>, Failure>,
    ) -> Result<(), Failure> {
        let place = self.place(format!("store {}", path.display()));
        let place = place.lock();
        let volume = if let Some(volume) = place.upgrade() {
            volume
        } else {
            let settings = settings(Policy::None);
            Arc::new(CacheVolume::open_within(open()?, &settings, &self.index_memory)?)
        };
        if volume.identity() != state.identity {
            return Err(Failure::new("another cache is there"));
        }
        Ok(volume.give_up(state.age)?)
    }
}

/// The settings of a volume on a store, which exists.
fn settings(policy: Policy) -> VolumeOptions {
    VolumeOptions {
        identity: None,
        block_size: 0,
        disks: 0,
        bitmap_pages: 0,
        is_kept: true,
        policy,
        times: CacheTimes::default(),
    }
}

fn check_size(options: &CacheOptions, volume: &CacheVolume) -> Result<(), Unusable> {
    if options.has_size_of(volume) {
        return Ok(());
    }
    let (capacity, block_size) = (volume.backend.capacity(), volume.format.block_size);
    let message = format!("its store has {capacity} bytes, in blocks of {block_size}");
    let remedy = "remove `size` and `block_size`, which the store determines";
    Err(Unusable::Refused(Failure::new(message).advise(remedy)))
}

/// Why a disk does not get its cache.
enum Unusable {
    /// The configuration is wrong, or the disk cannot be served safely.
    Refused(Failure),
    /// The cache is missing or cannot be used. No data is lost.
    Lost(Failure),
}

impl From<CacheError> for Unusable {
    fn from(error: CacheError) -> Self {
        match error {
            CacheError::Disk(failure) => Self::Refused(failure),
            CacheError::Superblock(_) | CacheError::Volume(_) | CacheError::Failed(_) => {
                Self::Lost(error.into())
            }
        }
    }
}

/// Makes the layer of a cache on a store.
pub(super) fn make(
    options: &CacheOptions,
    context: &LayerContext<'_>,
) -> Result<Arc<dyn Layer>, Failure> {
    let host = context.cache_host;
    let failure = match open(options, context) {
        Ok(cache) => {
            if let Some(reason) = cache.dropped() {
                host.report(&format!("the cache begins empty: {reason}"));
            }
            return Ok(Arc::new(cache));
        }
        Err(Unusable::Refused(failure)) => return Err(failure),
        Err(Unusable::Lost(failure)) => failure,
    };
    let shown = options.store.display();
    let failure = failure.about(format_args!("its cache at {shown} cannot be used"));
    if context.is_served {
        return Err(failure);
    }
    // The disk changes without the cache from now on.
    let home = host.home(&options.store)?;
    if !matches!(home.mark.read(), Ok(None)) {
        home.mark.reject().map_err(|error| {
            Failure::new(format!(
                "{failure}, and the mark of its image that names the cache cannot be removed: {error}"
            ))
            .advise(marking::remedy(&error))
        })?;
    }
    host.report(&format!("served without its cache: {failure}"));
    Ok(Arc::new(LostCache(failure)))
}

fn open(options: &CacheOptions, context: &LayerContext<'_>) -> Result<Cache, Unusable> {
    let host = context.cache_host;
    let lost = |error: io::Error| Unusable::Lost(error.into());
    let path = options.store.canonicalize().map_err(|error| {
        if error.kind() == io::ErrorKind::NotFound {
            let failure = Failure::new("it does not exist");
            let remedy = "is its device mounted? `fathom cache create` makes a new one";
            return Unusable::Lost(failure.advise(remedy));
        }
        lost(error)
    })?;
    let home = host.home(&path).map_err(Unusable::Refused)?;
    let volume = context.caches.kept(&path, options, host)?;
    let share = options.share_slots(&volume);
    let refused = |error: CacheError| Unusable::Refused(error.into());
    volume.check_share(context.disk, share).map_err(refused)?;
    let marked = home.mark.read().map_err(lost)?;
    let identity = volume.identity();
    let is_ours = |state: &Stamp| state.identity == identity;
    let is_other = marked.as_ref().is_some_and(|state| !is_ours(state));
    // Never 0, which is no state.
    let random = host.draw().map_err(|error| Unusable::Refused(error.into()))?;
    let generation =
        random.0.iter().fold(1, |number: u64, byte| number << 8 ^ u64::from(*byte)) | 1;
    let modified_ns = if options.exclusive {
        None
    } else {
        Some(certain_modified_ns(&*home.mark).map_err(lost)?)
    };
    let disk = CacheDisk {
        name: context.disk.to_owned(),
        home: home.name.clone(),
        capacity: context.capacity,
        expected: marked.filter(is_ours).map(|state| state.age),
        modified_ns,
        generation,
        log: home.log,
        changes: home.changes,
        region_shift: REGION_SHIFT,
    };
    let name = options.shared_name();
    let mark = Arc::clone(&home.mark);
    let names = Some(Arc::clone(context.names));
    let cache = Cache::named(&name, &volume, &disk, options.mode, mark, names)?;
    cache.set_share(share).map_err(refused)?;
    cache.set_read_ahead(options.read_ahead.0);
    let state = Stamp { identity, age: generation };
    let refused = |error: io::Error| {
        let remedy = marking::remedy(&error);
        let failure = Failure::from(error);
        let failure = failure.about("its image cannot be marked as having blocks in a cache");
        Unusable::Refused(failure.advise_else(remedy))
    };
    match home.mark.write(&state) {
        Ok(()) => cache.inner.confirm(),
        Err(error) if marking::is_space(&error) && !context.is_served => {
            // The blocks of another cache must not fit after this.
            if is_other {
                home.mark.reject().map_err(refused)?;
            }
            cache.inner.marking.failed(state, &error);
        }
        Err(error) => return Err(refused(error)),
    }
    Ok(cache)
}

/// The layer of a disk that is served without its cache.
struct LostCache(Failure);

impl Layer for LostCache {
    fn name(&self) -> &'static str {
        "cache"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn status(&self) -> LayerReport {
        let message = format!("{}. The disk is served without it", self.0);
        let remedy = format!(
            "{}. Then run `fathom cache detach` and `fathom cache attach`, or restart the daemon",
            self.0.remedy
        );
        LayerReport {
            figures: Vec::new(),
            problems: vec![LayerProblem { cause: LayerCause::NotUsed, message, remedy }],
        }
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Passthrough.open_queue(context)
    }
}
