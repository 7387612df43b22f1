//! Reads arbitrary bytes as trees of `/sys` and `/proc`: for the fuzzer, and for tests with seeded
//! inputs.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::resolve::{Identity, MediumKind, STEPS_MAX, Tree};
use crate::text::is_device_name;
use crate::{SysDevices, mounts};

/// The most files of a tree.
const FILES_MAX: usize = 64;
/// The most folders in a path of a tree, and the most bytes of a name.
const DEPTH_MAX: usize = 8;
const NAME_LENGTH_MAX: usize = 100;
/// The number of images that are looked up.
const IMAGES: u8 = 4;

/// A folder that is removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Option<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fathom-devices-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).ok()?;
        Some(Self(path))
    }

    /// The place of a path in the folder; `None` if it would not be within it.
    fn place(&self, path: &[u8]) -> Option<PathBuf> {
        let mut place = self.0.clone();
        for name in String::from_utf8_lossy(path).split('/').filter(|name| !name.is_empty()) {
            if name.starts_with('.') || name.len() > NAME_LENGTH_MAX {
                return None;
            }
            place.push(name);
        }
        (place.components().count() <= self.0.components().count() + DEPTH_MAX).then_some(place)
    }

    /// Makes a file or a link. What cannot be made is left out.
    fn make(&self, text: &[u8]) {
        let (is_link, text) = match text {
            [b'@', rest @ ..] => (true, rest),
            _ => (false, text),
        };
        let mut parts = text.splitn(2, |byte| *byte == b'=');
        let Some(path) = parts.next().and_then(|path| self.place(path)) else { return };
        let content = parts.next().unwrap_or_default();
        let _ = path.parent().map(fs::create_dir_all);
        let _ = match self.place(content).filter(|_| is_link) {
            Some(target) => symlink(target, path),
            None => fs::write(path, content),
        };
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// An identity that depends only on the path.
fn identify(path: &Path) -> io::Result<Identity> {
    let bytes = path.as_os_str().as_encoded_bytes();
    let hash = bytes.iter().fold(0_u32, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193).rotate_left(5)
    });
    if hash % 16 == 0 {
        return Err(io::ErrorKind::NotFound.into());
    }
    let major = if (hash >> 4) % 2 == 0 { 0 } else { 8 };
    let (number, mount) = ((major, (hash >> 8) % 8), u64::from(hash >> 16) % 8);
    Ok(Identity { number, is_device: (hash >> 5) % 4 == 0, mount: Some(mount) })
}

