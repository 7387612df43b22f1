//! The daemon is killed under load and started again: the guest notices nothing but the time.

use std::fs::File;

use fathom_tests::{Daemon, Disk, Guest, Result};

#[test]
fn killed_under_verified_writes_loses_nothing() -> Result<()> {
    let mut daemon = Daemon::start(|directory| {
        let image = directory.join("disk.img");
        File::create(&image).and_then(|file| file.set_len(256 << 20)).expect("room for an image");
        let socket = directory.join("disk.sock");
        format!(
            "[[disk]]\nname = \"disk\"\nimage = {image:?}\nvhost_user = {{ socket = {socket:?}, queues = 2 }}\n"
        )
    })?;
    let disk = Disk::vhost_user(daemon.path("disk.sock")).queues(2);
    let guest = Guest::builder().disk(disk).start()?;
    let load = guest.spawn(
        "fio --name=load --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=16 --numjobs=1 \
            --rw=randwrite --bsrange=4k-64k --size=192M --io_size=192M --rate=12M \
            --verify=crc32c --verify_fatal=1 --do_verify=1",
    )?;
    for _ in 0..3 {
        std::thread::sleep(std::time::Duration::from_secs(3));
        daemon.kill9();
        daemon.restart()?;
    }
    let output = guest.finish_within(load, 180)?;
    assert_eq!(output.status, 0, "{}", output.text);
    guest.check_console()?;
    guest.shutdown()
}
