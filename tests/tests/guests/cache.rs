//! A cache that outlives the daemon, beneath a guest's database: the daemon is killed again and
//! again while SQLite writes, and the database's own check finds nothing wrong.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fathom_control::DiskStatus;
use fathom_tests::{
    Assets, Daemon, Disk, Guest, Records, Result, Served, check_ext4, patience, until,
};

/// How often the daemon is killed.
const KILLS: usize = 5;

/// A writer of a table with an index whose rows belong together: in each transaction, the sum over
/// all rows stays 0. The number of the last transaction that SQLite has acknowledged is in a file
/// in memory.
const WRITER: &str = "number=0
    while [ ! -e /tmp/stop ]; do
        number=$((number + 1))
        /tools/sqlite3 /mnt/shop.db \"PRAGMA synchronous = FULL; PRAGMA cache_size = 50; BEGIN IMMEDIATE;
            INSERT INTO part SELECT NULL, 'Brand#' || ($number * 7919 % 997), $number, hex(randomblob(400))
                FROM (SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4);
            INSERT INTO part VALUES (NULL, 'balance', -4 * $number, '');
            DELETE FROM part WHERE $number > 60 AND size IN ($number - 60, -4 * ($number - 60));
            COMMIT;\" >/dev/null && echo $number >/tmp/acknowledged.new &&
            mv /tmp/acknowledged.new /tmp/acknowledged
    done; touch /tmp/stopped";

/// The number in the guest's file of the last acknowledged transaction.
fn acknowledged(guest: &Guest) -> Result<u64> {
    let text = guest.check("cat /tmp/acknowledged 2>/dev/null || echo 0")?;
    Ok(text.trim().parse().unwrap_or_default())
}

/// Makes a cache with places for the logs of disks. Returns the line of a disk that has it in
/// write-back.
pub fn write_back(folder: &Path, size: &str, log: &str, logs: u32) -> Result<String> {
    let store = folder.join("cache");
    let create = Command::new(Daemon::binary()?)
        .args(["cache", "create", "--size", size, "--log", log, "--logs", &logs.to_string()])
        .arg(&store)
        .output()?;
    assert!(create.status.success(), "{create:?}");
    Ok(format!(
        "layers = [{{ kind = \"classify\" }}, {{ kind = \"cache\", store = \"{}\", mode = \"write-back\" }}]",
        store.display()
    ))
}

#[test]
fn a_guest_survives_killed_daemons_over_a_cache_in_write_back() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let layer = write_back(folder.path(), "64M", "16M", 2)?;
    let mut daemon = Daemon::serve(&[
        Served::sparse("raw", 96).with(&layer),
        Served::sparse("files", 128).with(&layer),
    ])?;
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock"))).queues(2);
    let guest = Guest::builder().disk(disk("raw")).disk(disk("files")).start()?;
    guest.check("mkfs.ext4 -q /dev/vdb; mkdir -p /files; mount /dev/vdb /files")?;
    let mut records = Records::new("/files/records");
    let writer = records.write(&guest)?;
    let load = guest.spawn(
        "fio --name=load --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite \
            --bsrange=4k-64k --size=80M --rate=3M --verify=crc32c --verify_fatal=1 --do_verify=1",
    )?;
    let mut random = fastrand::Rng::with_seed(4);
    for _ in 0..KILLS {
        records.wait_for(&guest, 3)?;
        std::thread::sleep(Duration::from_millis(random.u64(0..800)));
        daemon.kill9();
        records.note(&guest);
        daemon.restart()?;
        for name in ["raw", "files"] {
            daemon.wait_for_guest(name)?;
            daemon.check(name)?;
        }
    }
    let output = guest.finish_within(load, 240)?;
    assert_eq!(output.status, 0, "{}", output.text);
    records.stop(&guest, writer)?;
    records.check(&guest)?;
    guest.check("umount /files; echo 3 > /proc/sys/vm/drop_caches; e2fsck -f -n /dev/vdb")?;
    guest.check_console()?;
    guest.shutdown()?;
    // An orderly end writes everything home: the image alone has it.
    assert!(daemon.stop()?.success());
    check_ext4(&daemon.path("files.img"))
}

