//! The devices beneath the disks, as operators see them.

use std::process::Stdio;
use std::time::Duration;

use fathom_control::{DeviceStatus, DiskChange, LayerDefinition};
use serde_json::Value;

use crate::nbd::{FLUSH, Nbd, READ, WRITE};
use crate::process::{Daemon, command, disk_over_nbd, image};
use crate::stuck::Stuck;

/// The devices on which `disk` lies.
fn beneath(devices: &[DeviceStatus], disk: &str) -> Vec<(String, String)> {
    let has = |device: &&DeviceStatus| device.disks.iter().any(|name| name == disk);
    let found = devices.iter().filter(has);
    found.map(|device| (device.kind.clone(), device.name.clone())).collect()
}

#[test]
fn disks_are_shown_with_the_devices_that_they_lie_on() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", 8 << 20);
    image(folder.path(), "b.img", 8 << 20);
    let daemon = Daemon::start_in(
        folder,
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
         layers = [{ kind = \"wal\", log = \"a.log\", size = \"16M\", model = { kind = \"ssd\", device = \"fast\" } }]\n\
         [[disk]]\nname = \"b\"\nimage = \"b.img\"\n\
         [[disk]]\nname = \"c\"\nmemory = \"1M\"\n\
         [[disk]]\nname = \"d\"\nmemory = \"1M\"\nmodel = { kind = \"hdd\", device = \"slow\" }\n\
         [[disk]]\nname = \"e\"\nmemory = \"1M\"\nmodel = { kind = \"ssd\" }\n",
    );
    let client = daemon.client();
    let list = client.devices().unwrap();
    let kind_and_name = |kind: &str, name: &str| vec![(kind.to_owned(), name.to_owned())];
    assert_eq!(beneath(&list.devices, "c"), kind_and_name("memory", "memory"));
    assert_eq!(beneath(&list.devices, "d"), kind_and_name("model", "slow"));
    assert_eq!(beneath(&list.devices, "e"), kind_and_name("model", "e (model)"));
    assert_eq!(list.device("model", "fast").unwrap().logs, ["a"]);
    let of_images = beneath(&list.devices, "b");
    assert_eq!(of_images, beneath(&list.devices, "a"));
    assert!(!of_images.is_empty());

    // Writes through the daemon reach the device, where the kernel counts them.
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "b");
    nbd.send(WRITE, 1, 0, 65536, &vec![7; 65536]);
    nbd.read_reply(0);
    nbd.send(FLUSH, 2, 0, 0, &[]);
    nbd.read_reply(0);
    let after = client.devices().unwrap();
    for (kind, name) in &of_images {
        let host = |devices: &fathom_control::DeviceList| devices.device(kind, name).unwrap().host;
        if let (Some(before), Some(after)) = (host(&list), host(&after)) {
            assert!(after.since(&before).written_bytes >= 65536, "{before:?} {after:?}");
        }
    }

    let socket = daemon.path("control.sock");
    let run = |more: &[&str]| {
        let mut command = command(daemon.path(".").as_path());
        let interval = ["devices", "--interval", "50ms", "--control"];
        let output = command.args(interval).arg(&socket).args(more).stderr(Stdio::inherit());
        let output = output.stdout(Stdio::piped()).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let text = run(&[]);
    assert!(text.contains("slow") && text.contains("log of a"), "{text}");
    let report: Value = serde_json::from_str(&run(&["--json"])).unwrap();
    assert_eq!(report["devices"].as_array().unwrap().len(), after.devices.len());
    let metrics = client.metrics().unwrap();
    let line = "fathom_device_disks{device=\"slow\",kind=\"model\"} 1";
    assert!(metrics.contains(line), "{metrics}");
}

#[test]
fn a_hung_file_system_delays_no_report_and_the_others_are_shown() {
    let Some(stuck) = Stuck::mount() else { return };
    let daemon = Daemon::start(&format!(
        "{}[[disk]]\nname = \"z\"\nmemory = \"1M\"\n",
        disk_over_nbd(&stuck.image(), "")
    ));
    let client = daemon.client();
    stuck.hang();
    // The kernel no longer answers from its cache.
    std::thread::sleep(Duration::from_millis(1500));
    for _ in 0..3 {
        let list = client.devices().unwrap();
        assert_eq!(beneath(&list.devices, "z")[0].0, "memory", "{list:?}");
        let hung = &beneath(&list.devices, "a")[0];
        println!("{hung:?}");
        assert!(["unknown", "network"].contains(&&*hung.0), "{list:?}");
    }
    // Threads that found the search of another one end at once.
    daemon.until("at most one thread to wait for the image", || {
        let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.id())).unwrap();
        let name = |task: std::io::Result<std::fs::DirEntry>| {
            let comm = task.ok().map(|task| task.path().join("comm"));
            comm.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default()
        };
        threads.map(name).filter(|name| name.trim() == "devices").count() <= 1
    });
    stuck.resume();
    daemon.until("the image to be found", || {
        beneath(&client.devices().unwrap().devices, "a")[0].0 == "network"
    });
}

