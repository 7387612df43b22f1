//! Guests that reset their device again and again, and clients that connect and leave again and
//! again, get no more than their limit, and their neighbours do not feel them.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fathom_control::DiskChange;
use vhost::VhostBackend;

use crate::nbd::{self, Nbd};
use crate::process::Daemon;
use crate::vmm::{Client, DATA, WRITE};

/// The limit of the disk, in bytes a second, and what it admits at once: a tenth of that, and one
/// request.
const RATE: u64 = 1 << 20;
const BLOCK: u64 = 64 << 10;
/// Each request writes to a block of its own, so that it shows whether it has landed.
const CAPACITY: u64 = 256 << 20;
const TIME: Duration = Duration::from_secs(4);

/// Two disks on one modelled SSD, of which the first has a limit and the least weight.
fn start() -> Daemon {
    let disk = |name: &str, layers: &str| {
        format!(
            "[[disk]]\nname = \"{name}\"\nmemory = \"256M\"\nlayers = [{layers}]\n\
             model = {{ kind = \"sata-ssd\", device = \"d\" }}\n\
             [disk.vhost_user]\nsocket = \"{name}.sock\"\n"
        )
    };
    let limit = format!("{{ kind = \"limit\", total_bytes_sec = {RATE} }}");
    Daemon::start(&format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n{}{}",
        disk("evil", &format!("{limit}, {{ kind = \"schedule\", weight = 1 }}")),
        disk("neighbour", "{ kind = \"schedule\", weight = 1000 }"),
    ))
}

/// Reads of a disk, one at a time, until `is_over`. Returns their times, sorted.
fn reads(socket: &Path, is_over: &AtomicBool) -> Vec<Duration> {
    let mut nbd = Nbd::connect(socket, "neighbour");
    let (mut times, mut random) = (Vec::new(), fastrand::Rng::with_seed(1));
    while !is_over.load(Ordering::Relaxed) {
        let begun = Instant::now();
        nbd.read(random.u64(..CAPACITY / 4096) * 4096, 4096);
        times.push(begun.elapsed());
        std::thread::sleep(Duration::from_millis(2));
    }
    times.sort_unstable();
    times
}

/// Runs `attack`, which writes each block once, and checks what it and the neighbour got.
fn check(attack: impl FnOnce(&Daemon)) {
    let daemon = start();
    let is_over = AtomicBool::new(false);
    let begun = Instant::now();
    let times = std::thread::scope(|scope| {
        let neighbour = scope.spawn(|| reads(&daemon.path("nbd.sock"), &is_over));
        attack(&daemon);
        is_over.store(true, Ordering::Relaxed);
        neighbour.join().unwrap()
    });
    daemon.until("requests to end", || {
        daemon.client().disk("evil").unwrap().figure("limit", "waiting") == Some(0)
    });
    let elapsed = begun.elapsed();
    let written = landed(&daemon) * BLOCK;
    let allowed = RATE as f64 * (elapsed.as_secs_f64() * 1.1 + 0.1) + BLOCK as f64;
    assert!(written as f64 <= allowed, "{written} bytes in {elapsed:?}");
    // It has used its limit, as far as a busy machine lets it.
    assert!(written as f64 >= RATE as f64 / 4.0, "{written} bytes in {elapsed:?}");
    // The median, since on a busy machine some reads wait for a processor.
    let median = times[times.len() / 2];
    assert!(median < Duration::from_millis(100), "half of the neighbour's reads: {median:?}");
}

/// The number of blocks that were written.
fn landed(daemon: &Daemon) -> u64 {
    let change = DiskChange { layers: Some(Vec::new()), ..DiskChange::default() };
    daemon.client().change_disk("evil", &change).unwrap();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "evil");
    (0..CAPACITY / BLOCK).filter(|block| nbd.read(block * BLOCK, 512)[0] != 0).count() as u64
}

#[test]
fn a_guest_that_resets_its_device_again_and_again_gets_its_limit() {
    check(|daemon| {
        let mut client = Client::start(&daemon.path("evil.sock"), 1, 0);
        let (begun, mut block) = (Instant::now(), 0);
        client.put(DATA + 0x10_0000, &vec![1; BLOCK as usize]);
        while begun.elapsed() < TIME {
            for number in 0..20_u16 {
                let at = DATA + 0x200 * u64::from(number);
                client.put_header(at, WRITE, block * BLOCK / 512);
                let data = (DATA + 0x10_0000, BLOCK as u32, false);
                client.put_chain(0, 3 * number, &[(at, 16, false), data, (at + 0x100, 1, true)]);
                client.offer(0, 3 * number);
                block = (block + 1) % (CAPACITY / BLOCK);
            }
            client.kick(0);
            std::thread::sleep(Duration::from_millis(10));
            let stop = Instant::now();
            client.frontend.get_vring_base(0).unwrap();
            assert!(stop.elapsed() < Duration::from_secs(15), "{:?}", stop.elapsed());
            client.clear(0);
            client.start_queue(0, 0);
        }
    });
}

#[test]
fn clients_that_connect_write_and_leave_get_their_limit() {
    for is_orderly in [false, true] {
        check(|daemon| {
            let (begun, mut block) = (Instant::now(), 0);
            while begun.elapsed() < TIME {
                let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "evil");
                for cookie in 0..64 {
                    let data = vec![1; BLOCK as usize];
                    if !nbd.send(nbd::WRITE, cookie, block * BLOCK, BLOCK as u32, &data) {
                        break;
                    }
                    block = (block + 1) % (CAPACITY / BLOCK);
                }
                if is_orderly {
                    nbd.send(nbd::DISCONNECT, 0, 0, 0, &[]);
                }
            }
        });
    }
}
