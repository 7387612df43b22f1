//! Power losses of a host, with the real daemon: its disk is changed in use, the daemon is ended and killed, while
//! clients write, flush and read. The image, the log, the cache and the daemon's state are on devices of which each write
//! and flush is recorded ([`recorder`]). Afterwards the content of all devices after a power loss is made for instants
//! of the record; a daemon is started on each, and everything that was flushed must be there.

mod client;
mod history;
mod life;
mod recorder;
mod volumes;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

use fathom_control::OffloadAction;
use fathom_sim::each_seed;

use crate::nbd::Nbd;
use crate::process;

use client::Shared;
use history::BLOCK;
use life::{LOGS, Layers, Life, MODES};
use recorder::Recorder;
use volumes::{CACHE, LOG, Volumes};

/// The size of the disk, in blocks.
const BLOCKS: usize = 512;
/// The clients, each with blocks of its own.
const LANES: usize = 2;
/// How long the disk is used and changed.
const LIFE_TIME: Duration = Duration::from_secs(4);
/// The power losses for each seed.
const LOSSES: u64 = 20;
/// The most flushes that no record of a log proves.
const UNPROVED_MAX: usize = 4;
/// The options of the cache.
const CACHE_OPTIONS: [&str; 8] =
    ["--size", "8M", "--log", "1M", "--logs", "1", "--block-size", "16K"];

/// The layers that the disk has, or may have, from an instant on.
struct Change {
    instant: usize,
    may: Vec<Layers>,
    text: String,
}

/// What else has happened to the stores when the daemon starts again.
#[derive(Clone, Copy, Debug)]
enum Damage {
    None,
    /// The device of the log, or that of the cache, is as it was at an instant before the daemon last opened it. A
    /// log may be refused then.
    Old(usize, usize),
    /// A byte of the log has another value. The disk may be refused then. If it is in one of the last records, which
    /// nothing proves to have been durable, these are lost.
    Rotten,
}

/// One life of the host: what was recorded in it.
struct Recorded {
    shared: Shared,
    changes: Vec<Change>,
    end: usize,
}

impl Recorded {
    /// An instant of a power loss: often one soon after a change.
    fn instant(&self, random: &mut fastrand::Rng) -> usize {
        let first = self.end / 20;
        if random.bool() {
            return random.usize(first..self.end);
        }
        let change = &self.changes[random.usize(0..self.changes.len())];
        (change.instant + random.usize(0..1500)).clamp(first, self.end - 1)
    }

    fn damage(&self, instant: usize, random: &mut fastrand::Rng) -> Damage {
        // A roll-back since the last opening cannot be seen.
        let before = |opening: &str| {
            let opens = |change: &&Change| {
                change.instant < instant
                    && ["restart", "kill", opening].contains(&change.text.as_str())
            };
            self.changes.iter().rfind(opens).map_or(0, |change| change.instant)
        };
        let (log, cache) = (before("add log"), before("attach"));
        match random.u8(0..8) {
            0 if log > 0 => Damage::Old(LOG, random.usize(0..log)),
            1 if cache > 0 => Damage::Old(CACHE, random.usize(0..cache)),
            2 => Damage::Rotten,
            _ => Damage::None,
        }
    }
}

#[test]
fn flushed_writes_survive_a_power_loss_at_any_instant() {
    each_seed(4, |seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        let recorder = Recorder::default();
        let Some(mut volumes) = Volumes::new(&recorder, seed) else { return };
        prepare(&volumes);
        recorder.begin();
        let recorded = live(&volumes, &recorder, &mut random);
        let mut wrong = Vec::new();
        for loss in 0..LOSSES {
            let instant = recorded.instant(&mut random);
            let damage = recorded.damage(instant, &mut random);
            let result = lose_power(&mut volumes, &recorded, instant, damage, &mut random);
            if let Err(error) = result {
                wrong.push(format!("power loss {loss} at {instant}, {damage:?}: {error}"));
            }
        }
        let changes: Vec<_> = recorded
            .changes
            .iter()
            .map(|change| format!("{}: {}", change.instant, change.text))
            .collect();
        recorded.shared.recorder.end();
        assert!(
            wrong.is_empty(),
            "{} of {LOSSES}:\n{}\nchanges:\n  {}",
            wrong.len(),
            wrong.join("\n"),
            changes.join("\n  ")
        );
    });
}

fn prepare(volumes: &Volumes) {
    let folder = volumes.path();
    process::image(folder, "home/a.img", (BLOCKS * BLOCK) as u64);
    let mut create = Command::new(env!("CARGO_BIN_EXE_fathom"));
    let status =
        create.current_dir(folder).args(["cache", "create", "cache/store"]).args(CACHE_OPTIONS);
    assert!(status.stdout(std::process::Stdio::null()).status().unwrap().success());
    volumes.sync();
}

