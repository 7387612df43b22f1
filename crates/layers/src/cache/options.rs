//! The configuration of the layer.

use std::path::PathBuf;
use std::sync::Arc;

use fathom_block::Layer;
use fathom_cache::Policy;
use fathom_failure::Failure;
use fathom_options::{Bytes, Check, Key, Nanoseconds};
use fathom_persistence::Identity;
use serde::{Deserialize, Serialize};

use super::format::Superblock;
use super::{Cache, CacheDisk, CacheMode, CacheShare, CacheVolume, format, kept};
use crate::kind::{LayerContext, LayerOptions, Rank};

/// The longest name of a cache, in bytes.
const CACHE_NAME_MAX: usize = 128;
/// The most disks of a cache in memory.
const DISKS: u32 = 1024;
/// The furthest that files are read ahead of the guest, in bytes.
const READ_AHEAD_MAX: u64 = 16 << 20;

/// The configuration of a cache in memory, or on a store that outlives the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CacheOptions {
    /// The name of a cache that several disks share; empty for a cache of this disk alone.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The file or block device that has the cache; empty for a cache in memory.
    #[serde(skip_serializing_if = "is_nowhere")]
    pub store: PathBuf,
    /// Whether nothing but Fathom changes the disk's image.
    pub exclusive: bool,
    /// The size of the cache, of all its disks together.
    pub size: Bytes,
    /// The size of its blocks.
    pub block_size: Bytes,
    /// What goes into the cache, and where changes become durable.
    pub mode: CacheMode,
    /// With [`CacheMode::WriteBack`]: how long a change may be only in the log.
    pub age: Nanoseconds,
    /// What decides which blocks are kept.
    pub policy: CachePolicy,
    /// What this disk keeps of the cache, however busy the other disks are.
    #[serde(skip_serializing_if = "is_nothing")]
    pub share: CacheShare,
    /// How far files are read ahead of the guest; 0 ends it.
    pub read_ahead: Bytes,
}

fn is_nothing(share: &CacheShare) -> bool {
    *share == CacheShare::default()
}

#[expect(clippy::ptr_arg, reason = "serde calls it so")]
fn is_nowhere(path: &PathBuf) -> bool {
    path.as_os_str().is_empty()
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
            store: PathBuf::new(),
            exclusive: false,
            size: Bytes(256 << 20),
            block_size: Bytes(16 << 10),
            mode: CacheMode::WriteThrough,
            age: Nanoseconds(5_000_000_000),
            policy: CachePolicy::Auto,
            share: CacheShare::default(),
            read_ahead: Bytes(0),
        }
    }
}

impl CacheOptions {
    /// The layout of a volume in memory. Its pages are never used, and so they use no memory.
    pub(super) fn format(&self) -> Superblock {
        Superblock {
            cache: Identity::NONE,
            block_size: u32::try_from(self.block_size.0).unwrap_or(u32::MAX),
            disks: DISKS,
            bitmap_pages: 1,
            slots: u32::try_from(self.size.0 / self.block_size.0.max(1)).unwrap_or(u32::MAX),
            logs: 0,
            log_length: 0,
        }
    }

    /// The share of the disk of a volume, in slots.
    pub(super) fn share_slots(&self, volume: &CacheVolume) -> u64 {
        let block_size = u64::from(volume.format.block_size);
        self.share.of(u64::from(volume.slots()) * block_size) / block_size
    }

    /// Whether changes are written to a log of the store first.
    pub fn has_log(&self) -> bool {
        self.is_kept() && self.mode == CacheMode::WriteBack
    }

    /// Whether the cache is on a store that outlives the daemon.
    pub fn is_kept(&self) -> bool {
        !is_nowhere(&self.store)
    }

    /// The name under which disks share the cache; empty for a cache of this disk alone.
    pub(super) fn shared_name(&self) -> String {
        if self.is_kept() {
            let path = self.store.canonicalize().unwrap_or_else(|_| self.store.clone());
            return path.display().to_string();
        }
        self.name.clone()
    }

    /// Whether `volume` has this size and policy.
    pub(super) fn is_of(&self, volume: &CacheVolume) -> bool {
        let is_same =
            if self.is_kept() { self.has_size_of(volume) } else { volume.format == self.format() };
        is_same && volume.policy == self.policy.into()
    }

    /// Whether the size and the block size are those of a volume on a store, or not given.
    pub(super) fn has_size_of(&self, volume: &CacheVolume) -> bool {
        let default = Self::default();
        let block_size = u64::from(volume.format.block_size);
        (self.size == default.size || self.size.0 == volume.backend.capacity())
            && (self.block_size == default.block_size || self.block_size.0 == block_size)
    }
}

