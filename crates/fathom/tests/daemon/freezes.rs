//! Snapshots with frozen file systems, whose guests' agents do what they want.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fathom_control::{Freeze, PoolChange, PoolEntry, ProblemKind};
use serde_json::{Value, json};

use crate::process::{Daemon, PATIENCE};
use crate::store::{entry, prepared, run};

/// What an agent does when it is to freeze.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    Good,
    /// It freezes, and answers after a second.
    Late,
    /// It freezes, and does nothing more until it is released.
    Hangs,
    /// It does not answer at all.
    Silent,
    /// It freezes, and ends the connection.
    HangsUp,
    /// It freezes nothing, and answers that.
    None,
    Refuses,
    /// It freezes, and answers something else.
    Lies,
    /// It freezes, and sends other bytes for ever.
    Rubbish,
    /// The same, without the end of a line.
    Flood,
    /// Its file systems are frozen already.
    Frozen,
}

/// An agent on a Unix socket, which carries out one command after the other.
struct Agent {
    manner: Manner,
    is_frozen: AtomicBool,
    is_released: AtomicBool,
    freezes: AtomicU32,
    thaws: AtomicU32,
}

impl Agent {
    fn start(path: &Path, manner: Manner) -> Arc<Self> {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).unwrap();
        let agent = Arc::new(Self {
            manner,
            is_frozen: AtomicBool::new(manner == Manner::Frozen),
            is_released: AtomicBool::new(false),
            freezes: AtomicU32::new(0),
            thaws: AtomicU32::new(0),
        });
        let own = Arc::clone(&agent);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let _ = own.serve(&stream);
            }
        });
        agent
    }

    fn serve(&self, stream: &UnixStream) -> std::io::Result<()> {
        let mut output = stream;
        for line in BufReader::new(stream).split(b'\n') {
            let line = line?;
            let begin = usize::from(line.first() == Some(&0xff));
            let Ok(command) = serde_json::from_slice::<Value>(&line[begin..]) else { continue };
            if self.manner == Manner::Silent {
                continue;
            }
            let answer = match command["execute"].as_str().unwrap() {
                "guest-sync-delimited" => {
                    output.write_all(&[0xff])?;
                    json!({ "return": command["arguments"]["id"] })
                }
                "guest-fsfreeze-status" => {
                    let is_frozen = self.is_frozen.load(Ordering::Acquire);
                    json!({ "return": if is_frozen { "frozen" } else { "thawed" } })
                }
                "guest-fsfreeze-thaw" => {
                    let was_frozen = self.is_frozen.swap(false, Ordering::AcqRel);
                    self.thaws.fetch_add(1, Ordering::AcqRel);
                    json!({ "return": i32::from(was_frozen) })
                }
                "guest-fsfreeze-freeze" => match self.freeze(output) {
                    Some(answer) => answer,
                    None => return Ok(()),
                },
                other => json!({ "error": { "desc": format!("what is {other}?") } }),
            };
            output.write_all(format!("{answer}\n").as_bytes())?;
        }
        Ok(())
    }

    /// Returns the answer, or none if the connection ends.
    fn freeze(&self, mut output: &UnixStream) -> Option<Value> {
        let freezes = !matches!(self.manner, Manner::None | Manner::Refuses);
        self.is_frozen.store(freezes, Ordering::Release);
        self.freezes.fetch_add(1, Ordering::AcqRel);
        match self.manner {
            Manner::Late => thread::sleep(Duration::from_secs(1)),
            Manner::Hangs => {
                while !self.is_released.load(Ordering::Acquire) {
                    thread::sleep(Duration::from_millis(5));
                }
            }
            Manner::HangsUp => return None,
            Manner::None => return Some(json!({ "return": 0 })),
            Manner::Refuses => return Some(json!({ "error": { "desc": "not\u{1b}[2J now" } })),
            Manner::Lies => return Some(json!({ "return": { "frozen": [[[[-1]]]] } })),
            Manner::Rubbish => {
                // Until the daemon has enough of it.
                while output.write_all(&b"{\"return\": \x00\n".repeat(4096)).is_ok() {}
                return None;
            }
            Manner::Flood => {
                while output.write_all(&b"x".repeat(1 << 16)).is_ok() {}
                return None;
            }
            Manner::Good | Manner::Silent | Manner::Frozen => {}
        }
        Some(json!({ "return": 2 }))
    }

    fn is_frozen(&self) -> bool {
        self.is_frozen.load(Ordering::Acquire)
    }

    fn release(&self) {
        self.is_released.store(true, Ordering::Release);
    }
}

