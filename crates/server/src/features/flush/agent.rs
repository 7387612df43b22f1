//! A client of the QEMU guest agent, a program in the guest. QEMU passes a Unix socket on to it.
//! The agent runs `sync`, which ends when all dirty data is durable.
//!
//! The agent can also freeze the file systems, which writes their data too. Flushes do not use
//! that: all programs of the guest wait meanwhile. Snapshots do (`freeze`).

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::process::line::{LineStream, Message, PeerError};

/// The byte before the answer that begins a session. The client sends it too, so that the agent
/// drops an unfinished command of an earlier client.
const DELIMITER: u8 = 0xff;
/// The most lines of earlier sessions that are ignored.
const STALE_LINES_MAX: usize = 64;
/// The interval between questions whether the program has ended.
const STATUS_INTERVAL: Duration = Duration::from_millis(20);

/// What the operator can do after an error.
pub(crate) fn remedy(error: &PeerError) -> &'static str {
    match error {
        PeerError::Connect(_) => {
            "start QEMU with `-chardev socket,path=PATH,server=on,wait=off,…` for the agent, and let the \
             daemon access the socket"
        }
        PeerError::Busy => {
            "start the QEMU guest agent in the guest, and let no other program use its socket"
        }
        PeerError::Foreign => "name the socket of the QEMU guest agent",
        PeerError::Refused(_) => {
            "let the agent run `guest-exec` and `guest-exec-status` (its option --block-rpcs, or \
             --allow-rpcs)"
        }
    }
}

/// `sync` in a guest.
#[derive(Debug)]
pub(crate) struct Sync {
    line: LineStream,
    process: u64,
    /// When its status was last requested, and whether the answer is missing.
    requested: Instant,
    is_waiting: bool,
}

/// Makes the agent run `sync`, within `limit`.
pub(super) fn begin_sync(path: &Path, limit: Duration) -> Result<Sync, PeerError> {
    let end = Instant::now() + limit;
    let mut line = LineStream::open(path, end)?;
    synchronize(&mut line, end)?;
    let arguments = json!({ "path": "sync", "arg": [], "capture-output": false });
    line.send(b"", &json!({ "execute": "guest-exec", "arguments": arguments }), end)?;
    let result = line.result(None, end)?;
    let process = result["pid"].as_u64().ok_or(PeerError::Foreign)?;
    Ok(Sync { line, process, requested: Instant::now(), is_waiting: false })
}

/// Begins a session: answers to an earlier client are skipped.
pub(super) fn synchronize(line: &mut LineStream, end: Instant) -> Result<(), PeerError> {
    static SESSIONS: AtomicU32 = AtomicU32::new(0);
    let session = u64::from(std::process::id()) << 20
        | u64::from(SESSIONS.fetch_add(1, Ordering::Relaxed) & 0xf_ffff);
    let command = json!({ "execute": "guest-sync-delimited", "arguments": { "id": session } });
    line.send(&[DELIMITER], &command, end)?;
    for _ in 0..STALE_LINES_MAX {
        let received = line.next(end)?;
        let begin = received.iter().rposition(|byte| *byte == DELIMITER).map_or(0, |at| at + 1);
        if Message::read(&received[begin..]) == Some(Message::Return(Value::from(session))) {
            return Ok(());
        }
    }
    Err(PeerError::Foreign)
}

