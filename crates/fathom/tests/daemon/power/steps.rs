//! The changes of a disk in use.

use fathom_control::OffloadAction;

use super::BLOCKS;
use super::history::BLOCK;
use super::life::{LOGS, Layers, Life, MODES};
use super::setup::Setup;
use super::volumes::HOME;
use crate::nbd::Nbd;

/// By how much the disk grows, in bytes.
const GROWTH: usize = 256 << 10;

/// A change, and the layers after it.
pub fn step(now: Layers, random: &mut fastrand::Rng) -> (Layers, String) {
    match random.u8(0..16) {
        0 => (now, "restart".into()),
        1 => (now, "kill".into()),
        // The configuration has no layers.
        2 => (Layers::default(), "reload".into()),
        3..6 => match now.cache {
            None => {
                let mode = MODES[random.usize(0..if now.log.is_some() { 2 } else { 3 })];
                (Layers { cache: Some(mode), ..now }, "attach".into())
            }
            Some(_) => (Layers { cache: None, ..now }, "detach".into()),
        },
        6 if now.cache.is_some() && now.log.is_none() => {
            (Layers { cache: Some(MODES[random.usize(0..3)]), ..now }, "mode".into())
        }
        7 | 8 if now.cache != Some("write-back") => match now.log {
            None => {
                let kind = LOGS[random.usize(0..2)];
                (Layers { log: Some(kind), ..now }, "add log".into())
            }
            Some(_) => (Layers { log: None, ..now }, "remove log".into()),
        },
        9 | 10 if now.log == Some("offload") => {
            (now, ["offload start", "offload stop"][random.usize(0..2)].into())
        }
        12 => (Layers { is_limited: !now.is_limited, ..now }, "limit".into()),
        13 => (now, "remove and add".into()),
        14 | 15 => (now, "resize".into()),
        _ => (now, "nothing".into()),
    }
}

/// Makes the disk larger, or as large as it was. What it gets has no content.
fn resize(life: &Life) -> Result<(), String> {
    let size = (BLOCKS * BLOCK) as u64;
    let mut nbd = Nbd::try_connect(&life.socket(), "a").map_err(|error| error.to_string())?;
    let has_grown = nbd.capacity() > size;
    if has_grown {
        nbd.write(size, &vec![0x5a; GROWTH]);
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
    let result = match text {
        "restart" | "kill" => {
            life.end(text == "restart");
            let life = Life::start(&folder, setup, setup.fails)
                .unwrap_or_else(|log| panic!("{now:?}: {log}"));
            return (life, Ok(()));
        }
        "reload" => life.reload(),
        "limit" if next.is_limited => life.set_layer("limit", ""),
        "limit" => life.remove_layer("limit"),
        "remove and add" => life.replace(now),
        "resize" if !setup.is_device[HOME] => resize(&life),
        "attach" | "mode" => life.set_layer("cache", next.cache.unwrap()),
        "detach" => life.remove_layer("cache"),
        "add log" => life.set_layer(next.log.unwrap(), ""),
        "remove log" => life.remove_layer(now.log.unwrap()),
        "offload start" => life.offload(OffloadAction::Start),
        "offload stop" => life.offload(OffloadAction::Stop),
        _ => Ok(()),
    };
    (life, result)
}
