//! The configuration of the layer, and the caches that disks share.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, Weak};

use fathom_block::{Backend, Layer};
use fathom_cache::Policy;
use fathom_options::{Bytes, Check, Key};
use serde::{Deserialize, Serialize};

use super::format::Superblock;
use super::{
    Cache, CacheDisk, CacheMark, CacheMode, CacheShare, CacheTimes, CacheVolume, format, lock,
};
use crate::kind::{LayerContext, LayerOptions};

/// The longest name of a cache, in bytes.
const CACHE_NAME_MAX: usize = 128;
/// The most disks of a cache in memory.
const DISKS: u32 = 1024;

/// The configuration of a cache in memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CacheOptions {
    /// The name of a cache that several disks share; empty for a cache of this disk alone.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The size of the cache, of all its disks together.
    pub size: Bytes,
    /// The size of its blocks.
    pub block_size: Bytes,
    /// What goes into the cache.
    pub mode: CacheMode,
    /// What decides which blocks are kept.
    pub policy: CachePolicy,
    /// What this disk keeps of the cache, however busy the other disks are.
    #[serde(skip_serializing_if = "is_nothing")]
    pub share: CacheShare,
}

fn is_nothing(share: &CacheShare) -> bool {
    *share == CacheShare::default()
}

/// What decides which blocks are kept: the names of [`Policy`] in configurations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CachePolicy {
    /// See [`Policy::None`].
    None,
    /// See [`Policy::Sky`].
    Sky,
    /// See [`Policy::Auto`].
    #[default]
    Auto,
}

impl From<CachePolicy> for Policy {
    fn from(policy: CachePolicy) -> Self {
        match policy {
            CachePolicy::None => Self::None,
            CachePolicy::Sky => Self::Sky,
            CachePolicy::Auto => Self::Auto,
        }
    }
}

impl Default for CacheOptions {
    /// A cache of 256 MiB for this disk alone, in blocks of 16 KiB.
    fn default() -> Self {
        Self {
            name: String::new(),
            size: Bytes(256 << 20),
            block_size: Bytes(16 << 10),
            mode: CacheMode::WriteThrough,
            policy: CachePolicy::Auto,
            share: CacheShare::default(),
        }
    }
}

impl CacheOptions {
    /// The layout of a volume in memory. Its pages are never used, and so they use no memory.
    fn format(&self) -> Superblock {
        Superblock {
            cache: [0; 16],
            block_size: u32::try_from(self.block_size.0).unwrap_or(u32::MAX),
            disks: DISKS,
            bitmap_pages: 1,
            slots: u32::try_from(self.size.0 / self.block_size.0.max(1)).unwrap_or(u32::MAX),
        }
    }

    /// The share of the disk, in slots.
    fn share_slots(&self) -> u64 {
        self.share.of(self.size.0) / self.block_size.0.max(1)
    }

    /// Whether `volume` has this size and policy.
    fn is_of(&self, volume: &CacheVolume) -> bool {
        volume.format == self.format() && volume.policy == self.policy.into()
    }
}

/// The caches in memory, while disks use them.
#[derive(Default)]
pub struct Caches {
    volumes: Mutex<HashMap<String, Weak<CacheVolume>>>,
}

/// A cache in memory ends with the daemon, so that no mark of an image names it.
struct NoMark;

