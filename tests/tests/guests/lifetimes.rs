//! How long what real programs write lives, against times that the guest itself notes.

use std::fmt::Write as _;

use fathom_control::{DiskChange, GroupedBy, LayerDefinition, LifetimesGroup};
use fathom_tests::{Error, Result, patience, until};
use serde_json::json;

use crate::introspection::newest;
use crate::scene::{Scene, kernel};

/// The file systems in which files live.
const PLACES: [(&str, &str); 3] = [
    ("ext4", "mkfs.ext4 -q -F -b 4096 /dev/vdb; mount /dev/vdb /mnt"),
    ("xfs", "mkfs.xfs -q -f /dev/vdb; mount /dev/vdb /mnt"),
    ("btrfs", "mkfs.btrfs -q -f /dev/vdb; mount /dev/vdb /mnt"),
];

/// Deaths in several ways, each of files with an ending of their own. The times are those since the
/// guest's boot.
const LIVES: &str = "
    echo 300 > /proc/sys/vm/dirty_expire_centisecs; echo 100 > /proc/sys/vm/dirty_writeback_centisecs
    now() { cut -d' ' -f1 /proc/uptime; }
    fill() { yes $1 | head -c $2; }
    cd /mnt; mkdir many
    fill keep 8000000 > some.keep
    fill log 8000000 > some.log; fill db 4000000 > some.db; fill new 4000000 > some.new
    dd if=/dev/zero of=some.direct bs=1M count=4 oflag=direct 2> /dev/null
    exec 3> some.open; fill open 4000000 >&3; rm some.open
    echo begun $(now)
    for i in $(seq 10); do fill $i 4000000 > many/$i.tmp; done
    echo made $(now)
    sleep 6; sync
    echo dying $(now)
    rm -r many some.direct; exec 3>&-
    truncate -s 1000000 some.log
    fill again 4000000 > some.new
    fill again 4000000 | dd of=some.db bs=64k conv=notrunc 2> /dev/null
    echo dead $(now)
    sleep 3; sync; echo 3 > /proc/sys/vm/drop_caches; sleep 1.2; cd /";

/// A page more or less, at the ends of files.
const SLACK: u64 = 16_384;

impl Scene {
    fn groups(&self) -> Result<Vec<LifetimesGroup>> {
        let found = self.daemon.client().lifetimes(Some("disk"));
        let report = found.map_err(|error| Error::new(error.to_string()))?;
        let disk = report.disks.into_iter().next();
        Ok(disk.ok_or_else(|| Error::new("there are no lifetimes"))?.groups)
    }

    /// Begins with an empty table.
    fn follow(&self, memory: &str) -> Result<()> {
        let layer = LayerDefinition::new("lifetimes", json!({ "memory": memory }));
        let change = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
        let changed = self.daemon.client().change_disk("disk", &change);
        changed.map(drop).map_err(|error| Error::new(error.to_string()))
    }

    fn lives(&self, place: &str) -> Result<()> {
        let text = self.guest.check(LIVES)?;
        let time = |name: &str| -> Result<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let found = line.and_then(|line| line.trim().parse().ok());
            found.ok_or_else(|| Error::new(format!("{name}: {text}")))
        };
        let (begun, made) = (time("begun")?, time("made")?);
        let (dying, dead) = (time("dying")?, time("dead")?);
        let groups = self.groups()?;
        let of = |ending: &str| {
            let is_it = |it: &&LifetimesGroup| {
                it.by == GroupedBy::Ending && it.name == format!(".{ending}")
            };
            groups.iter().find(is_it).cloned().unwrap_or_default()
        };
        let mut wrong = String::new();
        // Each ending, what died of it in which way, and the times at which it can have been made.
        let (tmp, log, direct) = (of("tmp"), of("log"), of("direct"));
        for (group, died, bytes) in [
            (&tmp, tmp.deleted_bytes, 40_000_000),
            (&log, log.truncated_bytes, 7_000_000),
            // XFS uses freed blocks again at once.
            (&direct, direct.deleted_bytes + direct.reused_bytes, 4 << 20),
            (&of("new"), of("new").overwritten_bytes + of("new").truncated_bytes, 4_000_000),
            (&of("db"), of("db").overwritten_bytes, 4_000_000),
        ] {
            let of = |percent| group.lifetimes.percentile(percent) as f64 / 1e9;
            println!(
                "{place} {}: {died} of {bytes} bytes died, after {:.2} to {:.2} s; naive: {}",
                group.name,
                of(1.0),
                of(99.0),
                group.naive_lifetimes.count(),
            );
            // The inode of one of ten files may have been used again before anybody looked.
            let slack = if group.name == ".tmp" { bytes / 9 } else { 10 * SLACK };
            if died.abs_diff(bytes) > slack {
                let _ = writeln!(wrong, "{} {died} of {bytes} bytes", group.name);
            }
        }
        // `bench/lifetimes` measures the error, which is less than a second. Here the host is busy.
        let truth = dying - made - 2.0..dead - begun + 2.0;
        println!("{place}: the truth is {:.2} to {:.2} s", dying - made, dead - begun);
        for percent in [1.0, 50.0, 99.0] {
            let found = tmp.lifetimes.percentile(percent) as f64 / 1e9;
            if !truth.contains(&found) {
                let _ = writeln!(wrong, "{found:.2} s instead of {truth:?}");
            }
        }
        if of("keep").born_bytes < 8_000_000 || of("keep").lifetimes.count() != 0 {
            let _ = writeln!(wrong, "what lives has died: {:?}", of("keep"));
        }
        // A disk alone does not notice that a file has been deleted.
        if tmp.naive_lifetimes.count() > tmp.deleted_bytes / 2 {
            let _ = writeln!(wrong, "naive: {}", tmp.naive_lifetimes.count());
        }
        if wrong.is_empty() { Ok(()) } else { Err(Error::new(wrong)) }
    }
}

/// Files are written, deleted, truncated, overwritten and rewritten on three file systems.
fn lifetimes_of(kernel: &str) -> Result<()> {
    let Some(mut scene) = Scene::start_above(kernel, 1024, "")? else {
        println!("Skipped: there is no kernel {kernel}");
        return Ok(());
    };
    for (number, (name, make)) in PLACES.iter().enumerate() {
        if !scene.has(name, name, "")? {
            continue;
        }
        scene.prepare(&format!("modprobe -q {name} || true; {make}"))?;
        // Another size makes another layer.
        scene.follow(&format!("{}MiB", 16 + number))?;
        let lives = scene.lives(name);
        scene.note(name, lives);
        scene.prepare("umount /mnt")?;
    }
    // What the next file system is made of ends what the last one had.
    scene.prepare("blkdiscard /dev/vdb || true")?;
    let found = until("all is dead", patience(10), || {
        let all = scene.groups()?.into_iter().next().unwrap_or_default();
        Ok((all.discarded_bytes > 0).then_some(all))
    });
    scene.note("discard", found.map(drop));
    scene.end()
}

#[test]
fn lifetimes_of_real_files() -> Result<()> {
    lifetimes_of(&kernel())
}

#[test]
fn lifetimes_of_real_files_on_the_newest_kernel() -> Result<()> {
    lifetimes_of(&newest())
}
