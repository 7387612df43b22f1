//! The stream `Changes`: what operators and the daemon changed, joined with the I/O.

use std::fs::File;
use std::io::Read;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use fathom_control::{Bytes, DiskChange, DiskDefinition, LayerDefinition};
use serde_json::json;

use crate::nbd::Nbd;
use crate::process::{Daemon, PATIENCE, command};

const ONE: &str = "[[disk]]\nname = \"a\"\nvm = \"web\"\nmemory = \"1M\"\n\
                   [[nbd]]\naddress = \"unix:nbd.sock\"\n";

/// A command of `fathom`, with its standard output in a file.
struct Command<'a> {
    daemon: &'a Daemon,
    child: Child,
    output: &'static str,
}

impl<'a> Command<'a> {
    fn start(daemon: &'a Daemon, output: &'static str, arguments: &[&str]) -> Self {
        let child = command(&daemon.path(""))
            .args(arguments)
            .stdout(File::create(daemon.path(output)).unwrap())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { daemon, child, output }
    }

    fn printed(&self) -> String {
        std::fs::read_to_string(self.daemon.path(self.output)).unwrap()
    }

    /// Waits for the end. Returns the output and the messages.
    fn end(mut self) -> (String, String) {
        let begun = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < PATIENCE, "{} does not end", self.output);
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert!(self.child.wait().unwrap().success(), "{stderr}");
        (self.printed(), stderr)
    }
}

