//! A limit of a real guest's memory beside a daemon of another user without rights, as the
//! package's unit runs it, and a pager of root: daemon and pager are killed, the daemon changes its
//! user, and the guest's memory and disk stay what they were.

use fathom_tests::{Daemon, Result, Served, despite_emulation, patience, until};

use super::attach::Scene;
use super::attach_evict::{CHECKER, count, works};
use super::attach_shadow::{begin, finish};

/// Users that need not exist.
const USER: u32 = 65_534;
const SECOND: u32 = 61_234;

#[test]
fn a_daemon_of_another_user_serves_a_guest_with_a_limit() -> Result<()> {
    despite_emulation(limit)
}

fn limit() -> Result<()> {
    if std::fs::File::options().write(true).read(true).open("/dev/userfaultfd").is_err() {
        println!("Skipped: /dev/userfaultfd may not be opened");
        return Ok(());
    }
    let Some(daemon) = Daemon::serve_as(USER, &[Served::sparse("disk", 64)])? else {
        return Ok(());
    };
    // Otherwise the guest's processor writes to each page just before the disk does.
    let mut scene = Scene::start_at(daemon, &[], "init_on_alloc=0")?;
    let (checker, disk_checker) = begin(&scene, CHECKER)?;
    let control = scene.daemon.control_socket().display().to_string();
    // What leaves goes to a disk.
    let swap = scene.swap_options()?;
    let mut arguments = vec!["--limit", "120M", "--control", &control];
    arguments.extend(swap.iter().map(String::as_str));
    let (pager, _) = scene.pager_with("attach", &arguments)?;
    let mut grown = vec![("evicted", 6000), ("brought", 1500), ("wanted", 20)];
    if !swap.is_empty() {
        grown.extend([("file_written", 1000), ("file_read", 300)]);
    }
    works(&scene, "eviction beside a daemon of another user", &grown)?;

    // Killed and started again, it takes leases from its first access on.
    for _ in 0..2 {
        scene.daemon.kill9();
        scene.daemon.restart()?;
        scene.daemon.wait_for_guest("disk")?;
        works(&scene, "eviction after the death of a daemon", &grown)?;
    }
    // Both die. The daemon's place is there before the next pager is.
    drop(pager);
    scene.daemon.kill9();
    scene.daemon.restart()?;
    scene.daemon.wait_for_guest("disk")?;
    let (pager, _) = scene.pager_with("adopt", &arguments)?;
    works(&scene, "eviction after the deaths of both", &grown)?;

    // A daemon of a user that was never let in, while pages are away: the pager finds it.
    scene.daemon.kill9();
    scene.daemon.set_user(SECOND)?;
    scene.daemon.restart()?;
    scene.daemon.wait_for_guest("disk")?;
    works(&scene, "eviction beside a daemon of a second user", &grown)?;

    let rounds = finish(&scene, checker, disk_checker)?;
    println!("the guest has checked its memory {rounds} times");
    let last = scene.detach()?;
    assert_eq!((&last["state"], count(&last, "away_bytes")), (&"detached".into(), 0), "{last}");
    drop(pager);
    // The table is still there: a daemon that is started now uses it.
    scene.daemon.kill9();
    scene.daemon.restart()?;
    scene.daemon.wait_for_guest("disk")?;
    scene.guest.check("md5sum -c /t/sums > /dev/null || (cd /t; md5sum -c sums > /dev/null)")?;
    scene.guest.check_console()?;
    until("the disk to have no problem", patience(30), || {
        Ok(scene.daemon.check("disk").is_ok().then_some(()))
    })?;
    scene.guest.shutdown()
}
