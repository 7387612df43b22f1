//! Compares the daemon's reports about a guest's requests, made from the guest's memory alone, with
//! the reports of the guest's own tools about the position of each request.

use fathom_tests::{Comparison, Result, Truth};

use crate::scene::Scene;

impl Scene {
    /// Makes and mounts a file system.
    fn mount(&self, make: &str) -> Result<()> {
        self.prepare(&format!("{make} /dev/vdb; mount /dev/vdb /mnt"))
    }

    /// Runs a script between two snapshots, notes wrong reports about its requests, and returns the
    /// second snapshot.
    fn phase(&mut self, name: &str, script: &str, before: &Truth, of: &str) -> Result<Truth> {
        let (comparison, after) = self.compare(name, script, before, of)?;
        self.note(name, comparison.check());
        self.note(name, comparison.check_groups(before, &after, 1 << 16));
        Ok(after)
    }

    /// Programs write, change, remove and read files in `folder`, in the file system mounted on
    /// /mnt.
    fn phases(&mut self, folder: &str) -> Result<()> {
        let mut truth = Truth::of(&self.guest, "/mnt")?;
        for name in ["write", "cold", "change", "remove", "cold"] {
            let script = format!("/usr/lib/fathom/phases {folder} {name}");
            truth = self.phase(name, &script, &truth, "/mnt")?;
        }
        Ok(())
    }

    /// Runs [`phases`](Self::phases) on several file systems, one after the other, each on the
    /// whole disk.
    fn rows(&mut self, rows: &[&str]) -> Result<()> {
        for make in rows {
            self.mount(make)?;
            self.phases("/mnt")?;
            self.guest.check("umount /mnt; blkdiscard /dev/vdb")?;
        }
        Ok(())
    }

    /// Programs read and write the disk without a file system.
    fn device(&mut self) -> Result<()> {
        let nothing = Truth::default();
        for (name, script) in [
            (
                "device",
                "dd if=/dev/urandom of=/dev/vdb bs=64k count=32 oflag=direct
                dd if=/dev/urandom of=/dev/vdb bs=64k count=32 seek=64 conv=fsync
                echo 3 > /proc/sys/vm/drop_caches
                dd if=/dev/vdb of=/dev/null bs=64k count=32 iflag=direct
                dd if=/dev/vdb of=/dev/null bs=64k count=32",
            ),
            (
                "device, from a file on another disk and from shared memory",
                "head -c 1048576 /dev/urandom > /root/victim.db; sync
                for memory in mmap:/root/victim.db mmapshared; do
                    for what in write read; do
                        fio --filename=/dev/vdb --direct=1 --ioengine=psync --bs=64k --size=1m \
                            --iomem=$memory --name=$what --rw=$what > /dev/null
                    done
                done",
            ),
            ("mkfs", "mkfs.ext4 -q -F /dev/vdb; sync"),
        ] {
            let comparison = Comparison::of(&self.requests(script)?, &nothing, &nothing, &[]);
            println!("{name}\n{comparison}");
            self.note(name, comparison.check());
        }
        Ok(())
    }
}

/// The kernel of the host's Debian release.
#[test]
fn the_default_kernel() -> Result<()> {
    let Some(mut scene) = Scene::start("default", 400)? else { return Ok(()) };
    scene.rows(&["mkfs.ext4 -b 4096", "mkfs.xfs", "mkfs.btrfs"])?;
    scene.end()
}

/// The kernel of the release's backports; ext4 with blocks smaller than pages.
#[test]
fn the_newer_kernel() -> Result<()> {
    let Some(mut scene) = Scene::start("backports", 400)? else { return Ok(()) };
    scene.rows(&["mkfs.ext4 -b 1024", "mkfs.xfs", "mkfs.btrfs"])?;
    scene.device()?;
    scene.end()
}

#[test]
fn f2fs() -> Result<()> {
    let Some(mut scene) = Scene::start("plain", 400)? else { return Ok(()) };
    scene.rows(&["mkfs.f2fs"])?;
    scene.end()
}

