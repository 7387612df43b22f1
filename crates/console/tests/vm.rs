//! `fathom vm --print` and `fathom doctor`, with fake QEMUs.
mod common;

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use common::{has, run, texts};
use serde_json::Value;

/// Creates a program that reports a version of QEMU.
fn fake_qemu(directory: &Path, version: &str) {
    let path = directory.join("qemu-system-x86_64");
    let script = format!("#!/bin/sh\necho 'QEMU emulator version {version} (fake)'\n");
    fs::write(&path, script).expect("it is written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it is executable");
}

#[test]
fn each_version_gets_its_own_option() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    let base = ["vm", "--print", "--accel", "tcg", "--qemu", "./qemu-system-x86_64", "--disk"];
    for (version, option) in
        [("7.2.9", "reconnect=1"), ("9.2.0", "reconnect-ms=1000"), ("10.0.2", "reconnect-ms=1000")]
    {
        fake_qemu(directory, version);
        let arguments = [&base[..], &["/run/a.sock", "--append", "a b", "--kernel", "k"]].concat();
        let (status, stdout, stderr) = run(directory, &arguments);
        assert_eq!(status, 0, "{stderr}");
        assert!(stdout.contains(&format!("path=/run/a.sock,{option} ")), "{stdout}");
        assert!(stdout.contains("share=on") && stdout.contains("-append 'a b'"), "{stdout}");
        assert!(stdout.lines().count() > 10, "{stdout}");
    }
    fake_qemu(directory, "6.0.0");
    let (status, _, stderr) = run(directory, &[&base[..], &["/run/a.sock"]].concat());
    assert!(status == 1 && stderr.contains("too old"), "{stderr}");
    let (status, _, stderr) = run(directory, &["vm", "--print", "--qemu", "/nowhere"]);
    assert!(status == 1 && stderr.contains("apt install"), "{stderr}");
}

#[test]
fn images_are_served_by_a_new_daemon() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    fake_qemu(directory, "10.0.2");
    for name in ["a.img", "b.img"] {
        run(directory, &["disk", "create", name, "1M"]);
    }
    let base = ["vm", "--accel", "tcg", "--qemu", "./qemu-system-x86_64", "--control", "none"];
    let images = ["--image", "a.img", "--image", "b.img", "--cpus", "3"];
    let (status, stdout, stderr) = run(directory, &[&base[..], &images, &["--print"]].concat());
    assert_eq!(status, 0, "{stderr}");
    for part in ["serve --name disk0", "disk add disk1", "num-queues=3,bootindex=1"] {
        assert!(stdout.contains(part), "{part} is missing:\n{stdout}");
    }
    let (_, stdout, _) = run(directory, &[&base[..], &images, &["--print", "--json"]].concat());
    let printed: Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!(
        (&printed["accelerator"], printed["serve"].as_array().map(Vec::len)),
        (&"tcg".into(), Some(2))
    );
    let (status, _, stderr) = run(directory, &[&base[..], &images, &["--daemonize"]].concat());
    assert!(status == 2 && stderr.contains("--disk"), "{stderr}");
    let (status, _, stderr) = run(directory, &[&base[..], &["--image", "c.img"]].concat());
    assert!(status == 1 && stderr.contains("fathom disk create c.img"), "{stderr}");
}

#[test]
fn the_accelerator_is_probed_once() {
    if !has("qemu-system-x86_64") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let doctor = || {
        let output = common::console()
            .current_dir(directory.path())
            .env("XDG_CACHE_HOME", directory.path())
            .args(["doctor", "--json"])
            .output();
        let (status, stdout, stderr) = texts(&output.expect("it starts"));
        assert_eq!(status, 0, "{stdout}{stderr}");
        let report: Value = serde_json::from_str(&stdout).expect("JSON");
        let findings = report["findings"].as_array().expect("findings").clone();
        let kvm = findings.iter().find(|finding| finding["subject"] == "KVM").cloned();
        kvm.expect("KVM is checked")["finding"].clone()
    };
    let first = doctor();
    if Path::new("/dev/kvm").exists() {
        let note = fs::read_to_string(directory.path().join("fathom/accelerator"));
        assert!(note.expect("a cached result").lines().count() == 2);
    }
    let again = std::time::Instant::now();
    assert_eq!(doctor(), first);
    assert!(again.elapsed().as_secs() < 15, "the second time nothing is probed");
}
