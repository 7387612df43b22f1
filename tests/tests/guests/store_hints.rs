//! What a guest is known to do saves a pool work, and its content stays right: copies and encrypted
//! files beside a load that verifies what it has written.

use std::process::Command;

use fathom_control::InsightState;
use fathom_tests::{Assets, Daemon, Disk, Guest, Result, Served, patience, until};

/// A count of the pool's.
fn count(daemon: &Daemon, name: &str) -> Result<u64> {
    let figures = daemon.status("web")?.backend.figures;
    let found = figures.iter().find(|figure| figure.name == name);
    Ok(found.expect("a figure of the pool").value)
}

#[test]
fn copies_and_encrypted_files_are_right_and_cost_a_pool_little() -> Result<()> {
    let hinted = |name: &str, mib| {
        Served::volume(name, mib).with("layers = [{ kind = \"patterns\" }]").with("direct = true")
    };
    let mut daemon = Daemon::serve(&[hinted("web", 256), hinted("load", 64)])?;
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock"))).queues(2);
    let guest = Guest::builder()
        .disk(disk("web"))
        .disk(disk("load"))
        .disk(Disk::snapshot_of(Assets::get()?.tools()?))
        .start()?;
    guest.check(
        "mkdir -p /web /tools; mount -o ro /dev/vdc /tools; mkfs.ext4 -q -b 4096 /dev/vda; mount /dev/vda /web",
    )?;
    until("the guest's kernel to be found", patience(60), || {
        guest.check("sync")?;
        Ok((daemon.status("web")?.insight.state == InsightState::Attached).then_some(()))
    })?;
    let load = guest.spawn(
        "fio --name=load --filename=/dev/vdb --direct=1 --ioengine=libaio --iodepth=8 --rw=randrw --bsrange=4k-64k \
            --size=60M --io_size=60M --dedupe_percentage=60 --verify=crc32c --verify_fatal=1 --do_verify=1",
    )?;
    guest.check("seq 3000000 | head -c 20000000 > /web/report.txt; sync; sha256sum < /web/report.txt > /tmp/sum")?;
    let blocks = 20_000_000 / 4096;
    let before = count(&daemon, "pool_copied_blocks_total")?;
    guest.check("echo 3 > /proc/sys/vm/drop_caches; cp /web/report.txt /web/copy.txt; sync")?;
    let copied = count(&daemon, "pool_copied_blocks_total")? - before;
    assert!(copied > blocks * 9 / 10, "{copied} of {blocks} blocks are a copy");
    let before = count(&daemon, "pool_unique_blocks_total")?;
    guest.check(
        "/tools/openssl enc -aes-256-cbc -pbkdf2 -iter 1 -pass pass:x -in /web/report.txt -out /web/report.txt.enc
        sync",
    )?;
    let unique = count(&daemon, "pool_unique_blocks_total")? - before;
    assert!(unique > blocks * 8 / 10, "{unique} of {blocks} blocks are known to be new");
    let check = "echo 3 > /proc/sys/vm/drop_caches; for f in report copy; do sha256sum < /web/$f.txt | cmp - /tmp/sum
        done; /tools/openssl enc -d -aes-256-cbc -pbkdf2 -iter 1 -pass pass:x -in /web/report.txt.enc | sha256sum |
            cmp - /tmp/sum";
    guest.check(check)?;
    // The source changes, and the copy does not.
    guest.check(
        "tr 0-9 a-j < /web/report.txt > /web/other.txt; cat /web/other.txt > /web/report.txt; sync",
    )?;
    daemon.kill9();
    daemon.restart()?;
    daemon.wait_for_guest("web")?;
    guest.check(
        "echo 3 > /proc/sys/vm/drop_caches; cmp /web/report.txt /web/other.txt; cp /web/copy.txt /web/report.txt; sync",
    )?;
    guest.check(check)?;
    let output = guest.finish_within(load, 240)?;
    assert_eq!(output.status, 0, "{}", output.text);
    guest.check("umount /web; e2fsck -f -n /dev/vda")?;
    guest.check_console()?;
    guest.shutdown()?;
    assert!(daemon.stop()?.success());
    let folder = daemon.path("");
    let checked = Command::new(Daemon::binary()?)
        .current_dir(folder)
        .args(["store", "check", "pool"])
        .output()?;
    assert!(checked.status.success(), "{checked:?}");
    Ok(())
}
