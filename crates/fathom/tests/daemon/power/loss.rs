//! A power loss: the devices at an instant of the record, and what a daemon makes of them.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::process::Command;

use super::history::{self, BLOCK};
use super::life::{self, Layers, Life};
use super::setup::Setup;
use super::volumes::{self, CACHE, HOME, LOG, Volumes};
use super::{BLOCKS, Change, Recorded, log};
use crate::nbd::Nbd;

/// The most flushes that no record of a log proves.
const UNPROVED_MAX: usize = 4;
/// How many instants are tried.
const INSTANTS_TRIED: usize = 16;
/// The first bytes of a record.
const RECORD: &[u8] = b"WRC2";
/// The blocks of a log.
const LOG_BLOCK: usize = 512;
/// How many instants of the record a message shows.
const TRACE_LENGTH: usize = 1500;
/// The size of a log, in bytes.
const LOG_SIZE: u64 = 1 << 20;

/// What else has happened to the stores when the daemon starts again.
#[derive(Clone, Copy, Debug)]
pub enum Damage {
    None,
    /// The device of the log, of the cache or of the image is as it was at an instant before the
    /// daemon last opened the log or cache. A log may be refused then.
    Old(usize, usize),
    /// A byte of the log has another value. The disk may be refused then. If it is in one of the
    /// last records, which nothing proves to have been durable, these are lost.
    Rotten,
    /// The image has another name, and the configuration names it and the layers. A log that is
    /// refused is kept.
    Renamed,
    /// The image is a copy of what it was: with its attributes, or without. A block device loses
    /// its mark. A log that is refused is kept.
    Copied(bool),
}

impl Recorded {
    /// An instant of a power loss: often one soon after a change.
    pub fn instant(&self, random: &mut fastrand::Rng) -> usize {
        let first = self.end / 20;
        if random.bool() {
            return random.usize(first..self.end);
        }
        let change = &self.changes[random.usize(0..self.changes.len())];
        (change.instant + random.usize(0..1500)).clamp(first, self.end - 1)
    }

    /// The last change before an instant.
    fn change(&self, instant: usize) -> &Change {
        self.changes.iter().rfind(|change| change.instant <= instant).unwrap()
    }

    /// An instant before `end`, if there is one, at which the disk had a log. An older log that was
    /// not in use has no changes.
    fn with_log(&self, end: usize, random: &mut fastrand::Rng) -> usize {
        let mut instants = (0..INSTANTS_TRIED).map(|_| random.usize(0..end));
        let has_log = |at: &usize| self.change(*at).may.iter().all(Layers::has_log);
        instants.find(has_log).unwrap_or_else(|| random.usize(0..end))
    }

    pub fn damage(&self, instant: usize, random: &mut fastrand::Rng) -> Damage {
        // A roll-back since the last opening cannot be seen.
        let before = |opening: &str| {
            let opens = |change: &&Change| {
                change.instant < instant
                    && ["restart", "kill", opening].contains(&change.text.as_str())
            };
            self.changes.iter().rfind(opens).map_or(0, |change| change.instant)
        };
        let (log, cache) = (before("add log"), before("attach"));
        let may = &self.change(instant).may;
        let has_log = may.iter().all(Layers::has_log);
        let is_file = !self.setup.is_device[HOME];
        let mut possible = Vec::new();
        if has_log && log > 0 {
            possible.push(Damage::Old(LOG, self.with_log(log, random)));
            possible.push(Damage::Old(LOG, self.with_log(log, random)));
            possible.push(Damage::Rotten);
            possible.push(Damage::Rotten);
        }
        if may.iter().all(|layers| layers.cache.is_some()) && cache > 0 {
            possible.push(Damage::Old(CACHE, self.with_log(cache, random)));
        }
        if is_file && log > 0 && may.iter().all(|layers| layers.log == Some("wal")) {
            possible.push(Damage::Old(HOME, random.usize(0..log)));
        }
        possible.push(Damage::Copied(is_file && random.bool()));
        // While layers are being changed, the operator does not know which to configure.
        if is_file && may.len() == 1 {
            possible.push(Damage::Renamed);
        }
        if possible.is_empty() || random.u8(0..3) == 0 {
            return Damage::None;
        }
        possible[random.usize(0..possible.len())]
    }
}

