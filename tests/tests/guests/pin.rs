//! Files that a program of a real guest has encrypted are brought back from the snapshot that was
//! held when the encryption was noticed.

use std::path::Path;
use std::process::Command;

use fathom_control::{Problem, ProblemKind};
use fathom_tests::{Assets, Daemon, Disk, Guest, Result, Served, patience, until};

use crate::scene::kernel;

/// Replaces the content of each file by its encryption, and renames it.
const ENCRYPT: &str = "
    export PATH=$PATH:/tools; key=$(echo secret | sha256sum | head -c 64)
    for f in /mnt/*.txt; do
        openssl enc -aes-256-ctr -nosalt -K $key -iv 000102030405060708090a0b0c0d0e0f -in $f -out /run/out
        dd if=/run/out of=$f bs=64k conv=notrunc 2> /dev/null; mv $f $f.locked
    done; sync";

fn fathom(folder: &Path, words: &[&str]) -> Result<String> {
    let done = Command::new(Daemon::binary()?)
        .current_dir(folder)
        .env("FATHOM_CONTROL", folder.join("control.sock"))
        .args(words)
        .output()?;
    assert!(done.status.success(), "{words:?}: {done:?}");
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

fn problem(daemon: &Daemon) -> Result<Option<Problem>> {
    let problems = daemon.status("disk")?.problems;
    Ok(problems.into_iter().find(|it| it.kind == ProblemKind::EncryptionInProgress))
}

#[test]
fn encrypted_files_come_back_from_the_snapshot_that_was_held() -> Result<()> {
    let assets = Assets::get()?;
    let Some(kernel) = assets.kernel(&kernel())? else {
        println!("Skipped: there is no kernel");
        return Ok(());
    };
    let layers = "layers = [{ kind = 'patterns', alarm_files = 8, alarm_time = '60s' }]";
    let rule = "[[snapshots]]\nname = 'r'\nstore = 'pool'\nvolumes = ['disk']\nevery = '1s'\n\
        keep_last = 100\n";
    let disk = Served::volume("disk", 256).with("classify = true").with(layers);
    let mut daemon = Daemon::serve_with(&[disk], rule)?;
    let folder = daemon.path("");
    let guest = Guest::builder()
        .kernel(kernel)
        .root(Disk::snapshot_of(&assets.root))
        .disk(Disk::vhost_user(daemon.path("disk.sock")).queues(2))
        .disk(Disk::snapshot_of(assets.tools()?))
        .start()?;
    guest.check(
        "mkdir -p /tools; mount -o ro /dev/vdc /tools; mkfs.ext4 -q -F /dev/vdb; mount /dev/vdb /mnt
        for i in $(seq 16); do
            seq $((i * 7000)) $((i * 7000 + 37000 + i * 20000)) > /mnt/report-$i.txt
        done
        cd /mnt; sha256sum *.txt > /run/sums; cp /run/sums /mnt/sums; cd /
        sync; echo 3 > /proc/sys/vm/drop_caches",
    )?;
    let sums = guest.check("cat /run/sums")?;
    // A snapshot with the files, from some time before.
    fathom(&folder, &["snapshot", "create", "disk", "--name", "mine"])?;
    guest.check("sleep 35; cat /mnt/*.txt > /dev/null")?;
    guest.check_within(ENCRYPT, 240)?;
    let found = until("the snapshot to be held", patience(60), || {
        Ok(problem(&daemon)?.filter(|problem| problem.message.contains("is held")))
    })?;
    println!("{}; {}", found.message, found.remedy);
    let pools = daemon.client().pools().map_err(|error| error.to_string()).unwrap().pools;
    let held: Vec<_> =
        pools[0].volumes[0].snapshots.iter().filter(|it| it.hold.is_some()).collect();
    assert_eq!(held.len(), 1, "{held:?}");
    let name = held[0].name.clone();
    assert!(held[0].hold.as_deref().is_some_and(|hold| hold.starts_with("encryption since")));
    assert!(found.message.contains(&name) && found.remedy.contains("rollback"), "{found:?}");
    assert!(daemon.log().contains(&format!("the snapshot {name}")), "the log names it");
    guest.check("umount /mnt")?;
    guest.shutdown()?;
    assert!(daemon.stop()?.success());
    fathom(&folder, &["snapshot", "rollback", "disk", &name, "--store", "pool"])?;
    daemon.restart()?;
    let guest = Guest::builder().disk(Disk::vhost_user(daemon.path("disk.sock"))).start()?;
    guest.check(
        "mkdir -p /mnt; mount /dev/vda /mnt; cd /mnt; sha256sum -c sums > /dev/null; cd /",
    )?;
    assert_eq!(guest.check("cat /mnt/sums")?, sums);
    assert_eq!(guest.check("ls /mnt | grep -c locked || true")?.trim(), "0");
    guest.shutdown()
}