fn figure(status: &DiskStatus, name: &str) -> u64 {
    status.figure("cache", name).unwrap_or_default()
}

#[test]
fn a_database_over_a_cache_is_sound_after_each_kill_of_the_daemon() -> Result<()> {
    let mut random = fastrand::Rng::with_seed(3);
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let store = folder.path().join("cache");
    let create = Command::new(Daemon::binary()?)
        .args(["cache", "create", "--size", "32M"])
        .arg(&store)
        .output()?;
    assert!(create.status.success(), "{create:?}");
    let layer = format!(
        "layers = [{{ kind = \"classify\" }}, {{ kind = \"cache\", store = {store:?}, exclusive = true }}]"
    );
    let mut daemon = Daemon::serve(&[Served::sparse("disk", 128).with(&layer)])?;
    let guest = Guest::builder()
        .disk(Disk::vhost_user(daemon.path("disk.sock")).queues(2))
        .disk(Disk::snapshot_of(Assets::get()?.tools()?))
        .start()?;
    guest.check(
        "mkdir /tools; mount -o ro /dev/vdb /tools
        mkfs.ext4 -q /dev/vda; mount /dev/vda /mnt
        /tools/sqlite3 /mnt/shop.db \"PRAGMA journal_mode = WAL;
            CREATE TABLE part (id INTEGER PRIMARY KEY, brand TEXT, size INTEGER, comment TEXT);
            CREATE INDEX by_brand ON part (brand); CREATE INDEX by_size ON part (size);\"",
    )?;
    guest.spawn(WRITER)?;
    let mut hits = 0;
    for round in 0..KILLS {
        let before = acknowledged(&guest)?;
        until("transactions", patience(60), || {
            Ok((acknowledged(&guest)? >= before + 4).then_some(()))
        })?;
        std::thread::sleep(Duration::from_millis(random.u64(0..200)));
        hits += figure(&daemon.status("disk")?, "hits_total");
        daemon.kill9();
        std::thread::sleep(Duration::from_millis(random.u64(1..60)));
        daemon.restart()?;
        daemon.wait_for_guest("disk")?;
        // The guest's own memory must not answer. What the writer was told is there.
        let noted = acknowledged(&guest)?;
        let found = guest.check(
            "echo 3 > /proc/sys/vm/drop_caches
            /tools/sqlite3 -cmd '.timeout 20000' /mnt/shop.db \"PRAGMA integrity_check;
                SELECT sum(size), max(size), count(*) % 5 FROM part;\"",
        )?;
        println!("kill {round}: {} transactions, {}", noted, found.trim().replace('\n', " "));
        let lines: Vec<&str> = found.trim().lines().collect();
        let [check, rows] = lines[..] else { panic!("two lines: {found}") };
        let numbers: Vec<i64> = rows.split('|').map(|number| number.parse().unwrap()).collect();
        assert_eq!((check, numbers[0], numbers[2]), ("ok", 0, 0), "{found}");
        assert!(numbers[1] >= noted as i64, "{} of {noted}", numbers[1]);
        daemon.check("disk")?;
        let status = daemon.status("disk")?;
        assert_eq!(figure(&status, "mismatches_total"), 0);
        assert!(figure(&status, "reads_total") > 0);
    }
    let status = daemon.status("disk")?;
    hits += figure(&status, "hits_total");
    println!("{hits} reads were hits, {} blocks", figure(&status, "blocks"));
    assert!(hits > 0 && !daemon.log().contains("begins empty"), "{}", daemon.log());
    guest.check("touch /tmp/stop; while [ ! -e /tmp/stopped ]; do sleep 0.1; done; umount /mnt")?;
    guest.check_console()?;
    guest.shutdown()?;
    assert!(daemon.stop()?.success());
    let check =
        Command::new(Daemon::binary()?).args(["cache", "check", "--data"]).arg(&store).output()?;
    assert!(check.status.success(), "{check:?}");
    check_ext4(&daemon.path("disk.img"))
}
