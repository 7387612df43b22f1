//! Records that a guest writes durably, and what the host knows of them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::{Error, Guest, Result, Ticket, patience, until};

/// Files with random contents in a folder of a guest, made one after another. The name of each
/// holds its checksum. A file gets it after its `fsync`; after another the guest says
/// so in its kernel's log, which the host keeps: whatever happens from then on, the record is there. (On
/// ext4 the `fsync` of a renamed file makes its name durable too.)
#[derive(Debug)]
pub struct Records {
    folder: String,
    acknowledged: BTreeSet<u64>,
    /// Where the next writer begins to count.
    next: u64,
}

impl Records {
    /// Records in this folder of the guest.
    pub fn new(folder: &str) -> Self {
        Self { folder: folder.to_owned(), acknowledged: BTreeSet::new(), next: 1 }
    }

    /// Starts a writer, which goes on until [`stop`](Self::stop).
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

    /// Waits until the host knows of `count` records more.
    ///
    /// # Errors
    /// When they do not come in a minute.
    pub fn wait_for(&mut self, guest: &Guest, count: usize) -> Result<()> {
        self.note(guest);
        let wanted = self.acknowledged.len() + count;
        until(&format!("{count} records in {}", self.folder), patience(60), || {
            guest.process().expect_running()?;
            self.note(guest);
            if guest.console().contains(&format!("the writer of {} failed", self.folder)) {
                return Err(Error::new(format!("the writer of {} failed", self.folder)));
            }
            Ok((self.acknowledged.len() >= wanted).then_some(()))
        })
        .map_err(|error| guest.explained(&error))
    }

    /// Reads the guest's console, also that of a guest that has died.
    pub fn note(&mut self, guest: &Guest) {
        let end = format!(" in {}.", self.folder);
        for line in guest.console().lines() {
            let number = line.rsplit_once("record ").and_then(|(_, rest)| rest.strip_suffix(&end));
            self.acknowledged.extend(number.and_then(|number| number.parse::<u64>().ok()));
        }
        // Behind whatever was written and not acknowledged.
        self.next = self.acknowledged.last().map_or(1, |last| last / 1000 * 1000 + 1000);
    }

    /// Ends the writer, in order.
    ///
    /// # Errors
    /// When it failed on its way.
    pub fn stop(&mut self, guest: &Guest, writer: Ticket) -> Result<()> {
        guest.check("touch /run/stop")?;
        let output = guest.finish(writer)?;
        self.note(guest);
        if output.status == 0 {
            return Ok(());
        }
        let said = format!("the writer of {} failed: {}", self.folder, output.text);
        Err(guest.explained(&Error::new(said)))
    }

    /// Fails unless every acknowledged record is there, and the contents of all fit their names.
    /// Gives the number of acknowledged records.
    ///
    /// # Errors
    /// With what is missing or wrong.
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
        let said = format!("{folder}: acknowledged records are missing: {missing:?}");
        Err(guest.explained(&Error::new(said)))
    }
}

/// Fails unless the ext4 file system in an image, which nobody uses, is without a fault.
///
/// # Errors
/// With what e2fsck says.
pub fn check_ext4(image: &Path) -> Result<()> {
    // Debian keeps it where only root looks.
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let output = Command::new("e2fsck").args(["-f", "-n"]).arg(image).env("PATH", path).output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Err(Error::new(format!("e2fsck -fn {}: {}\n{text}", image.display(), output.status)))
}
