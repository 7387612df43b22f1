//! The dirty pages of a guest as the daemon counts them from outside, compared with the guest's own
//! counters: on ext4, on XFS on a logical volume, and on Btrfs over two disks.

use fathom_control::{DirtyRequest, GuestDirty};
use fathom_tests::{Assets, Daemon, Disk, Error, Guest, Result, Served, patience, until};

const PAGE: u64 = 4096;
/// The disks of the guest, `/dev/vdb` and on.
const DISKS: [&str; 4] = ["a", "b", "c", "d"];

struct Scene {
    daemon: Daemon,
    guest: Guest,
}

impl Scene {
    /// Boots a kernel with three file systems; `None` if the kernel is not available. The guest
    /// writes nothing back by itself.
    fn start(kernel: &str) -> Result<Option<Self>> {
        let assets = Assets::get()?;
        // Its counters have parts for each processor.
        let processors = if kernel == "default" { 2 } else { 1 };
        let Some(kernel) = assets.kernel(kernel)? else { return Ok(None) };
        let served = DISKS.map(|name| Served::sparse(name, 400).with("classify = true"));
        let daemon = Daemon::serve(&served)?;
        let mut builder =
            Guest::builder().kernel(kernel).root(Disk::snapshot_of(&assets.root)).memory_mib(768);
        for name in DISKS {
            let socket = daemon.path(&format!("{name}.sock"));
            builder = builder.disk(Disk::vhost_user(socket).queues(processors));
        }
        let guest = builder.start()?;
        guest.check(
            "export DM_DISABLE_UDEV=1; modprobe -a dm-mod xfs btrfs; cd /mnt; mkdir ext4 xfs btrfs
            {
                mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 /dev/vdb; mount /dev/vdb ext4
                pvcreate /dev/vdc; vgcreate group /dev/vdc
                lvcreate -Zn -Wn -l 100%FREE -n volume group
                mkfs.xfs /dev/mapper/group-volume; mount /dev/mapper/group-volume xfs
                mkfs.btrfs -d raid0 -m raid1 /dev/vdd /dev/vde; mount /dev/vdd btrfs
            } > /run/made 2>&1 || { cat /run/made; exit 1; }
            sync",
        )?;
        let scene = Self { daemon, guest };
        scene.stop_write_back()?;
        Ok(Some(scene))
    }

