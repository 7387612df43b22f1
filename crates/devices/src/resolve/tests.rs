//! Made trees of `/sys`, and by seed trees of garbage. Real devices are in `tests/host.rs`.

use std::fs;
use std::os::unix::fs::symlink;
use std::rc::Rc;

use super::*;

/// A made `/sys`, list of mounts, and images.
struct Made {
    root: tempfile::TempDir,
    mounts: String,
    images: Vec<(String, Identity)>,
    count: u32,
}

impl Made {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        for folder in ["dev/block", "class/block", "devices", "fs/btrfs"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        Self { root, mounts: String::new(), images: Vec::new(), count: 0 }
    }

    /// Makes a device, in the folder of another one for a partition. Returns its number.
    fn device(&mut self, path: &str) -> (u32, u32) {
        let folder = self.root.path().join("devices").join(path);
        fs::create_dir_all(&folder).unwrap();
        self.count += 1;
        let number = (8, self.count);
        symlink(&folder, self.root.path().join(format!("dev/block/8:{}", self.count))).unwrap();
        symlink(&folder, self.root.path().join("class/block").join(folder.file_name().unwrap()))
            .unwrap();
        number
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root.path().join("devices").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Puts `upper` on `lower`.
    fn stack(&self, upper: &str, lower: &[&str]) {
        for lower in lower {
            let devices = self.root.path().join("devices");
            let slaves = devices.join(upper).join("slaves");
            fs::create_dir_all(&slaves).unwrap();
            let target = devices.join(lower);
            symlink(&target, slaves.join(target.file_name().unwrap())).unwrap();
        }
    }

    fn mount(&mut self, id: u64, file_system: &str, source: &str, options: &str) {
        let line = format!("{id} 1 0:1 / / rw - {file_system} {source} {options}\n");
        self.mounts.push_str(&line);
    }

    fn image(&mut self, path: &str, number: (u32, u32), is_device: bool, mount: Option<u64>) {
        self.images.push((path.into(), Identity { number, is_device, mount }));
    }

    fn resolve(&self, path: &str) -> Placement {
        let mounts = self.root.path().join("mounts");
        fs::write(&mounts, &self.mounts).unwrap();
        let images = Rc::new(self.images.clone());
        let identify = move |path: &Path| {
            let found = images.iter().find(|(name, _)| Path::new(name) == path);
            found.map(|(_, identity)| *identity).ok_or_else(|| io::ErrorKind::NotFound.into())
        };
        let tree = Tree { sys: self.root.path().into(), mounts, identify: Box::new(identify) };
        tree.resolve(Path::new(path))
    }

    /// The media as text, `device:sda`.
    fn media(&self, path: &str) -> Vec<String> {
        let media = self.resolve(path).media;
        media.iter().map(|medium| format!("{}:{}", medium.kind.name(), medium.name)).collect()
    }
}

#[test]
fn partitions_mapped_devices_arrays_and_loops_lead_to_whole_disks() {
    let mut made = Made::new();
    made.device("pci/block/sda");
    let partition = made.device("pci/block/sda/sda1");
    made.write("pci/block/sda/sda1/partition", "1\n");
    made.device("pci/block/sdb");
    made.device("pci/nvme/nvme0n1");
    made.device("virtual/md0");
    made.stack("virtual/md0", &["pci/block/sda/sda1", "pci/block/sdb"]);
    let mapped = made.device("virtual/dm-0");
    made.stack("virtual/dm-0", &["virtual/md0", "pci/nvme/nvme0n1"]);
    let looped = made.device("virtual/loop3");
    made.write("virtual/loop3/loop/backing_file", "/images/inner.img\n");
    made.image("/dev/sda1", partition, true, None);
    made.image("/images/inner.img", mapped, false, None);
    made.image("/images/outer.img", looped, false, None);
    assert_eq!(made.media("/dev/sda1"), ["device:sda"]);
    let all = ["device:nvme0n1", "device:sda", "device:sdb"];
    assert_eq!(made.media("/images/inner.img"), all);
    assert_eq!(made.media("/images/outer.img"), all);
    let placement = made.resolve("/images/outer.img");
    assert_eq!(placement.through, ["loop3", "dm-0", "md0", "sda1"]);
    assert_eq!(placement.devices().collect::<Vec<_>>(), ["nvme0n1", "sda", "sdb"]);
    assert_eq!(placement.problem, None);
}

#[test]
fn file_systems_without_a_device_number_are_found_by_their_mount() {
    let mut made = Made::new();
    for name in ["sda", "sdb", "sdc", "sdd", "zram1", "dm-4"] {
        made.device(name);
    }
    made.write("dm-4/dm/name", "group-data\n");
    made.stack("dm-4", &["sdd"]);
    for (uuid, names) in [("1-2", ["sda", "sdb"]), ("3-4", ["sdc", "dm-4"])] {
        let folder = made.root.path().join("fs/btrfs").join(uuid).join("devices");
        fs::create_dir_all(&folder).unwrap();
        for name in names {
            symlink(made.root.path().join("devices").join(name), folder.join(name)).unwrap();
        }
    }
    fs::create_dir_all(made.root.path().join("fs/btrfs/features")).unwrap();
    made.mount(1, "btrfs", "/dev/sdb", "rw,subvol=/x");
    made.mount(2, "btrfs", "/dev/mapper/group-data", "rw");
    made.mount(3, "tmpfs", "tmpfs", "rw");
    made.mount(4, "nfs4", "server:/export", "rw");
    made.mount(5, "fuse.sshfs", "user@host:", "rw");
    made.mount(6, "overlay", "overlay", "rw,lowerdir=/low1:/low2,upperdir=/up,workdir=/w");
    made.mount(7, "overlay", "overlay", "ro,lowerdir=/low1:/low2");
    made.mount(8, "zfs", "pool/data", "rw");
    made.mount(9, "bcachefs", "/dev/sda:/dev/sdc", "rw");
    made.mount(10, "xfs", "/dev/sda", "rw,rtdev=/dev/sdc,logdev=/dev/mapper/group-data");
    made.mount(11, "btrfs", "/dev/gone", "rw");
    made.mount(12, "fuse./../x", "a", "rw");
    let cases: [(u64, &[&str]); 12] = [
        (1, &["device:sda", "device:sdb"]),
        (2, &["device:sdc", "device:sdd"]),
        (3, &["memory:memory"]),
        (4, &["network:nfs4"]),
        (5, &["network:fuse.sshfs"]),
        (6, &["device:sdb"]),
        (7, &["memory:memory", "device:sda"]),
        (8, &["unknown:unknown"]),
        (9, &["device:sda", "device:sdc"]),
        (11, &["unknown:unknown"]),
        (12, &["network:network"]),
        (13, &["unknown:unknown"]),
    ];
    let (sda, sdb, zram) = ((8, 1), (8, 2), (8, 5));
    made.image("/low1", sda, false, None);
    made.image("/low2", zram, false, None);
    made.image("/up", sdb, false, None);
    for (mount, expected) in cases {
        let path = format!("/image{mount}");
        made.image(&path, (0, 40), false, Some(mount));
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        let mut media = made.media(&path);
        media.sort_unstable();
        assert_eq!(media, expected, "{path}");
    }
    made.image("/image10", sda, false, Some(10));
    assert_eq!(made.media("/image10"), ["device:sda", "device:sdc", "device:sdd"]);
    assert_eq!(made.media("/absent"), ["unknown:unknown"]);
    assert!(made.resolve("/absent").problem.unwrap().contains("/absent"));
}

#[test]
fn cycles_and_deep_nesting_end() {
    let mut made = Made::new();
    let first = made.device("dm-0");
    made.device("dm-1");
    made.stack("dm-0", &["dm-1"]);
    made.stack("dm-1", &["dm-0"]);
    made.image("/cycle", first, true, None);
    assert_eq!(made.media("/cycle"), ["unknown:unknown"]);
    // A loop device on a file of the file system on that loop device.
    let looped = made.device("loop0");
    made.write("loop0/loop/backing_file", "/in/itself");
    made.image("/in/itself", looped, false, None);
    assert_eq!(made.media("/in/itself"), ["unknown:unknown"]);
    made.write("loop0/loop/backing_file", "/in/itself (deleted)");
    assert!(made.resolve("/in/itself").problem.unwrap().contains("deleted"));
    // An overlay on itself.
    made.mount(1, "overlay", "overlay", "rw,upperdir=/over");
    made.image("/over", (0, 3), false, Some(1));
    let placement = made.resolve("/over");
    assert!(placement.problem.unwrap().contains("nested"), "{:?}", placement.media);
    let mut number = made.device("deep0");
    for level in 1..100 {
        number = made.device(&format!("deep{level}"));
        made.stack(&format!("deep{level}"), &[&format!("deep{}", level - 1)]);
    }
    made.image("/deep", number, true, None);
    assert!(made.resolve("/deep").problem.unwrap().contains("nested"));
    // More devices than are visited.
    let wide = made.device("wide");
    for leaf in 0..1100 {
        let name = format!("leaf{leaf}");
        fs::create_dir_all(made.root.path().join("devices").join(&name)).unwrap();
        made.stack("wide", &[&name]);
    }
    made.image("/wide", wide, true, None);
    let placement = made.resolve("/wide");
    assert!(placement.media.len() <= STEPS_MAX + 1 && placement.problem.is_some());
}

#[test]
fn a_tree_of_garbage_is_walked_to_an_end() {
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut made = Made::new();
        let names: Vec<String> = (0..8)
            .map(|index| match random.u8(..5) {
                0 => format!("sd{index}"),
                1 => format!("loop{index}"),
                2 => format!("dm {index}"),
                3 => format!("zram{index}"),
                _ => format!("x{index}/y{index}"),
            })
            .collect();
        let numbers: Vec<_> = names.iter().map(|name| made.device(name)).collect();
        let garbage = |random: &mut fastrand::Rng| -> String {
            let length = random.usize(..40);
            (0..length).map(|_| random.char('\0'..'\u{2ff}')).collect()
        };
        for name in &names {
            let text = match random.u8(..4) {
                0 => garbage(&mut random),
                1 => format!("/image{}", random.u8(..8)),
                2 => "/".repeat(6000),
                _ => String::new(),
            };
            match random.u8(..6) {
                0 => made.write(&format!("{name}/loop/backing_file"), &text),
                1 => made.write(&format!("{name}/partition"), &text),
                2 => made.write(&format!("{name}/slaves/{}", random.u8(..)), &text),
                3 => made.write(&format!("{name}/slaves"), &text),
                _ => {
                    let lower = &names[random.usize(..8)];
                    if !made.root.path().join("devices").join(name).join("slaves").exists() {
                        made.stack(name, &[lower]);
                    }
                }
            }
        }
        for index in 0..8_u64 {
            let text = garbage(&mut random);
            let kinds = ["btrfs", "overlay", "xfs", "tmpfs", "what", &text];
            let kind = kinds[random.usize(..kinds.len())].to_owned();
            let source = format!("/dev/{}", names[random.usize(..8)]);
            made.mount(index, &kind, &source, &format!("upperdir=/image{},{text}", random.u8(..9)));
            let number = if random.bool() { numbers[random.usize(..8)] } else { (0, 1) };
            made.image(&format!("/image{index}"), number, random.bool(), Some(random.u64(..9)));
        }
        for index in 0..9 {
            let placement = made.resolve(&format!("/image{index}"));
            assert!(!placement.media.is_empty(), "seed {seed}");
            for medium in &placement.media {
                assert!(is_device_name(&medium.name), "seed {seed}: {medium:?}");
            }
        }
    }
}