/// The power fails at `instant`. Starts a daemon on what is left, and checks the disk.
pub fn lose_power(
    volumes: &mut Volumes,
    recorded: &Recorded,
    instant: usize,
    damage: Damage,
    random: &mut fastrand::Rng,
) -> Result<(), String> {
    let shares: Vec<u8> = volumes::NAMES.map(|_| [0, 10, 50, 90, 100][random.usize(0..5)]).into();
    let recorder = &recorded.shared.recorder;
    let mut contents =
        recorder.after_power_loss(instant, |device| random.u8(0..100) < shares[device]);
    if let Damage::Old(device, instant) = damage {
        contents[device] = recorder.after_power_loss(instant, |_| true).swap_remove(device);
    }
    volumes.replace(contents, recorder, random);
    if let Damage::Rotten = damage {
        rot(volumes, &recorded.setup, random);
    }
    let change = recorded.change(instant);
    let setup = move_image(volumes, &recorded.setup, damage, change);
    let context = format!("{shares:?} after {:?}", change.text);
    life::kill_keepers(volumes.path());
    let life = match Life::start(volumes.path(), &setup, false) {
        Ok(life) => life,
        Err(log) => {
            if log == life::ABSENT && change.text == "remove and add" {
                let image = std::fs::read(volumes.path().join(setup.image())).unwrap();
                let checked = recorded.shared.history().check(instant, 0, &image);
                return checked
                    .map_err(|error| format!("{context}: without the disk: {}", error.1));
            }
            let may_be_refused = matches!(damage, Damage::Old(..) | Damage::Rotten);
            if may_be_refused && change.may.iter().any(Layers::has_log) {
                return Ok(());
            }
            return Err(format!("{context}: the disk is not served:\n{log}"));
        }
    };
    // An image is taken for a backup if the log has no changes.
    if matches!(damage, Damage::Old(HOME, _)) && !last_lines(volumes).contains("it writes home") {
        return Ok(());
    }
    let layers = life.layers();
    if !change.may.contains(&layers) {
        return Err(format!("{context}: the disk has {layers:?}"));
    }
    let lost = if matches!(damage, Damage::Rotten) { UNPROVED_MAX } else { 0 };
    let result = check(life, layers, recorded, &setup, (instant, lost), volumes);
    result.map_err(|error| format!("{context} with {layers:?}: {error}\n{}", last_lines(volumes)))
}

/// Renames or copies the image. Returns what the daemon gets.
fn move_image(volumes: &Volumes, setup: &Setup, damage: Damage, change: &Change) -> Setup {
    let (image, other) = (volumes.path().join(Setup::IMAGE), volumes.path().join(Setup::RENAMED));
    match damage {
        Damage::Renamed => {
            std::fs::rename(image, other).unwrap();
            Setup { renamed: Some(change.may[0]), keeps_log: true, ..*setup }
        }
        Damage::Copied(_) if setup.is_device[HOME] => {
            let marks = std::fs::read_dir(volumes.path().join("state/marks"));
            for file in marks.into_iter().flatten().map(|file| file.unwrap().path()) {
                if file.extension().is_some_and(|extension| extension == "fathom-log") {
                    std::fs::remove_file(file).unwrap();
                }
            }
            Setup { keeps_log: true, ..*setup }
        }
        Damage::Copied(has_attributes) => {
            let option = if has_attributes { "-a" } else { "--sparse=always" };
            let status = Command::new("cp").arg(option).args([&image, &other]).status().unwrap();
            assert!(status.success());
            std::fs::rename(other, image).unwrap();
            Setup { keeps_log: true, ..*setup }
        }
        _ => *setup,
    }
}

