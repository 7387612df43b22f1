use fathom_introspect::synthetic::{Linux, Shape, Store};

use super::peer::{Agent, Qemu};
use super::*;

const MIB: u64 = 1 << 20;
const CONTROL: &str = "/run/fathom.sock";

fn records(folder: &Path) -> Records {
    Records::new(folder.to_owned(), Path::new(CONTROL))
}

/// A flusher with the guest `web` of this QEMU, whose least memory is 256 MiB.
fn flusher(qemu: &Qemu, folder: &Path) -> Flusher {
    let flusher = Flusher::new(&[], folder.to_owned(), Path::new(CONTROL));
    *flusher.guests.write() = vec![GuestOptions {
        vm: "web".into(),
        qmp: Some(qemu.path().to_owned()),
        balloon_floor: Some(fathom_control::Bytes(256 * MIB)),
        ..GuestOptions::default()
    }];
    flusher
}

fn inflate(flusher: &Flusher) -> Inflated<'_> {
    flusher.inflate(&flusher.options("web").unwrap(), None, Some(64 * MIB)).unwrap()
}

#[test]
fn a_guest_that_has_not_followed_yet_gets_its_memory_too() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = Qemu::start(1024 * MIB);
    let flusher = flusher(&qemu, folder.path());
    let mut inflated = inflate(&flusher);
    assert_eq!(flusher.balloons(), ["web"]);
    inflated.advance().unwrap();
    // The guest still reports what it had.
    drop(inflated);
    assert_eq!(qemu.orders(), [960 * MIB, 1024 * MIB]);
    assert!(flusher.balloons().is_empty() && records(folder.path()).read_all().is_empty());
    // Without a step, nothing has to be given back.
    drop(inflate(&flusher));
    assert_eq!(qemu.orders().len(), 2);
    assert!(flusher.balloons().is_empty());
}

#[test]
fn a_later_restoration_does_not_trust_the_guest_either() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = Qemu::start(1024 * MIB);
    let flusher = flusher(&qemu, folder.path());
    let mut inflated = inflate(&flusher);
    inflated.advance().unwrap();
    qemu.set_refuses(true);
    drop(inflated);
    assert!(!flusher.restore_balloon("web"));
    assert_eq!(flusher.balloons(), ["web"]);
    qemu.set_refuses(false);
    assert!(flusher.restore_balloon("web"));
    assert_eq!(qemu.orders(), [960 * MIB, 1024 * MIB]);
    assert!(flusher.balloons().is_empty());
    // A guest that has started again with more memory keeps it.
    records(folder.path()).write(&Record::new("web", Own::MemoryBytes(1024 * MIB))).unwrap();
    let flusher = crate::features::flush::tests::flusher(&qemu, folder.path());
    qemu.set_memory(2048 * MIB);
    assert!(flusher.restore_balloon("web"));
    assert_eq!(qemu.orders().last(), Some(&(2048 * MIB)));
}

#[test]
fn a_restoration_that_hangs_delays_neither_a_shutdown_nor_another_way() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = Qemu::start(1024 * MIB);
    records(folder.path()).write(&Record::new("web", Own::MemoryBytes(1024 * MIB))).unwrap();
    let flusher = flusher(&qemu, folder.path());
    // The socket serves another client first.
    let other = balloon::Balloon::open(qemu.path()).unwrap();
    std::thread::scope(|scope| {
        let restored = scope.spawn(|| while !flusher.restore_balloon("web") {});
        let end = Instant::now() + Duration::from_secs(2);
        while flusher.begin("web", FlushWay::Balloon).is_ok() && Instant::now() < end {
            std::thread::sleep(CHECK_INTERVAL);
        }
        let refused = flusher.begin("web", FlushWay::Balloon).unwrap_err();
        assert!(refused.message.contains("given back"), "{refused:?}");
        assert!(flusher.begin("web", FlushWay::Sysrq).is_ok());
        let begun = Instant::now();
        flusher.end();
        assert!(begun.elapsed() < Duration::from_millis(2500), "{:?}", begun.elapsed());
        assert!(!restored.is_finished());
        drop(other);
        restored.join().unwrap();
    });
    assert_eq!(qemu.orders(), [1024 * MIB]);
    assert!(flusher.balloons().is_empty());
}

#[test]
fn a_guest_with_a_record_is_tried_until_it_has_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = Qemu::start(1024 * MIB);
    let flusher = flusher(&qemu, folder.path());
    assert!(!flusher.begin_restorer(Kind::Balloon, "web"), "it has its memory");
    let mut inflated = inflate(&flusher);
    inflated.advance().unwrap();
    qemu.set_refuses(true);
    drop(inflated);
    assert!(
        flusher.begin_restorer(Kind::Balloon, "web")
            && !flusher.begin_restorer(Kind::Balloon, "web")
    );
    let attempt = || Restoration::Try("web".into());
    assert_eq!(flusher.next_restoration(Kind::Balloon), attempt());
    assert!(!flusher.restore_balloon("web"));
    flusher.end_restoration(Kind::Balloon, "web");
    assert!(matches!(flusher.next_restoration(Kind::Balloon), Restoration::Wait(_)));
    assert!(!flusher.begin_restorer(Kind::Balloon, "web"), "it waits for the next attempt");
    qemu.set_refuses(false);
    std::thread::sleep(restorers::INTERVAL);
    assert_eq!(flusher.next_restoration(Kind::Balloon), attempt());
    assert!(flusher.restore_balloon("web"));
    flusher.end_restoration(Kind::Balloon, "web");
    assert_eq!(flusher.next_restoration(Kind::Balloon), Restoration::End);
    assert!(!flusher.restore_balloon("web") && !flusher.begin_restorer(Kind::Balloon, "web"));
}