/// The newest kernel in Debian's backports. The environment variable `FATHOM_GUEST_KERNEL` selects
/// another kernel of `scripts/guest-kernel`.
#[test]
fn the_newest_kernel() -> Result<()> {
    let kernel = std::env::var("FATHOM_GUEST_KERNEL").unwrap_or_else(|_| "newest".to_owned());
    let Some(mut scene) = Scene::start(&kernel, 400)? else { return Ok(()) };
    println!("Linux {}", scene.guest.check("uname -r")?.trim());
    scene.rows(&["mkfs.ext4 -q -F -b 4096", "mkfs.xfs -f", "mkfs.btrfs -f"])?;
    scene.device()?;
    scene.end()
}

/// Encryption over a logical volume over a partition: the pages of requests are not those of the
/// file system. Device mapper does not support write-zeroes, so mkfs zeroes the inode tables;
/// otherwise the kernel would do it later.
#[test]
fn ext4_encrypted_on_a_logical_volume() -> Result<()> {
    let Some(mut scene) = Scene::start("default", 400)? else { return Ok(()) };
    scene.prepare(
        "echo ',,8e' | sfdisk /dev/vdb
        pvcreate /dev/vdb1; vgcreate group /dev/vdb1
        lvcreate -Zn -Wn -l 100%FREE -n volume group; volume=/dev/mapper/group-volume
        echo secret > /run/key
        cryptsetup -q luksFormat --pbkdf pbkdf2 --pbkdf-force-iterations 1000 $volume /run/key
        cryptsetup open --key-file /run/key $volume secret
        mkfs.ext4 -b 4096 -E lazy_itable_init=0 /dev/mapper/secret; mount /dev/mapper/secret /mnt",
    )?;
    scene.phases("/mnt")?;
    scene.end()
}

/// One half of a mirror.
#[test]
fn xfs_on_a_mirror() -> Result<()> {
    let Some(mut scene) = Scene::start("default", 400)? else { return Ok(()) };
    scene.prepare(
        "modprobe raid1
        mdadm --create /dev/md0 --run --level=1 --raid-devices=2 --assume-clean /dev/vdb missing
        mkfs.xfs /dev/md0; mount /dev/md0 /mnt",
    )?;
    scene.phases("/mnt")?;
    scene.end()
}

/// A container's writes to an overlay reach the file system below.
#[test]
fn an_overlay_on_ext4() -> Result<()> {
    let Some(mut scene) = Scene::start("default", 400)? else { return Ok(()) };
    scene.mount("mkfs.ext4 -b 4096")?;
    scene.prepare(
        "cd /mnt; mkdir lower upper work /run/merged; modprobe overlay
        mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work /run/merged",
    )?;
    scene.phases("/run/merged")?;
    scene.end()
}

#[test]
fn swap_partition_and_file() -> Result<()> {
    let Some(mut scene) = Scene::start("default", 400)? else { return Ok(()) };
    let swap = "/usr/lib/fathom/phases / swap";
    scene.prepare("mkswap /dev/vdb; swapon /dev/vdb")?;
    let whole = "--swap /dev/vdb";
    let before = Truth::of(&scene.guest, whole)?;
    scene.phase("swap partition", swap, &before, whole)?;
    scene.prepare("swapoff /dev/vdb")?;
    scene.mount("mkfs.ext4 -F")?;
    scene.prepare(
        "dd if=/dev/zero of=/mnt/swapfile bs=1M count=64 conv=fsync status=none
        chmod 600 /mnt/swapfile; mkswap /mnt/swapfile; swapon /mnt/swapfile",
    )?;
    let before = Truth::of(&scene.guest, "/mnt")?;
    scene.phase("swap file", swap, &before, "/mnt")?;
    scene.prepare("swapoff /mnt/swapfile")?;
    scene.end()
}
