//! Devices that fail for a while: some of their writes end with an error, and so the kernel's
//! write-back of what was acknowledged long ago; or their flushes do.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::Advice;

use super::BLOCKS;
use super::client::Shared;
use super::drawn;
use super::history;
use super::life::{Layers, Life};
use super::recorder::Fault;
use super::setup::Setup;
use super::volumes::{CACHE, HOME, LOG};
use crate::nbd::Nbd;

/// How long the disk may take until it accepts flushes again.
const TIME_MAX: Duration = Duration::from_secs(90);
/// How long a log gets to be recovered in use.
const RESTART_AFTER: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);
/// The first bytes of a record of a log, and of a superblock.
const HEADERS: [&[u8]; 2] = [b"WRC2", b"\x8eFATHWAL"];

/// A device fails for a while, and the daemon may be killed meanwhile. Returns the daemon after
/// that, and what has happened.
pub fn fail(
    mut life: Life,
    layers: Layers,
    setup: &Setup,
    shared: &Shared,
    random: &mut fastrand::Rng,
) -> (Life, String) {
    let folder = life.socket().parent().unwrap().to_owned();
    let (device, what, fault) = choose(layers, setup, random);
    shared.history().begin_failures();
    if let Some(fault) = fault {
        drawn::note("a device fails writes");
        shared.recorder.fail(device, fault);
    } else {
        drawn::note("a device fails flushes");
        shared.recorder.fail_flushes(device);
    }
    let mut text = format!("fail the device {device} for {what}");
    for _ in 0..random.usize(1..4) {
        std::thread::sleep(Duration::from_millis(random.u64(20..300)));
        match random.u8(0..3) {
            0 => drop(Command::new("sync").arg(folder.join(Setup::IMAGE)).output()),
            1 => {
                drawn::note("evict");
                evict(&folder);
            }
            _ => {}
        }
    }
    if random.bool() {
        drawn::note("a kill while a device fails");
        text += ", kill";
        let _ = life.signal(libc::SIGKILL);
        // What nobody has open leaves memory, and its errors with it, if no keepsake holds it.
        let _ = Command::new("sync").arg(folder.join(Setup::IMAGE)).output();
        let _ = std::fs::write("/proc/sys/vm/drop_caches", "2");
        let failed = shared.recorder.mend().to_string();
        text.extend([", ", &failed, " requests have failed"]);
        life = start(&folder, setup);
    } else {
        let failed = shared.recorder.mend().to_string();
        text.extend([", ", &failed, " requests have failed"]);
    }
    let begun = Instant::now();
    let mut is_lost = false;
    loop {
        assert!(begun.elapsed() < TIME_MAX, "{text}: the disk accepts no flush");
        if life.has_lost_writes() {
            match life.recover() {
                Ok(()) => {
                    text += ", recovered";
                    is_lost = true;
                }
                Err((_, true)) => {
                    text += ", restarted";
                    let _ = life.signal(libc::SIGTERM);
                    life = start(&folder, setup);
                    continue;
                }
                Err((reason, false)) => text.extend([", not recovered: ", &reason]),
            }
        }
        if is_lost {
            // What comes after this is not lost.
            shared.history().end_failures(true, shared.recorder.now());
        }
        let flush = shared.recorder.now();
        let has_succeeded = Nbd::try_connect(&life.socket(), "a").is_ok_and(|mut nbd| {
            nbd.send(3, 7, 0, 0, &[]) && nbd.reply().is_some_and(|reply| reply.1 == 0)
        });
        if has_succeeded {
            let now = shared.recorder.now();
            let mut history = shared.history();
            history.flushed(flush, now);
            history.end_failures(false, now);
            return (life, text);
        }
        // A log in a cache is not recovered in use.
        if layers.cache == Some("write-back") && begun.elapsed() > RESTART_AFTER {
            text += ", restarted";
            let _ = life.signal(libc::SIGTERM);
            life = start(&folder, setup);
        }
        std::thread::sleep(PAUSE);
    }
}

fn start(folder: &Path, setup: &Setup) -> Life {
    Life::start(folder, setup, setup.fails).unwrap_or_else(|log| panic!("after a failure: {log}"))
}

/// A device, what fails on it, and how to know that; `None` for its flushes.
fn choose(
    layers: Layers,
    setup: &Setup,
    random: &mut fastrand::Rng,
) -> (usize, String, Option<Fault>) {
    let device = match random.u8(0..2) {
        0 if layers.cache.is_some() => CACHE,
        0 if layers.log.is_some() => LOG,
        _ => HOME,
    };
    // A file system whose journal cannot be flushed accepts no more writes.
    if setup.is_device[device] && random.bool() {
        return (device, "flushes".into(), None);
    }
    if device != HOME && random.bool() {
        let header = HEADERS[random.usize(0..HEADERS.len())];
        let what = format!("{:?}", String::from_utf8_lossy(header));
        return (device, what, Some(Box::new(move |sector| sector.starts_with(header))));
    }
    // Most writes of the clients are for the first blocks.
    let end = if random.u8(0..3) > 0 { 48 } else { BLOCKS };
    let blocks: Vec<usize> = (0..random.usize(1..12)).map(|_| random.usize(0..end)).collect();
    let what = format!("the blocks {blocks:?}");
    (device, what, Some(Box::new(move |sector| history::is_of(&blocks, sector))))
}

/// Has the kernel forget the clean pages of the image.
fn evict(folder: &Path) {
    if let Ok(image) = File::open(folder.join(Setup::IMAGE)) {
        let _ = rustix::fs::fadvise(&image, 0, None, Advice::DontNeed);
    }
}
