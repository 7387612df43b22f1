//! Large requests, which the layer `schedule` passes on in pieces, while the layers of the disk
//! change, while a neighbour uses the device, and across kills and ends of the daemon.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fathom_control::{DiskChange, LayerDefinition};
use serde_json::{Value, json};

use crate::cache::succeeds;
use crate::nbd::{FLUSH, Nbd, READ, WRITE};
use crate::process::{Daemon, image};

/// The length of a request, and of a part that has the content of one write, in bytes.
const LENGTH: usize = 2 << 20;
const BLOCK: usize = 4096;
/// The places of requests on the disk.
const PLACES: usize = 12;
/// The requests in flight.
const DEPTH: usize = 4;
const PAUSE: Duration = Duration::from_millis(10);

/// What the client knows of a place: the numbers of the last write that was sent, that was
/// acknowledged, and that was flushed. A write fills the place with its number.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    sent: u8,
    acknowledged: u8,
    flushed: u8,
}

struct Client {
    socket: PathBuf,
    places: [Place; PLACES],
    random: fastrand::Rng,
}

impl Client {
    /// Writes, flushes and reads until `stop` is set; connects again when the daemon has ended.
    fn run(&mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            let Ok(mut nbd) = Nbd::try_connect(&self.socket, "a") else {
                std::thread::sleep(PAUSE);
                continue;
            };
            let mut is_open = self.check(&mut nbd, |place| place.flushed).is_some();
            while is_open && !stop.load(Ordering::Relaxed) {
                is_open = self.round(&mut nbd).is_some();
            }
        }
    }

    /// Some writes side by side, at times a flush, and a read. `None` if the connection ends.
    fn round(&mut self, nbd: &mut Nbd) -> Option<()> {
        let mut chosen: Vec<usize> = (0..PLACES).collect();
        self.random.shuffle(&mut chosen);
        chosen.truncate(DEPTH);
        for index in &chosen {
            let place = &mut self.places[*index];
            // Numbers are compared: they do not begin again.
            if place.sent == u8::MAX {
                continue;
            }
            place.sent += 1;
            let (data, cookie) = (vec![place.sent; LENGTH], *index as u64);
            let offset = (index * LENGTH) as u64;
            nbd.send(WRITE, cookie, offset, LENGTH as u32, &data).then_some(())?;
        }
        let open = |places: &[Place]| places.iter().any(|it| it.sent != it.acknowledged);
        while open(&self.places) {
            let (cookie, error) = nbd.reply()?;
            assert_eq!(error, 0, "a write");
            let place = &mut self.places[cookie as usize];
            place.acknowledged = place.sent;
        }
        if self.random.u8(0..3) == 0 {
            self.flush(nbd)?;
        }
        let index = chosen[0];
        let content = Self::read(nbd, index)?;
        let expected = self.places[index].acknowledged;
        assert!(content.iter().all(|byte| *byte == expected), "a read after write {expected}");
        Some(())
    }

    fn read(nbd: &mut Nbd, index: usize) -> Option<Vec<u8>> {
        nbd.send(READ, 0, (index * LENGTH) as u64, LENGTH as u32, &[]).then_some(())?;
        assert_eq!(nbd.reply()?.1, 0, "a read");
        nbd.data(LENGTH)
    }

    /// Compares the disk with what is known, and writes each place again. Each block has a number
    /// from the `least` one of its place to that of the last write that was sent. `None` if the
    /// connection ends.
    fn check(&mut self, nbd: &mut Nbd, least: impl Fn(&Place) -> u8) -> Option<()> {
        for index in 0..PLACES {
            let content = Self::read(nbd, index)?;
            let place = &mut self.places[index];
            let known = least(place)..=place.sent;
            for block in content.chunks(BLOCK) {
                assert!(block.iter().all(|byte| *byte == block[0]), "a block is torn");
                assert!(known.contains(&block[0]), "place {index}: {} of {known:?}", block[0]);
            }
            place.sent = place.sent.saturating_add(1);
            let (data, offset) = (vec![place.sent; LENGTH], (index * LENGTH) as u64);
            nbd.send(WRITE, 0, offset, LENGTH as u32, &data).then_some(())?;
            assert_eq!(nbd.reply()?.1, 0, "a write");
            place.acknowledged = place.sent;
        }
        self.flush(nbd)
    }

    fn flush(&mut self, nbd: &mut Nbd) -> Option<()> {
        nbd.send(FLUSH, 0, 0, 0, &[]).then_some(())?;
        assert_eq!(nbd.reply()?.1, 0, "a flush");
        self.places.iter_mut().for_each(|it| it.flushed = it.acknowledged);
        Some(())
    }
}

