//! Why Fathom does not write a guest's dirty pages to the disk itself (the pull-based mechanism of
//! section 3.3.1 of *Design Choices for Utilizing Disk Idleness in a Virtual Machine Environment*).
//!
//! A file system that never overwrites data in place relies on the old data until it has committed
//! the new place. A page that is written ahead, to the place that the file has on the disk,
//! destroys the data that the guest was told is durable.

use std::os::unix::fs::FileExt;

use fathom_tests::{Daemon, Disk, Guest, Result, Served};

/// The length of the file, in bytes: longer than what btrfs keeps in its metadata.
const LENGTH: usize = 64 << 10;

/// The content of the file, from lines of `text`.
fn content(text: &str) -> Vec<u8> {
    format!("{text}\n").into_bytes().into_iter().cycle().take(LENGTH).collect()
}

/// Overwrites a durable file without a sync, writes the new content ahead if `is_pulled`, and kills
/// the guest. Returns the exit status and the output of reading the file in the next guest.
fn after_a_crash(is_pulled: bool) -> Result<(i32, String)> {
    let daemon = Daemon::serve(&[Served::sparse("disk", 256)])?;
    let start = || Guest::builder().disk(Disk::vhost_user(daemon.path("disk.sock"))).start();
    let guest = start()?;
    guest.check(&format!(
        "mkfs.btrfs -q -f /dev/vda; mount -o commit=300 /dev/vda /mnt
        yes old | head -c {LENGTH} > /mnt/file; sync"
    ))?;
    let image = daemon.path("disk.img");
    let bytes = std::fs::read(&image)?;
    let old = content("old");
    let blocks = (0..bytes.len() - LENGTH).step_by(4096);
    let places: Vec<usize> =
        blocks.filter(|place| bytes[*place..*place + LENGTH] == old[..]).collect();
    assert_eq!(places.len(), 1, "the file is on the disk once");
    // Dirty in the guest's memory, and not on the disk.
    guest.check(&format!(
        "yes new | head -c {LENGTH} | dd of=/mnt/file bs=64k iflag=fullblock conv=notrunc status=none"
    ))?;
    if is_pulled {
        let image = std::fs::File::options().write(true).open(&image)?;
        image.write_all_at(&content("new"), places[0] as u64)?;
    }
    drop(guest);
    let guest = start()?;
    let output = guest
        .run("mount /dev/vda /mnt && cat /mnt/file | sort | uniq -c; cat /mnt/file > /dev/null")?;
    Ok((output.status, output.text))
}

#[test]
fn a_page_that_is_written_ahead_destroys_durable_data() -> Result<()> {
    let (status, text) = after_a_crash(false)?;
    assert!(status == 0 && text.contains("old") && !text.contains("new"), "{text}");
    let (status, text) = after_a_crash(true)?;
    assert!(status != 0 && text.contains("Input/output error"), "status {status}: {text}");
    assert!(!text.contains("old"), "{text}");
    Ok(())
}
