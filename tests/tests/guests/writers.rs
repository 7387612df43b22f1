//! The process that wrote the data of each write-back, with the plugin for QEMU.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use fathom_tests::{Error, Kind, Result, accelerator, patience, until};

use crate::scene::{Scene, kernel};

/// The plugin, beside the daemon's binary.
pub(crate) fn plugin() -> Result<PathBuf> {
    let path = fathom_tests::Daemon::binary()?.with_file_name("libfathom_intercept_qemu.so");
    if path.exists() {
        return Ok(path);
    }
    Err(Error::new(format!("there is no {}; run: make build", path.display())))
}

/// A place for files: its name, the modules that it needs, and the commands that make and remove
/// it.
const PLACES: [(&str, &str, &str, &str); 5] = [
    ("ext4", "ext4", "mkfs.ext4 -q -F /dev/vdb; mount /dev/vdb /mnt", "umount /mnt"),
    ("xfs", "xfs", "mkfs.xfs -q -f /dev/vdb; mount /dev/vdb /mnt", "umount /mnt"),
    ("btrfs", "btrfs", "mkfs.btrfs -q -f /dev/vdb; mount /dev/vdb /mnt", "umount /mnt"),
    ("f2fs", "f2fs", "mkfs.f2fs -q -f /dev/vdb; mount /dev/vdb /mnt", "umount /mnt"),
    (
        "overlay on ext4",
        "overlay",
        "mkfs.ext4 -q -F /dev/vdb; mount /dev/vdb /srv; mkdir /srv/lower /srv/upper /srv/work
        mount -t overlay -o lowerdir=/srv/lower,upperdir=/srv/upper,workdir=/srv/work all /mnt",
        "umount /mnt; umount /srv",
    ),
];

/// Programs that write files. `$f` is the file, whose name ends with the number of the program's
/// process.
const WAYS: [(&str, &str); 9] = [
    ("dd", "exec dd if=/dev/zero of=$f bs=64k count=16"),
    ("cat", "exec cat /run/source > $f"),
    ("cp", "exec cp /run/source $f"),
    ("cp on disk", "exec cp --reflink=never /mnt/source $f"),
    (
        "fio",
        "exec fio --name=j --filename=$f --thread --ioengine=psync --rw=randwrite --bs=4k --size=1m",
    ),
    (
        "fio, mmap",
        "exec fio --name=j --filename=$f --thread --ioengine=mmap --rw=randwrite --bs=4k --size=1m",
    ),
    (
        "fio, vectors",
        "exec fio --name=j --filename=$f --thread --ioengine=pvsync --rw=write --bs=16k --size=1m",
    ),
    (
        "fio, io_uring",
        "exec fio --name=j --filename=$f --thread --ioengine=io_uring --iodepth=4 --rw=write --bs=16k --size=1m",
    ),
    (
        "fio, splice",
        "exec fio --name=j --filename=$f --thread --ioengine=splice --rw=write --bs=16k --size=1m",
    ),
];

impl Scene {
    /// Waits until the plugin has hooked the kernel: then a file that is written has a writer.
    pub(crate) fn await_writers(&self) -> Result<()> {
        until("the writers of pages", patience(30), || {
            let requests = self.requests(
                "echo x > /run/x; dd if=/dev/zero of=/mnt/first bs=4k count=4 conv=fsync",
            )?;
            let mut parts = requests.iter().flat_map(|request| &request.parts);
            Ok(parts.any(|part| part.role.as_deref() == Some("writer")).then_some(()))
        })
    }

