//! Shadow eviction at a real guest that checks its memory and its disk: the pager and the daemon
//! are killed meanwhile, and no page ever differs from a valid copy.

use std::time::Duration;

use fathom_tests::{Result, Ticket, despite_emulation, patience, until};
use serde_json::Value;

use super::attach::{CHECKER, Scene, wait_for_checker};

/// Writes to the disk from the guest's memory and reads it back, through the guest's cache and
/// beside it.
const DISK_CHECKER: &str = "set -e; touch /run/disk-begun
    while [ ! -e /t/stop ]; do
        dd if=/dev/urandom of=/run/d bs=64k count=64 2> /dev/null
        a=$(md5sum < /run/d)
        dd if=/run/d of=/dev/vda bs=64k oflag=direct 2> /dev/null
        b=$(dd if=/dev/vda bs=64k count=64 iflag=direct 2> /dev/null | md5sum); [ \"$a\" = \"$b\" ]
        echo 3 > /proc/sys/vm/drop_caches
        b=$(dd if=/dev/vda bs=64k count=64 2> /dev/null | md5sum); [ \"$a\" = \"$b\" ]
        dd if=/dev/vda of=/dev/null bs=1M count=40 2> /dev/null
    done";

fn count(status: &Value, name: &str) -> u64 {
    status["shadow"][name].as_u64().unwrap_or_default()
}

/// Waits until shadow eviction works, and each of these counts has grown by as much.
fn works(scene: &Scene, what: &str, wanted: &[(&str, u64)]) -> Result<Value> {
    let first = scene.status()?;
    let mut last = Value::Null;
    let status = until(what, patience(90), || {
        let status = scene.status()?;
        last = status["shadow"].clone();
        let has = |&(name, least): &(&str, u64)| {
            count(&status, name) >= count(&first, name).saturating_add(least)
        };
        assert_eq!(count(&status, "mismatches"), 0, "{status}");
        // The daemon would let pages leave: no access from before its leases is left.
        let reasons = ["suspended", "obstacle"].map(|name| status["shadow"][name] == "");
        let is_done = reasons == [true; 2] && wanted.iter().all(has);
        Ok(is_done.then_some(status))
    });
    let status = status.inspect_err(|_| println!("{what} have come to {last}"))?;
    println!("{what}: {}", status["shadow"]);
    Ok(status)
}

/// Has the guest check its memory with this script, and its disk.
pub(crate) fn begin(scene: &Scene, memory_checker: &str) -> Result<(Ticket, Ticket)> {
    let checker = scene.guest.spawn(memory_checker)?;
    wait_for_checker(&scene.guest)?;
    Ok((checker, scene.guest.spawn(DISK_CHECKER)?))
}

/// Has both checkers end. Returns how often the memory was checked.
pub(crate) fn finish(scene: &Scene, checker: Ticket, disk_checker: Ticket) -> Result<u64> {
    let rounds = scene.finish(checker)?;
    let output = scene.guest.finish_within(disk_checker, 120)?;
    assert_eq!(output.status, 0, "the guest's disk is wrong: {}", output.text);
    Ok(rounds)
}

#[test]
fn shadows_of_pages_are_right_while_pagers_and_daemons_are_killed() -> Result<()> {
    despite_emulation(shadow)
}

fn shadow() -> Result<()> {
    // Otherwise the guest's processor writes to each page just before the disk does.
    let Some(mut scene) = Scene::start_with(&[], "init_on_alloc=0")? else { return Ok(()) };
    let (checker, disk_checker) = begin(&scene, CHECKER)?;
    let control = scene.daemon.control_socket().display().to_string();
    let arguments = ["--shadow", "300M", "--control", &control];
    let (pager, _) = scene.pager_with("attach", &arguments)?;
    let grown = [("copies", 4000), ("equal", 500), ("write_faults", 300)];
    let status = works(&scene, "shadows of a guest", &grown)?;
    assert!(count(&status, "copied_bytes") <= 300 << 20, "{status}");

    drop(pager);
    std::thread::sleep(Duration::from_millis(200));
    let (pager, _) = scene.pager_with("adopt", &arguments)?;
    works(&scene, "shadows after the death of a pager", &grown)?;

    // The next daemon takes leases from its first access on.
    scene.daemon.kill9();
    scene.daemon.restart()?;
    scene.daemon.wait_for_guest("disk")?;
    works(&scene, "shadows after the death of a daemon", &grown)?;

    let rounds = finish(&scene, checker, disk_checker)?;
    // The disk is read into pages that nothing has used for a while.
    until("a read into a copied page", patience(120), || {
        let read = "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda of=/dev/null bs=1M count=60";
        scene.guest.check_within(read, 60)?;
        Ok((count(&scene.status()?, "overwritten") > 0).then_some(()))
    })?;
    let last = scene.detach()?;
    assert_eq!((count(&last, "mismatches"), &last["state"]), (0, &Value::from("detached")));
    println!("the guest has checked its memory {rounds} times: {}", last["shadow"]);
    drop(pager);
    scene.guest.check_console()?;
    scene.daemon.check("disk")?;
    scene.guest.shutdown()
}