/// Changes a byte of each log.
fn rot(volumes: &Volumes, setup: &Setup, random: &mut fastrand::Rng) {
    let places: &[(&str, u64)] = if setup.is_device[LOG] {
        &[(Setup::LOGS, 0), (Setup::LOGS, 8 << 20)]
    } else {
        &[("log/wal", 0), ("log/offload", 0)]
    };
    for (name, offset) in places {
        let file = File::options().read(true).write(true).open(volumes.path().join(name));
        let Ok(mut file) = file else { continue };
        let length = file.seek(SeekFrom::End(0)).unwrap().saturating_sub(*offset).min(LOG_SIZE);
        let mut content = vec![0; length as usize];
        file.read_exact_at(&mut content, *offset).unwrap();
        let records =
            content.chunks(LOG_BLOCK).enumerate().filter(|(_, it)| it.starts_with(RECORD));
        let records: Vec<_> = records.map(|(block, _)| block * LOG_BLOCK).collect();
        // Most bytes of a log are in use by nobody.
        let place = if records.is_empty() || random.u8(0..4) == 0 {
            random.usize(0..content.len().max(1))
        } else {
            records[random.usize(0..records.len())] + random.usize(0..LOG_BLOCK)
        };
        let mut byte = [0];
        let at = offset + place as u64;
        if file.read_at(&mut byte, at).unwrap() == 1 {
            file.write_all_at(&[byte[0] ^ 1 << random.u8(0..8)], at).unwrap();
        }
    }
}

fn last_lines(volumes: &Volumes) -> String {
    let text = log(volumes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

/// Reads the disk twice, flushes it, removes its layers, reads it again, and compares it with its
/// image after the end.
fn check(
    life: Life,
    layers: Layers,
    recorded: &Recorded,
    setup: &Setup,
    (instant, lost): (usize, usize),
    volumes: &Volumes,
) -> Result<(), String> {
    let mut nbd = Nbd::try_connect(&life.socket(), "a").unwrap();
    let length = (BLOCKS * BLOCK) as u32;
    let content = nbd.read(0, length);
    let checked = recorded.shared.history().check(instant, lost, &content);
    checked.map_err(|(block, error)| {
        let find = |sector: &[u8]| {
            history::number(block, sector).filter(|_| history::is_of(&[block], sector))
        };
        let first = instant.saturating_sub(TRACE_LENGTH);
        let trace = recorded.shared.recorder.trace(first..instant, find);
        format!("{error}\nblock {block} on the devices:\n  {}", trace.join("\n  "))
    })?;
    let same = |other: &[u8], what: &str| {
        let differs =
            |block: &usize| content[block * BLOCK..][..BLOCK] != other[block * BLOCK..][..BLOCK];
        let blocks: Vec<_> = (0..BLOCKS).filter(differs).collect();
        if blocks.is_empty() {
            return Ok(());
        }
        Err(format!("{what}: other content in the blocks {blocks:?}"))
    };
    same(&nbd.read(0, length), "read twice")?;
    if recorded.setup.fails && life.has_lost_writes() {
        life.recover().map_err(|(reason, _)| reason)?;
        same(&nbd.read(0, length), "after the recovery")?;
    }
    assert!(nbd.send(3, 7, 0, 0, &[]));
    if nbd.reply() != Some((7, 0)) {
        return Err("a flush fails".into());
    }
    same(&nbd.read(0, length), "after a flush")?;
    if layers.is_limited {
        life.remove_layer("limit")?;
    }
    if layers.cache.is_some() {
        life.remove_layer("cache")?;
        same(&nbd.read(0, length), "without the cache")?;
    }
    if let Some(log) = layers.log {
        life.remove_layer(log)?;
        same(&nbd.read(0, length), "without the log")?;
    }
    drop(nbd);
    life.end(true);
    same(&std::fs::read(volumes.path().join(setup.image())).unwrap(), "the image")
}
