//! Disks added, changed and removed over the control socket.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use fathom_control::{
    Bytes, ClientError, DiskChange, DiskDefinition, ErrorBody, ErrorCode, FrontendStatus,
    ImageFormat, LayerDefinition, ProblemKind, VhostUserDefinition,
};

use crate::nbd::Nbd;
use crate::process::{Daemon, command, image};

fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> ErrorBody {
    match result {
        Err(ClientError::Refused(body)) => body,
        other => panic!("expected a refusal: {other:?}"),
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario")]
fn an_image_of_another_format_is_served_only_as_a_raw_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.img");
    let mut content = vec![0; 1 << 20];
    content[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    std::fs::write(&path, &content).unwrap();
    image(folder.path(), "b.img", 1 << 20);
    let served = command(folder.path())
        .args(["serve", "--image", "a.img", "--nbd", "unix:x.sock", "--control", "x"])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&served.stderr);
    assert!(served.status.code() == Some(2) && stderr.contains("--format raw"), "{stderr}");
    // `bench` serves images as well.
    let bench = |more: &[&str]| {
        let common = ["bench", "--image", "a.img", "--depth", "1", "-t", "20ms", "--warmup", "1ms"];
        command(folder.path()).args(common).args(more).output().unwrap()
    };
    let refused_image = bench(&[]);
    let stderr = String::from_utf8_lossy(&refused_image.stderr);
    assert!(!refused_image.status.success() && stderr.contains("--format raw"), "{stderr}");
    let measured = bench(&["--format", "raw"]);
    assert!(measured.status.success(), "{}", String::from_utf8_lossy(&measured.stderr));
    let text = "[[nbd]]\naddress = \"unix:nbd.sock\"\n[[disk]]\nname = \"b\"\nimage = \"b.img\"\n\
                [[disk]]\nname = \"a\"\nimage = \"a.img\"\n";
    std::fs::write(folder.path().join("f.toml"), text).unwrap();
    let checked =
        command(folder.path()).args(["serve", "--config", "f.toml", "--check"]).output().unwrap();
    let stderr = String::from_utf8_lossy(&checked.stderr);
    assert_eq!(checked.status.code(), Some(2));
    assert!(stderr.contains("f.toml:8:9: ") && stderr.contains("qcow2"), "{stderr}");

    // Data that one guest writes does not prevent the service of other disks.
    let daemon = Daemon::start_in(folder, text);
    let client = daemon.client();
    let names = || client.disks().unwrap().disks.into_iter().map(|d| d.name).collect::<Vec<_>>();
    assert_eq!(names(), ["b"]);
    // The disk that is not served is a problem until it is served.
    let problem = || client.daemon().unwrap().problems.into_iter().next();
    let not_served = problem().expect("a problem");
    assert_eq!((not_served.kind, not_served.disk.as_deref()), (ProblemKind::NotServed, Some("a")));
    assert!(not_served.remedy.contains("format = \"raw\""), "{not_served:?}");
    let logged = |text: &str| daemon.log().lines().filter(|line| line.contains(text)).count();
    daemon.until("the problem to be logged", || logged(" a: problem not-served: ") == 1);
    let metrics = client.metrics().unwrap();
    for line in [
        "fathom_disk_problems{disk=\"a\",vm=\"\"} 1",
        "fathom_disk_problem{disk=\"a\",vm=\"\",kind=\"not-served\"} 1",
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
    let control = daemon.path("control.sock");
    // An entry of the disk's name changes nothing.
    std::fs::create_dir(daemon.path("a")).unwrap();
    let output = |arguments: &[&str]| {
        let mut command = command(&daemon.path("."));
        let output = command.args(arguments).arg("--control").arg(&control).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&text).into_owned()
    };
    assert!(output(&["disk", "list"]).contains("not-served"), "{}", output(&["disk", "list"]));
    assert!(output(&["disk", "info", "a"]).contains("qcow2"));
    let doctor = output(&["doctor"]);
    assert!(doctor.contains("disk a") && doctor.contains("qcow2"), "{doctor}");
    let report = client.reload().unwrap();
    assert!(report.refused.len() == 1 && report.refused[0].contains("format = \"raw\""));
    let mut definition = DiskDefinition {
        name: "added".into(),
        image: Some(path.clone()),
        ..DiskDefinition::default()
    };
    assert_eq!(refused(client.add_disk(&definition)).code, ErrorCode::ForeignFormat);
    definition.format = Some(ImageFormat::Raw);
    client.add_disk(&definition).unwrap();
    client.remove_disk("added", false).unwrap();
    // The remedy works without a restart.
    std::fs::write(daemon.path("f.toml"), format!("{text}format = \"raw\"\n")).unwrap();
    assert_eq!(client.reload().unwrap().refused, [""; 0]);
    assert_eq!(names(), ["a", "b"]);
    assert_eq!(problem(), None);
    daemon.until("the end of the problem to be logged", || {
        logged(" a: problem ended: not-served") == 1
    });
    assert_eq!(logged("problem not-served"), 1, "{}", daemon.log());
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.read(0, 8), content[..8]);
    // A disk stays in use after its guest has written such bytes.
    let mut other = Nbd::connect(&daemon.path("nbd.sock"), "b");
    other.write(0, &content[..512]);
    assert_eq!(other.read(0, 8), content[..8]);
    // For a running disk, declaring it raw changes nothing; the declaration takes effect when it is
    // opened again.
    let declared = text.replace("b.img\"\n", "b.img\"\nformat = \"raw\"\n") + "format = \"raw\"\n";
    std::fs::write(daemon.path("f.toml"), declared).unwrap();
    assert_eq!(client.reload().unwrap().refused, [""; 0]);
    drop((nbd, other));
    daemon.end();
}

