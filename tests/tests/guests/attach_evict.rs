//! A limit of a real guest's memory, below what the guest uses, while the guest checks its memory
//! and its disk: pagers, their guards and the daemon are killed while pages are away, the limit
//! changes, and every byte stays what it was.

use std::process::Command;
use std::time::Duration;

use fathom_control::GuestPagerState;
use fathom_tests::{Error, Result, despite_emulation, patience, until};
use serde_json::Value;

use super::attach::{MEMORY_MIB, Scene};
use super::attach_shadow::{begin, finish};

const MIB: u64 = 1 << 20;

/// As the checker of the other tests, with content that becomes smaller, as that of most guests.
pub(crate) const CHECKER: &str = "set -e; mkdir -p /t; mount -t tmpfs -o size=160m none /t; cd /t
    for i in 1 2 3; do seq $i$i 2500000 | head -c 16777216 > f$i; done
    md5sum f? > sums; n=0; touch /t/begun
    while [ ! -e /t/stop ]; do
        md5sum -c sums > /dev/null
        seq $n 2000000 | head -c 12582912 > w
        a=$(md5sum < w); cp w w2; b=$(md5sum < w2); [ \"$a\" = \"$b\" ]
        rm w w2; n=$((n + 1))
    done
    echo $n";

pub(crate) fn count(status: &Value, name: &str) -> u64 {
    status["eviction"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {status}"))
}

/// Waits until each of these counts has grown by as much, and pages may leave.
pub(crate) fn works(scene: &Scene, what: &str, wanted: &[(&str, u64)]) -> Result<Value> {
    let first = scene.status()?;
    let mut last = Value::Null;
    let found = until(what, patience(90), || {
        let status = scene.status()?;
        last = status.clone();
        assert_eq!(count(&status, "damaged"), 0, "{status}");
        // Eight for each death of a pager.
        assert!(count(&status, "existing") <= 80, "{status}");
        let has = |&(name, least): &(&str, u64)| {
            count(&status, name) >= count(&first, name).saturating_add(least)
        };
        let reasons = ["retreat", "obstacle"].map(|name| status["eviction"][name] == "");
        Ok((reasons == [true; 2] && wanted.iter().all(has)).then_some(status))
    });
    let status = found.inspect_err(|_| println!("{what} has come to {last}"))?;
    println!("{what}: {}", status["eviction"]);
    Ok(status)
}

fn set_limit(scene: &Scene, limit: &str) -> Result<Value> {
    let process = scene.guest.process().id().to_string();
    let output = scene.command(&["limit", &process, limit])?.output()?;
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::new(format!("fathom pager limit: {error}: {output:?}")))
}

/// Waits until the daemon shows the machine's pager in this state. While it is attached, pages are
/// away and come back, and nothing is wrong.
fn is_seen(scene: &Scene, state: GuestPagerState) -> Result<()> {
    let mut last = None;
    let found = until("the daemon to see the pager", patience(30), || {
        let report = scene.daemon.client().pager(Some("disk"));
        let mut report = report.map_err(|error| Error::new(error.to_string()))?;
        last = report.guests.pop().and_then(|guest| guest.pager);
        let Some(pager) = &last else { return Ok(None) };
        assert_eq!(u64::from(pager.process), u64::from(scene.guest.process().id()));
        assert_eq!(pager.damaged_pages, 0, "{pager:?}");
        let is_away = match state {
            GuestPagerState::Detached => pager.away_bytes == 0,
            _ => pager.away_bytes > 0 && pager.evicted_pages > 0 && pager.away_faults > 0,
        };
        Ok((pager.state == state && is_away).then_some(()))
    });
    println!("the daemon sees {last:?}");
    found
}

#[test]
fn pages_leave_and_come_back_while_pagers_and_daemons_are_killed() -> Result<()> {
    despite_emulation(evict)
}

fn evict() -> Result<()> {
    // Otherwise the guest's processor writes to each page just before the disk does.
    let Some(mut scene) = Scene::start_with(&[], "init_on_alloc=0")? else { return Ok(()) };
    let (checker, disk_checker) = begin(&scene, CHECKER)?;
    let control = scene.daemon.control_socket().display().to_string();
    let arguments = ["--limit", "120M", "--control", &control];
    let (pager, _) = scene.pager_with("attach", &arguments)?;
    let grown = [("evicted", 6000), ("brought", 1500)];
    let status = works(&scene, "eviction", &grown)?;
    let mut resident = 0;
    let below = until("the guest to be below its limit", patience(30), || {
        resident = count(&scene.status()?, "resident_bytes");
        Ok((resident <= 124 * MIB).then_some(()))
    });
    below.inspect_err(|_| println!("{resident} bytes are resident"))?;
    assert_eq!(count(&status, "limit_bytes"), 120 * MIB);
    assert!(count(&status, "store_bytes") > 0, "{status}");
    is_seen(&scene, GuestPagerState::Attached)?;

    // Its guard serves, and takes nothing away.
    drop(pager);
    scene.guest.check("head -c 4000000 /dev/zero > /t/z; rm /t/z; md5sum /t/f1 > /dev/null")?;
    let status = scene.status()?;
    assert_eq!(status["state"], "orphaned", "{status}");
    assert_eq!(status["registered_bytes"], MEMORY_MIB << 20, "{status}");
    std::thread::sleep(Duration::from_millis(500));
    let (pager, status) = scene.pager_with("adopt", &arguments)?;
    assert!(count(&status, "away_bytes") > 0, "{status}");
    works(&scene, "eviction after the death of a pager", &grown)?;

    // Pagers that die early, so that many guards wait for their turn.
    drop(pager);
    let seed = std::env::var("FATHOM_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(39);
    let mut random = fastrand::Rng::with_seed(seed);
    for kill in 0..8 {
        let mut pager = scene.start_pager_with("adopt", &arguments)?;
        std::thread::sleep(Duration::from_millis(random.u64(0..400)));
        let ended = pager.ended()?;
        assert!(ended.is_none(), "kill {kill} of seed {seed}: {ended:?}");
        drop(pager);
        scene.guest.check("md5sum /t/f2 > /dev/null")?;
    }
    let (pager, _) = scene.pager_with("attach", &arguments)?;
    works(&scene, "eviction after the deaths of pagers", &grown)?;

    // The next daemon takes leases from its first access on.
    scene.daemon.kill9();
    scene.daemon.restart()?;
    scene.daemon.wait_for_guest("disk")?;
    // Its disk is read into pages that are away, too.
    let grown_and_wanted = [grown[0], grown[1], ("wanted", 20), ("overwritten", 1)];
    works(&scene, "eviction after the death of a daemon", &grown_and_wanted)?;

    let status = set_limit(&scene, "100M")?;
    assert_eq!((&status["refused"], count(&status, "limit_bytes")), (&"".into(), 100 * MIB));
    works(&scene, "eviction with a lower limit", &grown)?;
    let status = set_limit(&scene, "none")?;
    assert_eq!(count(&status, "limit_bytes"), 0, "{status}");
    set_limit(&scene, "110M")?;
    works(&scene, "eviction with a limit again", &[("evicted", 1000)])?;

    let rounds = finish(&scene, checker, disk_checker)?;
    println!("the guest has checked its memory {rounds} times");

    // Both the pager and its guard die: only then somebody has to do something.
    let status = scene.status()?;
    assert!(count(&status, "away_bytes") > 0, "{status}");
    for process in [&status["guard"], &status["pager"]] {
        Command::new("kill").args(["-9", &process.to_string()]).status()?;
    }
    drop(pager);
    let last = scene.detach()?;
    assert_eq!((&last["state"], count(&last, "away_bytes")), (&"detached".into(), 0), "{last}");
    assert_eq!(scene.status()?["registered_bytes"], 0);
    is_seen(&scene, GuestPagerState::Detached)?;
    scene.guest.check("md5sum -c /t/sums > /dev/null || (cd /t; md5sum -c sums > /dev/null)")?;
    scene.guest.check_console()?;
    scene.daemon.check("disk")?;
    scene.guest.shutdown()
}

/// A guest under pressure for a long time, `FATHOM_MINUTES`: pagers, guards and the daemon die,
/// limits change, pagers detach and attach, the machine stops for a moment, in an order by
/// `FATHOM_SEED`.
#[test]
#[ignore = "an hour; make soak"]
fn a_guest_is_under_pressure_for_a_long_time() -> Result<()> {
    despite_emulation(pressure)
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn kill(process: &Value) -> Result<()> {
    Command::new("kill").args(["-9", &process.to_string()]).status()?;
    Ok(())
}

fn pressure() -> Result<()> {
    let Some(mut scene) = Scene::start_with(&[], "init_on_alloc=0")? else { return Ok(()) };
    let seed = number("FATHOM_SEED", 39);
    let time = Duration::from_secs(60 * number("FATHOM_MINUTES", 60));
    let mut random = fastrand::Rng::with_seed(seed);
    println!("seed {seed}, {time:?}");
    let (checker, disk_checker) = begin(&scene, CHECKER)?;
    let control = scene.daemon.control_socket().display().to_string();
    let mut arguments = vec!["--limit", "120M", "--control", &control];
    // Each other seed has a swap file.
    let swap = if seed % 2 == 1 { scene.swap_options()? } else { Vec::new() };
    arguments.extend(swap.iter().map(String::as_str));
    let (mut pager, _) = scene.pager_with("attach", &arguments)?;
    let begun = std::time::Instant::now();
    let (mut events, mut evicted, mut brought) = ([0_u64; 8], 0, 0);
    let mut last_counts = (0, 0);
    while begun.elapsed() < time {
        let event = random.usize(..events.len());
        events[event] += 1;
        let before = scene.status()?;
        let pause = Duration::from_millis(random.u64(..2000));
        match event {
            0 => {
                drop(pager);
                std::thread::sleep(pause);
                pager = scene.pager_with("adopt", &arguments)?.0;
            }
            1 => {
                for process in [&before["guard"], &before["pager"]] {
                    kill(process)?;
                }
                drop(pager);
                pager = scene.pager_with("adopt", &arguments)?.0;
            }
            2 => kill(&before["guard"])?,
            3 => {
                scene.daemon.kill9();
                scene.daemon.restart()?;
                scene.daemon.wait_for_guest("disk")?;
            }
            4 => drop(set_limit(&scene, &format!("{}M", random.u64(90..140)))?),
            5 => {
                let last = scene.detach()?;
                assert_eq!((&last["state"], count(&last, "away_bytes")), (&"detached".into(), 0));
                drop(pager);
                std::thread::sleep(pause);
                pager = scene.pager_with("attach", &arguments)?.0;
            }
            6 => {
                drop(pager);
                for _ in 0..3 {
                    let next = scene.start_pager_with("adopt", &arguments)?;
                    std::thread::sleep(Duration::from_millis(random.u64(..400)));
                    drop(next);
                }
                pager = scene.pager_with("adopt", &arguments)?.0;
            }
            _ => {
                scene.guest.qmp(&serde_json::json!({"execute": "stop"}))?;
                std::thread::sleep(pause);
                scene.guest.qmp(&serde_json::json!({"execute": "cont"}))?;
            }
        }
        let least = [("evicted", 300), ("brought", 100)];
        let status = works(&scene, &format!("event {event} after {:?}", begun.elapsed()), &least)?;
        // The counts begin anew with each pager.
        let now = (count(&status, "evicted"), count(&status, "brought"));
        let is_new = now.0 < last_counts.0;
        evicted += if is_new { now.0 } else { now.0 - last_counts.0 };
        brought += if is_new { now.1 } else { now.1.saturating_sub(last_counts.1) };
        last_counts = now;
    }
    let rounds = finish(&scene, checker, disk_checker)?;
    println!(
        "{rounds} checks of the memory; events {events:?}; at least {evicted} pages have left and \
         {brought} have come back"
    );
    let last = scene.detach()?;
    assert_eq!((&last["state"], count(&last, "away_bytes")), (&"detached".into(), 0), "{last}");
    drop(pager);
    scene.guest.check_console()?;
    scene.daemon.check("disk")?;
    scene.guest.shutdown()
}
