//! The caches that outlive the daemon: their stores, and the marks of images that name them.

pub(crate) mod changes;
pub(crate) mod feature;
pub(crate) mod metrics;
mod recover;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fathom_block::{Backend, Layer};
use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, LayerDefinition};
use fathom_failure::Failure;
use fathom_image::{CacheMark, MarkedCache};
use fathom_layers::cache::{self, CacheHome, CacheHost, CacheOptions, Caches};
use fathom_layers::{Cache, LayerOptions as _};
use fathom_persistence::{Identity, Stamp};

use crate::daemon::parts::Parts;
use crate::daemon::stack::{KeyedLayer, LayerKey, refusal};
use crate::features::log::{CacheStores, DiskLog, NAME_DEVICE};
use crate::stores::qemu;

/// What the cache of a disk needs of the daemon.
pub(crate) struct Host<'a> {
    pub definition: &'a DiskDefinition,
    /// The folder for records that outlive the daemon.
    pub records: &'a Path,
    /// The open stores of caches.
    pub stores: &'a CacheStores,
    /// The disk's log.
    pub log: Option<DiskLog>,
}

/// The mark of an image, for a cache at `path`.
struct Mark {
    mark: CacheMark,
    path: PathBuf,
}

impl cache::CacheMark for Mark {
    fn read(&self) -> io::Result<Option<Stamp>> {
        Ok(self.mark.read()?.map(|marked| marked.stamp))
    }

    fn write(&self, stamp: &Stamp) -> io::Result<()> {
        let path = self.path.display().to_string();
        self.mark.write(&MarkedCache { stamp: *stamp, path })
    }

    fn reject(&self) -> io::Result<()> {
        self.mark.clear()
    }

    fn modified_ns(&self) -> io::Result<u64> {
        self.mark.modified_ns()
    }
}

impl CacheHost for Host<'_> {
    fn open(&self, path: &Path) -> Result<Arc<dyn Backend>, Failure> {
        self.stores.open(path, &self.definition.name, self.records)
    }

    fn home(&self, cache: &Path) -> Result<CacheHome, Failure> {
        let Some(image) = &self.definition.image else {
            let message = "a cache with a `store` belongs to an image, and the disk has none";
            return Err(Failure::new(message).advise(
                "give the cache a `size` instead of the `store`: it is in memory then. Or move the \
                 disk to an image with `fathom disk move`",
            ));
        };
        if qemu::format(self.definition).is_some() {
            let message = "a cache with a `store` knows only when a raw image was changed";
            return Err(Failure::new(message).advise("remove `store`: the cache is in memory then"));
        }
        let key = self.definition.key.as_deref();
        let mark = CacheMark::open_named(image, self.records, key)?;
        if let Some(reason) = mark.lacks_key() {
            let message = format!("{} cannot be marked: {reason}", image.display());
            return Err(Failure::new(message).advise(NAME_DEVICE));
        }
        let name = mark.home();
        let mark = Arc::new(Mark { mark, path: cache.to_owned() });
        // Above a log, the cache sees a change only when the log has written it back.
        let changes = match &self.log {
            Some(log) if log.is_in_cache => log.wal.ranges(),
            _ => Vec::new(),
        };
        Ok(CacheHome { name, mark, log: identity(self.log.as_ref()), changes })
    }

    fn draw(&self) -> io::Result<Identity> {
        Identity::draw()
    }

    fn report(&self, text: &str) {
        tracing::warn!(disk = self.definition.name.as_str(), "{text}");
    }
}

/// Whether a disk has a cache that outlives the daemon.
pub(crate) fn has_cache(definition: &DiskDefinition) -> bool {
    definition.layers.iter().any(|layer| {
        let options = serde_json::Value::Object(layer.options.clone());
        let cache = || serde_json::from_value::<CacheOptions>(options).ok();
        layer.kind == CacheOptions::KIND && cache().is_some_and(|cache| cache.is_kept())
    })
}