#[test]
fn disks_are_added_changed_and_removed() {
    let daemon = Daemon::start("[[nbd]]\naddress = \"unix:nbd.sock\"\n");
    let client = daemon.client();
    assert_eq!(client.disks().unwrap().disks, []);

    image(daemon.path("").as_path(), "a.img", 1 << 20);
    let definition = DiskDefinition {
        name: "a b".into(),
        vm: "web".into(),
        image: Some(daemon.path("a.img")),
        vhost_user: Some(VhostUserDefinition {
            socket: daemon.path("a.sock"),
            ..VhostUserDefinition::default()
        }),
        ..DiskDefinition::default()
    };
    assert_eq!(definition.image, Some(daemon.path("a.img")));
    let added = client.add_disk(&definition).unwrap();
    assert_eq!((added.capacity_bytes, added.serial.as_str()), (1 << 20, "a b"));
    let layers: Vec<&str> = added.layers.iter().map(|layer| layer.name.as_str()).collect();
    assert_eq!(layers, ["classify", "tap"]);
    assert_eq!(added.frontends.len(), 2);
    assert!(matches!(&added.frontends[0], FrontendStatus::VhostUser(guest) if !guest.connected));
    assert_eq!(client.disk("a b").unwrap(), added);
    assert_eq!(client.disks().unwrap().disks, [added]);
    for socket in ["a.sock", "nbd.sock", "control.sock"] {
        let mode = daemon.path(socket).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{socket}");
    }

    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a b");
    assert_eq!(nbd.capacity(), 1 << 20);
    nbd.write(4096, &[7; 4096]);
    assert_eq!(nbd.read(4096, 4096), [7; 4096]);

    let small = refused(client.resize_disk("a b", 1 << 19, false));
    assert_eq!(small.code, ErrorCode::Conflict);
    assert_eq!(refused(client.resize_disk("a b", 1000, true)).code, ErrorCode::Invalid);
    let grown = client.resize_disk("a b", 2 << 20, false).unwrap();
    assert_eq!(grown.capacity_bytes, 2 << 20);
    assert_eq!(daemon.path("a.img").metadata().unwrap().len(), 2 << 20);

    let slow = LayerDefinition::new("delay", serde_json::json!({ "time": "1ms" }));
    let change = DiskChange { layers: Some(vec![slow]), ..DiskChange::default() };
    let instance = client.statistics().unwrap().disks[0].instance;
    let changed = client.change_disk("a b", &change).unwrap();
    let names: Vec<&str> = changed.layers.iter().map(|layer| layer.name.as_str()).collect();
    assert_eq!(names, ["classify", "tap", "delay"]);
    // The existing connection continues through the new layers.
    nbd.write(8192, &[8; 512]);
    let before = std::time::Instant::now();
    assert_eq!(nbd.read(8192, 512), [8; 512]);
    assert!(before.elapsed() >= Duration::from_millis(1));

    let statistics = client.statistics().unwrap();
    let disk = statistics.disk("a b").unwrap();
    assert_eq!(disk.instance, instance, "the tap continues to count");
    assert_eq!(disk.operation("read").unwrap().bytes, 4096 + 512);
    assert_eq!(disk.operation("write").unwrap().count, 2);
    assert_eq!(disk.operation("write").unwrap().latency.count(), 2);
    let metrics = client.metrics().unwrap();
    let line = "fathom_disk_bytes_total{disk=\"a b\",vm=\"web\",operation=\"write\"} 4608";
    assert!(metrics.contains(line), "{metrics}");

    let used = refused(client.remove_disk("a b", false));
    assert_eq!(used.code, ErrorCode::Conflict);
    assert!(used.message.contains("in use by an NBD client"), "{used}");
    let remove = |arguments: &[&str]| {
        let mut command = command(daemon.path("").as_path());
        command.args(["disk", "remove", "a b", "--control", "control.sock"]).args(arguments);
        command.stdin(std::process::Stdio::null()).output().unwrap()
    };
    // Without a terminal there is no question.
    let output = remove(&[]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("--force"), "{output:?}");
    assert_eq!(nbd.read(8192, 512), [8; 512]);
    assert!(remove(&["--force"]).status.success());
    assert_eq!(client.disks().unwrap().disks, []);
    assert!(!daemon.path("a.sock").exists());
    assert_eq!(refused(client.remove_disk("a b", false)).code, ErrorCode::NotFound);
    client.add_disk(&definition).unwrap();
    daemon.end();
}

