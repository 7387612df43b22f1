//! The file systems of Debian's plain kernel, one after the other, compared as in
//! `introspection.rs` with a smaller workload for each.

use fathom_tests::{Result, Truth};

use crate::scene::{Scene, kernel};

/// File systems: the modules, the command that makes it on `$disk`, the command that mounts it, and
/// further workloads besides small files.
const SYSTEMS: &[(&str, &str, &str, &str)] = &[
    ("ext2", "mkfs.ext2 -q -F -b 4096 $disk", "mount -t ext2", "direct"),
    ("jfs", "mkfs.jfs -q $disk", "mount -t jfs", "direct"),
    ("nilfs2", "mkfs.nilfs2 -q -f $disk", "mount -i -t nilfs2", "direct"),
    ("ntfs3", "mkntfs -q -Q -F $disk", "mount -i -t ntfs3", "direct"),
    ("reiserfs", "mkreiserfs -q -ff $disk", "mount -t reiserfs -o notail", "direct"),
    ("minix", "mkfs.minix -3 $disk", "mount -t minix", ""),
    ("udf", "mkudffs --media-type=hd --blocksize=512 $disk", "mount -t udf", ""),
    ("exfat", "mkfs.exfat $disk", "mount -t exfat", "direct"),
    ("vfat", "mkfs.vfat -F 32 $disk", "mount -t vfat", "direct"),
];

/// Reads all files without a cache.
const COLD: &str =
    "echo 3 > /proc/sys/vm/drop_caches; find /mnt -type f -exec cat {} + > /dev/null";

impl Scene {
    /// Runs a script and notes wrong reports about its requests.
    fn step(&mut self, name: &str, script: &str, before: &Truth) -> Result<Truth> {
        let (comparison, after) = self.compare(name, script, before, "/mnt")?;
        let title = format!("{}: {name}", after.filesystem);
        let checked = match after.filesystem.as_str() {
            // It writes each change to a new position, so many bytes cannot be judged.
            "nilfs2" => comparison.check_answers(1),
            // A part of its table of files is unknown while the table grows.
            "ntfs3" => comparison.check_answers(30),
            _ => comparison.check(),
        };
        self.note(&title, checked);
        Ok(after)
    }

    /// Programs write, change and read the file system mounted on /mnt.
    fn work(&mut self, more: &str) -> Result<()> {
        let truth = Truth::of(&self.guest, "/mnt")?;
        let script = format!("/usr/lib/fathom/phases /mnt small copy mail {more}");
        let truth = self.step("write", &script, &truth)?;
        let truth = self.step("change", "/usr/lib/fathom/phases /mnt append", &truth)?;
        self.step("cold", COLD, &truth).map(drop)
    }
}

#[test]
fn more_file_systems() -> Result<()> {
    let Some(mut scene) = Scene::start(&kernel(), 300)? else { return Ok(()) };
    for (name, make, mount, more) in SYSTEMS {
        let program = make.split(' ').next().expect("a program");
        if scene.has(name, name, program)? {
            scene.prepare(&format!("{make}; {mount} $disk /mnt"))?;
            scene.work(more)?;
            scene.guest.check("umount /mnt; blkdiscard -f /dev/vdb")?;
        }
    }
    // A file system that is only read.
    if scene.has("erofs", "erofs", "mkfs.erofs")? {
        scene.prepare(
            "mkdir -p /run/tree; /usr/lib/fathom/phases /run/tree small copy
            mkfs.erofs $disk /run/tree; mount -t erofs $disk /mnt",
        )?;
        let truth = Truth::of(&scene.guest, "/mnt")?;
        scene.step("cold", COLD, &truth)?;
        scene.guest.check("umount /mnt")?;
    }
    scene.end()
}
