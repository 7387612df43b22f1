//! A power loss: the devices at an instant of the record, and what a daemon makes of them.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::process::Command;

use super::drawn;
use super::history::{self, BLOCK};
use super::life::{self, Layers, Life};
use super::recorder::SECTOR;
use super::setup::Setup;
use super::steps;
use super::volumes::{self, CACHE, HOME, LOG, STATE, Volumes};
use super::{BLOCKS, Change, Recorded, log};
use crate::nbd::Nbd;

/// The changes with which both the log and the cache are opened.
const OPENINGS: [&str; 3] = ["restart", "kill", "remove and add"];
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
/// The bytes of a cache's store that are read at most.
const CACHE_SIZE: usize = 24 << 20;
/// The bytes at the beginning of a cache's store in which bytes rot that are not data.
const CACHE_HEAD: usize = 256 << 10;
/// The size of a log, in bytes.
const LOG_SIZE: u64 = 1 << 20;

/// What else has happened to the stores when the daemon starts again.
#[derive(Clone, Copy, Debug)]
pub enum Damage {
    None,
    /// The device of the log, of the cache, of the image or of the daemon's state is as it was at
    /// an instant before the daemon last opened the log or cache. A log may be refused then.
    Old(usize, usize),
    /// A byte of the log has another value. The disk may be refused then. If it is in one of the
    /// last records, which nothing proves to have been durable, these are lost.
    Rotten,
    /// A byte of the cache has another value. That is without effect, unless it is in the log of
    /// the cache.
    RottenCache,
    /// A byte of a block of the image has another value. That block is lost, or the disk is
    /// refused.
    RottenHome,
    /// The image has another name, and the configuration names it and the layers. A log that is
    /// refused is kept.
    Renamed,
    /// The image is a copy of what it was: with its attributes, or without. A block device loses
    /// its mark. A log that is refused is kept.
    Copied(bool),
}

impl Damage {
    /// The kind of the event.
    pub fn kind(&self, setup: &Setup) -> &'static str {
        match self {
            Self::None => "power loss",
            Self::Old(LOG, _) => "an old log",
            Self::Old(CACHE, _) => "an old cache",
            Self::Old(HOME, _) => "an old image",
            Self::Old(..) => "an old folder of the state",
            Self::Rotten => "a byte rots in a log",
            Self::RottenCache => "a byte rots in a cache",
            Self::RottenHome => "a byte rots in the image",
            Self::Renamed => "rename",
            Self::Copied(true) => "copy with attributes",
            Self::Copied(false) if setup.is_device[HOME] => "lose the mark of a device",
            Self::Copied(false) => "copy without attributes",
        }
    }
}

impl Recorded {
    /// An instant of a power loss: if one is found, one at which a kind of damage is possible that
    /// was never drawn. How far clients and changes come depends on the machine.
    pub fn instant(&self, random: &mut fastrand::Rng) -> usize {
        let (first, never) = (self.any_instant(random), drawn::report().1);
        let mut at = first;
        for _ in 0..INSTANTS_TRIED {
            let possible = self.possible(at, random);
            if possible.iter().any(|damage| never.contains(&damage.kind(&self.setup))) {
                return at;
            }
            at = self.any_instant(random);
        }
        first
    }

