//! Caches at their limits: a full file system beneath a sparse cache, shares, files that are read
//! ahead, and the recovery of a disk that has lost writes.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use fathom_control::ProblemKind;
use fathom_sim::{DEVICE_BLOCK, FaultyDevice};

use crate::cache::{BLOCK, fails, read, succeeds, write};
use crate::nbd::{FLUSH, Nbd};
use crate::process::{Daemon, command, disk_over_nbd, image};

const IO_ERROR: u32 = 5;

fn figure(daemon: &Daemon, disk: &str, name: &str) -> u64 {
    daemon.client().disk(disk).unwrap().figure("cache", name).unwrap()
}

fn flush(nbd: &mut Nbd) -> u32 {
    assert!(nbd.send(FLUSH, 7, 0, 0, &[]));
    nbd.reply().expect("an answer").1
}

/// The file system of a sparse cache becomes full: the cache is taken out of service with one
/// problem, and the disk has its data, also after a restart and after room was made.
#[test]
fn a_full_file_system_costs_the_cache_and_no_data() {
    const BLOCKS: u64 = 256;
    let Some(device) = FaultyDevice::new() else { return };
    let store = device.mount().join("cache");
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", BLOCKS * BLOCK);
    succeeds(folder.path(), &["create", "--size", "64M", "--sparse", store.to_str().unwrap()]);
    // About a quarter of the disk's blocks finds room.
    let filler = device.mount().join("filler");
    let mut file = File::create(&filler).unwrap();
    while file.write_all(&[1; DEVICE_BLOCK as usize]).is_ok() {}
    let length = file.metadata().unwrap().len();
    file.set_len(length.saturating_sub(BLOCKS * BLOCK / 4)).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let more = format!("layers = [{{ kind = \"cache\", store = {store:?} }}]\n");
    let text = disk_over_nbd(&folder.path().join("a.img"), &more);
    let daemon = Daemon::start_in(folder, &text);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let content = |block: u64| 1 + (block % 250) as u8;
    for block in 0..BLOCKS {
        write(&mut nbd, block, content(block));
    }
    let problems = || {
        let problems = daemon.client().disk("a").unwrap().problems;
        problems.into_iter().filter(|problem| problem.kind == ProblemKind::LayerFailed)
    };
    daemon.until("the cache to be out of service", || problems().count() > 0);
    let message = problems().next().unwrap().message;
    assert!(message.contains("no space left"), "{message}");
    for round in 0..2 {
        for block in 0..BLOCKS {
            assert_eq!(read(&mut nbd, block), content(block), "round {round}, block {block}");
        }
    }
    write(&mut nbd, 7, 99);
    assert_eq!((flush(&mut nbd), problems().count()), (0, 1), "one problem");
    drop(nbd);

    // The next daemon finds no block of before, and there is room.
    std::fs::remove_file(&filler).unwrap();
    let folder = daemon.end();
    let daemon = Daemon::start_in(folder, &text);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!((read(&mut nbd, 7), read(&mut nbd, 8)), (99, content(8)));
    for block in 0..BLOCKS {
        write(&mut nbd, block, content(block + 1));
    }
    daemon.until("the blocks to be in the cache", || figure(&daemon, "a", "blocks") == BLOCKS);
    for block in 0..BLOCKS {
        assert_eq!(read(&mut nbd, block), content(block + 1));
    }
    assert!(figure(&daemon, "a", "hits_total") >= BLOCKS - 2);
    daemon.end();
}