impl Drop for Command<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(daemon: &Daemon, arguments: &[&str]) -> String {
    let output = command(&daemon.path("")).args(arguments).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{arguments:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

/// Lines of CSV without the line of names, sorted.
fn lines(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text.lines().skip(1).map(str::to_owned).collect();
    lines.sort();
    lines
}

/// The query of the cookbook, with other lengths of time.
fn cookbook() -> String {
    let page = include_str!("../../../../docs/queries.md");
    let (_, rest) =
        page.split_once("\n## How fast was each disk before and after a change?\n").unwrap();
    let text = rest.split("```sql\n").nth(1).unwrap().split("```").next().unwrap();
    text.replace("[range 10 seconds]", "[range 1 second]")
        .replace("[range 20 seconds]", "[range 2 seconds]")
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario")]
fn a_change_of_a_disk_in_use_is_joined_with_its_requests() {
    let daemon = Daemon::start(ONE);
    let client = daemon.client();
    let record = Command::start(
        &daemon,
        "record.out",
        &["record", "--control", "control.sock", "-o", "all.rec", "-q"],
    );
    let select =
        "select VDisk, Change, Layer, Text, ChangedBy from Changes where VDisk is not null";
    let listed = ["query", "--control", "control.sock", "--csv", select];
    let all = Command::start(&daemon, "all.out", &listed);
    let of_b: Vec<&str> = listed.into_iter().chain(["--disk", "a"]).collect();
    let of_a = Command::start(&daemon, "a.out", &of_b);
    let mut disk = Nbd::connect(&daemon.path("nbd.sock"), "a");
    // Until the commands listen, disks come and go.
    let added = |name: &str| DiskDefinition {
        name: name.into(),
        memory: Some(Bytes(1 << 20)),
        ..DiskDefinition::default()
    };
    daemon.until("the commands listen", || {
        client.add_disk(&added("probe")).unwrap();
        client.remove_disk("probe", true).unwrap();
        client
            .change_disk("a", &DiskChange { classify: Some(true), ..DiskChange::default() })
            .unwrap();
        client
            .change_disk("a", &DiskChange { classify: Some(false), ..DiskChange::default() })
            .unwrap();
        let records = std::fs::metadata(daemon.path("all.rec")).is_ok();
        records && [&all, &of_a].iter().all(|command| command.printed().contains("classify"))
    });
    let mut load = |time: Duration| {
        let end = Instant::now() + time;
        while Instant::now() < end {
            disk.write(0, &[1; 4096]);
        }
    };
    load(Duration::from_millis(1200));
    let delay = LayerDefinition::new("delay", json!({ "time": "20ms" }));
    let change = DiskChange { set_layer: Some(delay), ..DiskChange::default() };
    client.change_disk("a", &change).unwrap();
    load(Duration::from_millis(1500));
    let smaller =
        DiskChange { capacity: Some(Bytes(1 << 19)), shrink: true, ..DiskChange::default() };
    client.change_disk("a", &smaller).unwrap();
    client.add_disk(&added("b")).unwrap();
    client.remove_disk("b", true).unwrap();
    // A change that is refused is none.
    client
        .change_disk("a", &DiskChange { capacity: Some(Bytes(1)), ..DiskChange::default() })
        .unwrap_err();
    daemon.until("the last change", || all.printed().contains("b,disk-removed"));
    daemon.signal(libc::SIGTERM);
    let (of_all, of_a) = (all.end().0, of_a.end().0);
    let of_one = |text: &str| {
        let mut rows = lines(text);
        rows.retain(|line| !line.starts_with("probe") && !line.contains("classify"));
        rows
    };
    let of_disk_a =
        ["a,disk-resized,,from 1 MiB to 512 KiB,control", "a,layer-added,delay,,control"];
    assert_eq!(of_one(&of_a), of_disk_a);
    let of_disk_b = ["b,disk-added,,,control", "b,disk-removed,,,control"];
    assert_eq!(of_one(&of_all), [of_disk_a, of_disk_b].concat());
    // The recording has both streams. The join shows what the layer did.
    record.end();
    let printed = run(&daemon, &["query", "--replay", "all.rec", "--csv", &cookbook()]);
    let rows = lines(&printed);
    let delayed = rows.iter().find(|line| line.starts_with("a,layer-added,delay,")).expect("a row");
    let after: f64 = delayed.split(',').nth(4).unwrap().parse().unwrap();
    assert!(after >= 20_000.0, "{printed}");
    let before = delayed.split(',').nth(3).unwrap();
    assert!(before.parse::<f64>().unwrap() > 0.0, "{printed}");
    let select = "select Change, Host from Changes where VDisk is null";
    let of_daemon = run(&daemon, &["query", "--replay", "all.rec", "--csv", select]);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert_eq!(lines(&of_daemon), [format!("stop,{}", host.trim())]);
    // Each stream is exported by itself.
    let export = ["record", "--export", "all.rec", "-o", "-"];
    assert!(run(&daemon, &export).starts_with("@time,BlktapTS,Type,"));
    let changes: Vec<&str> = export.into_iter().chain(["--stream", "changes"]).collect();
    let changes = run(&daemon, &changes);
    assert!(changes.starts_with("@time,ChangeTS,Change,VMName,VDisk,PDisk,Layer,"), "{changes}");
    assert!(
        changes.lines().any(|line| line.contains(",layer-added,web,a,memory,delay,")),
        "{changes}"
    );
    std::fs::write(daemon.path("changes.csv"), changes).unwrap();
    let select =
        "select distinct Layer from Changes where Change = 'layer-added' and Layer <> 'classify'";
    let again = run(&daemon, &["query", "--replay", "changes.csv", "--csv", select]);
    assert_eq!(lines(&again), ["delay"]);
    assert_eq!(daemon.wait().0.code(), Some(0));
}

/// A kept query of changes alone is there when the daemon starts, and makes no disk collect events.
#[test]
fn a_kept_query_sees_the_start_problems_and_reloads() {
    let query = |name: &str| {
        format!(
            "[[query]]\nname = \"{name}\"\naction = {{ log = \"info\" }}\n\
             cql = \"select '{name}' as Mark, Change, VDisk, Problem from Changes\"\n"
        )
    };
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("i.img"), vec![0; 1 << 20]).unwrap();
    let disk = "[[disk]]\nname = \"i\"\nimage = \"i.img\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n";
    let daemon = Daemon::start_in(folder, &format!("{disk}{}", query("first")));
    let logged = |text: &str| {
        let log = daemon.log();
        log.lines().any(|line| line.contains("first") && line.contains(text))
    };
    daemon.until("the start", || logged("start"));
    std::fs::remove_file(daemon.path("i.img")).unwrap();
    daemon.until("the problem", || {
        // A request for the disks looks for problems.
        daemon.client().disks().unwrap();
        logged("problem-began") && logged("deleted")
    });
    daemon.client().reload().unwrap();
    daemon.until("the reload", || logged("reload"));
    daemon.signal(libc::SIGTERM);
    daemon.wait();
}

/// A program that names no stream gets what it always got: one stream, in the first version.
#[test]
fn a_request_without_streams_gets_the_requests_alone() {
    let daemon = Daemon::start(ONE);
    let client = daemon.client();
    let read = |streams: &[&str]| {
        let mut stream = client.recording(&[], streams, None).unwrap();
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).unwrap();
            bytes
        })
    };
    let (old, changes) = (read(&[]), read(&["Changes"]));
    client
        .change_disk("a", &DiskChange { classify: Some(false), ..DiskChange::default() })
        .unwrap();
    Nbd::connect(&daemon.path("nbd.sock"), "a").write(0, &[1; 512]);
    assert!(client.recording(&[], &["else"], None).is_err());
    daemon.signal(libc::SIGTERM);
    let (old, changes) = (old.join().unwrap(), changes.join().unwrap());
    assert_eq!((old[8], changes[8]), (1, 2));
    let has =
        |bytes: &[u8], text: &str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
    assert!(!has(&old, "Changes") && has(&changes, "Changes"));
    std::fs::write(daemon.path("changes.rec"), changes).unwrap();
    let select = "select Change, Layer from Changes";
    let rows = run(&daemon, &["query", "--replay", "changes.rec", "--csv", select]);
    assert_eq!(lines(&rows), ["layer-removed,classify", "stop,"]);
    let none =
        run(&daemon, &["query", "--replay", "changes.rec", "--csv", "select Size from IOstream"]);
    assert_eq!(lines(&none), [""; 0]);
    assert_eq!(daemon.wait().0.code(), Some(0));
}