impl Sync {
    /// Whether `sync` has ended, without waiting.
    ///
    /// # Errors
    /// If it has failed, or if the connection is broken.
    pub(crate) fn poll(&mut self) -> Result<bool, PeerError> {
        if !self.is_waiting {
            if self.requested.elapsed() < STATUS_INTERVAL {
                return Ok(false);
            }
            let arguments = json!({ "pid": self.process });
            let command = json!({ "execute": "guest-exec-status", "arguments": arguments });
            self.line.send(b"", &command, Instant::now() + STATUS_INTERVAL)?;
            (self.requested, self.is_waiting) = (Instant::now(), true);
        }
        let Some(status) = self.line.available_result()? else { return Ok(false) };
        self.is_waiting = false;
        match (status["exited"].as_bool(), status["exitcode"].as_i64(), &status["signal"]) {
            (Some(false), ..) => Ok(false),
            (Some(true), Some(0), _) => Ok(true),
            (Some(true), Some(code), _) => {
                Err(PeerError::Refused(format!("`sync` ended with the status {code}")))
            }
            (Some(true), None, signal) if signal.is_number() => {
                Err(PeerError::Refused(format!("`sync` was ended by the signal {signal}")))
            }
            _ => Err(PeerError::Foreign),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::flush::peer::Peer;
    use crate::process::line::LINE_MAX;

    const LIMIT: Duration = Duration::from_millis(500);

    /// An agent that answers each command, with `exec` and `status`.
    fn agent(
        exec: &'static str,
        status: &'static [&'static str],
    ) -> (tempfile::TempDir, Result<Sync, PeerError>) {
        use std::io::{BufRead, BufReader, Write};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut output = stream.try_clone().unwrap();
            let mut statuses = status.iter();
            for line in BufReader::new(stream).split(b'\n') {
                let Ok(line) = line else { return };
                let begin = usize::from(line.first() == Some(&DELIMITER));
                let command: Value = serde_json::from_slice(&line[begin..]).unwrap();
                let answer = match command["execute"].as_str().unwrap() {
                    "guest-sync-delimited" => {
                        assert_eq!(begin, 1);
                        let id = &command["arguments"]["id"];
                        // The answer to an earlier client precedes it.
                        output.write_all(b"{\"return\": 17}\nrubbish").unwrap();
                        output.write_all(&[DELIMITER]).unwrap();
                        json!({ "return": id }).to_string()
                    }
                    "guest-exec" => exec.to_owned(),
                    _ => match statuses.next() {
                        Some(status) => (*status).to_owned(),
                        None => return,
                    },
                };
                if output.write_all(format!("{answer}\n").as_bytes()).is_err() {
                    return;
                }
            }
        });
        let sync = begin_sync(&path, LIMIT);
        (folder, sync)
    }

    /// The outcome of a `sync` with these answers.
    fn outcome(exec: &'static str, status: &'static [&'static str]) -> Result<(), PeerError> {
        let (_folder, sync) = agent(exec, status);
        let mut sync = sync?;
        while !sync.poll()? {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    #[test]
    fn a_sync_ends_when_its_program_has() {
        const RUNNING: &str = "{\"return\": {\"exited\": false}}";
        const DONE: &str = "{\"return\": {\"exitcode\": 0, \"exited\": true}}";
        outcome("{\"return\": {\"pid\": 9}}", &[RUNNING, RUNNING, DONE]).unwrap();
    }

    #[test]
    fn failures_of_the_agent_are_errors() {
        const STARTED: &str = "{\"return\": {\"pid\": 9}}";
        let blocked = "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"is disabled\"}}";
        assert!(
            matches!(outcome(blocked, &[]), Err(PeerError::Refused(text)) if text == "is disabled")
        );
        for (status, expected) in [
            (&["{\"return\": {\"exited\": true, \"exitcode\": 3}}"], "the status 3"),
            (&["{\"return\": {\"exited\": true, \"signal\": 9}}"], "the signal 9"),
        ] {
            let failed = outcome(STARTED, status);
            assert!(
                matches!(&failed, Err(PeerError::Refused(text)) if text.contains(expected)),
                "{failed:?}"
            );
        }
        for foreign in ["{\"return\": {\"pid\": -1}}", "{\"return\": []}", "{}", "\u{0}"] {
            let failed = outcome(foreign, &[]);
            assert!(matches!(failed, Err(PeerError::Foreign)), "{foreign}: {failed:?}");
        }
        let failed = outcome(STARTED, &["{\"return\": {\"exited\": true}}"]);
        assert!(matches!(failed, Err(PeerError::Foreign)), "{failed:?}");
        assert!(matches!(outcome(STARTED, &[]), Err(PeerError::Connect(_))));
    }

    static FLOOD: [u8; LINE_MAX * 4] = [b'\n'; LINE_MAX * 4];
    static FLOODS: [&[u8]; 1] = [&FLOOD];
    static LONG: [u8; LINE_MAX + 2] = [DELIMITER; LINE_MAX + 2];
    static LONGS: [&[u8]; 1] = [&LONG];

    #[test]
    fn a_hostile_or_silent_agent_ends_in_time() {
        let flood = Peer::start(false, &FLOODS);
        assert!(matches!(begin_sync(flood.path(), LIMIT), Err(PeerError::Foreign)));
        let long = Peer::start(false, &LONGS);
        assert!(matches!(begin_sync(long.path(), LIMIT), Err(PeerError::Foreign)));
        // The agent does not run: QEMU accepts the connection, and nothing answers.
        let silent = Peer::start(false, &[b"", b""]);
        assert!(matches!(
            begin_sync(silent.path(), Duration::from_millis(100)),
            Err(PeerError::Busy)
        ));
        assert!(silent.received().contains("guest-sync-delimited"));
    }
}