/// A disk keeps its share of a cache while its neighbour reads far more than the cache has.
#[test]
fn a_share_holds_while_the_neighbour_is_busy() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", 8 << 20);
    image(folder.path(), "b.img", 32 << 20);
    let layer = |share: &str| {
        format!("layers = [{{ kind = \"cache\", name = \"both\", size = \"1M\", {share}}}]")
    };
    let configuration = |share: &str| {
        format!(
            "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
             [[disk]]\nname = \"a\"\nimage = \"a.img\"\n{}\n\
             [[disk]]\nname = \"b\"\nimage = \"b.img\"\n{}\n",
            layer(share),
            layer("")
        )
    };
    let daemon = Daemon::start_in(folder, &configuration("share = \"50%\" "));
    let [mut a, mut b] = ["a", "b"].map(|disk| Nbd::connect(&daemon.path("nbd.sock"), disk));
    // 64 slots, of which the disk keeps 32.
    let kept = 32;
    let fill =
        |nbd: &mut Nbd| (0..kept).for_each(|block| drop(nbd.read(block * BLOCK, BLOCK as u32)));
    let scan =
        |nbd: &mut Nbd| (0..2048).for_each(|block| drop(nbd.read(block * BLOCK, BLOCK as u32)));
    fill(&mut a);
    daemon
        .until("the blocks to be in the cache", || figure(&daemon, "a", "blocks_of_disk") == kept);
    scan(&mut b);
    assert_eq!(
        (figure(&daemon, "a", "share"), figure(&daemon, "a", "blocks_of_disk")),
        (kept, kept)
    );
    let hits = figure(&daemon, "a", "hits_total");
    fill(&mut a);
    assert_eq!(figure(&daemon, "a", "hits_total"), hits + kept);

    // The command changes the share of a disk in use; what does not fit is refused.
    let folder = daemon.path("");
    let arguments = |disk, share| {
        let cache = ["attach", disk, "--name", "both", "--size", "1M"];
        [&cache[..], &["--share", share, "--control", "control.sock"]].concat()
    };
    let attach = |disk, share| succeeds(&folder, &arguments(disk, share));
    let refuse = |disk, share| fails(&folder, &arguments(disk, share), "share");
    refuse("b", "75%");
    for share in ["x", "101%"] {
        refuse("b", share);
    }
    assert_eq!(figure(&daemon, "a", "share"), kept);
    attach("a", "128K");
    assert_eq!(figure(&daemon, "a", "share"), 8);
    attach("b", "75%");
    fill(&mut b);
    scan(&mut b);
    // Its share, and at most the slots that belong to no share.
    let blocks = figure(&daemon, "a", "blocks_of_disk");
    assert!((8..=16).contains(&blocks), "{blocks}");
    // A reload puts the configured shares back.
    attach("b", "0");
    attach("a", "50%");
    assert_eq!(figure(&daemon, "a", "share"), kept);
    daemon.end();
}

/// How far files are read ahead is changed while the disk is in use, and checked.
#[test]
fn the_read_ahead_is_an_option_of_a_disk_in_use() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", 8 << 20);
    let daemon = Daemon::start_in(folder, &disk_over_nbd("a.img".as_ref(), ""));
    let folder = daemon.path("");
    let arguments = |size| ["attach", "a", "--read-ahead", size, "--control", "control.sock"];
    succeeds(&folder, &arguments("2M"));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    write(&mut nbd, 1, 5);
    daemon.until("the block to be in the cache", || figure(&daemon, "a", "blocks") == 1);
    succeeds(&folder, &arguments("0"));
    assert_eq!(figure(&daemon, "a", "blocks"), 1, "the layer stays");
    fails(&folder, &arguments("1G"), "16 MiB");
    let metrics = daemon.client().metrics().unwrap();
    assert!(
        metrics.contains("fathom_layer_cache_read_ahead_total{disk=\"a\",vm=\"\"} 0"),
        "{metrics}"
    );
    daemon.end();
}