    /// All ways to write files in /mnt, by programs that have ended long before the files are
    /// written back.
    fn writers(&mut self, place: &str) -> Result<()> {
        self.prepare(
            "dd if=/dev/urandom of=/run/source bs=64k count=16; cp /run/source /mnt/source",
        )?;
        // The guest writes nothing back before it is told to.
        let mut script = "echo 60000 > /proc/sys/vm/dirty_expire_centisecs
            echo 0 > /proc/sys/vm/dirty_writeback_centisecs\n"
            .to_owned();
        for (number, (_, command)) in WAYS.iter().enumerate() {
            let _ = writeln!(script, "sh -c 'f=/mnt/w-{number}-$$; {command}' > /dev/null 2>&1");
        }
        // Two programs with one file, and one with a file that it inherits.
        script.push_str(
            "sh -c 'echo $$ > /run/one; exec dd if=/dev/zero of=/mnt/two bs=4k count=50' 2> /dev/null
            sh -c 'echo $$ > /run/other; exec dd if=/dev/zero of=/mnt/two bs=4k count=50 seek=50 conv=notrunc' \
                2> /dev/null
            sh -c '(sh -c \"exec dd if=/dev/zero bs=4k count=20\") > /mnt/inherited' 2> /dev/null
            sh -c 'printf %05000d 0 > /mnt/before-$$; mv /mnt/before-$$ /mnt/renamed-$$'
            sh -c 'exec 3> /mnt/gone-$$; printf %05000d 0 >&3; rm /mnt/gone-$$'
            mkdir /mnt/storm
            for round in $(seq 10); do
                for i in $(seq 30); do sh -c 'printf %05000d 0 > /mnt/storm/storm-$$' & done; wait
            done
            sync",
        );
        let requests = self.requests(&script)?;
        let number = |path: &str| -> Result<Option<u32>> {
            Ok(self.guest.check(&format!("cat {path}"))?.trim().parse().ok())
        };
        let (one, other) = (number("/run/one")?, number("/run/other")?);
        // The right, the unknown and the wrong bytes of each way.
        let mut counts: BTreeMap<String, [u64; 3]> = BTreeMap::new();
        let mut examples = Vec::new();
        for part in
            requests.iter().filter(|request| request.operation == "write").flat_map(|r| &r.parts)
        {
            let path = part.path.as_deref().unwrap_or_default();
            let name = path.rsplit('/').next().unwrap_or_default();
            if part.kind != Kind::Data {
                continue;
            }
            let words: Vec<&str> = name.split('-').collect();
            let (way, is_right) = match words[..] {
                ["w", way, process] => {
                    let way = way.parse().ok().and_then(|way: usize| WAYS.get(way));
                    (way.map_or("?", |way| way.0), part.process_id == process.parse().ok())
                }
                [way @ ("storm" | "renamed"), process] => {
                    (way, part.process_id == process.parse().ok())
                }
                ["two"] => ("two writers", part.process_id == one || part.process_id == other),
                ["inherited"] => ("inherited", part.process.as_deref() == Some("dd")),
                _ => continue,
            };
            let is_writer = part.role.as_deref() == Some("writer");
            let outcome = match part.process_id {
                None => 1,
                Some(_) if is_right && is_writer => 0,
                Some(_) => 2,
            };
            if outcome > 0 && examples.len() < 8 {
                examples.push(format!("{way}: {part:?}"));
            }
            counts.entry(way.to_owned()).or_default()[outcome] += part.length;
        }
        println!("{place}: KiB with the right writer, with none, with a wrong one");
        for (way, [right, none, wrong]) in &counts {
            println!("  {way:14} {:6} {:6} {:6}", right / 1024, none / 1024, wrong / 1024);
        }
        let sum = counts.values().fold([0; 3], |sum, of| [0, 1, 2].map(|at| sum[at] + of[at]));
        let [right, none, wrong] = sum;
        if wrong > 0 || none * 1000 > right + none || counts.len() < WAYS.len() + 4 {
            let problem =
                format!("{right} bytes right, {none} unknown, {wrong} wrong: {examples:#?}");
            self.note(place, Err(Error::new(problem)));
        }
        Ok(())
    }
}

fn writers(kernel: &str) -> Result<()> {
    if accelerator()?.starts_with("kvm") {
        println!("Skipped: QEMU loads plugins only for emulated guests");
        return Ok(());
    }
    let plugin = plugin()?;
    let started = Scene::start_intercepted(kernel, 400, &plugin)?;
    let Some(mut scene) = started else { return Ok(()) };
    for (name, modules, make, remove) in &PLACES {
        if !scene.has(name, modules, "")? {
            continue;
        }
        scene.prepare(make)?;
        scene.await_writers()?;
        scene.writers(name)?;
        scene.prepare(&format!("{remove}; blkdiscard -f /dev/vdb"))?;
    }
    // A daemon that has ended leaves the guest running, and the next one goes on.
    scene.daemon.restart()?;
    scene.daemon.wait_for_guest("disk")?;
    scene.prepare(PLACES[0].2)?;
    scene.await_writers()?;
    // Another boot has other places.
    scene.prepare("umount /mnt")?;
    scene.guest.reboot()?;
    scene.prepare(PLACES[0].2)?;
    scene.await_writers()?;
    scene.writers("ext4 after a reboot")?;
    scene.end()
}

/// The oldest kernel, with all modules.
#[test]
fn writers_of_pages() -> Result<()> {
    writers(&kernel())
}

/// The newest kernel.
#[test]
fn writers_of_pages_of_the_newest_kernel() -> Result<()> {
    writers(&crate::introspection::newest())
}
