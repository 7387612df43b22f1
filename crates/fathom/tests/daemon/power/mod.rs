//! Power losses of a host, with the real daemon: its disk is changed in use, the daemon is ended
//! and killed, while clients write, flush and read. The image, the log, the cache and the daemon's
//! state are on devices of which each write and flush is recorded ([`recorder`]). Afterwards the
//! content of all devices after a power loss is made for instants of the record; a daemon is
//! started on each, and everything that was flushed must be there ([`loss`]).
//!
//! What a host has is drawn from the seed ([`setup`]). On some, devices fail at times
//! ([`failures`]); on all, file systems are full for a while. How often each kind of event was
//! drawn is printed at the end ([`drawn`]), and none may be missing.
//!
//! `crates/fathom/tests/mutants.toml` has the negative controls: rules that are taken away, and the
//! tests that notice it, of which this is one.

mod client;
mod drawn;
mod failures;
mod history;
mod life;
mod loss;
mod recorder;
mod setup;
mod steps;
mod volumes;

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fathom_sim::each_seed_beside;

use crate::nbd::Nbd;
use crate::process;

use client::Shared;
use history::BLOCK;
use life::{Layers, Life};
use recorder::Recorder;
use setup::{OFFSETS, Setup};
use volumes::{HOME, LOG, STATE, Volumes};

/// The size of the disk, in blocks.
const BLOCKS: usize = 512;
/// The clients, each with blocks of its own.
const LANES: usize = 2;
/// How long the disk is used and changed, and how often at least.
const LIFE_TIME: Duration = Duration::from_secs(4);
const STEPS_MIN: usize = 20;
/// The power losses for each seed.
const LOSSES: u64 = 24;
/// How many hosts live at a time: they wait for most of their time.
const LIVES: usize = 3;
/// The most further seeds, until each kind of event was drawn.
const SEEDS_MORE_MAX: u64 = 16;
/// The options of the cache.
const CACHE_OPTIONS: [&str; 8] =
    ["--size", "8M", "--log", "1M", "--logs", "1", "--block-size", "16K"];

/// The layers that the disk has, or may have, from an instant on.
struct Change {
    instant: usize,
    may: Vec<Layers>,
    text: String,
}

/// One life of the host: what was recorded in it.
struct Recorded {
    setup: Setup,
    shared: Shared,
    changes: Vec<Change>,
    end: usize,
}

#[test]
fn flushed_writes_survive_a_power_loss_at_any_instant() {
    let (has_run, last) = (AtomicBool::new(true), AtomicU64::new(0));
    each_seed_beside(8, LIVES, |seed| {
        has_run.fetch_and(run(seed), Ordering::Relaxed);
        last.fetch_max(seed, Ordering::Relaxed);
    });
    // A run of some seeds, to repeat a failure, need not have all kinds of events.
    if has_run.into_inner() && std::env::var_os("FATHOM_SEED").is_none() {
        let more = last.into_inner() + 1;
        for seed in more..more + SEEDS_MORE_MAX {
            if drawn::report().1.is_empty() {
                break;
            }
            run(seed);
        }
        let (counts, never) = drawn::report();
        eprintln!("drawn:\n{counts}");
        assert!(never.is_empty(), "never drawn: {never:?}");
    }
}

/// The power fails right after the first change of a new log was acknowledged: home has nothing
/// that was not made durable, and its mark was.
#[test]
fn a_mark_is_durable_before_the_first_change() {
    let layers = Layers { log: Some("wal"), ..Layers::default() };
    let setup = Setup {
        fails: false,
        is_device: [false; 3],
        is_xfs: false,
        // The configuration has the log.
        renamed: Some(layers),
        keeps_log: false,
    };
    let recorder = Recorder::default();
    let mut random = fastrand::Rng::with_seed(0);
    let Some(mut volumes) = Volumes::new(&recorder, &setup, u64::MAX) else { return };
    let folder = volumes.path().to_owned();
    process::image(&folder, setup.image(), (BLOCKS * BLOCK) as u64);
    volumes.sync();
    recorder.begin();
    let life = Life::start(&folder, &setup, false).unwrap();
    assert_eq!(Nbd::connect(&life.socket(), "a").fill_block(3, 7), Some(0));
    let instant = recorder.now();
    life.end(false);
    let contents = recorder.after_power_loss(instant, |device| device != HOME);
    volumes.replace(contents, &recorder, &mut random);
    let life = Life::start(&folder, &setup, false).unwrap_or_else(|log| panic!("{log}"));
    assert_eq!(Nbd::connect(&life.socket(), "a").read_block(3), 7);
    recorder.end();
}

/// One life of a host, and the power losses in it. Returns false if this machine cannot have it.
fn run(seed: u64) -> bool {
    let mut random = fastrand::Rng::with_seed(seed);
    let recorder = Recorder::default();
    let setup = Setup::draw(seed, &mut random);
    eprintln!("seed {seed}: {setup:?}");
    let Some(mut volumes) = Volumes::new(&recorder, &setup, seed) else { return false };
    prepare(&volumes, &setup);
    recorder.begin();
    let recorded = live(&volumes, &setup, &recorder, &mut random);
    let mut wrong = Vec::new();
    for loss in 0..LOSSES {
        let instant = recorded.instant(&mut random);
        let damage = recorded.damage(instant, &mut random);
        drawn::note(damage.kind(&recorded.setup));
        let result = loss::lose_power(&mut volumes, &recorded, instant, damage, &mut random);
        if let Err(error) = result {
            wrong.push(format!("power loss {loss} at {instant}, {damage:?}: {error}"));
        }
    }
    let changes = texts(&recorded.changes);
    recorded.shared.recorder.end();
    assert!(
        wrong.is_empty(),
        "seed {seed}: {} of {LOSSES}:\n{}\nchanges:{changes}",
        wrong.len(),
        wrong.join("\n"),
    );
    true
}

