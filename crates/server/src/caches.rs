//! The caches that outlive the daemon: their stores, and the marks of images that name them.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_backend::{FileBackend, FileOptions};
use fathom_block::{Backend, Disk};
use fathom_control::{BackendDefinition, DiskDefinition, ErrorBody, ErrorCode};
use fathom_image::{CacheMark, MarkedCache};
use fathom_layers::LayerOptions as _;
use fathom_layers::cache::{self, CacheHome, CacheHost, CacheOptions, CacheState};

use crate::wiring::refusal;

/// What the cache of a disk needs of the daemon.
pub(crate) struct Host<'a> {
    pub definition: &'a DiskDefinition,
    /// The folder for records that outlive the daemon.
    pub records: &'a Path,
}

/// The mark of an image, for a cache at `path`.
struct Mark {
    mark: CacheMark,
    path: PathBuf,
}

impl cache::CacheMark for Mark {
    fn read(&self) -> io::Result<Option<CacheState>> {
        let of = |MarkedCache { identity, generation, .. }| CacheState { identity, generation };
        Ok(self.mark.read()?.map(of))
    }

    fn write(&self, state: &CacheState) -> io::Result<()> {
        let CacheState { identity, generation } = *state;
        let path = self.path.display().to_string();
        self.mark.write(&MarkedCache { identity, generation, path })
    }

    fn reject(&self) -> io::Result<()> {
        self.mark.clear()
    }

    fn stamp(&self) -> io::Result<u64> {
        self.mark.stamp()
    }
}

impl CacheHost for Host<'_> {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn Backend>> {
        // Without direct I/O, because its alignment would become that of all disks of the cache.
        let options = FileOptions {
            path: path.to_owned(),
            direct: false,
            read_only: false,
            block_size: None,
            disk: format!("the cache of {}", self.definition.name),
            records: Some(self.records.to_owned()),
            foreign_allowed: true,
        };
        let opened = FileBackend::open(&options);
        Ok(Arc::new(opened.map_err(|error| io::Error::other(error.to_string()))?))
    }

    fn home(&self, cache: &Path) -> io::Result<CacheHome> {
        let Some(BackendDefinition::Image(image)) = self.definition.backend() else {
            return Err(io::Error::other(
                "a cache with a `store` outlives the daemon, but the disk has no image; remove \
                 `store`, or add an `image`",
            ));
        };
        let mark = CacheMark::open(&image, self.records)?;
        let name = image.canonicalize()?.display().to_string();
        Ok(CacheHome { name, mark: Arc::new(Mark { mark, path: cache.to_owned() }) })
    }

    fn random(&self) -> io::Result<[u8; 16]> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn note(&self, text: &str) {
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

/// Rejects what a cache may have of the image of a disk that will change without it.
pub(crate) fn reject(definition: &DiskDefinition, records: &Path) -> Result<(), ErrorBody> {
    let Some(BackendDefinition::Image(image)) = definition.backend() else { return Ok(()) };
    if definition.read_only || has_cache(definition) {
        return Ok(());
    }
    let shown = image.display();
    let mark = CacheMark::open(&image, records).map_err(|error| {
        let message = format!("it is unknown whether a cache has blocks of {shown}: {error}");
        refusal(ErrorCode::Failed, message, "check its file system")
    })?;
    let cleared = mark.exists().and_then(|exists| if exists { mark.clear() } else { Ok(()) });
    cleared.map_err(|error| {
        let message = format!(
            "{shown} is marked as having blocks in a cache, and the mark cannot be removed: {error}"
        );
        let remedy = format!(
            "serve it with the layer `cache` and that cache, or {}: the cache could otherwise return old \
             blocks later",
            mark.removal()
        );
        refusal(ErrorCode::Failed, message, remedy)
    })
}

/// Makes the states of a disk's layers durable that outlive the daemon, within `limit`.
pub(crate) fn settle(disk: &Arc<Disk>, limit: Duration) {
    let end = Instant::now() + limit;
    for layer in disk.layers() {
        let left = end.saturating_duration_since(Instant::now());
        if let Err(error) = layer.settle(disk, left) {
            let (disk, layer) = (disk.name(), layer.name());
            tracing::warn!(disk, layer, %error, "its state is not complete: the next start has less");
        }
    }
}
