//! Exports of real servers, and of servers that fail.

mod support;

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fathom_block::{Backend, BackendProblem, ErrorKind};
use fathom_sim::{OneRequest, SimBackend, SimOptions, certificates, each_seed};
use support::*;

#[test]
fn an_export_is_a_disk_and_keeps_its_content() {
    let folder = in_memory();
    let file = |name: &str| folder.path().join(name).display().to_string();
    std::fs::File::create(file("image")).unwrap().set_len(CAPACITY).unwrap();
    std::fs::File::create(file("other")).unwrap().set_len(CAPACITY).unwrap();
    let socket = folder.path().join("nbd.sock");
    let (image, path) = (file("image"), socket.display().to_string());
    let raw = format!("file={}", file("other"));
    let policy =
        ["blocksize-minimum=4096", "blocksize-maximum=64K", "blocksize-error-policy=error"];
    let commands: [(&[&str], u64); 4] = [
        (&["nbdkit", "-f", "-U", &path, "memory", "8M"], 512),
        // Requests have to be divided.
        (
            &[
                &["nbdkit", "-f", "-U", &path, "--filter=blocksize-policy", "memory", "8M"][..],
                &policy,
            ]
            .concat(),
            4096,
        ),
        (&["nbdkit", "-f", "-U", &path, "--no-sr", "file", &raw], 512),
        (&["qemu-nbd", "-t", "-e", "4", "-k", &path, "-f", "raw", "--discard=unmap", &image], 512),
    ];
    for (seed, (command, alignment)) in (1..).zip(commands) {
        let Some(_server) = Program::start(command, &socket) else { return };
        let remote = open(&on_socket(&socket));
        assert_eq!(
            (remote.capacity(), remote.geometry().alignment.max(512)),
            (CAPACITY, alignment as u32)
        );
        let served = disk(&remote);
        let mut harness = harness(&served, 32);
        harness.run(&mut workload(seed, alignment), 3000, |_| {});
        harness.verify(CAPACITY);
        assert!(remote.problems().is_empty(), "{:?}", remote.problems());
        // Another client finds the same content.
        drop(harness);
        let again = disk(&open(&on_socket(&socket)));
        let mut queue = OneRequest::open(&again);
        let mut first = OneRequest::open(&served);
        for offset in (0..CAPACITY).step_by(MIB as usize) {
            assert!(queue.read(offset, MIB) == first.read(offset, MIB), "{command:?}");
        }
    }
}

#[test]
fn a_server_that_is_killed_costs_time_and_no_write() {
    let folder = in_memory();
    let image = folder.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(CAPACITY).unwrap();
    let socket = folder.path().join("nbd.sock");
    let Some(mut server) = nbdkit(&socket, &["file", &image.display().to_string()]) else { return };
    let remote = open(&on_socket(&socket));
    let served = disk(&remote);
    let mut harness = harness(&served, 16);
    let (mut requests, is_over) = (workload(7, 512), AtomicBool::new(false));
    let is_verified = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..12 {
                std::thread::sleep(Duration::from_millis(100));
                server.kill();
                std::thread::sleep(Duration::from_millis(20 * (round % 3)));
                server.run();
            }
            is_over.store(true, Ordering::Release);
            // nbdkit ends with the thread that has started it.
            until("the last requests", || is_verified.load(Ordering::Acquire));
        });
        while !is_over.load(Ordering::Acquire) {
            harness.run(&mut requests, 50, |_| {});
        }
        harness.run(&mut requests, 200, |_| {});
        harness.verify(CAPACITY);
        is_verified.store(true, Ordering::Release);
    });
    assert!(remote.problems().is_empty(), "{:?}", remote.problems());
}

