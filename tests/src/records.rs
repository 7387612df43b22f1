//! Records that a guest writes durably, and that the host verifies.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::{Error, Guest, Result, Ticket, patience, until};

/// Files with random contents in a folder of a guest, made one after another. The name of each file
/// contains its checksum. A file gets this name after its `fsync`. After a second `fsync` the guest
/// acknowledges the record in its kernel's log, which the host keeps: from then on, the record must
/// exist. (On ext4 the `fsync` of a renamed file also makes its name durable.)
#[derive(Debug)]
pub struct Records {
    folder: String,
    acknowledged: BTreeSet<u64>,
    /// The first number of the next writer.
    next: u64,
}

impl Records {
    /// Records in this folder of the guest.
    pub fn new(folder: &str) -> Self {
        Self { folder: folder.to_owned(), acknowledged: BTreeSet::new(), next: 1 }
    }

    /// Starts a writer, which runs until [`stop`](Self::stop).
    ///
    /// # Errors
    /// When QEMU has ended.
    pub fn write(&self, guest: &Guest) -> Result<Ticket> {
        let (folder, next) = (&self.folder, self.next);
        guest.spawn(&format!(
            "set -e
            trap '[ $? = 0 ] || echo the writer of {folder} failed > /dev/kmsg' EXIT
            mkdir -p {folder}; cd {folder}; rm -f new /run/stop; number={next}
            until [ -e /run/stop ]; do
                busybox dd if=/dev/urandom of=new bs=1k count=$((number * 7 % 30 + 1)) conv=fsync
                set -- $(busybox sha256sum new)
                busybox mv new $number.$1
                busybox dd if=/dev/null of=$number.$1 conv=fsync,notrunc
                echo \"record $number in {folder}.\" > /dev/kmsg
                number=$((number + 1))
            done"
        ))
    }

    /// Waits for the acknowledgement of another `count` records.
    ///
    /// # Errors
    /// When there are fewer after a minute.
    pub fn wait_for(&mut self, guest: &Guest, count: usize) -> Result<()> {
        self.note(guest);
        let expected = self.acknowledged.len() + count;
        until(&format!("{count} records in {}", self.folder), patience(60), || {
            guest.process().expect_running()?;
            self.note(guest);
            if guest.console().contains(&format!("the writer of {} failed", self.folder)) {
                return Err(Error::new(format!("the writer of {} failed", self.folder)));
            }
            Ok((self.acknowledged.len() >= expected).then_some(()))
        })
        .map_err(|error| guest.explained(&error))
    }

    /// Reads the acknowledgements from the guest's console, which still exists after the guest's
    /// death.
    pub fn note(&mut self, guest: &Guest) {
        let end = format!(" in {}.", self.folder);
        for line in guest.console().lines() {
            let number = line.rsplit_once("record ").and_then(|(_, rest)| rest.strip_suffix(&end));
            self.acknowledged.extend(number.and_then(|number| number.parse::<u64>().ok()));
        }
        // Greater than the numbers of written records that were not acknowledged.
        self.next = self.acknowledged.last().map_or(1, |last| last / 1000 * 1000 + 1000);
    }

    /// Ends the writer regularly.
    ///
    /// # Errors
    /// When the writer has failed.
    pub fn stop(&mut self, guest: &Guest, writer: Ticket) -> Result<()> {
        guest.check("touch /run/stop")?;
        let output = guest.finish(writer)?;
        self.note(guest);
        if output.status == 0 {
            return Ok(());
        }
        let text = format!("the writer of {} failed: {}", self.folder, output.text);
        Err(guest.explained(&Error::new(text)))
    }

    /// Checks that every acknowledged record exists, and that the contents of all records match
    /// their names. Returns the number of acknowledged records.
    ///
    /// # Errors
    /// With the missing or wrong records.
    pub fn check(&self, guest: &Guest) -> Result<usize> {
        let folder = &self.folder;
        let there = guest.check(&format!(
            "cd {folder}; rm -f new; echo 3 > /proc/sys/vm/drop_caches
            ls | sed 's/[0-9]*[.]\\(.*\\)/\\1  &/' > /run/sums
            sha256sum -c /run/sums > /run/checked || {{ grep -v ': OK$' /run/checked; exit 1; }}
            ls | cut -d . -f 1"
        ))?;
        let there: BTreeSet<u64> = there.lines().filter_map(|line| line.parse().ok()).collect();
        let missing: Vec<u64> = self.acknowledged.difference(&there).copied().collect();
        if missing.is_empty() {
            return Ok(self.acknowledged.len());
        }
        let text = format!("{folder}: acknowledged records are missing: {missing:?}");
        Err(guest.explained(&Error::new(text)))
    }
}

/// Checks that the ext4 file system in an unused image is without errors.
///
/// # Errors
/// With e2fsck's output.
pub fn check_ext4(image: &Path) -> Result<()> {
    // Debian installs e2fsck in a folder that is only on root's path.
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let output = Command::new("e2fsck").args(["-f", "-n"]).arg(image).env("PATH", path).output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Err(Error::new(format!("e2fsck -fn {}: {}\n{text}", image.display(), output.status)))
}
