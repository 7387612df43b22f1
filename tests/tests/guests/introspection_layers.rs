//! Device layers that copy or move blocks, while no tool reports the positions of blocks. Each
//! block of each file begins with the file's path, so the disk itself contains the right answer.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;

use fathom_tests::{Classified, Comparison, Error, Kind, Result, Truth};

use crate::scene::{DIRECT, Scene, kernel};

/// Shell functions. `label PATH COUNT` prints COUNT blocks of the file PATH. `cold FILE…` reads
/// files from the disk.
const LABEL: &str = r#"label() { awk -v path="$1" -v count="$2" 'BEGIN {
        for (i = 0; i < count; i++) printf "%-4095s\n", "block of " path " " i
    }'; }
    cold() {
        for file; do dd if="$file" iflag=nocache count=0 status=none; done
        echo 3 > /proc/sys/vm/drop_caches; cat "$@" > /dev/null
    }
    "#;
const BLOCK: u64 = 4096;

/// Numbers of bytes by operation, kind and path.
type Moved = BTreeMap<(String, Kind, Option<String>), u64>;

/// The path at the beginning of a block of the disk.
fn label(image: &File, place: u64) -> Result<Option<String>> {
    let mut bytes = [0; 64];
    image.read_exact_at(&mut bytes, place)?;
    let text = String::from_utf8_lossy(&bytes);
    let words: Vec<&str> = text.split(' ').collect();
    Ok(match words[..] {
        ["block", "of", path, ..] => Some(path.to_owned()),
        _ => None,
    })
}

impl Scene {
    /// Counts the bytes of the reports about requests. Notes each block that was not reported with
    /// the path at its beginning.
    fn check_labels(&mut self, name: &str, requests: &[Classified]) -> Result<Moved> {
        let image = File::open(self.daemon.path("disk.img"))?;
        // The last request that changed each block: the image has the data of that request.
        let mut changed = HashMap::new();
        for (number, request) in requests.iter().enumerate() {
            if matches!(&*request.operation, "write" | "write-zeroes" | "discard") {
                let end = request.offset + request.length;
                changed.extend((request.offset / BLOCK..end.div_ceil(BLOCK)).map(|b| (b, number)));
            }
        }
        let mut moved = Moved::new();
        let (mut seen, mut wrong) = (0, Vec::new());
        for (number, request) in requests.iter().enumerate() {
            for part in &request.parts {
                let key = (request.operation.clone(), part.kind, part.path.clone());
                *moved.entry(key).or_default() += part.length;
                let end = (part.offset + part.length) / BLOCK;
                for block in part.offset.div_ceil(BLOCK)..end {
                    if changed.get(&block).is_some_and(|last| *last > number) {
                        continue;
                    }
                    let label = label(&image, block * BLOCK)?;
                    let right = match part.kind {
                        Kind::Data | Kind::Direct => label.is_some() && label == part.path,
                        Kind::Unknown | Kind::Device => part.path.is_none(),
                        Kind::Directory => label.is_none(),
                        _ => label.is_none() && part.path.is_none(),
                    };
                    seen += u64::from(part.path.is_some());
                    if !right {
                        let what = &request.operation;
                        wrong.push(format!("{what} at {}: {label:?} was {part:?}", block * BLOCK));
                    }
                }
            }
        }
        println!("{name}: {seen} blocks with a path, {} wrong", wrong.len());
        for ((operation, kind, path), length) in &moved {
            println!("  {:8} KiB {operation} {kind:?} {path:?}", length / 1024);
        }
        let examples = wrong.iter().take(8).cloned().collect::<Vec<_>>().join("\n");
        self.note(name, if wrong.is_empty() { Ok(()) } else { Err(Error::new(examples)) });
        Ok(moved)
    }

    /// Notes files for which the reported bytes differ from the expected blocks.
    fn expect(&mut self, name: &str, moved: &Moved, expected: &[(&str, Kind, &str, u64)]) {
        for (operation, kind, path, blocks) in expected {
            let key = ((*operation).to_owned(), *kind, Some((*path).to_owned()));
            let found = moved.get(&key).copied().unwrap_or(0);
            if found != blocks * BLOCK {
                let text = format!("{operation} {path}: {found} of {} bytes", blocks * BLOCK);
                self.note(name, Err(Error::new(text)));
            }
        }
    }

    /// Notes unknown bytes of these operations.
    fn expect_known(&mut self, name: &str, moved: &Moved, operations: &[&str]) {
        for operation in operations {
            let key = ((*operation).to_owned(), Kind::Unknown, None);
            let unknown = moved.get(&key).unwrap_or(&0);
            if *unknown > 0 {
                let text = format!("{operation}: {unknown} bytes are unknown");
                self.note(name, Err(Error::new(text)));
            }
        }
    }