/// The store of the server has a volatile cache, which is lost with it.
#[test]
fn what_a_server_loses_without_a_flush_is_sent_again() {
    each_seed(6, |seed| {
        // Nothing wakes the server's thread for another round.
        let options = SimOptions { rounds_max: 0, ..SimOptions::new(CAPACITY) };
        let new =
            |image: Vec<u8>, seed| Arc::new(SimBackend::with_image(options.clone(), seed, image));
        let mut store = new(vec![0; CAPACITY as usize], seed);
        let mut server = Fathom::start(Arc::clone(&store) as _);
        let remote = open(&server.uri());
        let served = disk(&remote);
        let mut harness = harness(&served, 16);
        let (mut requests, is_over) = (workload(seed, 512), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..5 {
                    std::thread::sleep(Duration::from_millis(60));
                    // No acknowledgement leaves the server after the crash.
                    server.cut();
                    let image = store.crash(seed ^ round);
                    server.stop();
                    store = new(image, seed + round);
                    server.serve(Arc::clone(&store) as _);
                }
                is_over.store(true, Ordering::Release);
            });
            while !is_over.load(Ordering::Acquire) {
                harness.run(&mut requests, 50, |_| {});
            }
        });
        harness.run(&mut requests, 100, |_| {});
        harness.verify(CAPACITY);
        assert!(remote.problems().is_empty(), "{:?}", remote.problems());
    });
}

#[test]
fn a_failed_flush_ends_writing_for_all_until_the_export_is_recovered() {
    let store =
        Arc::new(SimBackend::new(SimOptions { rounds_max: 0, ..SimOptions::new(CAPACITY) }, 1));
    let server = Fathom::start(Arc::clone(&store) as Arc<dyn Backend>);
    let remote = open(&server.uri());
    let served = disk(&remote);
    let (mut one, mut other) = (OneRequest::open(&served), OneRequest::open(&served));
    one.write(0, &[1; 4096]).unwrap();
    store.die();
    assert_eq!((remote.losses(), one.flush()), (0, Err(ErrorKind::Io)));
    store.revive();
    assert_eq!(other.write(4096, &[2; 4096]), Err(ErrorKind::Io), "the other queue learns of it");
    assert_eq!(other.flush(), Err(ErrorKind::Io));
    assert_eq!(other.read(0, 4096).unwrap(), [1; 4096]);
    assert_eq!(remote.losses(), 1);
    let problems = remote.problems();
    assert!(matches!(problems[..], [BackendProblem::WritesLost { .. }]), "{problems:?}");
    remote.recover().unwrap();
    assert!(remote.problems().is_empty() && remote.losses() == 2);
    for queue in [&mut one, &mut other] {
        queue.write(4096, &[3; 4096]).unwrap();
        queue.flush().unwrap();
    }
}

#[test]
fn a_server_that_hangs_or_is_gone_fails_requests_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd.sock");
    let Some(mut server) = nbdkit(&socket, &["memory", "8M"]) else { return };
    let remote = open_within(&on_socket(&socket), Duration::from_secs(2)).unwrap();
    let served = disk(&remote);
    let mut queue = OneRequest::open(&served);
    queue.write(0, &[1; 512]).unwrap();
    queue.flush().unwrap();
    server.signal("STOP");
    // It has several threads.
    std::thread::sleep(Duration::from_millis(200));
    for _ in 0..2 {
        let begun = Instant::now();
        assert_eq!(queue.read(0, 512), Err(ErrorKind::Io));
        assert!(begun.elapsed() > Duration::from_millis(1900), "{:?}", begun.elapsed());
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    }
    let unreachable = |remote: &fathom_nbd::RemoteDisk| match &remote.problems()[..] {
        [BackendProblem::Unreachable { text }] => text.contains("does not answer"),
        _ => false,
    };
    until("the problem", || unreachable(&remote));
    server.signal("CONT");
    until("the end of the problem", || remote.problems().is_empty());
    assert_eq!(queue.read(0, 512).unwrap(), [1; 512]);
    server.kill();
    assert_eq!(queue.write(0, &[2; 512]), Err(ErrorKind::Io));
    // Another export in its place is not the same disk.
    let mut smaller = nbdkit(&socket, &["memory", "4M"]).unwrap();
    until("the refusal", || format!("{:?}", remote.problems()).contains("not what it was"));
    smaller.kill();
    server.run();
    until("the end of the problem", || remote.problems().is_empty());
    queue.write(0, &[3; 512]).unwrap();
}

