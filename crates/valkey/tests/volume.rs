//! Volumes in a real cluster whose nodes work: what a disk is, who owns it, and content that is not
//! what was written.

mod support;

use fathom_block::{Backend as _, BackendProblem, ErrorKind};
use fathom_sim::OneRequest;
use fathom_valkey::{BLOCK, ClusterVolume, VolumeOptions};
use support::{
    CAPACITY, content, disk, harness, impatient, open, options, steady_cluster, volume, workload,
};

#[test]
fn a_volume_is_a_disk_and_keeps_its_content() {
    let Some((_folder, cluster)) = steady_cluster() else { return };
    let options = options(&cluster);
    for (name, alignment, seed) in [("whole", 4096, 1), ("parts", 512, 2)] {
        let first = open(&options, name);
        let served = disk(&first);
        let mut harness = harness(&served, 16);
        harness.run(&mut workload(seed, alignment), 1500, |_| {});
        harness.verify(CAPACITY);
        assert!(first.problems().is_empty(), "{:?}", first.problems());
        // Another daemon opens the volume while the first one still has it.
        let second = open(&options, name);
        harness.model().check_now(&content(&disk(&second))).unwrap();
        let mut old = OneRequest::open(&served);
        assert_eq!(old.write(0, &[1; 4096]), Err(ErrorKind::Io), "an older epoch writes");
        assert_eq!(old.read(0, 4096), Err(ErrorKind::Io), "an older epoch reads");
        let problems = first.problems();
        assert!(matches!(problems[..], [BackendProblem::TakenOver { .. }]), "{problems:?}");
        let mut new = OneRequest::open(&disk(&second));
        new.write(0, &[2; 4096]).unwrap();
        assert_eq!(new.read(0, 4096).unwrap(), [2; 4096]);
    }
}

#[test]
fn the_older_of_two_daemons_is_refused_in_the_middle_of_its_writes() {
    let Some((_folder, cluster)) = steady_cluster() else { return };
    let options = options(&cluster);
    let first = open(&options, "v");
    let served = disk(&first);
    let writer = std::thread::spawn(move || {
        let mut queue = OneRequest::open(&served);
        let mut written = 0_u64;
        // Each write has the next number, at changing places.
        loop {
            let bytes = [written.to_le_bytes(); 512].concat();
            match queue.write(written % 64 * 16 * BLOCK, &bytes) {
                Ok(()) => written += 1,
                Err(kind) => return (written, kind),
            }
        }
    });
    std::thread::sleep(std::time::Duration::from_millis(500));
    let second = open(&options, "v");
    let mut queue = OneRequest::open(&disk(&second));
    let mut found = 0;
    for place in 0..64 {
        let bytes = queue.read(place * 16 * BLOCK, 8).unwrap();
        found = found.max(u64::from_le_bytes(bytes.try_into().unwrap()));
        queue.write(place * 16 * BLOCK, &[0xff; 4096]).unwrap();
    }
    let (written, kind) = writer.join().unwrap();
    assert_eq!(kind, ErrorKind::Io);
    // What had completed is there, and nothing came later.
    assert!(found + 1 == written || found == written, "{found} of {written}");
    for place in 0..64 {
        assert_eq!(queue.read(place * 16 * BLOCK, 4096).unwrap(), [0xff; 4096]);
    }
}

#[test]
fn wrong_content_is_an_error_and_never_data() {
    let Some((_folder, cluster)) = steady_cluster() else { return };
    let volume = open(&impatient(&cluster), "v");
    let mut queue = OneRequest::open(&disk(&volume));
    for block in 0..8 {
        queue.write(block * BLOCK, &[block as u8 + 1; 4096]).unwrap();
    }
    let key = |block: u64| format!("fathom:{{v#0}}:{block}");
    let ask = |command: &[&str]| {
        let mut all = vec!["-c"];
        all.extend_from_slice(command);
        cluster.ask(0, &all).unwrap()
    };
    // The old content of a block, which is replayed after a write.
    ask(&["COPY", &key(1), &format!("{}:old", key(1))]);
    queue.write(BLOCK, &[0x77; 4096]).unwrap();
    ask(&["COPY", &format!("{}:old", key(1)), &key(1), "REPLACE"]);
    ask(&["SETRANGE", &key(2), "2000", "x"]);
    ask(&["DEL", &key(3)]);
    ask(&["SET", &key(4), "short"]);
    ask(&["COPY", &key(0), &key(5), "REPLACE"]);
    ask(&["DEL", &key(6)]);
    ask(&["LPUSH", &key(6), "a list"]);
    for block in 1..7 {
        assert_eq!(queue.read(block * BLOCK, BLOCK), Err(ErrorKind::Io), "block {block}");
    }
    for block in [0, 7] {
        assert_eq!(queue.read(block * BLOCK, BLOCK).unwrap(), [block as u8 + 1; 4096]);
    }
    let problems = volume.problems();
    let is_wrong =
        |problem: &BackendProblem| matches!(problem, BackendProblem::ContentWrong { .. });
    assert!(problems.iter().any(is_wrong), "{problems:?}");
    // A write replaces wrong content.
    for block in [1, 2, 3, 4, 5] {
        queue.write(block * BLOCK, &[9; 4096]).unwrap();
        assert_eq!(queue.read(block * BLOCK, BLOCK).unwrap(), [9; 4096]);
    }
}