/// Uses and changes the disk until the time is over. The daemon is killed at the end.
fn live(volumes: &Volumes, recorder: &Recorder, random: &mut fastrand::Rng) -> Recorded {
    let folder = volumes.path();
    let shared = Shared::new(recorder.clone(), BLOCKS);
    let mut layers = Layers::default();
    let mut changes =
        vec![Change { instant: 0, may: vec![layers], text: "the first start".into() }];
    let mut daemon = Some(Life::start(folder).unwrap());
    let socket = daemon.as_ref().unwrap().socket();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        // A check that fails must not leave the clients running.
        let stop = Stop(&shared);
        let clients: Vec<_> = (0..LANES)
            .map(|lane| {
                let (shared, socket, random) = (&shared, &socket, random.fork());
                scope.spawn(move || client::run(shared, socket, (lane, LANES), BLOCKS, random))
            })
            .collect();
        while begun.elapsed() < LIFE_TIME && clients.iter().all(|client| !client.is_finished()) {
            std::thread::sleep(Duration::from_millis(random.u64(5..250)));
            let (next, text) = step(layers, random);
            // From now on, it may have either.
            let instant = recorder.now();
            changes.push(Change { instant, may: vec![layers, next], text: text.clone() });
            let life = daemon.take().unwrap();
            let (life, result) = carry_out(life, layers, next, &text);
            daemon = Some(life);
            // One that is refused, or fails, leaves them as they were.
            let found = daemon.as_ref().unwrap().layers();
            assert!(
                found == if result.is_ok() { next } else { layers },
                "{text}: {result:?}, {found:?}"
            );
            layers = found;
            let text = format!("{text}: {result:?}, now {layers:?}");
            changes.push(Change { instant: recorder.now(), may: vec![layers], text });
        }
        drop(stop);
        for client in clients {
            if let Err(error) = client.join().unwrap() {
                panic!("{error}\n{}", log(volumes));
            }
        }
    });
    let end = recorder.now();
    daemon.unwrap().end(false);
    let (requests, errors) = shared.counts();
    let texts: Vec<_> = changes.iter().map(|change| change.text.as_str()).collect();
    eprintln!(
        "{requests} requests, {errors} errors, {end} instants, {:?} bytes\n  {}",
        recorder.written(),
        texts.join("\n  ")
    );
    Recorded { shared, changes, end }
}

/// Stops the clients when it is dropped.
struct Stop<'s>(&'s Shared);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

fn log(volumes: &Volumes) -> String {
    std::fs::read_to_string(volumes.path().join("log.txt")).unwrap_or_default()
}

/// A change, and the layers after it.
fn step(now: Layers, random: &mut fastrand::Rng) -> (Layers, String) {
    match random.u8(0..12) {
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
        _ => (now, "nothing".into()),
    }
}

/// Carries a change out. Returns the daemon after it.
fn carry_out(life: Life, now: Layers, next: Layers, text: &str) -> (Life, Result<(), String>) {
    let folder = life.socket().parent().unwrap().to_owned();
    let result = match text {
        "restart" | "kill" => {
            life.end(text == "restart");
            let life = Life::start(&folder).unwrap_or_else(|log| panic!("{now:?}: {log}"));
            return (life, Ok(()));
        }
        "reload" => life.reload(),
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

/// The power fails at `instant`. Starts a daemon on what is left, and checks the disk.
fn lose_power(
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
    volumes.replace(&contents);
    if let Damage::Rotten = damage {
        rot(volumes, random);
    }
    let change = recorded.changes.iter().rfind(|change| change.instant <= instant).unwrap();
    let context = format!("{shares:?} after {:?}", change.text);
    let life = match Life::start(volumes.path()) {
        Ok(life) => life,
        Err(log) => {
            let has_log = |it: &Layers| it.log.is_some() || it.cache == Some("write-back");
            if !matches!(damage, Damage::None) && change.may.iter().any(has_log) {
                return Ok(());
            }
            return Err(format!("{context}: the disk is not served:\n{log}"));
        }
    };
    let layers = life.layers();
    if !change.may.contains(&layers) {
        return Err(format!("{context}: the disk has {layers:?}"));
    }
    let lost = if matches!(damage, Damage::Rotten) { UNPROVED_MAX } else { 0 };
    let result = check(life, layers, recorded, (instant, lost), volumes);
    result.map_err(|error| format!("{context} with {layers:?}: {error}\n{}", last_lines(volumes)))
}

/// Changes a byte of a log.
fn rot(volumes: &Volumes, random: &mut fastrand::Rng) {
    for name in ["log/wal", "log/offload"] {
        let file = File::options().read(true).write(true).open(volumes.path().join(name));
        let Ok(file) = file else { continue };
        let length = file.metadata().unwrap().len();
        let mut byte = [0];
        let at = random.u64(0..length.max(1));
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

/// Reads the disk twice, flushes it, removes its layers, reads it again, and compares it with its image after the end.
fn check(
    life: Life,
    layers: Layers,
    recorded: &Recorded,
    (instant, lost): (usize, usize),
    volumes: &Volumes,
) -> Result<(), String> {
    let mut nbd = Nbd::try_connect(&life.socket(), "a").unwrap();
    let length = (BLOCKS * BLOCK) as u32;
    let content = nbd.read(0, length);
    recorded.shared.history().check(instant, lost, &content)?;
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
    assert!(nbd.send(3, 7, 0, 0, &[]));
    if nbd.reply() != Some((7, 0)) {
        return Err("a flush fails".into());
    }
    same(&nbd.read(0, length), "after a flush")?;
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
    same(&std::fs::read(volumes.path().join("home/a.img")).unwrap(), "the image")
}