/// The cache has a block whose write-back home has failed. After the recovery the disk has what the
/// device has: it must not change once more when the block leaves the cache.
#[test]
fn a_recovered_disk_has_what_its_store_has() {
    const BAD: u64 = 17;
    // A write-back of both blocks in one request would fail as a whole.
    const GOOD: u64 = 40;
    const PER_BLOCK: u64 = BLOCK / DEVICE_BLOCK;
    for is_kept in [false, true] {
        let Some(device) = FaultyDevice::new() else { return };
        let path = device.image("a.img", 64 * PER_BLOCK);
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let options = if is_kept {
            succeeds(folder.path(), &["create", "cache", "--size", "8M"]);
            format!("store = {:?}", folder.path().join("cache"))
        } else {
            "size = \"8M\"".to_owned()
        };
        for number in 0..PER_BLOCK {
            device.break_block(&path, BAD * PER_BLOCK + number);
        }
        let text = disk_over_nbd(&path, &format!("layers = [{{ kind = \"cache\", {options} }}]\n"));
        let daemon = Daemon::start_in(folder, &text);
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
        let blocks = || figure(&daemon, "a", "blocks");
        write(&mut nbd, BAD, 3);
        write(&mut nbd, GOOD, 4);
        daemon.until("the blocks to be in the cache", || blocks() == 2);
        device.write_back();
        assert_eq!(flush(&mut nbd), IO_ERROR);
        assert_eq!(read(&mut nbd, BAD), 3, "until then it is served");
        device.mend();
        daemon.client().recover_disk("a").unwrap();
        assert_eq!(blocks(), 0);
        for _ in 0..2 {
            assert_eq!(read(&mut nbd, BAD), 0, "what the device has");
            assert_eq!(read(&mut nbd, GOOD), 4);
        }
        write(&mut nbd, BAD, 9);
        assert_eq!((flush(&mut nbd), read(&mut nbd, BAD)), (0, 9));
        drop(nbd);
        daemon.signal(libc::SIGKILL);
        let daemon = Daemon::start_in(daemon.wait().1, &text);
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
        assert_eq!((read(&mut nbd, BAD), read(&mut nbd, GOOD)), (9, 4));
        drop(nbd);
        daemon.end();
    }
}

/// A superblock of a cache of this many slots of 4 KiB, for one disk.
fn forged(slots: u32) -> Vec<u8> {
    let mut copy = vec![0; 4096];
    copy[..8].copy_from_slice(b"\x8eFATHCAC");
    for (at, number) in [(8, 1), (12, 4096), (16, 7), (32, 1), (36, 1), (40, slots)] {
        copy[at..at + 4].copy_from_slice(&number.to_le_bytes());
    }
    let mut sum = u32::MAX;
    for byte in &copy[..508] {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = sum >> 1 ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    copy[508..512].copy_from_slice(&(!sum).to_le_bytes());
    copy.repeat(2)
}

/// A store of 8 KiB says that it has any number of blocks.
#[test]
fn a_forged_store_takes_no_more_memory_than_indexes_may_have() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 1 << 20);
    let info = rustix::system::sysinfo();
    let memory = info.totalram * u64::from(info.mem_unit);
    // An index of about 3 % of the host's memory.
    let slots = u32::try_from(memory * 3 / 100 / 25).unwrap().min(1 << 30);
    let store = folder.path().join("cache");
    std::fs::write(&store, forged(slots)).unwrap();
    File::options().write(true).open(&store).unwrap().set_len(8 << 40).unwrap();
    let more = format!("layers = [{{ kind = \"cache\", store = {store:?} }}]\n");
    let disk = disk_over_nbd(&folder.path().join("a.img"), &more);
    let daemon = Daemon::start_in(folder, &format!("[daemon]\ncache_index_percent = 1\n{disk}"));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    write(&mut nbd, 3, 9);
    assert_eq!(read(&mut nbd, 3), 9);
    let problem = daemon.client().disk("a").unwrap().problems.remove(0);
    assert_eq!(problem.kind, ProblemKind::LayerFailed);
    assert!(problem.message.contains("its index takes"), "{problem:?}");
    assert!(problem.remedy.contains("cache_index_percent"), "{problem:?}");
    let status = daemon.proc("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak << 10 < memory / 100 + (300 << 20), "{peak} KiB");
    daemon.end();
}

/// Images and stores have the data of guests, so that they are their owner's alone.
#[test]
fn images_and_stores_are_made_for_their_owner_alone() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    succeeds(folder.path(), &["create", "cache", "--size", "8M", "--log", "2M", "--logs", "1"]);
    succeeds(folder.path(), &["create", "sparse", "--size", "8M", "--sparse"]);
    let arguments = ["disk", "create", "a.img", "4M"];
    assert!(command(folder.path()).args(arguments).status().unwrap().success());
    let more = "layers = [{ kind = \"wal\", log = \"a.log\", size = \"2M\" }]\n";
    let daemon = Daemon::start_in(folder, &disk_over_nbd(Path::new("a.img"), more));
    for name in ["cache", "sparse", "a.img", "a.log"] {
        let mode = daemon.path(name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    daemon.end();
}
