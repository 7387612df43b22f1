//! Volumes in a real cluster whose nodes die, hang, come and go, and are replaced.

mod support;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Backend as _, ErrorKind};
use fathom_sim::OneRequest;
use fathom_valkey::local::LocalCluster;
use fathom_valkey::{ClusterOptions, ClusterTls, ClusterVolume};
use support::{beside, cluster, disk, impatient, open, options, steady_cluster, volume};

fn primary(cluster: &LocalCluster) -> usize {
    (0..cluster.count()).find(|node| cluster.is_primary(*node)).unwrap()
}

#[test]
fn nodes_that_are_killed_or_hang_cost_time_and_no_write() {
    let Some((_folder, mut cluster)) = cluster(|_| {}) else { return };
    let options = options(&cluster);
    beside(&options, 3, || {
        let cluster = &mut cluster;
        for round in 0..3 {
            std::thread::sleep(Duration::from_millis(300));
            let node = primary(cluster);
            // The second time, it hangs until its replica has taken over, and then believes to be a
            // primary.
            if round == 1 {
                cluster.signal(node, "STOP");
                std::thread::sleep(Duration::from_secs(6));
                cluster.signal(node, "CONT");
            } else {
                cluster.signal(node, "KILL");
                std::thread::sleep(Duration::from_secs(6));
                cluster.run(node).unwrap();
            }
            cluster.wait_until_ready().unwrap();
        }
        // All replicas at once: writes wait until there is a copy again.
        let replicas: Vec<usize> =
            (0..cluster.count()).filter(|node| !cluster.is_primary(*node)).collect();
        for node in &replicas {
            cluster.signal(*node, "KILL");
        }
        std::thread::sleep(Duration::from_secs(1));
        for node in replicas {
            cluster.run(node).unwrap();
        }
        cluster.wait_until_ready().unwrap();
    });
}

#[test]
fn nodes_join_and_leave_while_requests_run() {
    let Some((_folder, mut cluster)) = cluster(|_| {}) else { return };
    let options = options(&cluster);
    beside(&options, 4, || {
        let cluster = &mut cluster;
        let known = cluster.addresses()[0].clone();
        let node = cluster.add().unwrap();
        let added = cluster.addresses()[node].clone();
        cluster.manage(&["add-node", &added, &known]).unwrap();
        let id = cluster.ask(node, &["CLUSTER", "MYID"]).unwrap().trim().to_owned();
        let replica = cluster.add().unwrap();
        let address = cluster.addresses()[replica].clone();
        std::thread::sleep(Duration::from_secs(2));
        let master = ["--cluster-slave", "--cluster-master-id", &id];
        cluster.manage(&[&["add-node", &address, &known][..], &master].concat()).unwrap();
        cluster.wait_until_ready().unwrap();
        cluster
            .manage(&[
                "reshard",
                &known,
                "--cluster-from",
                "all",
                "--cluster-to",
                &id,
                "--cluster-slots",
                "400",
                "--cluster-yes",
                "--cluster-pipeline",
                "10",
            ])
            .unwrap();
        let weight = format!("{id}=0");
        cluster.manage(&["rebalance", &known, "--cluster-weight", &weight]).unwrap();
        cluster.signal(node, "KILL");
        cluster.signal(replica, "KILL");
        for other in 0..6 {
            let nodes = cluster.ask(other, &["CLUSTER", "NODES"]).unwrap();
            for line in
                nodes.lines().filter(|line| line.contains(&added) || line.contains(&address))
            {
                let gone = line.split_whitespace().next().unwrap();
                cluster.ask(other, &["CLUSTER", "FORGET", gone]).unwrap();
            }
        }
    });
}

#[test]
fn without_copies_nothing_is_acknowledged_and_a_wiped_node_is_no_zeroes() {
    let Some((_folder, mut cluster)) = steady_cluster() else { return };
    let volume_options = impatient(&cluster);
    let opened = open(&volume_options, "v");
    let mut queue = OneRequest::open(&disk(&opened));
    for block in 0..48 {
        queue.write(block * 65536, &[7; 4096]).unwrap();
    }
    // A primary and its replica are gone together, and with them their part of the slots.
    let node = primary(&cluster);
    let id = cluster.ask(node, &["CLUSTER", "MYID"]).unwrap().trim().to_owned();
    let replica = (0..cluster.count())
        .find(|other| {
            let nodes = cluster.ask(*other, &["CLUSTER", "NODES"]).unwrap();
            nodes.lines().any(|line| line.contains("myself,slave") && line.contains(&id))
        })
        .unwrap();
    for gone in [replica, node] {
        cluster.signal(gone, "KILL");
    }
    let mut failed = 0;
    for block in 0..6 {
        match queue.read(block * 65536, 4096) {
            Ok(bytes) => assert_eq!(bytes, [7; 4096]),
            Err(kind) => {
                assert_eq!(kind, ErrorKind::Io);
                failed += 1;
            }
        }
    }
    assert!(failed > 0 && !opened.problems().is_empty());
    // Both come back without their data.
    for gone in [node, replica] {
        let _ = std::fs::remove_dir_all(cluster.folder(gone).join("appendonlydir"));
        cluster.run(gone).unwrap();
    }
    cluster.wait_until_ready().unwrap();
    let (mut failed, mut found) = (0, 0);
    for block in 0..12 {
        match queue.read(block * 65536, 4096) {
            Ok(bytes) => {
                assert_eq!(bytes, [7; 4096], "block {block}");
                found += 1;
            }
            Err(_) => failed += 1,
        }
    }
    assert!(failed > 0 && found > 0, "{failed} of {}", failed + found);
    drop((queue, opened));
    let text = ClusterVolume::open(&volume_options, &volume("v")).err().unwrap().message;
    assert!(text.contains("is gone"), "{text}");
}

