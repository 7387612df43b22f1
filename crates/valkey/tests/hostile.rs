//! A node that answers what it wants.

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use fathom_valkey::{ClusterOptions, ClusterVolume};
use support::volume;

/// The bytes after which a node gives up sending.
const FLOOD: u64 = 64 << 20;

/// Serves every connection with `answer`, and then `again` without an end. Returns its address, and
/// the most bytes that a client has taken.
fn node(answer: &'static [u8], again: &'static [u8]) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let most = Arc::new(AtomicU64::new(0));
    let taken = Arc::clone(&most);
    std::thread::spawn(move || {
        let mut clients: Vec<JoinHandle<()>> = Vec::new();
        for stream in listener.incoming().flatten() {
            let taken = Arc::clone(&taken);
            clients.push(std::thread::spawn(move || flood(stream, answer, again, &taken)));
        }
    });
    (address, most)
}

fn flood(mut stream: TcpStream, answer: &[u8], again: &[u8], taken: &AtomicU64) {
    let _ = stream.read(&mut [0; 4096]);
    let piece = again.repeat((64 << 10) / again.len() + 1);
    let mut sent = answer.len() as u64;
    let mut result = stream.write_all(answer);
    while result.is_ok() && sent < FLOOD {
        result = stream.write_all(&piece);
        sent += piece.len() as u64;
    }
    taken.fetch_max(sent, Ordering::Relaxed);
}

/// The message of an opening whose only node is at `address`.
fn refusal(address: String) -> String {
    let options = ClusterOptions {
        nodes: vec![address],
        timeout: Duration::from_secs(3),
        ..ClusterOptions::default()
    };
    let opened = ClusterVolume::open(&options, &volume("v"));
    opened.err().map(|error| error.message).unwrap_or_default()
}

#[test]
fn a_node_cannot_send_more_than_an_answer_has() {
    for (answer, again) in [
        // A text of 1.3 GB, an array of as many values, a line without an end, an array in arrays.
        (&b"$1300000000\r\n"[..], &b"x"[..]),
        (b"*1300000000\r\n", b":1\r\n"),
        (b"*2000000000\r\n", b"$-1\r\n"),
        (b"-", b"x"),
        (b"*1\r\n", b"*1\r\n"),
    ] {
        let (address, taken) = node(answer, again);
        assert!(refusal(address).contains("no node answers"));
        // What the buffers of two sockets have, and the beginning of an answer.
        let most = taken.load(Ordering::Relaxed);
        assert!(most < FLOOD, "{most} bytes of {:?}", String::from_utf8_lossy(answer));
    }
}

#[test]
fn the_texts_of_a_node_command_no_terminal() {
    let (address, _) =
        node(b"-ERR \x1b[2J\x1b]0;owned\x07\r\n", b"-ERR \x1b[2J\x1b]0;owned\x07\r\n");
    let message = refusal(address);
    assert!(message.contains("no node answers"), "{message:?}");
    assert!(!message.contains(char::is_control), "{message:?}");
    assert!(message.chars().count() < 400, "{message:?}");
}