    /// From here until it boots again, the guest writes back only what a program asks for: on a
    /// busy machine its own time limit of 30 s can pass between a write and its count. A device to
    /// which nothing was written lately has no part of the limits of dirty data, and so begins to
    /// write at once, unless it has a part in any case.
    fn stop_write_back(&self) -> Result<()> {
        self.guest.check(
            "cd /proc/sys/vm; echo 0 > dirty_writeback_centisecs
            echo 90 > dirty_ratio; echo 80 > dirty_background_ratio
            for part in /sys/class/bdi/*/min_ratio; do echo 10 > $part || exit 1; done",
        )?;
        Ok(())
    }

    /// The daemon's count.
    fn count(&self, files: Option<usize>) -> Result<GuestDirty> {
        let request = DirtyRequest { files, mapped: true, tables: Some(20), written_ms: Some(1) };
        let report = self.daemon.client().dirty(Some("a"), request);
        let mut report = report.map_err(|error| Error::new(error.to_string()))?;
        assert_eq!(report.guests.len(), 1);
        Ok(report.guests.remove(0))
    }

    /// `Dirty` and `Writeback` of the guest's own `/proc/meminfo`, in bytes.
    fn meminfo(&self) -> Result<(u64, u64)> {
        let text = self.guest.check("awk '/^Dirty:|^Writeback:/ { print $2 }' /proc/meminfo")?;
        let mut numbers = text.split_whitespace().filter_map(|word| word.parse::<u64>().ok());
        Ok((numbers.next().unwrap() * 1024, numbers.next().unwrap() * 1024))
    }

    /// The count and the guest's own, at a moment at which nothing changes.
    fn both(&self) -> Result<(GuestDirty, (u64, u64))> {
        for _ in 0..20 {
            let before = self.meminfo()?;
            let count = self.count(Some(100))?;
            if self.meminfo()? == before {
                return Ok((count, before));
            }
        }
        Err(Error::new("the guest never rests"))
    }

    /// The paper's Table 2: pages written, pages detected. `step` is the distance of two counts.
    fn at_rest(&self, step: usize) -> Result<()> {
        for (mount, disks) in [("ext4", &DISKS[..1]), ("xfs", &DISKS[1..2]), ("btrfs", &DISKS[2..])]
        {
            println!("{mount}: pages written, detected more than before, shown by the guest");
            self.guest.check(&format!("head -c 1048576 /dev/zero > /mnt/{mount}/file; sync"))?;
            let (before, _) = self.both()?;
            for pages in (0..=150).step_by(step) {
                self.guest.check(&format!(
                    "sync; dd if=/dev/urandom of=/mnt/{mount}/file bs=4096 count={pages} \
                     conv=notrunc iflag=fullblock status=none"
                ))?;
                let (count, (dirty, writeback)) = self.both()?;
                assert_eq!(count.shown_dirty_bytes, Some(dirty), "{count:?}");
                assert_eq!(count.shown_writeback_bytes, Some(writeback), "{count:?}");
                let exact = count.dirty_bytes.unwrap();
                let devices = count.devices.as_ref().unwrap();
                let sum: u64 = devices.iter().map(|device| device.dirty_bytes).sum();
                assert_eq!(sum, exact, "the devices' sum: {count:?}");
                let files = count.files.as_ref().unwrap();
                assert!(files.is_whole && files.dirty_bytes == exact, "the files' sum: {count:?}");
                let file = files.files.iter().find(|file| file.path == "/file");
                let file_pages = file.map_or(0, |file| file.dirty_bytes / PAGE);
                assert_eq!(file_pages, pages, "{count:?}");
                let on_disk: u64 = devices
                    .iter()
                    .filter(|device| device.disks == disks && !device.lies_elsewhere)
                    .map(|device| device.dirty_bytes)
                    .sum();
                assert!(on_disk >= pages * PAGE, "{disks:?}: {count:?}");
                let more = (exact / PAGE) as i64 - (before.dirty_bytes.unwrap() / PAGE) as i64;
                println!("{pages:5} {more:5} {:5} in {} ns", dirty / PAGE, count.count_ns);
            }
        }
        Ok(())
    }

    /// A program writes, and the guest writes nothing back, so its own report lies between two
    /// counts. When the program has ended, the shown counter still falls by a few pages: the kernel
    /// adds the parts of its processors later.
    fn while_it_writes(&self) -> Result<()> {
        self.guest.check("sync")?;
        let writer = self.guest.spawn(
            "number=0
            while [ $number -lt 100 ]; do
                head -c 1048576 /dev/zero >> /mnt/ext4/grow; number=$((number + 1))
            done",
        )?;
        let mut widest: f64 = 0.0;
        let mut last = 0;
        for _ in 0..20 {
            let low = self.count(None)?.shown_dirty_bytes.unwrap();
            let (dirty, _) = self.meminfo()?;
            let high = self.count(None)?.shown_dirty_bytes.unwrap();
            let range = low.min(high)..=low.max(high);
            assert!(range.contains(&dirty), "{low} {dirty} {high}");
            if dirty > 0 {
                widest = widest.max(high.abs_diff(low) as f64 / dirty as f64);
            }
            last = high;
        }
        println!("while it writes: between two counts, the furthest {widest:.3} of it apart");
        assert!(last > 1 << 20, "the program wrote: {last}");
        self.guest.finish(writer)?;
        Ok(())
    }

    /// A program changes a file through a mapping: as many pages as its own kernel reports.
    fn mapped(&self) -> Result<()> {
        for mount in ["ext4", "xfs"] {
            // The file exists before, so that its pages are clean: the guest's report counts pages
            // that were written in any way.
            self.guest.check(&format!("head -c 8388608 /dev/urandom > /mnt/{mount}/map; sync"))?;
            self.guest.spawn(&format!(
                "exec fio --name=map --filename=/mnt/{mount}/map --ioengine=mmap --rw=randwrite \
                 --bs=4k --size=8m --time_based --runtime=100000 --thread --end_fsync=0"
            ))?;
            // The program changes all pages, then stops. A write-back that has begun before does
            // not end while pages become dirty again, so it gets a pause then.
            let of_program = "pid=$(pgrep -f filename=/mnt/MOUNT/map | head -1)
                dirty() {
                    awk -v file=/mnt/MOUNT/map '/^[0-9a-f]+-/ { mine = $6 == file }
                        mine && /^(Shared|Private)_Dirty:/ { sum += $2 } END { print sum + 0 }' /proc/$pid/smaps
                }\n"
            .replace("MOUNT", mount);
            let stopped = self.guest.check_within(
                &format!(
                    "{of_program}while :; do
                        tries=0
                        until [ \"$(dirty)\" -ge 6000 ] || [ $tries -eq 50 ]; do
                            sleep 0.2; tries=$((tries + 1))
                        done
                        kill -STOP $pid; sleep 0.5
                        [ \"$(dirty)\" -lt 1000 ] || break
                        kill -CONT $pid
                    done
                    dirty"
                ),
                120,
            )?;
            let truth = stopped.trim().parse::<u64>().unwrap() * 1024;
            let (count, _) = self.both()?;
            let mapped = count.mapped.unwrap();
            println!(
                "{mount}: changed through a mapping {truth}, marked {}, not counted {}, {} ns",
                mapped.marked_bytes, mapped.unknown_bytes, mapped.count_ns
            );
            assert!(mapped.is_whole, "{mapped:?}");
            assert_eq!((mapped.marked_bytes, mapped.unknown_bytes), (truth, 0));
            assert!(count.dirty_bytes.unwrap() >= truth, "{count:?}", count = count.dirty_bytes);
            // Write-back removes the marks.
            self.guest.check("sync")?;
            let (count, _) = self.both()?;
            assert_eq!(count.mapped.unwrap().marked_bytes, 0, "after sync");
            self.guest.check(&format!(
                "{of_program}kill -KILL $pid; until ! kill -0 $pid 2> /dev/null; do sleep 0.1; done"
            ))?;
        }
        Ok(())
    }

    /// Write-back: what was dirty is being written, then neither.
    fn written_back(&self) -> Result<()> {
        let (before, _) = self.both()?;
        assert!(before.dirty_bytes.unwrap() > 64 << 20, "{before:?}");
        self.guest.check("sync")?;
        let (after, _) = self.both()?;
        assert!(after.dirty_bytes.unwrap() < 1 << 20, "{after:?}");
        assert_eq!(after.writeback_bytes, Some(0), "{after:?}");
        Ok(())
    }

    /// The command and the metrics show the same.
    fn shown(&self) -> Result<()> {
        self.guest.check("sync; head -c 1048576 /dev/urandom > /mnt/ext4/shown")?;
        self.both()?;
        let output = self.daemon.command(&["dirty", "a", "--files"])?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        println!("{text}");
        assert!(output.status.success() && text.contains("/shown"), "{text}");
        let metrics = self.daemon.command(&["dirty", "nobody"])?;
        let error = String::from_utf8_lossy(&metrics.stderr).into_owned();
        assert!(!metrics.status.success() && error.contains("no guest is called"), "{error}");
        Ok(())
    }

    fn run(self, step: usize) -> Result<()> {
        self.at_rest(step)?;
        self.while_it_writes()?;
        self.written_back()?;
        self.mapped()?;
        self.shown()?;
        // Another kernel has other objects: the disks are found again after a reboot.
        self.guest.reboot()?;
        self.stop_write_back()?;
        self.guest.check("mount /dev/vdb /mnt; sync; head -c 1048576 /dev/urandom > /mnt/again")?;
        // The search for the kernel, and for the object of each disk, may still go on.
        let count = until("the disk of the new kernel", patience(20), || {
            let (count, (dirty, _)) = self.both()?;
            let shown = count.shown_dirty_bytes;
            assert!(shown.is_none_or(|shown| shown == dirty), "{dirty}: {count:?}");
            let is_found = count.devices.iter().flatten().any(|device| device.disks == DISKS[..1]);
            Ok(is_found.then_some(count))
        })?;
        let devices = count.devices.unwrap();
        let device = devices.iter().find(|device| device.disks == DISKS[..1]);
        assert!(device.is_some_and(|device| device.dirty_bytes >= 1 << 20), "{devices:?}");
        self.guest.check_console()?;
        for name in DISKS {
            self.daemon.check(name)?;
        }
        self.guest.shutdown()
    }
}

#[test]
fn dirty_pages_with_the_default_kernel() -> Result<()> {
    Scene::start("default")?.map_or(Ok(()), |scene| scene.run(25))
}

#[test]
fn dirty_pages_with_the_newer_kernel() -> Result<()> {
    Scene::start("backports")?.map_or(Ok(()), |scene| scene.run(75))
}

#[test]
fn dirty_pages_with_the_newest_kernel() -> Result<()> {
    Scene::start("newest")?.map_or(Ok(()), |scene| scene.run(75))
}
