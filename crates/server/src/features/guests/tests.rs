use std::fs::File;
use std::time::Duration;

use fathom_frontend::vhost_user::GuestObserver;

use super::*;

const MEMORY: u64 = 1 << 20;

fn file() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(MEMORY).unwrap();
    file
}

/// The memory of a guest, mapped separately for each of its disks' connections.
fn memory(file: &File) -> GuestMemory {
    memory_of(&[(0, file)])
}

/// The memory in files, each at a guest-physical address.
fn memory_of(parts: &[(u64, &File)]) -> GuestMemory {
    let mut memory = GuestMemory::default();
    for (start, file) in parts {
        memory.add(*start, MEMORY, file.try_clone().unwrap(), 0, &Arc::default()).unwrap();
    }
    memory
}

/// The disks of each guest that is followed.
fn followed(introspection: &Introspection) -> Vec<Vec<String>> {
    introspection.guests().into_iter().map(|guest| guest.disks).collect()
}

#[test]
fn no_thread_runs_before_there_is_a_guest() {
    let introspection = Introspection::new(100);
    let disk = DiskGuest::new(&introspection, "a", true);
    assert!(introspection.guests().is_empty() && disk.status().is_none());
    assert!(introspection.shared.thread.get().is_none());
}

#[test]
fn disks_of_one_memory_share_a_guest_until_the_last_connection_ends() {
    let introspection = Introspection::new(100);
    let disk = |name| DiskGuest::new(&introspection, name, true);
    let (a, b, other) = (disk("a"), disk("b"), disk("other"));
    let (mine, theirs) = (file(), file());
    a.started(0, &memory(&mine));
    b.started(3, &memory(&mine));
    other.started(0, &memory(&theirs));
    assert_eq!(followed(&introspection), [vec!["a", "b"], vec!["other"]]);
    assert!(Arc::ptr_eq(&a.slot().guest().unwrap(), &b.slot().guest().unwrap()));
    assert_eq!(introspection.guests()[0].memory_bytes, MEMORY);
    // A reboot: the guest is kept, although no ring runs for a moment.
    let before = a.slot().guest().unwrap();
    a.stopped(0);
    b.stopped(3);
    assert!(a.slot().guest().is_none() && b.status().is_none());
    a.started(0, &memory(&mine));
    assert!(Arc::ptr_eq(&a.slot().guest().unwrap(), &before));
    b.ended(3);
    assert_eq!(followed(&introspection), [["a"], ["other"]]);
    a.stopped(0);
    a.ended(0);
    drop(other);
    assert!(introspection.guests().is_empty());
}

#[test]
fn changed_memory_is_another_guest() {
    let introspection = Introspection::new(100);
    let disk = DiskGuest::new(&introspection, "a", true);
    let (first, plugged) = (file(), file());
    disk.started(0, &memory(&first));
    let before = disk.slot().guest().unwrap();
    let both = memory_of(&[(0, &first), (MEMORY, &plugged)]);
    let [one, two, other] = [&memory(&first), &both, &memory(&plugged)].map(identity);
    assert!(is_changed(&one, &two) && is_changed(&two, &one), "the kernel continues");
    assert!(!is_changed(&one, &other) && !is_changed(&other, &two));
    assert!(!is_changed(&Vec::new(), &one));
    disk.moved(0, &both);
    let after = disk.slot().guest().unwrap();
    assert!(!Arc::ptr_eq(&before, &after));
    assert_eq!(after.memory().length(), 2 * MEMORY);
    assert_eq!(followed(&introspection), [["a"]], "the earlier guest was dropped");
}

#[test]
fn introspection_of_a_disk_can_be_disabled_and_enabled() {
    let introspection = Introspection::new(100);
    let disk = DiskGuest::new(&introspection, "a", false);
    let file = file();
    disk.started(0, &memory(&file));
    assert!(disk.slot().guest().is_none() && introspection.guests().is_empty());
    disk.set_wanted(true);
    assert!(disk.slot().guest().is_some());
    disk.set_wanted(false);
    assert!(disk.slot().guest().is_none() && introspection.guests().is_empty());
    disk.stopped(0);
    disk.set_wanted(true);
    assert!(disk.slot().guest().is_none());
}

#[test]
fn the_thread_does_the_pending_work_and_then_sleeps() {
    let introspection = Introspection::new(100);
    let disk = DiskGuest::new(&introspection, "a", true);
    let file = file();
    disk.started(0, &memory(&file));
    let followed = introspection.shared.guests.lock()[0].clone();
    let begun = Instant::now();
    while followed.due.load(Ordering::Acquire) {
        assert!(begun.elapsed() < Duration::from_secs(20), "the guest's work was never done");
        std::thread::sleep(Duration::from_millis(1));
    }
}