/// A configuration whose disks belong to the guests `web` and `db`.
fn configuration(more: &str) -> String {
    format!(
        "[[disk]]\nname = \"a\"\nvm = \"web\"\nstore = \"pool\"\nvolume = \"one\"\n\
         [[disk]]\nname = \"b\"\nvm = \"db\"\nstore = \"pool\"\nvolume = \"two\"\n\
         [[guest]]\nvm = \"web\"\nagent = \"web.agent\"\nfreeze_time_max = \"600ms\"\n\
         [[guest]]\nvm = \"db\"\nagent = \"db.agent\"\n{more}"
    )
}

fn take(daemon: &Daemon, name: &str, freeze: Freeze) -> Result<PoolEntry, String> {
    let volumes = vec!["one".to_owned(), "two".to_owned()];
    let change = PoolChange::Snapshot { volumes, name: name.to_owned(), freeze };
    let taken = daemon.client().change_pool(&daemon.path("pool"), change);
    taken.map_err(|error| error.to_string())
}

fn has(daemon: &Daemon, name: &str) -> bool {
    let pool = entry(daemon);
    let with = pool.volumes.iter().filter(|it| it.snapshots.iter().any(|it| it.name == name));
    let count = with.count();
    assert!(count == 0 || count == 2, "all volumes or none");
    count == 2
}

/// The records of frozen guests.
fn records(folder: &Path) -> usize {
    let names = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.file_name());
    names.filter(|name| name.to_string_lossy().starts_with("frozen-")).count()
}

#[test]
fn whatever_an_agent_does_the_guests_are_thawed() {
    for (manner, expected) in [
        (Manner::Good, ""),
        (Manner::Late, "does not answer"),
        (Manner::Hangs, "does not answer"),
        (Manner::Silent, "does not answer"),
        (Manner::HangsUp, "cannot be reached"),
        (Manner::None, "no such file system"),
        (Manner::Refuses, "not[2J now"),
        (Manner::Lies, "not of this protocol"),
        (Manner::Rubbish, "not of this protocol"),
        (Manner::Flood, "not of this protocol"),
        (Manner::Frozen, "frozen already"),
    ] {
        let folder = prepared();
        let web = Agent::start(&folder.path().join("web.agent"), manner);
        let db = Agent::start(&folder.path().join("db.agent"), Manner::Good);
        let daemon = Daemon::start_in(folder, &configuration(""));
        let required = take(&daemon, "required", Freeze::Require);
        let (is_good, froze) = (manner == Manner::Good, db.freezes.load(Ordering::Acquire));
        match &required {
            Ok(pool) => assert!(is_good && pool.warning.is_none(), "{manner:?}"),
            Err(error) => assert!(!is_good && error.contains(expected), "{manner:?}: {error}"),
        }
        assert_eq!(has(&daemon, "required"), is_good, "{manner:?}");
        let is_prepared = !matches!(manner, Manner::Silent | Manner::Frozen);
        // One that fails may do so before the other has begun.
        let is_right = froze == u32::from(is_prepared) || is_prepared && !is_good && froze == 0;
        assert!(is_right, "{manner:?}: it is frozen only if all answer");
        daemon.until("the other guest is thawed", || !db.is_frozen());
        assert!(db.thaws.load(Ordering::Acquire) >= froze, "{manner:?}");
        web.release();
        if manner != Manner::Frozen {
            daemon.until("the guest is thawed", || !web.is_frozen());
        }
        daemon.until("the records are removed", || records(&daemon.path("")) == 0);
        // One that was released hangs no more.
        let is_good = is_good || manner == Manner::Hangs;
        let mut attempts = 0;
        let warning = loop {
            attempts += 1;
            let tried = take(&daemon, &format!("tried{attempts}"), Freeze::Try).unwrap();
            let warning = tried.warning.unwrap_or_default();
            // The last attempt to thaw it may not have ended.
            if !warning.contains("being flushed") {
                break warning;
            }
        };
        assert_eq!(warning.is_empty(), is_good, "{manner:?}: {warning}");
        assert!(warning.contains(if is_good { "" } else { expected }), "{manner:?}: {warning}");
        assert!(has(&daemon, &format!("tried{attempts}")));
        assert_eq!(db.freezes.load(Ordering::Acquire), froze + attempts, "{manner:?}");
        daemon.until("the guests are thawed", || {
            !db.is_frozen() && (manner == Manner::Frozen) == web.is_frozen()
        });
        daemon.until("the records are removed", || records(&daemon.path("")) == 0);
        if manner == Manner::Frozen {
            assert_eq!(web.thaws.load(Ordering::Acquire), 0, "what others froze stays frozen");
        }
        daemon.end();
    }
}

