//! The load of a guest's disks is carried to other hosts: to a Valkey cluster, or to another daemon
//! over NBD with TLS. They are killed and hang in each phase, and the daemon is killed, while fio
//! verifies what it reads and a file system keeps records for which an fsync returned.

use std::time::Duration;

use fathom_control::{OffloadAction, OffloadDisk, OffloadRequest, OffloadState};
use fathom_tests::{Daemon, Disk, Guest, Records, Result, Served, patience, until};
use fathom_valkey::local::{LocalCluster, LocalOptions};

/// The layer with its log at a place.
fn layer(place: &str) -> String {
    format!(
        "layers = [{{ kind = \"offload\", {place}, size = \"64M\", copies = \"8M\", age = \"1s\" }}]"
    )
}

/// Starts or stops both disks. A log that is out of reach is not used until it answers again.
fn change(daemon: &Daemon, action: OffloadAction) -> Result<()> {
    for name in ["raw", "files"] {
        until("the log to be fit", patience(30), || {
            match daemon.client().change_offload(name, OffloadRequest { action, dry_run: false }) {
                Ok(_) => Ok(Some(())),
                Err(error) if error.to_string().contains("does not carry out requests") => Ok(None),
                Err(error) => panic!("{name}: {error}"),
            }
        })?;
    }
    Ok(())
}

fn state(daemon: &Daemon, name: &str) -> OffloadDisk {
    daemon.client().offload(Some(name)).unwrap().disks.remove(0)
}

#[test]
fn a_guest_survives_dead_nodes_and_daemons_while_a_cluster_carries_its_disks() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let mut cluster = LocalCluster::start(&LocalOptions::new(folder.path()))?;
    let table = format!(
        "[[cluster]]\nname = \"local\"\nnodes = {:?}\nplain_allowed = true",
        cluster.addresses()
    );
    let place = |name: &str| format!("cluster = \"local\", volume = \"{name}\"");
    // A node dies, or hangs until its replica has taken over, and comes back.
    survive(place, &table, |node, is_killed| {
        if is_killed {
            cluster.signal(node, "KILL");
            std::thread::sleep(Duration::from_secs(4));
            cluster.run(node)?;
        } else {
            cluster.signal(node, "STOP");
            std::thread::sleep(Duration::from_secs(5));
            cluster.signal(node, "CONT");
        }
        Ok(cluster.wait_until_ready()?)
    })
}

#[test]
fn a_guest_survives_dead_daemons_while_another_host_carries_its_disks() -> Result<()> {
    let certified = tempfile::tempdir()?;
    assert!(fathom_sim::certificates(certified.path()), "certtool is missing");
    let files = certified.path().display();
    let table = format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n[nbd.tls]\ncertificate = \"{files}/server-cert.pem\"\n\
         key = \"{files}/server-key.pem\"\nclient_ca = \"{files}/ca-cert.pem\""
    );
    let logs = [Served::sparse("raw", 96), Served::sparse("files", 96)];
    let mut other = Daemon::serve_with(&logs, &table)?;
    let socket = other.path("nbd.sock").display().to_string();
    let place = |name: &str| {
        format!("log = \"nbds+unix:///{name}?socket={socket}&tls-certificates={files}\"")
    };
    survive(place, "", |_, is_killed| {
        if is_killed {
            other.kill9();
            std::thread::sleep(Duration::from_secs(2));
            other.restart()?;
        } else {
            other.process().signal("STOP")?;
            std::thread::sleep(Duration::from_secs(5));
            other.process().signal("CONT")?;
        }
        Ok(())
    })
}

/// Carries two disks of a guest to `place`, and calls `disturb` in each phase.
fn survive(
    place: impl Fn(&str) -> String,
    table: &str,
    mut disturb: impl FnMut(usize, bool) -> Result<()>,
) -> Result<()> {
    let disks = [
        Served::sparse("raw", 96).with(&layer(&place("raw"))),
        Served::sparse("files", 128).with(&layer(&place("files"))),
    ];
    let mut daemon = Daemon::serve_with(&disks, table)?;
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock"))).queues(2);
    let guest = Guest::builder().disk(disk("raw")).disk(disk("files")).start()?;
    guest.check("mkfs.ext4 -q /dev/vdb; mkdir -p /files; mount /dev/vdb /files")?;
    let mut records = Records::new("/files/records");
    let writer = records.write(&guest)?;
    let load = guest.spawn(
        "for turn in 1 2; do
            fio --name=load --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite \
                --bsrange=4k-64k --size=80M --rate=2M --verify=crc32c --verify_fatal=1 --do_verify=1 \
                --randseed=$turn || exit 1
        done",
    )?;
    // At rest, then carried, then returning, and carried again from there.
    disturb(0, true)?;
    change(&daemon, OffloadAction::Start)?;
    disturb(1, false)?;
    until("changes in the log", patience(60), || {
        // A log that failed and was recovered carries nothing before it is started again.
        for name in ["raw", "files"] {
            if state(&daemon, name).state != OffloadState::Carrying {
                let start = OffloadRequest { action: OffloadAction::Start, dry_run: false };
                let _ = daemon.client().change_offload(name, start);
            }
        }
        Ok((state(&daemon, "raw").log_used_bytes > 1 << 20).then_some(()))
    })?;
    disturb(3, true)?;
    records.wait_for(&guest, 3)?;
    daemon.kill9();
    records.note(&guest);
    disturb(2, false)?;
    daemon.restart()?;
    until("the disks to be served", patience(60), || {
        Ok(["raw", "files"].iter().all(|name| daemon.status(name).is_ok()).then_some(()))
    })?;
    for name in ["raw", "files"] {
        daemon.wait_for_guest(name)?;
    }
    assert_eq!(state(&daemon, "raw").state, OffloadState::Returning);
    disturb(4, true)?;
    change(&daemon, OffloadAction::Start)?;
    records.wait_for(&guest, 3)?;
    change(&daemon, OffloadAction::Stop)?;
    disturb(5, false)?;
    let output = guest.finish_within(load, 300)?;
    assert_eq!(output.status, 0, "{}", output.text);
    records.stop(&guest, writer)?;
    records.check(&guest)?;
    guest.check("umount /files; e2fsck -f -n /dev/vdb")?;
    for name in ["raw", "files"] {
        until("the return", patience(120), || {
            Ok((state(&daemon, name).state == OffloadState::Resting).then_some(()))
        })?;
        daemon.check(name)?;
    }
    guest.check("e2fsck -f -n /dev/vdb")?;
    guest.check_console()?;
    guest.shutdown()
}