    /// An instant: often one soon after a change.
    fn any_instant(&self, random: &mut fastrand::Rng) -> usize {
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

    /// What else may have happened to the stores at an instant.
    pub fn damage(&self, instant: usize, random: &mut fastrand::Rng) -> Damage {
        if random.u8(0..4) == 0 {
            return Damage::None;
        }
        let possible = self.possible(instant, random);
        drawn::choose(possible, |damage| damage.kind(&self.setup), random).unwrap_or(Damage::None)
    }

    fn possible(&self, instant: usize, random: &mut fastrand::Rng) -> Vec<Damage> {
        // A roll-back since the last opening cannot be seen. The opening is between the instants of
        // its begin and of its end.
        let before = |openings: &[&str]| {
            let opens = |changes: &&[Change]| {
                let text = &*changes[0].text;
                changes[1].instant < instant
                    && (OPENINGS.contains(&text) || openings.contains(&text))
            };
            let mut pairs = self.changes.windows(2);
            pairs.rfind(opens).map_or(0, |changes| changes[0].instant)
        };
        // A cache that is replaced in use leaves the log open.
        let (log, cache) = (before(&["add log"]), before(&["attach", "replace"]));
        let may = &self.change(instant).may;
        let has_log = may.iter().all(Layers::has_log);
        let is_file = !self.setup.is_device[HOME];
        let mut possible = vec![Damage::None, Damage::RottenHome];
        if has_log && log > 0 {
            possible.push(Damage::Old(LOG, self.with_log(log, random)));
            possible.push(Damage::Old(LOG, self.with_log(log, random)));
        }
        // A record proves the flushes before it. While offloading is off, no record is written,
        // and any number of flushes is unproved.
        if has_log && log > 0 && may.iter().all(|layers| layers.log == Some("wal")) {
            possible.push(Damage::Rotten);
            possible.push(Damage::Rotten);
        }
        if may.iter().all(|layers| layers.cache.is_some()) && cache > 0 {
            possible.push(Damage::Old(CACHE, self.with_log(cache, random)));
            possible.push(Damage::RottenCache);
        }
        if is_file && log > 0 && may.iter().all(|layers| layers.log == Some("wal")) {
            possible.push(Damage::Old(HOME, random.usize(0..log)));
        }
        possible.push(Damage::Copied(is_file && random.bool()));
        if is_file {
            possible.push(Damage::Renamed);
            // The marks of devices are in this folder.
            possible.push(Damage::Old(STATE, random.usize(0..instant)));
        }
        possible
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
    let rotten = match damage {
        Damage::RottenHome => rot_home(&mut contents[HOME], random),
        _ => None,
    };
    volumes.replace(contents, recorder, random);
    match damage {
        Damage::Rotten => rot(volumes, &recorded.setup, random),
        Damage::RottenCache => rot_cache(volumes, &recorded.setup, random),
        _ => {}
    }
    let change = recorded.change(instant);
    let setups = move_image(volumes, &recorded.setup, damage, change);
    let context = format!("{shares:?} after {:?}", change.text);
    life::kill_keepers(volumes.path());
    let has_log_in_cache = change.may.iter().any(|layers| layers.cache == Some("write-back"));
    let may_be_refused = match damage {
        Damage::Old(..) | Damage::Rotten | Damage::RottenHome => true,
        Damage::RottenCache => has_log_in_cache,
        _ => false,
    };
    let mut setup = setups[0];
    let mut started = Life::start(volumes.path(), &setup, false);
    let has_no_space = |log: &String| log.contains("No space left on device");
    if matches!(damage, Damage::Renamed) && started.as_ref().err().is_some_and(has_no_space) {
        // An image with another name needs another mark, and the operator makes space for it.
        steps::make_room(volumes.path());
        started = Life::start(volumes.path(), &setup, false);
    }
    for other in &setups[1..] {
        // The operator configures what the disk had otherwise.
        if started.is_err() {
            setup = *other;
            started = Life::start(volumes.path(), &setup, false);
        }
    }
    let life = match started {
        Ok(life) => life,
        Err(log) => {
            // It was being removed then, and the log still has its changes.
            if log == life::ABSENT && matches!(damage, Damage::Old(STATE, _)) {
                return Ok(());
            }
            if log == life::ABSENT && change.text == "remove and add" {
                let image = std::fs::read(volumes.path().join(setup.image())).unwrap();
                let checked = recorded.shared.history().check((instant, 0), rotten, &image);
                return checked
                    .map_err(|error| format!("{context}: without the disk: {}", error.1));
            }
            // An old state may have a log where there was none.
            let has_log =
                matches!(damage, Damage::Old(STATE, _)) || change.may.iter().any(Layers::has_log);
            if may_be_refused && has_log {
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
    if !change.may.contains(&layers) && !matches!(damage, Damage::Old(STATE, _)) {
        return Err(format!("{context}: the disk has {layers:?}"));
    }
    let may_lose = matches!(damage, Damage::Rotten)
        || matches!(damage, Damage::RottenCache) && has_log_in_cache;
    let lost = if may_lose { UNPROVED_MAX } else { 0 };
    let result = check(life, layers, recorded, &setup, (instant, lost), rotten, volumes);
    result.map_err(|error| format!("{context} with {layers:?}: {error}\n{}", last_lines(volumes)))
}

/// Renames or copies the image. Returns what the daemon gets: several if the operator does not know
/// which layers to configure, because they were being changed.
fn move_image(volumes: &Volumes, setup: &Setup, damage: Damage, change: &Change) -> Vec<Setup> {
    let (image, other) = (volumes.path().join(Setup::IMAGE), volumes.path().join(Setup::RENAMED));
    match damage {
        Damage::Renamed => {
            std::fs::rename(image, other).unwrap();
            let with =
                |layers: &Layers| Setup { renamed: Some(*layers), keeps_log: true, ..*setup };
            let mut setups: Vec<_> = change.may.iter().map(with).collect();
            setups.dedup_by_key(|setup| setup.renamed);
            setups
        }
        Damage::Copied(_) if setup.is_device[HOME] => {
            let marks = std::fs::read_dir(volumes.path().join("state/marks"));
            for file in marks.into_iter().flatten().map(|file| file.unwrap().path()) {
                if file.extension().is_some_and(|extension| extension == "fathom-log") {
                    std::fs::remove_file(file).unwrap();
                }
            }
            vec![Setup { keeps_log: true, ..*setup }]
        }
        Damage::Copied(has_attributes) => {
            steps::make_room(volumes.path());
            let option = if has_attributes { "-a" } else { "--sparse=always" };
            let status = Command::new("cp").arg(option).args([&image, &other]).status().unwrap();
            assert!(status.success());
            std::fs::rename(other, image).unwrap();
            vec![Setup { keeps_log: true, ..*setup }]
        }
        _ => vec![*setup],
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

/// Changes a byte of each store of a cache: of a block, or of what comes before all blocks.
fn rot_cache(volumes: &Volumes, setup: &Setup, random: &mut fastrand::Rng) {
    for name in &Setup::STORES[..setup.stores()] {
        let path = volumes.path().join(name);
        let file = File::options().read(true).write(true).open(path).unwrap();
        let mut content = vec![0; CACHE_SIZE];
        let length = file.read_at(&mut content, 0).unwrap();
        let place = match random_sector(&content[..length], random) {
            Some((place, _)) if random.bool() => place,
            _ => random.usize(0..length.min(CACHE_HEAD)),
        };
        file.write_all_at(&[content[place] ^ 1 << random.u8(0..8)], place as u64).unwrap();
    }
}

/// Changes a byte of the data of a block. Returns the block.
fn rot_home(content: &mut [u8], random: &mut fastrand::Rng) -> Option<usize> {
    let (place, block) = random_sector(content, random)?;
    content[place + random.usize(0..SECTOR)] ^= 1 << random.u8(0..8);
    Some(block)
}

/// A sector with the data of a block, and the block.
fn random_sector(content: &[u8], random: &mut fastrand::Rng) -> Option<(usize, usize)> {
    let sectors = content.chunks_exact(SECTOR).enumerate();
    let block = |sector: &[u8]| history::block_of(sector).filter(|block| *block < BLOCKS);
    let found: Vec<_> =
        sectors.filter_map(|(at, sector)| Some((at * SECTOR, block(sector)?))).collect();
    if found.is_empty() { None } else { Some(found[random.usize(0..found.len())]) }
}

fn last_lines(volumes: &Volumes) -> String {
    let text = log(volumes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

/// Reads the disk twice, flushes it, removes its layers, reads it again, and compares it with its
/// image after the end. The block `rotten` may have anything.
fn check(
    life: Life,
    layers: Layers,
    recorded: &Recorded,
    setup: &Setup,
    (instant, lost): (usize, usize),
    rotten: Option<usize>,
    volumes: &Volumes,
) -> Result<(), String> {
    let mut nbd = Nbd::try_connect(&life.socket(), "a").unwrap();
    let length = (BLOCKS * BLOCK) as u32;
    let content = nbd.read(0, length);
    let checked = recorded.shared.history().check((instant, lost), rotten, &content);
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
        let history = recorded.shared.history();
        let is_known = |block: &usize| {
            Some(*block) != rotten && !history.is_discarded(*block, (instant, lost))
        };
        let differs = |block: &usize| is_known(block) && differs(block);
        let blocks: Vec<_> = (0..BLOCKS).filter(differs).collect();
        if blocks.is_empty() {
            return Ok(());
        }
        Err(format!("{what}: other content in the blocks {blocks:?}"))
    };
    same(&nbd.read(0, length), "read twice")?;
    // A full file system has not kept it from being served.
    steps::make_room(volumes.path());
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