/// The cache of a disk that `layer` would replace by another one, in words. `made` are the disk's
/// layers.
pub(crate) fn replaced(
    definition: &DiskDefinition,
    layer: &LayerDefinition,
    made: &[KeyedLayer],
) -> Option<String> {
    let is_cache = |layer: &&LayerDefinition| layer.kind == CacheOptions::KIND;
    let old = definition.layers.iter().find(is_cache).filter(|_| is_cache(&layer))?;
    let options = |layer: &LayerDefinition| {
        let options = serde_json::Value::Object(layer.options.clone());
        serde_json::from_value::<CacheOptions>(options).ok()
    };
    let (before, after) = (options(old)?, options(layer)?);
    let store = |options: &CacheOptions| {
        options.store.canonicalize().unwrap_or_else(|_| options.store.clone())
    };
    let key = LayerKey::listed(old);
    let is_same = match (before.is_kept(), after.is_kept()) {
        (true, true) => store(&before) == store(&after),
        (false, false) => {
            let what = |it: &CacheOptions| (it.name.clone(), it.size, it.block_size, it.policy);
            let made = made.iter().find(|(made, _)| *made == key);
            what(&before) == what(&after) || made.is_some_and(|(_, made)| after.fits(&**made))
        }
        _ => false,
    };
    let shown = match (before.is_kept(), before.name.is_empty()) {
        (true, _) => format!("that at {}", before.store.display()),
        (false, true) => format!("one of {} in memory", before.size),
        (false, false) => format!("{:?} of {} in memory", before.name, before.size),
    };
    (!is_same).then_some(shown)
}

/// Rejects what a cache may have of the image of a disk that will change without it.
pub(crate) fn reject(
    definition: &DiskDefinition,
    records: &Path,
    parts: &Parts,
) -> Result<(), ErrorBody> {
    if definition.read_only || has_cache(definition) {
        Ok(())
    } else {
        forget(definition, records, parts)
    }
}

/// Makes a cache forget what it may have of the image of a disk that nobody serves.
pub(crate) fn forget(
    definition: &DiskDefinition,
    records: &Path,
    parts: &Parts,
) -> Result<(), ErrorBody> {
    let Some(image) = &definition.image else { return Ok(()) };
    let shown = image.display();
    let key = definition.key.as_deref();
    let mark = CacheMark::open_named(image, records, key).map_err(|error| {
        let what = format!("it is unknown whether a cache has blocks of {shown}");
        Failure::from(error).about(what).advise_else("check its file system")
    })?;
    let cleared = mark.exists().and_then(|exists| if exists { mark.clear() } else { Ok(()) });
    let Err(error) = cleared else { return Ok(()) };
    let Err(reason) = give_up(&mark, definition, records, parts) else { return Ok(()) };
    let message = format!(
        "{shown} is marked as having blocks in a cache, and the mark cannot be removed: {error}. Nor can the \
         cache forget them: {reason}"
    );
    let remedy = if error.kind() == io::ErrorKind::StorageFull {
        "make space on its file system".to_owned()
    } else {
        "make its file system and its folder writable, or serve it with the layer `cache` and that cache: the cache \
         could otherwise return old blocks later"
            .to_owned()
    };
    Err(refusal(ErrorCode::Failed, message, remedy))
}

/// Makes the cache that a mark names forget the blocks of the image, because the mark cannot be
/// removed: on some full file systems not even that is possible.
fn give_up(
    mark: &CacheMark,
    definition: &DiskDefinition,
    records: &Path,
    parts: &Parts,
) -> Result<(), Failure> {
    // A damaged mark fits no cache.
    let Some(MarkedCache { stamp, path }) = mark.read()? else { return Ok(()) };
    let path = Path::new(&path).canonicalize()?;
    let open = || parts.of::<CacheStores>().open(&path, &definition.name, records);
    parts.of::<Caches>().give_up(&path, &stamp, open)?;
    tracing::warn!(
        disk = definition.name.as_str(),
        "its image keeps the mark of a cache, which has forgotten its blocks: the mark cannot be removed"
    );
    Ok(())
}

/// The identity of a disk's log, or [`Identity::NONE`].
fn identity(log: Option<&DiskLog>) -> Identity {
    log.map_or(Identity::NONE, |log| log.wal.identity())
}

/// Notes in the caches among `layers` that their disk has this log from now on, or none. All queues
/// have it.
pub(crate) fn note_log<'l>(
    layers: impl IntoIterator<Item = &'l Arc<dyn Layer>>,
    log: Option<&DiskLog>,
) {
    for cache in layers.into_iter().filter_map(|layer| Cache::of(&**layer)) {
        cache.set_log(identity(log));
        let beneath = log.filter(|log| log.is_in_cache);
        if let Some(log) = beneath {
            log.wal.set_notes(cache.notes());
        }
        cache.rely_on_log(beneath.is_some());
    }
}

/// The disk is about to lose its log: changes wait again until its caches have noted them.
pub(crate) fn leave_log<'l>(layers: impl IntoIterator<Item = &'l Arc<dyn Layer>>) {
    for cache in layers.into_iter().filter_map(|layer| Cache::of(&**layer)) {
        cache.rely_on_log(false);
    }
}