    /// Runs a script that may use [`LABEL`], and checks its requests.
    fn labelled(&mut self, name: &str, script: &str) -> Result<(Vec<Classified>, Moved)> {
        let requests = self.requests(&format!("{LABEL}{script}"))?;
        let moved = self.check_labels(name, &requests)?;
        Ok((requests, moved))
    }
}

/// A thin volume, also with a snapshot, whose shared blocks are copied before they are written.
#[test]
fn a_thin_volume() -> Result<()> {
    let Some(mut scene) = Scene::start(&kernel(), 300)? else { return Ok(()) };
    if !scene.has("thin volumes", "dm-mod dm-thin-pool", "dmsetup")? {
        return scene.end();
    }
    scene.prepare(
        "size=$(blockdev --getsz $disk)
        dmsetup create meta --table \"0 16384 linear $disk 0\"
        dmsetup create data --table \"0 $((size - 16384)) linear $disk 16384\"
        dd if=/dev/zero of=/dev/mapper/meta bs=4k count=1 status=none
        dmsetup create pool --table \"0 $((size - 16384)) thin-pool /dev/mapper/meta /dev/mapper/data 128 0\"
        dmsetup message /dev/mapper/pool 0 'create_thin 0'
        dmsetup create thin --table '0 524288 thin /dev/mapper/pool 0'
        mkfs.ext4 -q -b 4096 -E lazy_itable_init=0,nodiscard /dev/mapper/thin; mount /dev/mapper/thin /mnt",
    )?;
    let (_, moved) = scene.labelled(
        "thin",
        "label /large 2000 > /mnt/large; sync
        label /past 512 | dd of=/mnt/past bs=64k iflag=fullblock oflag=direct status=none; sync
        cold /mnt/large /mnt/past",
    )?;
    scene.expect(
        "thin",
        &moved,
        &[
            ("write", Kind::Data, "/large", 2000),
            ("read", Kind::Data, "/large", 2000),
            ("write", Kind::Direct, "/past", 512),
            ("read", Kind::Data, "/past", 512),
        ],
    );
    scene.expect_known("thin", &moved, &["read", "write"]);
    scene.prepare(
        "dmsetup suspend thin; dmsetup message /dev/mapper/pool 0 'create_snap 1 0'
        dmsetup resume thin",
    )?;
    let (_, moved) = scene.labelled(
        "thin, with a snapshot",
        "label /large 500 | dd of=/mnt/large bs=20k seek=3 conv=notrunc iflag=fullblock status=none
        sync; cold /mnt/large",
    )?;
    scene.expect(
        "thin, with a snapshot",
        &moved,
        &[("write", Kind::Data, "/large", 500), ("read", Kind::Data, "/large", 2000)],
    );
    scene.expect_known("thin, with a snapshot", &moved, &["read", "write"]);
    scene.end()
}

#[test]
fn a_snapshot_and_its_origin() -> Result<()> {
    let Some(mut scene) = Scene::start(&kernel(), 300)? else { return Ok(()) };
    if !scene.has("snapshots", "dm-mod dm-snapshot", "dmsetup")? {
        return scene.end();
    }
    scene.prepare(
        "dmsetup create base --table \"0 262144 linear $disk 2048\"
        dmsetup create changes --table \"0 131072 linear $disk 270336\"
        dmsetup create origin --table '0 262144 snapshot-origin /dev/mapper/base'
        mkfs.ext4 -q -b 4096 -E lazy_itable_init=0,nodiscard /dev/mapper/origin
        mount /dev/mapper/origin /mnt",
    )?;
    let write = "label /kept 1000 > /mnt/kept; label /changed 1000 > /mnt/changed; sync";
    let before = Truth::of(&scene.guest, "/mnt")?;
    let (requests, moved) = scene.labelled("origin", write)?;
    let after = Truth::of(&scene.guest, "/mnt")?;
    scene.note("origin", Comparison::of(&requests, &before, &after, DIRECT).check());
    scene.expect("origin", &moved, &[("write", Kind::Data, "/changed", 1000)]);
    scene.expect_known("origin", &moved, &["read", "write"]);
    scene.prepare(
        "umount /mnt; dmsetup suspend origin
        dmsetup create snapshot --table '0 262144 snapshot /dev/mapper/base /dev/mapper/changes P 16'
        dmsetup resume origin
        mkdir -p /run/snapshot; mount /dev/mapper/origin /mnt
        mount /dev/mapper/snapshot /run/snapshot",
    )?;
    // Blocks of the origin are copied before they are overwritten.
    let (_, moved) = scene.labelled(
        "origin with a snapshot",
        "label /changed 500 | dd of=/mnt/changed bs=20k seek=3 conv=notrunc iflag=fullblock status=none
        sync; cold /mnt/kept /mnt/changed",
    )?;
    scene.expect(
        "origin with a snapshot",
        &moved,
        &[
            ("write", Kind::Data, "/changed", 500),
            ("read", Kind::Data, "/changed", 1000),
            ("read", Kind::Data, "/kept", 1000),
        ],
    );
    scene.expect_known("origin with a snapshot", &moved, &["read", "write"]);
    let (_, moved) = scene.labelled(
        "snapshot",
        "cold /run/snapshot/changed /run/snapshot/kept
        label /kept 300 | dd of=/run/snapshot/kept bs=20k seek=3 conv=notrunc iflag=fullblock status=none
        label /new 700 > /run/snapshot/new; sync; cold /run/snapshot/new",
    )?;
    scene.expect(
        "snapshot",
        &moved,
        &[
            ("read", Kind::Data, "/changed", 1000),
            ("read", Kind::Data, "/kept", 1000),
            ("write", Kind::Data, "/kept", 300),
            ("write", Kind::Data, "/new", 700),
            ("read", Kind::Data, "/new", 700),
        ],
    );
    scene.expect_known("snapshot", &moved, &["read", "write"]);
    scene.end()
}

