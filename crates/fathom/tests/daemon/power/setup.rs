//! What the host of a seed has.

use std::path::Path;

use fathom_control::{DiskDefinition, LayerDefinition};
use serde_json::{Value, json};

use super::life::Layers;
use super::volumes::{CACHE, HOME, LOG};

/// The places of the two logs on a block device.
pub const OFFSETS: [&str; 2] = ["0", "8M"];

/// What a host has.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Whether devices fail at times.
    pub fails: bool,
    /// For the image, the logs and the cache: whether it is a block device itself instead of a file
    /// on one.
    pub is_device: [bool; 3],
    /// Whether the file systems are XFS instead of ext4, except that of the state.
    pub is_xfs: bool,
    /// The layers that the configuration has since the image has got another name.
    pub renamed: Option<Layers>,
    /// Whether a log that is refused is kept.
    pub keeps_log: bool,
}

impl Setup {
    /// Devices fail with every other seed. With one of four seeds, all have file systems; with
    /// another one, the image is a device. With one of those with devices that do not fail, the
    /// file systems are XFS.
    pub fn draw(seed: u64, random: &mut fastrand::Rng) -> Self {
        let mut is_device = [(); 3].map(|()| random.u8(0..3) == 0);
        match seed % 4 {
            0 => is_device = [false; 3],
            3 => is_device[HOME] = true,
            _ => {}
        }
        let (fails, is_xfs) = (seed % 2 == 1, seed % 4 == 2);
        Self { fails, is_device, is_xfs, renamed: None, keeps_log: false }
    }

    /// The name below the mount points of the disk's image, or of a link to its device.
    pub const IMAGE: &str = "home/a.img";
    /// The image's other name.
    pub const RENAMED: &str = "home/b.img";
    /// The same for the stores of caches. A device has only the first.
    pub const STORES: [&str; 2] = ["cache/store", "cache/other"];
    /// The link to a device with both logs.
    pub const LOGS: &str = "log/volume";

    /// The image, or the link to its device.
    pub fn image(&self) -> &'static str {
        if self.renamed.is_some() { Self::RENAMED } else { Self::IMAGE }
    }

    /// The configuration of the daemon: a disk without layers, or with those of `renamed`. While
    /// devices fail, it has keepsakes, without which not every loss is seen.
    pub fn configuration(&self, folder: &Path, has_keepsakes: bool) -> String {
        let keepsakes = if has_keepsakes { "on" } else { "off" };
        let key = if self.is_device[HOME] { "key = \"home-of-a\"\n" } else { "" };
        let image = folder.join(self.image());
        let layers = self.renamed.map_or_else(String::new, |layers| self.layers(folder, layers));
        format!(
            "[daemon]\nkeepsakes = \"{keepsakes}\"\n[[disk]]\nname = \"a\"\nimage = \"{}\"\n{key}{layers}[[nbd]]\naddress = \
             \"unix:nbd.sock\"\n",
            image.display(),
        )
    }

    /// The disk with these layers.
    pub fn definition(&self, folder: &Path, layers: Layers) -> DiskDefinition {
        let limit = layers.is_limited.then_some("limit");
        let cache = layers.cache.map(|_| "cache");
        let kinds = [limit, cache, layers.log].into_iter().flatten();
        let cache = (layers.cache.unwrap_or_default(), layers.store);
        let layers =
            kinds.map(|kind| LayerDefinition::new(kind, self.options(kind, folder, cache)));
        DiskDefinition {
            name: "a".into(),
            image: Some(folder.join(self.image())),
            key: self.is_device[HOME].then(|| "home-of-a".into()),
            layers: layers.collect(),
            ..DiskDefinition::default()
        }
    }

    fn layers(&self, folder: &Path, layers: Layers) -> String {
        let layers = self.definition(folder, layers).layers.into_iter().map(|layer| {
            let options = layer.options.iter().map(|(key, value)| format!(", {key} = {value}"));
            format!("{{ kind = \"{}\"{} }}", layer.kind, options.collect::<Vec<_>>().concat())
        });
        format!("layers = [{}]\n", layers.collect::<Vec<_>>().join(", "))
    }

    /// Options of the layer `kind`. A cache has this mode, and the store with this index.
    pub fn options(&self, kind: &str, folder: &Path, (mode, store): (&str, usize)) -> Value {
        let path = |name: &str| folder.join(name).display().to_string();
        if kind == "cache" {
            return json!({ "store": path(Self::STORES[store]), "mode": mode, "age": "300ms" });
        }
        if kind == "limit" {
            return json!({ "total_iops_sec": 1_000_000 });
        }
        let (file, offset) = match (self.is_device[LOG], kind) {
            (false, "wal") => ("log/wal", "0"),
            (false, _) => ("log/offload", "0"),
            (true, "wal") => (Self::LOGS, OFFSETS[0]),
            (true, _) => (Self::LOGS, OFFSETS[1]),
        };
        json!({ "log": path(file), "offset": offset, "size": "1M", "age": "200ms" })
    }

    /// The number of stores of caches.
    pub fn stores(&self) -> usize {
        if self.is_device[CACHE] { 1 } else { 2 }
    }

    /// The link to the device of the volume with this index; `None` if it is a file system.
    pub fn link(&self, volume: usize) -> Option<&'static str> {
        match volume {
            HOME if self.is_device[HOME] => Some(Self::IMAGE),
            LOG if self.is_device[LOG] => Some(Self::LOGS),
            CACHE if self.is_device[CACHE] => Some(Self::STORES[0]),
            _ => None,
        }
    }
}