#[test]
fn a_shard_that_has_forgotten_writes_or_everything_is_found_at_the_next_opening() {
    let Some((_folder, cluster)) = steady_cluster() else { return };
    let options = options(&cluster);
    let first = open(&options, "v");
    let mut queue = OneRequest::open(&disk(&first));
    for block in 0..64 {
        queue.write(block * 16 * BLOCK, &[1; 4096]).unwrap();
    }
    drop((queue, first));
    let ask = |command: &[&str]| {
        let mut all = vec!["-c"];
        all.extend_from_slice(command);
        cluster.ask(0, &all).unwrap()
    };
    let refusal = || ClusterVolume::open(&options, &volume("v")).err().map(|error| error.message);
    assert_eq!(refusal(), None);
    // A node with an older state: one write of the shard is gone.
    ask(&["HINCRBY", "fathom:{v#5}:state", "count", "-1"]);
    let text = refusal().unwrap();
    assert!(text.contains("shard 5") && text.contains("forgotten"), "{text}");
    ask(&["HINCRBY", "fathom:{v#5}:state", "count", "1"]);
    assert_eq!(refusal(), None);
    ask(&["DEL", "fathom:{v#9}:state"]);
    let text = refusal().unwrap();
    assert!(text.contains("is gone"), "{text}");
    // The volume itself is gone.
    ask(&["DEL", "fathom:{v}:volume"]);
    let text = refusal().unwrap();
    assert!(text.contains("earlier volume"), "{text}");
    let wanted = VolumeOptions { may_make: false, ..volume("w") };
    let text = ClusterVolume::open(&options, &wanted).err().unwrap().message;
    assert!(text.contains("not in this cluster"), "{text}");
}

/// Whoever relies on the whole volume again after a rest has to find out with the first change.
#[test]
fn a_shard_that_was_emptied_during_a_rest_is_found_by_the_first_change_of_any_other() {
    let Some((_folder, cluster)) = steady_cluster() else { return };
    let first = open(&impatient(&cluster), "v");
    let mut queue = OneRequest::open(&disk(&first));
    let mut write = |group: u64| queue.write(group * 16 * BLOCK, &[1; 4096]);
    (0..64).for_each(|group| write(group).unwrap());
    let state = "fathom:{v#9}:state";
    cluster.ask(0, &["-c", "RENAME", state, "fathom:{v#9}:kept"]).unwrap();
    // Nothing is examined between changes that follow each other.
    write(5).unwrap();
    std::thread::sleep(std::time::Duration::from_secs(6));
    assert_eq!(write(5), Err(ErrorKind::Io));
    let problems = first.problems();
    let [BackendProblem::ContentWrong { text }] = &problems[..] else { panic!("{problems:?}") };
    assert!(text.contains("shard 9") && text.contains("lost its state"), "{text}");
    cluster.ask(0, &["-c", "RENAME", "fathom:{v#9}:kept", state]).unwrap();
    write(5).unwrap();
    std::thread::sleep(std::time::Duration::from_secs(6));
    write(5).unwrap();
}

#[test]
fn nodes_that_would_lose_writes_are_refused() {
    let Some((_folder, cluster)) = steady_cluster() else { return };
    let wanted = options(&cluster);
    let set = |name: &str, value: &str| {
        for node in 0..cluster.count() {
            cluster.ask(node, &["CONFIG", "SET", name, value]).unwrap();
        }
    };
    let refusal = |copies: u32| {
        let wanted = fathom_valkey::ClusterOptions { copies, ..wanted.clone() };
        ClusterVolume::open(&wanted, &volume("v"))
            .err()
            .map(|error| format!("{error:#}"))
            .unwrap_or_default()
    };
    assert_eq!(refusal(1), "");
    assert!(refusal(2).contains("has 1 replicas"), "{}", refusal(2));
    set("appendfsync", "everysec");
    assert!(refusal(1).contains("appendfsync always"), "{}", refusal(1));
    set("appendfsync", "always");
    set("maxmemory-policy", "allkeys-lru");
    assert!(refusal(1).contains("noeviction"), "{}", refusal(1));
    set("maxmemory-policy", "noeviction");
    set("appendonly", "no");
    assert!(refusal(1).contains("appendonly yes"), "{}", refusal(1));
    set("appendonly", "yes");
    assert_eq!(refusal(0), "");
}

#[test]
fn a_full_node_fails_writes_and_loses_nothing() {
    let Some((_folder, cluster)) = steady_cluster() else { return };
    let volume = open(&impatient(&cluster), "v");
    let mut queue = OneRequest::open(&disk(&volume));
    queue.write(0, &vec![1; 65536]).unwrap();
    let limit = |bytes: &str| {
        for node in 0..cluster.count() {
            cluster.ask(node, &["CONFIG", "SET", "maxmemory", bytes]).unwrap();
        }
    };
    limit("1");
    assert_eq!(queue.write(65536, &vec![2; 65536]), Err(ErrorKind::NoSpace));
    assert_eq!(queue.read(0, 65536).unwrap(), vec![1; 65536]);
    limit("0");
    queue.write(65536, &vec![3; 65536]).unwrap();
    assert_eq!(queue.read(65536, 65536).unwrap(), vec![3; 65536]);
    // An operator sees it for a while.
    let problems = format!("{:?}", volume.problems());
    assert!(problems.contains("OOM"), "{problems}");
}