#[test]
fn connections_are_encrypted_and_both_sides_are_verified() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    if !certificates(folder.path()) || !certificates(other.path()) {
        return;
    }
    let place = folder.path().display().to_string();
    let socket = folder.path().join("nbd.sock");
    let certified = format!("--tls-certificates={place}");
    let arguments = ["--tls=require", &certified, "--tls-verify-peer", "memory", "8M"];
    let Some(_server) = nbdkit(&socket, &arguments) else { return };
    let uri = |place: &str| {
        let socket = socket.display();
        format!("nbds+unix:///?socket={socket}&tls-certificates={place}")
    };
    let remote = open(&uri(&place));
    let served = disk(&remote);
    let mut harness = harness(&served, 16);
    harness.run(&mut workload(1, 512), 1000, |_| {});
    harness.verify(CAPACITY);
    let refusal = |uri: &str| match open_within(uri, PATIENCE) {
        Ok(_) => panic!("{uri} was opened"),
        Err(error) => error.to_string(),
    };
    let text = refusal(&uri(&other.path().display().to_string()));
    assert!(text.contains("TLS handshake failed") && text.contains("certificate"), "{text}");
    let text = refusal(&format!("{}&tls-hostname=elsewhere", uri(&place)));
    assert!(text.contains("TLS handshake failed") && text.contains("mismatch"), "{text}");
    assert!(
        refusal(&on_socket(&socket)).contains("requires TLS"),
        "{}",
        refusal(&on_socket(&socket))
    );
    let text = refusal(&uri("/nowhere"));
    assert!(text.contains("/nowhere/ca-cert.pem"), "{text}");
    // The server verifies the client.
    std::fs::copy(folder.path().join("ca-cert.pem"), other.path().join("ca-cert.pem")).unwrap();
    let text = refusal(&uri(&other.path().display().to_string()));
    assert!(!text.is_empty());
}

#[test]
fn what_cannot_be_used_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd.sock");
    let refusal =
        || open_within(&on_socket(&socket), PATIENCE).err().map(|error| error.to_string());
    let failure = open_within(&on_socket(&socket), PATIENCE).map(drop).unwrap_err();
    assert!(failure.message.contains("No such file"), "{failure:?}");
    assert_eq!(failure.remedy, "check the server, and the URI");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let served = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut client, b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    });
    let text = refusal().unwrap();
    assert!(text.contains("no NBD server"), "{text}");
    served.join().unwrap();
    std::fs::remove_file(&socket).unwrap();
    let Some(old) = nbdkit(&socket, &["-o", "memory", "8M"]) else { return };
    let text = refusal().unwrap();
    assert!(text.contains("newstyle") || text.contains("no NBD server"), "{text}");
    if Command::new("qemu-nbd").arg("--version").stdout(Stdio::null()).status().is_err() {
        return;
    }
    let image = folder.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(CAPACITY).unwrap();
    let (path, image) = (socket.display().to_string(), image.display().to_string());
    let command = ["qemu-nbd", "-t", "-r", "-x", "there", "-k", &path, "-f", "raw", &image];
    drop(old);
    let _server = Program::start(&command, &socket).unwrap();
    let text = refusal().unwrap();
    assert!(text.contains("no such export"), "{text}");
    let uri = format!("nbd+unix:///there?socket={path}");
    let read_only = open(&uri);
    assert!(!read_only.capabilities().write);
    let served = disk(&read_only);
    assert_eq!(OneRequest::open(&served).read(0, 512).unwrap(), [0; 512]);
}