#[test]
fn a_guest_that_an_ended_daemon_froze_is_thawed() {
    for signal in [libc::SIGKILL, libc::SIGTERM] {
        let folder = prepared();
        let agent = Agent::start(&folder.path().join("web.agent"), Manner::Good);
        let hanging = Agent::start(&folder.path().join("db.agent"), Manner::Hangs);
        let daemon = Daemon::start_in(folder, &configuration(""));
        // Its client goes away with the daemon.
        let client = daemon.client();
        let path = daemon.path("pool");
        let request = thread::spawn(move || {
            let volumes = vec!["one".to_owned(), "two".to_owned()];
            let change =
                PoolChange::Snapshot { volumes, name: "s".into(), freeze: Freeze::Require };
            client.change_pool(&path, change).is_err()
        });
        daemon.until("the guest is frozen", || hanging.is_frozen());
        assert!(records(&daemon.path("")) >= 1);
        let begun = Instant::now();
        daemon.signal(signal);
        let (_, folder) = daemon.wait();
        assert!(begun.elapsed() < PATIENCE, "the end waits for nobody");
        assert!(request.join().unwrap());
        if signal == libc::SIGTERM {
            assert!(!agent.is_frozen(), "the daemon thaws before it ends");
        }
        assert!(records(folder.path()) >= 1, "the record outlives it");
        let daemon = Daemon::start_in(folder, &configuration(""));
        let has_problem = || {
            let info = daemon.client().daemon().unwrap();
            info.problems.iter().any(|problem| problem.kind == ProblemKind::GuestFrozen)
        };
        daemon.until("it is a problem", has_problem);
        hanging.release();
        daemon.until("the guests are thawed", || !hanging.is_frozen() && !agent.is_frozen());
        daemon.until("the problem ends", || !has_problem());
        assert_eq!(records(&daemon.path("")), 0);
        assert!(!has(&daemon, "s"));
        daemon.until("it can be frozen again", || match take(&daemon, "again", Freeze::Require) {
            Ok(taken) => taken.warning.is_none(),
            // The last attempt to thaw it has not ended, or the host is busy.
            Err(error) => {
                let late = ["being flushed", "does not answer", "was thawed before"];
                assert!(late.iter().any(|text| error.contains(text)), "{error}");
                false
            }
        });
        daemon.end();
    }
}

#[test]
fn a_client_that_goes_away_leaves_no_guest_frozen() {
    let folder = prepared();
    let web = Agent::start(&folder.path().join("web.agent"), Manner::Hangs);
    let db = Agent::start(&folder.path().join("db.agent"), Manner::Good);
    let daemon = Daemon::start_in(folder, &configuration(""));
    let body = json!({ "path": daemon.path("pool"), "change": {
        "action": "snapshot", "volumes": ["one", "two"], "name": "s", "freeze": "require" } });
    let body = body.to_string();
    let mut client = UnixStream::connect(daemon.path("control.sock")).unwrap();
    write!(
        client,
        "POST /v1/stores HTTP/1.1\r\nHost: fathom\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    daemon.until("the guest is frozen", || web.is_frozen());
    drop(client);
    web.release();
    daemon.until("the guests are thawed", || !web.is_frozen() && !db.is_frozen());
    daemon.until("the records are removed", || records(&daemon.path("")) == 0);
    daemon.end();
}

#[test]
fn a_rule_freezes_and_a_disk_without_an_agent_is_refused() {
    let folder = prepared();
    let web = Agent::start(&folder.path().join("web.agent"), Manner::Good);
    let rule = "[[disk]]\nname = \"c\"\nstore = \"pool\"\nvolume = \"three\"\n\
        [[snapshots]]\nname = \"r\"\nstore = \"pool\"\nvolumes = [\"one\"]\nevery = \"1s\"\n\
        keep_last = 2\nfreeze = \"require\"\n";
    run(folder.path(), &["store", "new", "pool", "three", "4M"]).unwrap();
    let daemon = Daemon::start_in(folder, &configuration(rule));
    daemon.until("snapshots by rule", || entry(&daemon).volumes[0].snapshots.len() == 2);
    assert!(web.freezes.load(Ordering::Acquire) >= 2);
    let create = |more: &[&str]| {
        let words = ["snapshot", "create", "c", "--name", "s"];
        run(&daemon.path(""), &[&words, more].concat())
    };
    let refused = create(&["--freeze"]).unwrap_err();
    assert!(refused.contains("names no agent") && refused.contains("[[guest]]"), "{refused}");
    let tried = create(&["--freeze=try"]).unwrap();
    assert!(tried.contains("warning: ") && tried.contains("not frozen"), "{tried}");
    daemon.until("the guest is thawed", || !web.is_frozen());
    daemon.end();
}