fn prepare(volumes: &Volumes, setup: &Setup) {
    let folder = volumes.path();
    if !setup.is_device[HOME] {
        process::image(folder, Setup::IMAGE, (BLOCKS * BLOCK) as u64);
    }
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fathom"));
        command.current_dir(folder).args(arguments).stdout(Stdio::null());
        assert!(command.status().unwrap().success(), "{arguments:?}");
    };
    for store in &Setup::STORES[..setup.stores()] {
        run(&[&["cache", "create", store], &CACHE_OPTIONS[..]].concat());
    }
    for offset in OFFSETS.iter().filter(|_| setup.is_device[LOG]) {
        run(&["log", "create", Setup::LOGS, "--offset", offset]);
    }
    volumes.sync();
}

/// Uses and changes the disk until the time is over. The daemon is killed at the end.
fn live(
    volumes: &Volumes,
    setup: &Setup,
    recorder: &Recorder,
    random: &mut fastrand::Rng,
) -> Recorded {
    let folder = volumes.path();
    let shared = Shared::new(recorder.clone(), BLOCKS);
    let mut layers = Layers::default();
    let mut changes =
        vec![Change { instant: 0, may: vec![layers], text: "the first start".into() }];
    let mut daemon = Some(Life::start(folder, setup, setup.fails).unwrap());
    let socket = daemon.as_ref().unwrap().socket();
    let begun = Instant::now();
    // The volume whose file system is full, and what a change may have left that was refused
    // because its record could not be written.
    let (mut full, mut doubt): (Option<usize>, Vec<Layers>) = (None, Vec::new());
    std::thread::scope(|scope| {
        // A check that fails must not leave the clients running.
        let stop = Stop(&shared);
        let clients: Vec<_> = (0..LANES)
            .map(|lane| {
                let (shared, socket, random) = (&shared, &socket, random.fork());
                scope.spawn(move || client::run(shared, socket, (lane, LANES), BLOCKS, random))
            })
            .collect();
        while (begun.elapsed() < LIFE_TIME || changes.len() < 2 * STEPS_MIN)
            && clients.iter().all(|client| !client.is_finished())
        {
            std::thread::sleep(Duration::from_millis(random.u64(5..150)));
            if setup.fails && full.is_none() && random.u8(0..4) == 0 {
                let text = "devices fail".into();
                let may = [&[layers], &doubt[..]].concat();
                changes.push(Change { instant: recorder.now(), may: may.clone(), text });
                let life = daemon.take().unwrap();
                let (life, text) = failures::fail(life, layers, setup, &shared, random);
                daemon = Some(life);
                layers = daemon.as_ref().unwrap().layers();
                assert!(may.contains(&layers), "{text}: {layers:?} of {may:?}");
                changes.push(Change { instant: recorder.now(), may, text });
                continue;
            }
            let (next, step) = steps::step(layers, setup, full, random);
            // From now on, it may have either.
            let instant = recorder.now();
            let may = [&[layers, next], &doubt[..]].concat();
            changes.push(Change { instant, may: may.clone(), text: step.into() });
            let life = daemon.take().unwrap();
            let (life, result) = steps::carry_out(life, setup, (layers, next), step);
            daemon = Some(life);
            let found = daemon.as_ref().unwrap().layers();
            let is_right = match &result {
                // A record that could not be completed decides at a start.
                _ if matches!(step, "kill" | "restart") => found == next || doubt.contains(&found),
                Ok(()) => found == next,
                Err(_) if full == Some(STATE) => may.contains(&found),
                // One that is refused, or fails, leaves them as they were.
                Err(_) => found == layers,
            };
            assert!(is_right, "{step}: {result:?}, {found:?} of {may:?}");
            if full == Some(STATE) && result.is_err() {
                doubt = may;
            } else if full != Some(STATE) && next != layers && result.is_ok() {
                doubt.clear();
            }
            layers = found;
            full = steps::full_after(full, step);
            let text = format!("{step}: {result:?}, now {layers:?}");
            let may = [&[layers], &doubt[..]].concat();
            changes.push(Change { instant: recorder.now(), may, text });
        }
        drop(stop);
        for client in clients {
            if let Err(error) = client.join().unwrap() {
                panic!("{error}\nchanges:{}\n{}", texts(&changes), log(volumes));
            }
        }
    });
    let end = recorder.now();
    daemon.unwrap().end(false);
    life::kill_keepers(folder);
    let (requests, errors) = shared.counts();
    eprintln!(
        "{requests} requests, {errors} errors, {end} instants, {:?} bytes{}",
        recorder.written(),
        texts(&changes)
    );
    Recorded { setup: *setup, shared, changes, end }
}

/// The changes, a line each.
fn texts(changes: &[Change]) -> String {
    let lines = changes.iter().map(|change| format!("\n  {}: {}", change.instant, change.text));
    lines.collect::<Vec<_>>().concat()
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