impl LayerOptions for CacheOptions {
    const KIND: &'static str = "cache";
    const RANK: Rank = Rank::Cache;
    const BENEATH: Option<&'static str> =
        Some("it keeps what is written home, and reads of what is in the log pass it by");
    const MEANING: &'static str = "keeps blocks of the disk in memory or on a fast device";
    const KEYS: &'static [Key] = &[
        Key::new(
            "name",
            "",
            "the name of a cache that disks share; by default the disk has its own",
        ),
        Key::new(
            "store",
            "",
            "a file or block device with a cache that outlives the daemon, made by `fathom cache create`; \
             by default the cache is in memory. Disks with the same `store` share it",
        ),
        Key::new(
            "exclusive",
            "false",
            "with `store`: nothing but Fathom changes the image, so that its modification time is not \
             compared",
        ),
        Key::new(
            "size",
            "\"256M\"",
            "the size of a cache in memory, of all its disks together; a `store` has its own",
        ),
        Key::new(
            "block_size",
            "\"16K\"",
            "the size of the blocks in memory: a power of two from 4 to 64 KiB; a `store` has its own",
        ),
        Key::new(
            "mode",
            "\"write-through\"",
            "what goes into it: `write-through` (reads and writes), `write-around` (reads), \
             `read-only` (nothing), or `write-back` (reads and writes; changes are written to a log of \
             the `store` first, where a flush makes them durable)",
        ),
        Key::new("age", "\"5s\"", "with `write-back`: how long a change may be only in the log"),
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
        Key::new(
            "read_ahead",
            "0",
            "how far a file that a guest reads in order is read ahead, such as `\"1M\"`, at most 16 MiB; \
             0 does not read ahead",
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
        if self.read_ahead.0 > READ_AHEAD_MAX {
            check.problem(
                "read_ahead",
                "files are read ahead by more than 16 MiB",
                "lower `read_ahead`",
            );
        }
        let (least, most) = (1 << 20, u64::from(u32::MAX >> 2) * self.block_size.0);
        if !(least..=most).contains(&self.size.0) {
            let message = "the cache is smaller than 1 MiB, or has more than 2^30 blocks";
            check.problem("size", message, "correct `size`");
        }
        if !self.is_kept() && self.share.of(self.size.0) > self.size.0 {
            let message = "the disk's share is larger than the cache";
            check.problem("share", message, "lower `share`, or make the cache larger");
        }
        if self.is_kept() && !self.name.is_empty() {
            check.problem(
                "name",
                "the cache has a `store` and a `name`",
                "remove `name`: disks with the same `store` share the cache",
            );
        }
        if self.is_kept() {
            check.new_file("store", &self.store, "a cache cannot be at");
        } else if self.mode == CacheMode::WriteBack {
            check.problem(
                "mode",
                "a cache in memory cannot keep changes that are nowhere else",
                "add a `store` made by `fathom cache create --log SIZE`, or choose another `mode`",
            );
        } else if self.exclusive {
            check.problem(
                "exclusive",
                "the cache has no `store`",
                "remove `exclusive`, which only a cache that outlives the daemon needs",
            );
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

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        if self.is_kept() {
            return kept::make(self, context).map(Some);
        }
        let volume = context.caches.in_memory(context.disk, self, context.memory)?;
        let share = self.share_slots(&volume);
        volume.check_share(context.disk, share)?;
        let disk = CacheDisk::in_memory(context.disk, context.capacity);
        let names = Some(Arc::clone(context.names));
        let mark = Arc::new(kept::NoMark);
        let cache = Cache::named(&self.name, &volume, &disk, self.mode, mark, names)?;
        cache.set_share(share)?;
        cache.set_read_ahead(self.read_ahead.0);
        Ok(Some(Arc::new(cache)))
    }

    fn fits(&self, layer: &dyn Layer) -> bool {
        Cache::of(layer).is_some_and(|cache| {
            self.is_of(cache.volume())
                && cache.volume().is_kept == self.is_kept()
                && cache.shared_name() == self.shared_name()
                && cache.can_have_share(self.share_slots(cache.volume()))
        })
    }

    fn apply(&self, layer: &dyn Layer) {
        if let Some(cache) = Cache::of(layer) {
            cache.set_mode(self.mode);
            cache.set_read_ahead(self.read_ahead.0);
            // That it is possible was checked: only another disk that gets a share at this moment
            // could prevent it, and this disk then keeps the share that it has.
            _ = cache.set_share(self.share_slots(cache.volume()));
        }
    }
}