/// Reads of another disk on the device, until `stop` is set.
fn disturb(socket: &Path, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut nbd) = Nbd::try_connect(socket, "b") else {
            std::thread::sleep(PAUSE);
            continue;
        };
        while !stop.load(Ordering::Relaxed) && nbd.send(READ, 0, 0, BLOCK as u32, &[]) {
            if nbd.reply().is_none() || nbd.data(BLOCK).is_none() {
                break;
            }
        }
    }
}

#[test]
fn large_requests_in_pieces_survive_changes_kills_and_an_end() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", (PLACES * LENGTH) as u64);
    image(folder.path(), "b.img", 1 << 20);
    succeeds(folder.path(), &["create", "store", "--size", "16M", "--log", "8M", "--logs", "1"]);
    let disk = |name: &str| {
        format!(
            "[[disk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nlayers = [{{ kind = \"schedule\", device = \
             \"d\", depth = 4 }}]\n"
        )
    };
    let text = format!("[[nbd]]\naddress = \"unix:nbd.sock\"\n{}{}", disk("a"), disk("b"));
    let mut daemon = Some(Daemon::start_in(folder, &text));
    let socket = daemon.as_ref().unwrap().path("nbd.sock");
    let path = |name: &str| socket.with_file_name(name).display().to_string();
    let set = |kind: &str, options: Value| DiskChange {
        set_layer: Some(LayerDefinition::new(kind, options)),
        ..DiskChange::default()
    };
    let remove =
        |kind: &str| DiskChange { remove_layer: Some(kind.into()), ..DiskChange::default() };
    let schedule =
        |weight: u32| set("schedule", json!({ "device": "d", "depth": 4, "weight": weight }));
    let log = |kind: &str| set(kind, json!({ "log": path(kind), "size": "8M", "age": "100ms" }));
    let cache = |mode: &str| set("cache", json!({ "store": path("store"), "mode": mode }));
    let changes = [
        Some(schedule(300)),
        Some(log("wal")),
        None,
        Some(remove("schedule")),
        Some(schedule(1)),
        Some(remove("wal")),
        Some(cache("write-through")),
        Some(set("limit", json!({ "bps-total": "200M" }))),
        Some(cache("write-back")),
        None,
        Some(remove("limit")),
        Some(schedule(100)),
        Some(remove("cache")),
        Some(log("offload")),
        Some(remove("schedule")),
        None,
        Some(schedule(1000)),
        Some(remove("offload")),
    ];
    let mut client = Client {
        socket: socket.clone(),
        places: [Place::default(); PLACES],
        random: fastrand::Rng::with_seed(1),
    };
    let stop = AtomicBool::new(false);
    let folder = std::thread::scope(|scope| {
        let clients = [scope.spawn(|| client.run(&stop)), scope.spawn(|| disturb(&socket, &stop))];
        for change in changes {
            std::thread::sleep(Duration::from_millis(150));
            let running = daemon.take().unwrap();
            if let Some(change) = change {
                if let Err(error) = running.client().change_disk("a", &change) {
                    stop.store(true, Ordering::Relaxed);
                    panic!("{change:?}: {error:?}\n{}", running.log());
                }
                daemon = Some(running);
            } else {
                running.signal(libc::SIGKILL);
                daemon = Some(Daemon::start_in(running.wait().1, &text));
            }
        }
        // The end comes while requests are in flight.
        std::thread::sleep(Duration::from_millis(150));
        let running = daemon.take().unwrap();
        running.signal(libc::SIGTERM);
        let (status, folder) = running.wait();
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().unwrap();
        }
        assert!(status.success(), "the end was not clean");
        folder
    });
    let daemon = Daemon::start_in(folder, &text);
    client.check(&mut Nbd::connect(&socket, "a"), |place| place.acknowledged).unwrap();
    daemon.end();
}