/// bcache, with the cache on the same disk after the backing device.
#[test]
fn bcache() -> Result<()> {
    let Some(mut scene) = Scene::start(&kernel(), 1224)? else { return Ok(()) };
    if !scene.has("bcache", "dm-mod bcache", "dmsetup make-bcache")? {
        return scene.end();
    }
    // A backing device of 200 MiB, and a cache large enough for its buckets.
    scene.prepare(
        "dmsetup create back --table \"0 409600 linear $disk 0\"
        dmsetup create cache --table \"0 2097152 linear $disk 409600\"
        make-bcache -B /dev/mapper/back -C /dev/mapper/cache
        for device in back cache; do echo /dev/mapper/$device > /sys/fs/bcache/register; done
        for tenth in $(seq 100); do [ -e /sys/block/bcache0/bcache/cache ] && break; sleep 0.1; done
        echo 0 > /sys/block/bcache0/bcache/sequential_cutoff
        # The disk is slow here, and bcache would bypass the cache.
        for what in read write; do
            for set in /sys/fs/bcache/*-*; do echo 0 > $set/congested_${what}_threshold_us; done
        done
        mkfs.ext4 -q -b 4096 -E lazy_itable_init=0,nodiscard /dev/bcache0; mount /dev/bcache0 /mnt",
    )?;
    let before = Truth::of(&scene.guest, "/mnt")?;
    let (requests, moved) =
        scene.labelled("through", "label /through 1000 > /mnt/through; sync; cold /mnt/through")?;
    let after = Truth::of(&scene.guest, "/mnt")?;
    let is_backing = |request: &&Classified| request.offset < 409_600 * 512;
    let backing: Vec<Classified> = requests.iter().filter(is_backing).cloned().collect();
    let comparison = Comparison::of(&backing, &before, &after, DIRECT);
    println!("{comparison}");
    scene.note("through", comparison.check());
    // The backing device is checked above. The cache gets only as many blocks as it has space for
    // at the time; the owner of other blocks that are read from the device is unknown by then.
    scene.expect("through", &moved, &[("read", Kind::Data, "/through", 1000)]);
    scene.expect_known("through", &moved, &["read"]);
    let (_, moved) = scene.labelled(
        "around",
        "echo writearound > /sys/block/bcache0/bcache/cache_mode
        label /around 1000 > /mnt/around; sync
        echo writethrough > /sys/block/bcache0/bcache/cache_mode
        cold /mnt/around; cold /mnt/around",
    )?;
    // The file is read from the device, and then from the cache, to which it has been copied.
    scene.expect(
        "around",
        &moved,
        &[("write", Kind::Data, "/around", 1000), ("read", Kind::Data, "/around", 2000)],
    );
    scene.expect_known("around", &moved, &["read"]);
    let (_, moved) = scene.labelled(
        "back",
        "echo writeback > /sys/block/bcache0/bcache/cache_mode
        label /back 1000 > /mnt/back; sync; cold /mnt/back
        cd /sys/block/bcache0/bcache; echo 0 > writeback_percent; echo 0 > writeback_delay
        echo writethrough > cache_mode
        for tenth in $(seq 200); do [ $(cat state) = clean ] && break; sleep 0.1; done
        cat state; [ $(cat state) = clean ]",
    )?;
    scene.expect(
        "back",
        &moved,
        &[("write", Kind::Data, "/back", 1000), ("read", Kind::Data, "/back", 1000)],
    );
    scene.expect_known("back", &moved, &["read", "write"]);
    scene.end()
}

/// The write of a file and its read, and the number of times that each block is written.
fn check_file(scene: &mut Scene, name: &str, copies: u64) -> Result<()> {
    let (_, moved) = scene.labelled(name, "label /file 1000 > /mnt/file; sync; cold /mnt/file")?;
    scene.expect(
        name,
        &moved,
        &[("write", Kind::Data, "/file", copies * 1000), ("read", Kind::Data, "/file", 1000)],
    );
    scene.expect_known(name, &moved, &["read", "write"]);
    scene.prepare("umount /mnt")
}

/// Device mapper's mirrors and checksums.
fn mirrors_and_checksums(scene: &mut Scene) -> Result<()> {
    if !scene.has("mirrors", "dm-mod dm-mirror dm-integrity", "dmsetup integritysetup")? {
        return Ok(());
    }
    scene.prepare(
        "for half in 0 1; do
            dmsetup create half$half --table \"0 131072 linear $disk $((half * 131072))\"
        done
        dmsetup create mirror --table \
            '0 131072 mirror core 2 1024 nosync 2 /dev/mapper/half0 0 /dev/mapper/half1 0'
        mkfs.ext4 -q -b 4096 -E lazy_itable_init=0,nodiscard /dev/mapper/mirror
        mount /dev/mapper/mirror /mnt",
    )?;
    check_file(scene, "mirror", 2)?;
    scene.prepare(
        "dmsetup remove mirror; blkdiscard -f $disk
        set -- --integrity sha256 --integrity-no-journal
        integritysetup format -q \"$@\" --tag-size 32 /dev/mapper/half0
        integritysetup open \"$@\" /dev/mapper/half0 checked
        mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0,nodiscard /dev/mapper/checked
        mount /dev/mapper/checked /mnt",
    )?;
    check_file(scene, "checksums", 1)?;
    scene.prepare("integritysetup close checked; dmsetup remove half0 half1; blkdiscard -f $disk")
}

/// File systems that move content, that have trees in the page cache, or that ignore case.
fn content_of_file_systems(scene: &mut Scene) -> Result<()> {
    scene.prepare("mkfs.btrfs -q -f $disk; mount $disk /mnt")?;
    let write = "label /file 1000 > /mnt/file; sync";
    scene.labelled("Btrfs", write)?;
    scene.labelled("scrub", "btrfs scrub start -B /mnt > /dev/null")?;
    scene.labelled("balance", "btrfs balance start -d /mnt > /dev/null; sync")?;
    scene.prepare("umount /mnt; blkdiscard -f $disk")?;
    if scene.has("NILFS2", "nilfs2", "mkfs.nilfs2")? {
        scene.prepare("mkfs.nilfs2 -q -f $disk; mount -i -t nilfs2 $disk /mnt")?;
        scene.labelled("the nodes of a tree", &format!("{write}; cold /mnt/file"))?;
        scene.prepare("umount /mnt; blkdiscard -f $disk")?;
    }
    scene.prepare(
        "mkfs.ext4 -q -F -O casefold -b 4096 -E lazy_itable_init=0,nodiscard $disk
        mount $disk /mnt; mkdir /mnt/folder; chattr +F /mnt/folder",
    )?;
    // The kernel forgets the name when the file is closed.
    let new = "label /folder/new 100 |
        dd of=/mnt/folder/new bs=64k iflag=fullblock conv=fsync status=none";
    let (_, moved) = scene.labelled("a folder without case", new)?;
    let expected = [("write", Kind::Data, "/folder/new", 100)];
    scene.expect("a folder without case", &moved, &expected);
    scene.prepare("umount /mnt; blkdiscard -f $disk")
}

fn layers_and_content(kernel: &str) -> Result<()> {
    let Some(mut scene) = Scene::start(kernel, 400)? else { return Ok(()) };
    mirrors_and_checksums(&mut scene)?;
    content_of_file_systems(&mut scene)?;
    scene.end()
}

#[test]
fn layers_and_content_with_the_plain_kernel() -> Result<()> {
    layers_and_content(&kernel())
}

#[test]
fn layers_and_content_with_the_newest_kernel() -> Result<()> {
    layers_and_content("newest")
}