/// A certificate authority, and a certificate for the loopback address.
fn certificates(folder: &Path) {
    let run = |arguments: &[&str]| {
        let done = Command::new("openssl").args(arguments).current_dir(folder).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    let new =
        ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    run(&[
        &new[..],
        &["-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "30"],
    ]
    .concat());
    let signed = [
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-addext",
        "basicConstraints=critical,CA:FALSE",
    ];
    let own = ["-keyout", "node.key", "-out", "node.pem", "-subj", "/CN=node", "-days", "30"];
    run(&[&new[..], &own, &signed].concat());
}

#[test]
fn connections_are_encrypted_and_users_need_few_rights() {
    let certified = tempfile::tempdir().unwrap();
    certificates(certified.path());
    let file = |name: &str| certified.path().join(name);
    let started = cluster(|options| {
        let path = |name: &str| file(name).display().to_string();
        for (name, value) in [
            ("--tls-port", "{port}".to_owned()),
            ("--tls-cluster", "yes".to_owned()),
            ("--tls-replication", "yes".to_owned()),
            ("--tls-cert-file", path("node.pem")),
            ("--tls-key-file", path("node.key")),
            ("--tls-ca-cert-file", path("ca.pem")),
            ("--tls-auth-clients", "yes".to_owned()),
        ] {
            options.extra.extend([name.to_owned(), value]);
        }
        options.cli = vec![
            "--tls".into(),
            "--cacert".into(),
            path("ca.pem"),
            "--cert".into(),
            path("node.pem"),
            "--key".into(),
            path("node.key"),
        ];
    });
    let Some((_folder, cluster)) = started else { return };
    let rights = "on >secret ~fathom:* +eval +eval_ro +wait +info +ping +client|setinfo +hello \
                  +cluster|slots +cluster|shards +cluster|nodes +get +getrange +set +mget +exists +hmget +hget +hset \
                  +hincrby +hgetall";
    for node in 0..cluster.count() {
        let command: Vec<&str> =
            ["ACL", "SETUSER", "fathom"].into_iter().chain(rights.split_whitespace()).collect();
        assert_eq!(cluster.ask(node, &command).unwrap().trim(), "OK");
    }
    std::fs::write(file("password"), "secret\n").unwrap();
    let right = ClusterOptions {
        user: Some("fathom".into()),
        password: Some(file("password")),
        tls: Some(ClusterTls {
            authority: file("ca.pem"),
            own: Some((file("node.pem"), file("node.key"))),
        }),
        ..options(&cluster)
    };
    let opened = open(&right, "v");
    let mut queue = OneRequest::open(&disk(&opened));
    queue.write(512, &vec![5; 70_000 / 512 * 512]).unwrap();
    assert_eq!(queue.read(512, 1024).unwrap(), [5; 1024]);
    assert!(opened.problems().is_empty(), "{:?}", opened.problems());
    // Another password: the next connections use it.
    for node in 0..cluster.count() {
        for command in ["ACL SETUSER fathom >renewed <secret", "CLIENT KILL USER fathom"] {
            let words: Vec<&str> = command.split(' ').collect();
            assert!(cluster.ask(node, &words).is_some(), "{command}");
        }
    }
    std::fs::write(file("password"), "renewed\n").unwrap();
    queue.write(512, &[6; 1024]).unwrap();
    assert_eq!(queue.read(512, 1024).unwrap(), [6; 1024]);
    assert!(opened.problems().is_empty(), "{:?}", opened.problems());
    let refusal = |options: &ClusterOptions| {
        ClusterVolume::open(options, &volume("v"))
            .err()
            .map(|error| error.message)
            .unwrap_or_default()
    };
    let plain = ClusterOptions { tls: None, ..right.clone() };
    assert!(refusal(&plain).contains("no node answers"), "{}", refusal(&plain));
    std::fs::write(file("wrong"), "guess").unwrap();
    let guess = ClusterOptions { password: Some(file("wrong")), ..right.clone() };
    assert!(refusal(&guess).contains("no node answers"), "{}", refusal(&guess));
    // An authority that has not signed the nodes' certificates.
    let other = tempfile::tempdir().unwrap();
    certificates(other.path());
    let tls =
        ClusterTls { authority: other.path().join("ca.pem"), own: right.tls.clone().unwrap().own };
    let foreign = ClusterOptions { tls: Some(tls), ..right };
    assert!(refusal(&foreign).contains("no node answers"), "{}", refusal(&foreign));
    let opened: Arc<ClusterVolume> = opened;
    assert_eq!(opened.name(), "valkey");
}
