//! Volumes with guarantees in a full pool.

use fathom_control::ProblemKind;

use crate::nbd::Nbd;
use crate::problems::kinds;
use crate::process::Daemon;
use crate::store::{entry, run};

const CONFIGURATION: &str = "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
    [[disk]]\nname = \"kept\"\nstore = \"pool\"\nvolume = \"kept\"\n\
    [[disk]]\nname = \"waits\"\nstore = \"pool\"\nvolume = \"waits\"\nwhen_full = \"wait\"\n\
    [[disk]]\nname = \"fails\"\nstore = \"pool\"\nvolume = \"fails\"\nwhen_full = \"fail\"\n";

/// The length of a write, in bytes.
const LENGTH: usize = 256 << 10;
/// The NBD error for a full store.
const ENOSPC: u32 = 28;
const KEPT: u64 = 16 << 20;

/// Blocks that are equal to no others.
fn data(what: u64, number: u64) -> Vec<u8> {
    let mut bytes = vec![0; LENGTH];
    for (block, bytes) in (0_u64..).zip(bytes.chunks_mut(4096)) {
        bytes[..8].copy_from_slice(&(what << 40 | number << 16 | block).to_le_bytes());
        bytes[8] = 1;
    }
    bytes
}

#[test]
fn what_a_volume_is_guaranteed_is_there_in_a_full_pool() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    run(&path, &["store", "create", "pool", "96M"]).unwrap();
    for (volume, size) in [("kept", "16M"), ("waits", "200M"), ("fails", "200M")] {
        run(&path, &["store", "new", "pool", volume, size]).unwrap();
    }
    let refused = run(&path, &["store", "guarantee", "pool", "kept", "17M"]).unwrap_err();
    assert!(refused.contains("at most the size"), "{refused}");
    let refused = run(&path, &["store", "guarantee", "pool", "waits", "100M"]).unwrap_err();
    assert!(refused.contains("too little free space") && refused.contains("lower a"), "{refused}");
    let shown = run(&path, &["store", "guarantee", "pool", "kept", "16M"]).unwrap();
    assert!(shown.contains("GUARANTEED") && shown.contains("kept for guarantees"), "{shown}");
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    let connect = |name| Nbd::connect(&daemon.path("nbd.sock"), name);
    let (mut kept, mut waits, mut fails) = (connect("kept"), connect("waits"), connect("fails"));
    let mut filled = 0;
    let error = (0..).find_map(|number| {
        let data = data(1, number);
        fails.send(1, number, number * LENGTH as u64, LENGTH as u32, &data);
        filled = number;
        Some(fails.reply().unwrap().1).filter(|error| *error != 0)
    });
    assert_eq!(error, Some(ENOSPC));
    assert!(filled > 100, "{filled}");
    waits.send(1, 7, 0, LENGTH as u32, &data(2, 0));
    daemon.until("a write to wait", || kinds(&daemon, "waits") == [ProblemKind::WaitingForRoom]);
    // The guaranteed volume is written as a whole, and once more.
    for round in 0..2 {
        for number in 0..KEPT / LENGTH as u64 {
            kept.write(number * LENGTH as u64, &data(3 + round, number));
        }
    }
    let shown = run(&path, &["snapshot", "create", "kept", "--name", "s"]).unwrap_err();
    assert!(shown.contains("too little free space"), "{shown}");
    let pool = entry(&daemon);
    assert_eq!(pool.volumes[0].guarantee_bytes, Some(KEPT));
    assert!((1..8 << 20).contains(&pool.guaranteed_bytes), "{}", pool.guaranteed_bytes);
    assert_eq!(kinds(&daemon, "waits"), [ProblemKind::WaitingForRoom]);
    // What another disk discards is for those that wait.
    fails.send(4, 8, 0, 16 << 20, &[]);
    assert_eq!(fails.reply(), Some((8, 0)));
    assert_eq!(waits.reply(), Some((7, 0)));
    run(&path, &["store", "guarantee", "pool", "kept", "none"]).unwrap();
    assert_eq!(entry(&daemon).guaranteed_bytes, 0);
    for number in 0..KEPT / LENGTH as u64 {
        assert!(kept.read(number * LENGTH as u64, LENGTH as u32) == data(4, number), "{number}");
    }
    drop((kept, waits, fails));
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    let checked = run(folder.path(), &["store", "check", "pool", "--json"]).unwrap();
    assert!(checked.contains("\"problem_count\": 0"), "{checked}");
}
