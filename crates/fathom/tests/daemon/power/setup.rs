//! What the host of a seed has.

use std::path::Path;

use serde_json::{Value, json};

use super::volumes::{CACHE, HOME, LOG};

/// The places of the two logs on a block device.
pub const OFFSETS: [&str; 2] = ["0", "8M"];

/// What a host has.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Whether devices fail at times.
    pub fails: bool,
    /// For the image, the logs and the cache: whether it is a block device itself instead of a file on one.
    pub is_device: [bool; 3],
}

impl Setup {
    pub fn draw(random: &mut fastrand::Rng) -> Self {
        Self { fails: random.bool(), is_device: [(); 3].map(|()| random.u8(0..3) == 0) }
    }

    /// The name below the mount points of the disk's image, or of a link to its device.
    pub const IMAGE: &str = "home/a.img";
    /// The same for the store of the cache.
    pub const STORE: &str = "cache/store";
    /// The link to a device with both logs.
    pub const LOGS: &str = "log/volume";

    /// The configuration of the daemon: a disk without layers. While devices fail, it has keepsakes, without which not
    /// every loss is seen.
    pub fn configuration(&self, folder: &Path, has_keepsakes: bool) -> String {
        let keepsakes = if has_keepsakes { "on" } else { "off" };
        let key = if self.is_device[HOME] { "key = \"home-of-a\"\n" } else { "" };
        let image = folder.join(Self::IMAGE);
        format!(
            "[daemon]\nkeepsakes = \"{keepsakes}\"\n[[disk]]\nname = \"a\"\nimage = \"{}\"\n{key}[[nbd]]\naddress = \
             \"unix:nbd.sock\"\n",
            image.display(),
        )
    }

    /// Options of the layer `kind`.
    pub fn options(&self, kind: &str, folder: &Path, mode: &str) -> Value {
        let path = |name: &str| folder.join(name).display().to_string();
        if kind == "cache" {
            return json!({ "store": path(Self::STORE), "mode": mode, "age": "300ms" });
        }
        let (file, offset) = match (self.is_device[LOG], kind) {
            (false, "wal") => ("log/wal", "0"),
            (false, _) => ("log/offload", "0"),
            (true, "wal") => (Self::LOGS, OFFSETS[0]),
            (true, _) => (Self::LOGS, OFFSETS[1]),
        };
        json!({ "log": path(file), "offset": offset, "size": "1M", "age": "200ms" })
    }

    /// The link to the device of the volume with this index; `None` if it is a file system.
    pub fn link(&self, volume: usize) -> Option<&'static str> {
        match volume {
            HOME if self.is_device[HOME] => Some(Self::IMAGE),
            LOG if self.is_device[LOG] => Some(Self::LOGS),
            CACHE if self.is_device[CACHE] => Some(Self::STORE),
            _ => None,
        }
    }
}