/// Reads `data` as a list of mounts and, after a zero byte each, the files of a tree like `/sys`
/// (`path=content`, or `@path=target` for a link). Looks up the devices beneath some images and the
/// activity of all devices, and panics if a promise is broken.
pub fn fuzz_devices(data: &[u8]) {
    let mut parts = data.split(|byte| *byte == 0);
    let text = String::from_utf8_lossy(parts.next().unwrap_or_default()).into_owned();
    for mount in (0..8).filter_map(|id| mounts::find(&text, id)) {
        for folder in mounts::overlay_folders(&mount) {
            assert!(folder.as_os_str().len() <= text.len() * 3, "text does not grow");
        }
    }
    let Some(folder) = Folder::new() else { return };
    for file in parts.take(FILES_MAX) {
        folder.make(file);
    }
    let list = folder.0.join("mounts");
    if fs::write(&list, text).is_err() {
        return;
    }
    let tree = Tree { sys: folder.0.clone(), mounts: list, identify: Box::new(identify) };
    for image in 0..IMAGES {
        let placement = tree.resolve(Path::new(&format!("/image{image}")));
        assert!(!placement.media.is_empty(), "an image lies on something");
        assert!(placement.media.len() + placement.through.len() <= 2 * STEPS_MAX + 1);
        for medium in &placement.media {
            assert!(is_device_name(&medium.name), "{medium:?}");
            let is_known = medium.kind != MediumKind::Unknown;
            assert!(is_known || placement.problem.is_some(), "{placement:?}");
        }
        assert!(placement.through.iter().all(|name| is_device_name(name)), "{placement:?}");
    }
    let devices = SysDevices::at(&folder.0);
    let names = fs::read_dir(folder.0.join("block")).into_iter().flatten().flatten();
    for name in names.map(|entry| entry.file_name()) {
        let Some(name) = name.to_str() else { continue };
        let facts = devices.facts(name);
        assert!(facts.size_bytes == 0 || is_device_name(name), "{name}");
        if let Some(activity) = devices.activity(name) {
            let in_flight = devices.in_flight(name).unwrap_or(activity.in_flight);
            assert_eq!(activity.in_flight, in_flight, "{name}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A whole tree: partitions, an array, a mapped device, a loop device, mounts of several types.
    const WHOLE: &[u8] = b"0 1 0:1 / /a rw - btrfs /dev/sda1 rw\n\
        1 1 0:2 / /b rw - overlay overlay rw,lowerdir=/image0:/image1\\134:x,upperdir=/image2\n\
        2 1 0:3 / /c rw shared:1 - bcachefs /dev/sda1:/dev/sdb rw\n\
        3 1 8:1 / /d rw - xfs /dev/sda rw,rtdev=/dev/sdb,logdev=/dev/mapper/group-data\n\
        4 1 0:4 / /e rw - tmpfs tmpfs rw\n5 1 0:5 / /f rw - nfs4 host:/x rw\n\
        6 1 0:6 / /g rw - fuse.sshfs a@b: rw\n7 1 0:7 / /h rw - zfs pool/data rw\0\
        devices/sda/sda1/partition=1\0devices/sda/queue/rotational=1\0devices/sdb/size=2048\0\
        devices/dm-0/dm/name=group-data\0@devices/dm-0/slaves/sdb=devices/sdb\0\
        @devices/dm-0/slaves/sda1=devices/sda/sda1\0devices/loop0/loop/backing_file=/image3\0\
        devices/zram0/size=1\0@devices/md0/slaves/dm-0=devices/dm-0\0\
        @dev/block/8:0=devices/sda\0@dev/block/8:1=devices/sda/sda1\0@dev/block/8:2=devices/sdb\0\
        @dev/block/8:3=devices/dm-0\0@dev/block/8:4=devices/loop0\0@dev/block/8:5=devices/zram0\0\
        @dev/block/8:6=devices/md0\0@class/block/sda=devices/sda\0\
        @class/block/sda1=devices/sda/sda1\0@class/block/sdb=devices/sdb\0\
        @class/block/dm-0=devices/dm-0\0@fs/btrfs/1-2/devices/sda1=devices/sda/sda1\0\
        @fs/btrfs/1-2/devices/sdb=devices/sdb\0\
        block/sda/stat=10 1 80 5 20 2 160 9 3 77 99 4 0 8 0 6 1\0block/sda/inflight=2 5\0\
        block/sda/size=2048\0block/sda/queue/rotational=1\0block/sdb/stat=1 2 3\0\
        block/sdb/inflight=18446744073709551615 9";

    #[test]
    fn mutated_trees_keep_the_promises() {
        fuzz_devices(WHOLE);
        let words: [&[u8]; 9] =
            [b"\0", b"/", b"=", b"@", b":", b",", b"\\134", b" - ", b"18446744073709551616"];
        for seed in 0..400 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut bytes = WHOLE.to_vec();
            for _ in 0..random.usize(1..10) {
                let at = random.usize(..bytes.len());
                match random.u8(..5) {
                    0 => bytes[at] = random.u8(..),
                    1 => bytes[at] ^= 1 << random.u8(..8),
                    2 => {
                        let word = words[random.usize(..words.len())];
                        drop(bytes.splice(at..at, word.iter().copied()));
                    }
                    // A part of the input in another place.
                    3 => {
                        let from = random.usize(..bytes.len());
                        let part =
                            bytes[from..(from + random.usize(1..60)).min(bytes.len())].to_vec();
                        drop(bytes.splice(at..at, part));
                    }
                    _ => drop(bytes.drain(at..(at + random.usize(1..20)).min(bytes.len()))),
                }
            }
            let result = std::panic::catch_unwind(|| fuzz_devices(&bytes));
            assert!(result.is_ok(), "seed {seed}");
        }
    }
}