#[test]
fn invalid_definitions_are_refused_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", 1 << 20);
    let text = "[[disk]]\nname = \"a\"\nimage = \"a.img\"\nvhost_user.socket = \"a.sock\"\n";
    let daemon = Daemon::start_in(folder, text);
    let client = daemon.client();
    let memory = |name: &str| DiskDefinition {
        name: name.into(),
        memory: Some(Bytes(1 << 20)),
        ..DiskDefinition::default()
    };
    let same_name = refused(client.add_disk(&memory("a")));
    assert_eq!(same_name.code, ErrorCode::Conflict);
    let same_socket = DiskDefinition {
        vhost_user: Some(VhostUserDefinition {
            socket: daemon.path("a.sock"),
            ..VhostUserDefinition::default()
        }),
        ..memory("b")
    };
    assert_eq!(refused(client.add_disk(&same_socket)).message, "the disk \"a\" has this socket");
    let same_image =
        DiskDefinition { memory: None, image: Some(daemon.path("a.img")), ..memory("b") };
    assert_eq!(refused(client.add_disk(&same_image)).code, ErrorCode::Conflict);
    let missing =
        DiskDefinition { memory: None, image: Some(daemon.path("missing.img")), ..memory("b") };
    assert!(refused(client.add_disk(&missing)).remedy.contains("fathom disk create"));
    let relative = DiskDefinition { memory: None, image: Some("a.img".into()), ..memory("b") };
    assert!(refused(client.add_disk(&relative)).message.contains("not an absolute path"));
    assert_eq!(refused(client.disk("b")).remedy, "choose among: a");
    assert_eq!(client.disks().unwrap().disks.len(), 1);
    daemon.end();
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    for socket in ["control.sock", "a.sock", "nbd.sock"] {
        drop(std::os::unix::net::UnixListener::bind(folder.path().join(socket)).unwrap());
    }
    let text = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\nvhost_user.socket = \"a.sock\"\n\
                [[nbd]]\naddress = \"unix:nbd.sock\"\n";
    let daemon = Daemon::start_in(folder, text);
    assert_eq!(daemon.client().disks().unwrap().disks.len(), 1);
    for control in ["control.sock", "other.sock"] {
        let second = command(&daemon.path(""))
            .args(["serve", "--strict", "--config", "f.toml", "--control", control])
            .output()
            .unwrap();
        assert_eq!(second.status.code(), Some(1));
        let stderr = String::from_utf8(second.stderr).unwrap();
        let expected =
            if control == "control.sock" { "running already" } else { "another process" };
        assert!(stderr.contains(expected), "{stderr}");
    }
    // The sockets of the first daemon still exist.
    assert_eq!(daemon.client().disks().unwrap().disks.len(), 1);
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "a").capacity(), 1 << 20);
    daemon.end();
}

