//! What is asked of QEMU by its machine protocol. The client disconnects after use, because QEMU
//! serves one client of a socket at a time.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::process::line::PeerError;
use crate::process::qmp::Qmp;

/// What the operator can do after an error.
pub(crate) fn remedy(error: &PeerError) -> &'static str {
    match error {
        PeerError::Connect(_) => {
            "start QEMU with `-qmp unix:PATH,server=on,wait=off`, and let the daemon access the socket"
        }
        PeerError::Busy => "give the daemon a QMP socket that no other program is connected to",
        PeerError::Foreign => "name a socket of QEMU's machine protocol",
        PeerError::Refused(_) => "see QEMU's message",
    }
}

/// Presses and releases `keys` together; their names are those of QEMU's `QKeyCode`.
pub(super) fn send_keys(path: &Path, keys: &[&str], limit: Duration) -> Result<(), PeerError> {
    let keys: Vec<Value> = keys.iter().map(|key| json!({ "type": "qcode", "data": key })).collect();
    Qmp::open(path, limit)?.command("send-key", &json!({ "keys": keys }), limit)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::Instant;

    use super::*;
    use crate::features::flush::peer::Peer;
    use crate::process::line::{LINE_MAX, LineStream};

    /// The outcome of a command to a peer that sends `answers`.
    fn outcome(answers: &'static [&'static [u8]]) -> Result<(), PeerError> {
        let peer = Peer::start(true, answers);
        send_keys(peer.path(), &["alt", "sysrq", "s"], Duration::from_secs(10))
    }

    static LONG: [u8; LINE_MAX + 1] = [b'x'; LINE_MAX + 1];
    static TOO_LONG: [&[u8]; 1] = [&LONG];
    const GREETING: &[u8] = b"{\"event\": \"SHUTDOWN\"}\r\n{\"QMP\": {}}\r\n";
    const DONE: &[u8] = b"{\"event\": \"RESUME\"}\n{\"return\": {}}\n";

    #[test]
    fn a_command_succeeds_among_events() {
        assert!(outcome(&[GREETING, DONE, DONE]).is_ok());
    }

    #[test]
    fn a_late_answer_is_not_that_of_the_next_command() {
        const LIMIT: Duration = Duration::from_millis(100);
        // The answer to the second command comes with that to the third.
        let answers: &[&[u8]] = &[
            GREETING,
            b"{\"return\": {}, \"id\": 1}\n",
            b"",
            b"{\"return\": {}, \"id\": 2}\n{\"error\": {\"desc\": \"late\"}, \"id\": 2}\n\
              {\"return\": {\"actual\": 7}, \"id\": 3}\n",
        ];
        let peer = Peer::start(true, answers);
        let mut qmp = Qmp::open(peer.path(), Duration::from_secs(5)).unwrap();
        let late = qmp.command("balloon", &json!({ "value": 1 }), LIMIT);
        assert!(matches!(late, Err(PeerError::Busy)), "{late:?}");
        let found = qmp.command("query-balloon", &json!({}), Duration::from_secs(5)).unwrap();
        assert_eq!(found["actual"], 7);
    }

    #[test]
    fn malformed_peers_are_errors() {
        let refused = outcome(&[GREETING, b"{\"error\": {\"desc\": \"no\\u001b[2J\"}}\n"]);
        assert!(matches!(refused, Err(PeerError::Refused(text)) if text == "no[2J"));
        assert!(matches!(outcome(&[b"220 mail.example\r\n"]), Err(PeerError::Foreign)));
        assert!(matches!(outcome(&[b"{\"return\": {}}\n"]), Err(PeerError::Foreign)));
        assert!(matches!(outcome(&[b"[1, 2]\n"]), Err(PeerError::Foreign)));
        assert!(matches!(outcome(&TOO_LONG), Err(PeerError::Foreign)));
        assert!(matches!(outcome(&[]), Err(PeerError::Connect(_))));
        assert!(matches!(outcome(&[GREETING]), Err(PeerError::Connect(_))));
    }

    #[test]
    fn a_silent_peer_and_a_full_backlog_end_in_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let _listener = UnixListener::bind(&path).unwrap();
        let mut waiting = Vec::new();
        // The first connections wait in the backlog for a greeting; later ones find it full.
        let begun = Instant::now();
        let is_full = (0..5000).any(|_| match LineStream::open(&path, Instant::now()) {
            Ok(line) => {
                waiting.push(line);
                false
            }
            Err(error) => matches!(error, PeerError::Busy),
        });
        assert!(is_full, "{} connections", waiting.len());
        let outcome = send_keys(&path, &["s"], Duration::from_millis(100));
        assert!(matches!(outcome, Err(PeerError::Busy)));
        waiting.pop();
        drop(waiting);
        assert!(begun.elapsed() < Duration::from_secs(60));
        let missing = send_keys(&folder.path().join("missing"), &["s"], Duration::from_secs(1));
        assert!(matches!(missing, Err(PeerError::Connect(_))));
    }
}
