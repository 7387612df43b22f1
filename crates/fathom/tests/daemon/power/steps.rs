//! The changes of a disk in use.

use std::fs::File;
use std::path::{Path, PathBuf};

use fathom_control::OffloadAction;
use rustix::fs::FallocateFlags;

use super::BLOCKS;
use super::drawn;
use super::history::BLOCK;
use super::life::{LOGS, Layers, Life, MODES};
use super::setup::Setup;
use super::volumes::{CACHE, HOME, LOG, NAMES, STATE};
use crate::nbd::Nbd;

/// By how much the disk grows, in bytes.
const GROWTH: usize = 256 << 10;
/// The error of a write that finds no space.
const NO_SPACE: u32 = 28;
/// The file that fills a file system.
const FILLER: &str = "filler";
/// The steps that fill the file systems.
const FILLS: [&str; 4] = ["fill home", "fill log", "fill cache", "fill state"];

/// A change of the disk, and the layers after it.
type Step = (Layers, &'static str);

/// A change, and the layers after it. `full` is the volume whose file system is full.
pub fn step(now: Layers, setup: &Setup, full: Option<usize>, random: &mut fastrand::Rng) -> Step {
    let mut possible = vec![(now, "kill")];
    if full.is_some() {
        possible.extend([(now, "make room"); 4]);
    } else {
        let fills = FILLS.into_iter().enumerate();
        let has_files = |(volume, _): &(usize, _)| setup.link(*volume).is_none();
        possible.extend(fills.filter(has_files).map(|(_, fill)| (now, fill)));
        possible.extend([(now, "restart"), (now, "remove and add")]);
        // The configuration has no layers.
        possible.push((Layers::default(), "reload"));
        if !setup.is_device[HOME] {
            possible.extend([(now, "resize"); 2]);
        }
    }
    possible.push((Layers { is_limited: !now.is_limited, ..now }, "limit"));
    // What is taken away has to be written home first.
    let can_go_home = full != Some(HOME) && full != Some(CACHE);
    match now.cache {
        None => {
            let mode = MODES[random.usize(0..if now.log.is_some() { 2 } else { 3 })];
            let store = random.usize(0..setup.stores());
            possible.extend([(Layers { cache: Some(mode), store, ..now }, "attach"); 3]);
        }
        Some(_) if can_go_home => {
            possible.extend([(Layers { cache: None, store: 0, ..now }, "detach"); 2]);
            let mode = MODES[random.usize(0..if now.log.is_some() { 2 } else { 3 })];
            if now.log.is_none() {
                possible.push((Layers { cache: Some(mode), ..now }, "mode"));
            }
            if setup.stores() > 1 {
                let store = 1 - now.store;
                possible.push((Layers { cache: Some(mode), store, ..now }, "replace"));
            }
        }
        Some(_) => {}
    }
    if now.cache != Some("write-back") {
        match now.log {
            None => {
                let kind = LOGS[random.usize(0..2)];
                possible.extend([(Layers { log: Some(kind), ..now }, "add log"); 2]);
            }
            Some(_) if can_go_home => {
                possible.extend([(Layers { log: None, ..now }, "remove log"); 2]);
            }
            Some(_) => {}
        }
    }
    if now.log == Some("offload") {
        possible.extend([(now, "offload start"), (now, "offload stop")]);
    }
    let step = drawn::choose(possible, |step| step.1, random).expect("a kill is possible");
    drawn::note(step.1);
    step
}

/// The volume whose file system is full after a step.
pub fn full_after(full: Option<usize>, step: &str) -> Option<usize> {
    match step {
        "make room" => None,
        _ => FILLS.iter().position(|fill| *fill == step).or(full),
    }
}

fn filler(folder: &Path, volume: usize) -> PathBuf {
    folder.join(NAMES[volume]).join(FILLER)
}

/// Takes all space of a file system.
fn fill(folder: &Path, volume: usize) {
    let file = File::create(filler(folder, volume)).unwrap();
    let (mut length, mut step) = (0, 16 << 20);
    while step >= BLOCK as u64 {
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), length, step) {
            Ok(()) => length += step,
            Err(_) => step /= 2,
        }
    }
}

/// Frees what [`fill`] has taken, if there is a full file system.
pub fn make_room(folder: &Path) {
    for volume in [HOME, LOG, CACHE, STATE] {
        let _ = std::fs::remove_file(filler(folder, volume));
    }
}

/// Makes the disk larger, or as large as it was. What it gets has no content.
fn resize(life: &Life) -> Result<(), String> {
    let size = (BLOCKS * BLOCK) as u64;
    let mut nbd = Nbd::try_connect(&life.socket(), "a").map_err(|error| error.to_string())?;
    let has_grown = nbd.capacity() > size;
    if has_grown {
        // A log whose write-back has found no space is full until this is tried again.
        assert!(nbd.send(1, 1, size, GROWTH as u32, &vec![0x5a; GROWTH]));
        let reply = nbd.reply();
        assert!(matches!(reply, Some((1, 0 | NO_SPACE))), "{reply:?}");
        return life.resize(size);
    }
    life.resize(size + GROWTH as u64)?;
    let mut nbd = Nbd::try_connect(&life.socket(), "a").map_err(|error| error.to_string())?;
    assert!(nbd.read(size, GROWTH as u32) == vec![0; GROWTH], "content beyond the end is back");
    Ok(())
}

/// Carries a change out. Returns the daemon after it.
pub fn carry_out(
    life: Life,
    setup: &Setup,
    (now, next): (Layers, Layers),
    text: &str,
) -> (Life, Result<(), String>) {
    let folder = life.socket().parent().unwrap().to_owned();
    let cache = (next.cache.unwrap_or_default(), next.store);
    let result = match text {
        "restart" | "kill" => {
            life.end(text == "restart");
            let life = Life::start(&folder, setup, setup.fails)
                .unwrap_or_else(|log| panic!("{now:?}: {log}"));
            return (life, Ok(()));
        }
        "reload" => life.reload(),
        "limit" if next.is_limited => life.set_layer("limit", cache),
        "limit" => life.remove_layer("limit"),
        "remove and add" => life.replace(now),
        "resize" => resize(&life),
        "attach" | "mode" | "replace" => life.set_layer("cache", cache),
        "detach" => life.remove_layer("cache"),
        "add log" => life.set_layer(next.log.unwrap(), cache),
        "remove log" => life.remove_layer(now.log.unwrap()),
        "offload start" => life.offload(OffloadAction::Start),
        "offload stop" => life.offload(OffloadAction::Stop),
        "make room" => {
            make_room(&folder);
            Ok(())
        }
        _ => {
            fill(&folder, full_after(None, text).expect("a step that fills"));
            Ok(())
        }
    };
    (life, result)
}