#[test]
fn a_client_can_wait_for_events() {
    let daemon = Daemon::start("");
    let client = daemon.client();
    let first = client.events(0, Duration::ZERO).unwrap();
    assert!(first.events[0].message.starts_with("ready in "), "{first:?}");
    let waiting = std::thread::spawn({
        let client = client.clone();
        move || client.events(first.last, Duration::from_secs(20)).unwrap()
    });
    std::thread::sleep(Duration::from_millis(50));
    let definition = DiskDefinition {
        name: "m".into(),
        memory: Some(Bytes(1 << 20)),
        ..DiskDefinition::default()
    };
    client.add_disk(&definition).unwrap();
    let list = waiting.join().unwrap();
    assert_eq!(list.events[0].disk.as_deref(), Some("m"));
    assert_eq!(list.events[0].message, "added");
    assert_eq!(list.lost, 0);
    // Who has added it is known a moment later, perhaps in the same answer.
    let mut next = list;
    next.events.remove(0);
    if next.events.is_empty() {
        next = client.events(next.last, Duration::from_secs(20)).unwrap();
    }
    assert_eq!(next.events[0].message.split(" user_id").next(), Some("audit: POST /v1/disks"));
    assert_eq!(client.events(next.last, Duration::from_millis(20)).unwrap().events, []);
    daemon.end();
}

#[test]
fn metrics_over_tcp_serve_nothing_else_and_no_client_blocks_them() {
    use std::io::{Read, Write};
    let text = "[daemon]\nmetrics = \"127.0.0.1:0\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n";
    let daemon = Daemon::start(text);
    let address = daemon.client().daemon().unwrap().metrics_address.unwrap();
    let ask = |request: &str| {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    // Clients that send nothing, or slowly, delay no other.
    let silent: Vec<_> =
        (0..200).map(|_| std::net::TcpStream::connect(&address).unwrap()).collect();
    for mut stream in silent.iter().step_by(2) {
        // It may have lost its place to a later one.
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\n");
    }
    let begin = std::time::Instant::now();
    let page = ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
    assert!(page.contains("fathom_disk_capacity_bytes{disk=\"a\",vm=\"\"} 1048576\n"), "{page}");
    for other in ["GET /v1/disks HTTP/1.1\r\n\r\n", "POST /v1/shutdown HTTP/1.1\r\n\r\n"] {
        assert!(ask(other).starts_with("HTTP/1.1 404 "));
    }
    daemon.end();
}

#[test]
fn a_configured_group_may_use_the_sockets() {
    let output = std::process::Command::new("id").arg("-gn").output().unwrap();
    let group = String::from_utf8(output.stdout).unwrap().trim().to_owned();
    let daemon = Daemon::start(&format!(
        "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
         vhost_user = {{ socket = \"a.sock\", group = \"{group}\" }}\n\
         [[nbd]]\naddress = \"unix:nbd.sock\"\ngroup = \"{group}\"\n"
    ));
    for (socket, expected) in [("a.sock", 0o660), ("nbd.sock", 0o660), ("control.sock", 0o600)] {
        let mode = daemon.path(socket).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, expected, "{socket}");
    }
    daemon.end();
}