impl CacheMark for NoMark {
    fn reject(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Caches {
    /// The cache that `options` name for `disk`, made with `memory` if there is none.
    fn volume(
        &self,
        disk: &str,
        options: &CacheOptions,
        memory: &dyn Fn(u64) -> io::Result<Arc<dyn Backend>>,
    ) -> io::Result<Arc<CacheVolume>> {
        // A name in the configuration is not empty, so that it is no disk's own cache.
        let name = if options.name.is_empty() { format!("/{disk}") } else { options.name.clone() };
        let mut volumes = lock(&self.volumes);
        volumes.retain(|_, volume| volume.strong_count() > 0);
        if let Some(volume) = volumes.get(&name).and_then(Weak::upgrade) {
            if !options.is_of(&volume) {
                return Err(io::Error::other(format!(
                    "the cache {name:?} exists with another `size`, `block_size` or `policy`; use the \
                     same for all its disks, or remove the layer from all of them first"
                )));
            }
            return Ok(volume);
        }
        let store = memory(options.format().length())?;
        let (format, policy) = (options.format(), options.policy.into());
        let times = CacheTimes::default();
        let volume = CacheVolume::assemble(store, format, false, policy, times, Vec::new());
        let volume = Arc::new(volume);
        volumes.insert(name, Arc::downgrade(&volume));
        Ok(volume)
    }
}

impl LayerOptions for CacheOptions {
    const KIND: &'static str = "cache";
    const MEANING: &'static str = "keeps blocks of the disk in memory";
    const KEYS: &'static [Key] = &[
        Key::new(
            "name",
            "",
            "the name of a cache that disks share; by default the disk has its own",
        ),
        Key::new("size", "\"256M\"", "the size of the cache, of all its disks together"),
        Key::new(
            "block_size",
            "\"16K\"",
            "the size of its blocks: a power of two from 4 to 64 KiB",
        ),
        Key::new(
            "mode",
            "\"write-through\"",
            "what goes into it: `write-through` (reads and writes), `write-around` (reads), or \
             `read-only` (nothing)",
        ),
        Key::new(
            "policy",
            "\"auto\"",
            "which blocks are kept: `auto` learns what misses cost, `sky` prefers metadata and small \
             files, `none` does not tell blocks apart",
        ),
        Key::new(
            "share",
            "0",
            "what this disk keeps of a shared cache however busy the other disks are: a size, or a \
             percentage such as `\"25%\"`. What it does not use is lent to the others",
        ),
    ];
    const ONCE: Option<&'static str> = Some("a block is in one cache");

    fn check(&self, check: &mut Check<'_>) {
        let block_size = u32::try_from(self.block_size.0).unwrap_or(0);
        if !block_size.is_power_of_two() || !format::BLOCK_SIZES.contains(&block_size) {
            check.problem(
                "block_size",
                "the size of the cache's blocks is not a power of two from 4 to 64 KiB",
                "write for example `block_size = \"16K\"`",
            );
        }
        let (least, most) = (1 << 20, u64::from(u32::MAX >> 2) * self.block_size.0);
        if !(least..=most).contains(&self.size.0) {
            let message = "the cache is smaller than 1 MiB, or has more than 2^30 blocks";
            check.problem("size", message, "correct `size`");
        }
        if self.share.of(self.size.0) > self.size.0 {
            let message = "the disk's share is larger than the cache";
            check.problem("share", message, "lower `share`, or make the cache larger");
        }
        if self.name.len() > CACHE_NAME_MAX || self.name.starts_with('/') {
            check.problem(
                "name",
                format!(
                    "the cache's name has more than {CACHE_NAME_MAX} bytes, or begins with `/`"
                ),
                "choose another name",
            );
        }
    }

    fn make(&self, context: &LayerContext<'_>) -> io::Result<Option<Arc<dyn Layer>>> {
        let volume = context.caches.volume(context.disk, self, context.memory)?;
        let disk = CacheDisk {
            name: context.disk.to_owned(),
            home: String::new(),
            capacity: context.capacity,
            generation: 0,
            region_shift: 20,
        };
        let names = Some(Arc::clone(context.names));
        let cache = Cache::named(&self.name, &volume, &disk, self.mode, Arc::new(NoMark), names);
        let cache = cache.map_err(io::Error::other)?;
        cache.set_share(self.share_slots()).map_err(io::Error::other)?;
        Ok(Some(Arc::new(cache)))
    }

    fn fits(&self, layer: &dyn Layer) -> bool {
        cache(layer).is_some_and(|cache| {
            self.is_of(cache.volume())
                && cache.shared_name() == self.name
                && cache.can_have_share(self.share_slots())
        })
    }

    fn apply(&self, layer: &dyn Layer) {
        if let Some(cache) = cache(layer) {
            cache.set_mode(self.mode);
            // That it is possible was checked: only another disk that gets a share at this moment could
            // prevent it, and this disk then keeps the share that it has.
            _ = cache.set_share(self.share_slots());
        }
    }
}

/// `layer`, if it is a cache.
fn cache(layer: &dyn Layer) -> Option<&Cache> {
    layer.as_any()?.downcast_ref()
}
