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

/// The name of the newest kernel in Debian's backports. The environment variable
/// `FATHOM_GUEST_KERNEL` selects another kernel of `scripts/guest-kernel`.
pub(crate) fn newest() -> String {
    std::env::var("FATHOM_GUEST_KERNEL").unwrap_or_else(|_| "newest".to_owned())
}

#[test]
fn the_newest_kernel() -> Result<()> {
    let Some(mut scene) = Scene::start(&newest(), 400)? else { return Ok(()) };
    println!("Linux {}", scene.guest.check("uname -r")?.trim());
    scene.rows(&["mkfs.ext4 -q -F -b 4096", "mkfs.xfs -f", "mkfs.btrfs -f"])?;
    scene.device()?;
    scene.end()
}

/// A stack of devices and file systems on the disk.
struct Stack {
    name: &'static str,
    /// The commands that make the stack and mount it.
    make: &'static str,
    /// The folder in which programs work.
    folder: &'static str,
    /// The commands that take it apart after /mnt was unmounted.
    remove: &'static str,
}

/// The stacks. Device mapper does not support write-zeroes, so mkfs zeroes the inode tables;
/// otherwise the kernel would do it later. One disk has all members of an array that are there.
const STACKS: [Stack; 4] = [
    // The pages of requests are not those of the file system.
    Stack {
        name: "ext4 on LUKS on a logical volume on a partition",
        make: "echo ',,8e' | sfdisk /dev/vdb
            pvcreate /dev/vdb1; vgcreate group /dev/vdb1
            lvcreate -Zn -Wn -l 100%FREE -n volume group; volume=/dev/mapper/group-volume
            echo secret > /run/key
            cryptsetup -q luksFormat --pbkdf pbkdf2 --pbkdf-force-iterations 1000 $volume /run/key
            cryptsetup open --key-file /run/key $volume secret
            mkfs.ext4 -b 4096 -E lazy_itable_init=0 /dev/mapper/secret
            mount /dev/mapper/secret /mnt",
        folder: "/mnt",
        remove: "cryptsetup close secret; vgchange -an group; sfdisk --delete /dev/vdb",
    },
    Stack {
        name: "XFS on one half of RAID 1",
        make: "mdadm --create /dev/md0 --run --level=1 --raid-devices=2 --assume-clean /dev/vdb missing
            mkfs.xfs -f /dev/md0; mount /dev/md0 /mnt",
        folder: "/mnt",
        remove: "mdadm --stop /dev/md0",
    },
    // A container's writes to an overlay reach the file system below.
    Stack {
        name: "an overlay on ext4 on RAID 0",
        make: "mdadm --create /dev/md0 --run --force --level=0 --raid-devices=1 /dev/vdb
            mkfs.ext4 -F -b 4096 /dev/md0; mount /dev/md0 /mnt
            cd /mnt; mkdir -p lower upper work /run/merged; modprobe overlay
            mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work /run/merged",
        folder: "/run/merged",
        remove: "mdadm --stop /dev/md0",
    },
    Stack {
        name: "ext4 on LUKS on a logical volume on one half of RAID 10",
        make: "mdadm --create /dev/md0 --run --level=10 --raid-devices=2 --assume-clean /dev/vdb missing
            pvcreate /dev/md0; vgcreate group /dev/md0
            lvcreate -Zn -Wn -l 100%FREE -n volume group; volume=/dev/mapper/group-volume
            cryptsetup -q luksFormat --pbkdf pbkdf2 --pbkdf-force-iterations 1000 $volume /run/key
            cryptsetup open --key-file /run/key $volume secret
            mkfs.ext4 -F -b 4096 -E lazy_itable_init=0 /dev/mapper/secret
            mount /dev/mapper/secret /mnt",
        folder: "/mnt",
        remove: "cryptsetup close secret; vgchange -an group; mdadm --stop /dev/md0",
    },
];

impl Scene {
    /// A swap partition and a swap file.
    fn swap(&mut self) -> Result<()> {
        let swap = "/usr/lib/fathom/phases / swap";
        self.prepare("mkswap /dev/vdb; swapon /dev/vdb")?;
        let whole = "--swap /dev/vdb";
        let before = Truth::of(&self.guest, whole)?;
        self.phase("swap partition", swap, &before, whole)?;
        self.prepare("swapoff /dev/vdb")?;
        self.mount("mkfs.ext4 -F")?;
        self.prepare(
            "dd if=/dev/zero of=/mnt/swapfile bs=1M count=64 conv=fsync status=none
            chmod 600 /mnt/swapfile; mkswap /mnt/swapfile; swapon /mnt/swapfile",
        )?;
        let before = Truth::of(&self.guest, "/mnt")?;
        self.phase("swap file", swap, &before, "/mnt")?;
        self.prepare("swapoff /mnt/swapfile; umount /mnt")
    }

    /// A kernel's [`STACKS`], and swap, one after the other.
    fn stacks(mut self) -> Result<()> {
        for stack in &STACKS {
            self.prepare(stack.make)?;
            let mut truth = Truth::of(&self.guest, "/mnt")?;
            for phase in ["write", "change", "cold"] {
                let name = format!("{}: {phase}", stack.name);
                let script = format!("/usr/lib/fathom/phases {} {phase}", stack.folder);
                truth = self.phase(&name, &script, &truth, "/mnt")?;
            }
            self.prepare("cd /; ! mountpoint -q /run/merged || umount /run/merged; umount /mnt")?;
            self.prepare(stack.remove)?;
            self.guest.check("blkdiscard -f /dev/vdb")?;
        }
        self.swap()?;
        self.end()
    }
}

#[test]
fn stacks_with_the_default_kernel() -> Result<()> {
    Scene::start("default", 400)?.map_or(Ok(()), Scene::stacks)
}

#[test]
fn stacks_with_the_newest_kernel() -> Result<()> {
    Scene::start(&newest(), 400)?.map_or(Ok(()), Scene::stacks)
}
