//! TLS with the clients' own libraries: certificates, and pre-shared keys.

mod nbd_common;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_frontend::nbd::{Address, Exports, Listener, ListenerOptions};
use fathom_sim::certificates;
use fathom_tls::{Certificates, Tls};
use nbd_common::*;

fn serve(exports: &Arc<Exports>, tls: Tls) -> (Listener, u16) {
    let mut options = ListenerOptions::new(Address::Tcp("127.0.0.1:0".parse().unwrap()));
    options.tls = Some(tls);
    let listener = Listener::new(options, Arc::clone(exports)).unwrap();
    let Address::Tcp(address) = listener.address() else { panic!("a TCP listener") };
    let port = address.port();
    (listener, port)
}

/// Waits until `count` clients have been refused: the client may see the refusal before the server.
fn await_errors(listener: &Listener, count: u64) {
    let end = Instant::now() + Duration::from_secs(10);
    while listener.counters().protocol_errors < count {
        assert!(Instant::now() < end, "{:?}", listener.counters());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn exports() -> Arc<Exports> {
    let exports = Arc::new(Exports::new());
    exports.add("disk", "", disk("disk", 16 * MIB)).unwrap();
    exports
}

/// Copies enough data for many records and for full sockets, in both directions.
fn copy_there_and_back(directory: &Path, uri: &str) {
    let (source, target) = (directory.join("source"), directory.join("target"));
    fs::write(&source, pattern(11, 16 << 20)).unwrap();
    run("nbdcopy", &[&source.display().to_string(), uri]);
    run("nbdcopy", &[uri, &target.display().to_string()]);
    assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap());
}

#[test]
fn certificates_encrypt_and_verify() {
    if !have(&["certtool", "nbdinfo", "nbdcopy"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    certificates(directory.path());
    let exports = exports();
    let tls = Tls::server(&Certificates::of_directory(directory.path(), false)).unwrap();
    let (listener, port) = serve(&exports, tls);
    // Without TLS no client is admitted, not even to the list.
    let plain = attempt("nbdinfo", &[&format!("nbd://localhost:{port}/disk")]);
    assert!(!plain.status.success());
    let text = String::from_utf8_lossy(&plain.stderr).into_owned();
    // The messages of libnbd before and from 1.20 on.
    let messages = ["server replied with error", "requires TLS"];
    assert!(messages.iter().any(|words| text.contains(words)), "{text}");
    let mut client = Client::greet(std::net::TcpStream::connect(("127.0.0.1", port)).unwrap());
    assert_eq!(client.outcome(LIST, &[]), ERROR | 5);
    assert_eq!(client.outcome(GO, &go("disk", &[])), ERROR | 5);
    client.send_option(EXPORT_NAME, b"disk");
    assert!(client.is_disconnected());
    assert!(!attempt("nbdinfo", &["--list", &format!("nbd://localhost:{port}")]).status.success());
    // With TLS, and a client that trusts the server's authority.
    let place = directory.path().display();
    let uri = format!("nbds://localhost:{port}/disk?tls-certificates={place}");
    let info = run("nbdinfo", &[&uri]);
    assert!(info.contains("with TLS"), "{info}");
    copy_there_and_back(directory.path(), &uri);
    assert!(listener.connections().iter().all(|connection| connection.tls.is_some()));
    if have(&["qemu-img"]) {
        let credentials = format!("tls-creds-x509,id=tls0,endpoint=client,dir={place}");
        let image = format!("driver=nbd,host=localhost,port={port},export=disk,tls-creds=tls0");
        run("qemu-img", &["info", "--object", &credentials, "--image-opts", &image]);
    }
    // A client that trusts another authority disconnects.
    let other = tempfile::tempdir().unwrap();
    certificates(other.path());
    let wrong = format!("nbds://localhost:{port}/disk?tls-certificates={}", other.path().display());
    assert!(!attempt("nbdinfo", &[&wrong]).status.success());
    listener.shutdown();

    // The server also verifies clients: one of its authority, one of another, and one without a
    // certificate.
    let tls = Tls::server(&Certificates::of_directory(directory.path(), true)).unwrap();
    let (listener, port) = serve(&exports, tls);
    let uri = format!("nbds://localhost:{port}/disk?tls-certificates={place}");
    run("nbdinfo", &[&uri]);
    fs::copy(directory.path().join("ca-cert.pem"), other.path().join("ca-cert.pem")).unwrap();
    let wrong = format!("nbds://localhost:{port}/disk?tls-certificates={}", other.path().display());
    assert!(!attempt("nbdinfo", &[&wrong]).status.success());
    fs::remove_file(other.path().join("client-cert.pem")).unwrap();
    fs::remove_file(other.path().join("client-key.pem")).unwrap();
    assert!(!attempt("nbdinfo", &[&wrong]).status.success());
    await_errors(&listener, 2);
    run("nbdinfo", &[&uri]);
    listener.shutdown();
}

#[test]
fn shared_keys_encrypt_and_verify() {
    if !have(&["psktool", "nbdinfo", "nbdcopy"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let keys = directory.path().join("keys.psk").display().to_string();
    run("psktool", &["-u", "alice", "-p", &keys]);
    let exports = exports();
    let (listener, port) = serve(&exports, Tls::shared_keys(Path::new(&keys)).unwrap());
    assert!(!attempt("nbdinfo", &[&format!("nbd://localhost:{port}/disk")]).status.success());
    let uri = format!("nbds://alice@localhost:{port}/disk?tls-psk-file={keys}");
    let info = run("nbdinfo", &[&uri]);
    assert!(info.contains("with TLS"), "{info}");
    copy_there_and_back(directory.path(), &uri);
    if have(&["qemu-img"]) {
        // QEMU looks for keys.psk in the directory.
        let place = directory.path().display();
        let credentials =
            format!("tls-creds-psk,id=tls0,endpoint=client,username=alice,dir={place}");
        let image = format!("driver=nbd,host=localhost,port={port},export=disk,tls-creds=tls0");
        run("qemu-img", &["info", "--object", &credentials, "--image-opts", &image]);
    }
    // Another user, and another key of the same user.
    let wrong = format!("nbds://bob@localhost:{port}/disk?tls-psk-file={keys}");
    assert!(!attempt("nbdinfo", &[&wrong]).status.success());
    let forged = directory.path().join("forged.psk").display().to_string();
    run("psktool", &["-u", "alice", "-p", &forged]);
    let wrong = format!("nbds://alice@localhost:{port}/disk?tls-psk-file={forged}");
    assert!(!attempt("nbdinfo", &[&wrong]).status.success());
    run("nbdinfo", &[&uri]);
    await_errors(&listener, 1);
    listener.shutdown();
}

#[test]
fn tls_is_available_on_unix_sockets_too() {
    if !have(&["psktool", "nbdinfo"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let keys = directory.path().join("keys.psk").display().to_string();
    run("psktool", &["-u", "alice", "-p", &keys]);
    let tls = Tls::shared_keys(Path::new(&keys)).unwrap();
    let server = Server::with(&[&disk("disk", MIB)], |options| {
        options.tls = Some(tls);
        options.plain_allowed = true;
    });
    assert_eq!(server.client("disk", Mode::Extended).read(0, 1), [0]);
    let socket = server.socket().display().to_string();
    let uri = format!("nbds+unix://alice@/disk?socket={socket}&tls-psk-file={keys}");
    assert!(run("nbdinfo", &[&uri]).contains("with TLS"));
    // Options before TLS, sent so that they look like options after it.
    let mut client = Client::greet(server.connect());
    let mut bytes = Vec::new();
    for code in [STARTTLS, STRUCTURED] {
        bytes.extend(b"IHAVEOPT");
        bytes.extend(code.to_be_bytes());
        bytes.extend([0; 4]);
    }
    std::io::Write::write_all(&mut client.stream, &bytes).unwrap();
    let _acknowledged = client.take(20);
    assert!(client.is_disconnected());
}

/// Connections of an address that never authenticate take each other's places.
#[test]
fn clients_that_never_authenticate_lock_nobody_out() {
    if !have(&["nbdinfo"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let keys = directory.path().join("keys.psk").display().to_string();
    fs::write(&keys, format!("alice:{}\n", "5a".repeat(32))).unwrap();
    let exports = exports();
    let mut options = ListenerOptions::new(Address::Tcp("127.0.0.1:0".parse().unwrap()));
    options.tls = Some(Tls::shared_keys(Path::new(&keys)).unwrap());
    options.connections_max = 100;
    options.authentication_time_max = Duration::from_secs(6);
    let listener = Listener::new(options, Arc::clone(&exports)).unwrap();
    let Address::Tcp(address) = *listener.address() else { panic!("a TCP listener") };
    let uri = format!("nbds://alice@localhost:{}/disk?tls-psk-file={keys}", address.port());
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(std::net::TcpStream::connect(address).unwrap());
    }
    // Some have begun, and go on no further.
    for stream in silent.iter().skip(250) {
        let mut client = Client::greet(stream.try_clone().unwrap());
        client.send_option(STARTTLS, &[]);
    }
    let begin = Instant::now();
    for _ in 0..3 {
        run("nbdinfo", &[&uri]);
    }
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    let counters = listener.counters();
    assert!(counters.refused >= 300 - 64, "{counters:?}");
    assert!(listener.connections().len() <= 100, "{}", listener.connections().len());
    // Those that are left have seconds.
    let end = Instant::now() + Duration::from_secs(30);
    while !listener.connections().is_empty() {
        assert!(Instant::now() < end, "{} are left", listener.connections().len());
        std::thread::sleep(Duration::from_millis(20));
    }
    run("nbdinfo", &[&uri]);
    listener.shutdown();
}