#[test]
fn the_records_of_many_guests_need_a_few_threads() {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..100 {
        let record = Record::new(&format!("vm{number}"), Own::MemoryBytes(1024 * MIB));
        records(folder.path()).write(&record).unwrap();
    }
    let flusher = Flusher::new(&[], folder.path().to_owned(), Path::new(CONTROL));
    let guests = flusher.balloons();
    assert_eq!(guests.len(), 100);
    let threads = guests.iter().filter(|vm| flusher.begin_restorer(Kind::Balloon, vm)).count();
    assert_eq!(threads, restorers::THREADS_MAX);
}

#[test]
fn a_record_is_removed_only_by_its_own_flush() {
    let folder = tempfile::tempdir().unwrap();
    let flusher = Flusher::new(&[], folder.path().to_owned(), Path::new(CONTROL));
    let [old, new] = [3000, 500].map(|own| Record::new("web", Own::DirtyExpire(own)));
    flusher.remember(&old).unwrap();
    flusher.remember(&new).unwrap();
    flusher.forget(&old);
    assert_eq!(flusher.replaced(Kind::Tunables, "web").as_ref(), Some(&new));
    assert_eq!(records(folder.path()).read_all(), std::slice::from_ref(&new));
    flusher.forget(&new);
    assert!(records(folder.path()).read_all().is_empty());
}

/// The kernel of a synthetic guest.
fn kernel() -> Kernel {
    let shape = Shape::default();
    let store = Store::new(&shape.memory()).unwrap();
    let linux = Linux::build(&store, &shape);
    Kernel::attach(&store.memory(), Some(linux.requests[0].view.header)).unwrap()
}

#[test]
fn tunables_that_an_earlier_daemon_has_lowered_are_put_back_and_lowered_again() {
    let (folder, kernel) = (tempfile::tempdir().unwrap(), kernel());
    let start = || Flusher::new(&[], folder.path().to_owned(), Path::new(CONTROL));
    let expire = || kernel.tunables().unwrap().dirty_expire;
    let own = expire();
    start().lower("web", &kernel, &|| Ok(())).unwrap();
    assert_eq!(expire(), EXPIRE_NOW);
    // The daemon was killed. Without the restoration, the next one takes the value for the guest's
    // own.
    let flusher = start();
    assert_eq!(flusher.tunables(), ["web"]);
    let refused = flusher.lower("web", &kernel, &|| Ok(())).unwrap_err();
    assert!(refused.message.contains("has no effect"), "{refused:?}");
    assert!(flusher.has_tunables("web") && flusher.restore("web", &kernel));
    assert_eq!((expire(), flusher.has_tunables("web")), (own, false));
    flusher.lower("web", &kernel, &|| Ok(())).unwrap();
    assert!(flusher.restore("web", &kernel) && records(folder.path()).read_all().is_empty());
    // A shutdown that begins at the last moment.
    let stopping = || Err(refusal(ErrorCode::ShuttingDown, "the daemon is shutting down", ""));
    let refused = flusher.lower("web", &kernel, &stopping).unwrap_err();
    assert_eq!(refused.code, ErrorCode::ShuttingDown);
    assert_eq!((expire(), flusher.has_tunables("web")), (own, false));
    // The guest has booted again: its kernel has another value, which stays.
    flusher.lower("web", &kernel, &|| Ok(())).unwrap();
    kernel.replace_dirty_expire(EXPIRE_NOW, 77).unwrap();
    assert!(!flusher.restore("web", &kernel) && !flusher.has_tunables("web"));
    assert_eq!(expire(), 77);
}

/// The guest's time is over, or the daemon ends, while a snapshot is being taken: the guest is
/// thawed at once, and it is known that the snapshot may be later.
#[test]
fn a_guest_is_thawed_while_a_snapshot_hangs() {
    use std::sync::atomic::{AtomicBool, Ordering};

    for ends in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let agent = Agent::start();
        let flusher = Flusher::new(&[], folder.path().to_owned(), Path::new(CONTROL));
        let time_max = Duration::from_millis(if ends { 10_000 } else { 300 });
        let (vm, path) = ("web".to_owned(), agent.path().to_owned());
        let guests = [freeze::FreezeGuest { vm, agent: path, time_max }];
        let is_stopping = AtomicBool::new(false);
        let outcome =
            flusher.with_frozen(&guests, false, &|| is_stopping.load(Ordering::Acquire), || {
                assert_eq!((agent.is_frozen(), flusher.frozen()), (true, vec!["web".to_owned()]));
                is_stopping.store(ends, Ordering::Release);
                let end = Instant::now() + Duration::from_secs(20);
                while agent.is_frozen() && Instant::now() < end {
                    std::thread::sleep(CHECK_INTERVAL);
                }
                agent.is_frozen()
            });
        assert_eq!(outcome.taken, Some(false), "it is thawed before the snapshot is taken");
        let expected = if ends { "shutting down" } else { "was thawed before the snapshot" };
        assert!(outcome.failures[0].message.contains(expected), "{:?}", outcome.failures);
        assert!(flusher.frozen().is_empty() && !flusher.marks.is_flushing());
        // In time: there is no failure.
        is_stopping.store(false, Ordering::Release);
        let guests =
            guests.map(|guest| freeze::FreezeGuest { time_max: RESTORE_TIME_MAX, ..guest });
        let outcome = flusher.with_frozen(&guests, false, &|| false, || agent.is_frozen());
        assert_eq!((outcome.taken, outcome.failures.len()), (Some(true), 0));
        assert!(!agent.is_frozen());
    }
}