/// A disk with a log on `device`, whose changes stay in the log for `age`.
fn logged(name: &str, age: &str) -> String {
    format!(
        "[[disk]]\nname = \"{name}\"\nimage = \"{name}.img\"\n\
         model = {{ kind = \"hdd\", device = \"slow\" }}\n\
         layers = [{{ kind = \"wal\", log = \"{name}.log\", size = \"16M\", age = \"{age}\" }}]\n"
    )
}

#[test]
fn a_log_is_written_back_in_idle_time_long_before_its_age() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.img", "b.img"] {
        image(folder.path(), name, 8 << 20);
    }
    let configuration = format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n{}{}[[disk]]\nname = \"c\"\nmemory = \"1M\"\n",
        logged("a", "8s"),
        logged("b", "1h"),
    );
    let daemon = Daemon::start_in(folder, &configuration);
    let client = daemon.client();
    // The two disks share a device; the third one has no background work.
    let list = client.background().unwrap();
    assert_eq!(list.devices.len(), 1, "{list:?}");
    assert_eq!(list.devices[0].devices, ["slow"]);
    assert_eq!(list.devices[0].steps, 0);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let mut other = Nbd::connect(&daemon.path("nbd.sock"), "b");
    for cookie in 0..16 {
        for nbd in [&mut nbd, &mut other] {
            nbd.send(WRITE, cookie, cookie * 65536, 65536, &vec![cookie as u8; 65536]);
            nbd.read_reply(0);
        }
    }
    let used = |disk| client.disk(disk).unwrap().figure("wal", "used_bytes").unwrap();
    assert!(used("a") > 1 << 20 && used("b") > 1 << 20);
    let begun = std::time::Instant::now();
    daemon.until("the log of a to be written back", || used("a") == 0);
    println!("written back after {:?}", begun.elapsed());
    let device = &client.background().unwrap().devices[0];
    assert!(device.steps > 0 && device.bytes >= 1 << 20, "{device:?}");
    assert!(device.used_ns > 0 && device.used_ns <= device.offered_ns, "{device:?}");
    assert!(used("b") > 1 << 20, "half of its age has not passed");
    let text = client.metrics().unwrap();
    assert!(text.contains("fathom_background_steps_total{device=\"slow\"}"), "{text}");
    let list = client.devices().unwrap();
    let idle = list.device("model", "slow").unwrap().idle_time.clone().unwrap();
    assert!(idle.is_idle && idle.idle_ns > 0, "{idle:?}");
    assert!(
        list.devices.iter().all(|device| device.kind != "memory" || device.idle_time.is_none())
    );

    // A disk that is emptied does not wait for idle time.
    client
        .change_disk("b", &DiskChange { remove_layer: Some("wal".into()), ..Default::default() })
        .unwrap();
    let mut command = command(daemon.path(".").as_path());
    let output = command
        .args(["background", "--control"])
        .arg(daemon.path("control.sock"))
        .stdout(Stdio::piped())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("slow") && text.contains("No work waits"), "{text}");
}

#[test]
fn a_disk_is_observed_when_another_one_on_its_device_gets_background_work() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "b.img", 8 << 20);
    let model = |device: &str| format!("model = {{ kind = \"ssd\", device = \"{device}\" }}\n");
    let configuration = format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [[disk]]\nname = \"a\"\nmemory = \"1M\"\n{}[[disk]]\nname = \"b\"\nimage = \"b.img\"\n{}\
         [[disk]]\nname = \"c\"\nmemory = \"1M\"\n{}",
        model("shared"),
        model("shared"),
        model("other"),
    );
    let daemon = Daemon::start_in(folder, &configuration);
    let client = daemon.client();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let mut cookie = 0;
    let mut read = || {
        cookie += 1;
        nbd.send(READ, cookie, 0, 4096, &[]);
        nbd.read_reply(4096);
    };
    read();
    assert_eq!(client.background().unwrap().devices, []);
    let log = daemon.path("b.log");
    let options = serde_json::json!({ "log": log, "size": "16M", "age": "1h" });
    let layer = LayerDefinition::new("wal", options);
    let change = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
    client.change_disk("b", &change).unwrap();
    // The disk `b` has no requests.
    daemon.until("the requests of a to be seen at its device", || {
        read();
        client.background().unwrap().devices[0].idle_periods.count() > 0
    });
    assert_eq!(client.background().unwrap().devices[0].devices, ["shared"]);
    let list = client.devices().unwrap();
    assert!(list.device("model", "other").unwrap().idle_time.is_none(), "{list:?}");
    let idle = list.device("model", "shared").unwrap().idle_time.clone().unwrap();
    assert!(idle.periods.count() > 0, "{idle:?}");
    let names: Vec<String> =
        client.disk("a").unwrap().layers.into_iter().map(|layer| layer.name).collect();
    assert!(!names.iter().any(|name| name == "activity"), "an internal layer: {names:?}");
}
