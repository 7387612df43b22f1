//! The activity of the host's devices, as the kernel counts it for all programs.

use std::path::{Path, PathBuf};

use crate::text::{is_device_name, number, read};

/// The bytes of a sector in the kernel's counts, whatever the device's block size.
const SECTOR: u64 = 512;

/// What a device has done since the host booted, and what it does now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostActivity {
    /// Requests in flight now.
    pub in_flight: u64,
    /// Completed reads, after merging.
    pub reads: u64,
    /// The bytes of these.
    pub read_bytes: u64,
    /// Completed writes, after merging.
    pub writes: u64,
    /// The bytes of these.
    pub written_bytes: u64,
    /// Completed discards.
    pub discards: u64,
    /// Completed flushes.
    pub flushes: u64,
    /// The time during which requests were in flight, in milliseconds.
    pub busy_ms: u64,
    /// Requests in flight, integrated over time, in milliseconds.
    pub depth_ms: u64,
}

/// The fixed properties of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its size, in bytes; 0 if it is unknown.
    pub size_bytes: u64,
    /// Whether it rotates, if that is known.
    pub rotational: Option<bool>,
}

/// The devices in `/sys`.
#[derive(Clone, Debug)]
pub struct SysDevices {
    folder: PathBuf,
}

impl Default for SysDevices {
    fn default() -> Self {
        Self::at(Path::new("/sys"))
    }
}

impl SysDevices {
    /// The devices in a tree like `/sys`.
    pub fn at(sys: &Path) -> Self {
        Self { folder: sys.join("block") }
    }

    fn device(&self, name: &str) -> Option<PathBuf> {
        is_device_name(name).then(|| self.folder.join(name))
    }

    /// The activity of the device `name`; `None` if there is no such device or the kernel does not
    /// count its requests.
    pub fn activity(&self, name: &str) -> Option<HostActivity> {
        let folder = self.device(name)?;
        let mut activity = parse_stat(&read(&folder.join("stat")).ok()?)?;
        // The file `inflight` is exact; the field in `stat` is an approximation on some kernels.
        if let Some(in_flight) =
            read(&folder.join("inflight")).ok().and_then(|t| parse_in_flight(&t))
        {
            activity.in_flight = in_flight;
        }
        Some(activity)
    }

    /// The number of the device's requests in flight, of all programs.
    pub fn in_flight(&self, name: &str) -> Option<u64> {
        parse_in_flight(&read(&self.device(name)?.join("inflight")).ok()?)
    }

    /// The fixed properties of the device `name`.
    pub fn facts(&self, name: &str) -> DeviceFacts {
        let Some(folder) = self.device(name) else { return DeviceFacts::default() };
        let sectors = number(&folder.join("size")).unwrap_or(0);
        let rotational = number(&folder.join("queue/rotational")).map(|value| value != 0);
        DeviceFacts { size_bytes: sectors.saturating_mul(SECTOR), rotational }
    }
}

fn parse_in_flight(text: &str) -> Option<u64> {
    let mut numbers = text.split_ascii_whitespace().map(str::parse::<u64>);
    Some(numbers.next()?.ok()?.saturating_add(numbers.next()?.ok()?))
}

fn parse_stat(text: &str) -> Option<HostActivity> {
    let fields: Vec<u64> =
        text.split_ascii_whitespace().take(32).map(str::parse).collect::<Result<_, _>>().ok()?;
    if fields.len() < 11 {
        return None;
    }
    // Discards and flushes came with later kernels.
    let field = |index: usize| fields.get(index).copied().unwrap_or(0);
    Some(HostActivity {
        in_flight: field(8),
        reads: field(0),
        read_bytes: field(2).saturating_mul(SECTOR),
        writes: field(4),
        written_bytes: field(6).saturating_mul(SECTOR),
        discards: field(11),
        flushes: field(15),
        busy_ms: field(9),
        depth_ms: field(10),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counts_are_read_and_garbage_is_not() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("block/sda");
        std::fs::create_dir_all(folder.join("queue")).unwrap();
        let stat = "  10 1 80 5 20 2 160 9 3 77 99 4 0 8 0 6 1\n";
        std::fs::write(folder.join("stat"), stat).unwrap();
        std::fs::write(folder.join("inflight"), "       2        5\n").unwrap();
        std::fs::write(folder.join("size"), "2048\n").unwrap();
        std::fs::write(folder.join("queue/rotational"), "1\n").unwrap();
        let devices = SysDevices::at(root.path());
        let activity = devices.activity("sda").unwrap();
        let expected = HostActivity {
            in_flight: 7,
            reads: 10,
            read_bytes: 80 * 512,
            writes: 20,
            written_bytes: 160 * 512,
            discards: 4,
            flushes: 6,
            busy_ms: 77,
            depth_ms: 99,
        };
        assert_eq!(activity, expected);
        assert_eq!(devices.in_flight("sda"), Some(7));
        let facts = DeviceFacts { size_bytes: 1 << 20, rotational: Some(true) };
        assert_eq!(devices.facts("sda"), facts);
        for name in ["sdb", "../block/sda", "", "a/b", "..", &"s".repeat(65)] {
            assert_eq!(devices.activity(name), None, "{name}");
        }
        let damaged = ["", "1 2 3", "a b", "1 2 3 4 5 6 7 8 9 10 -1", &"9".repeat(5000)];
        for text in damaged {
            std::fs::write(folder.join("stat"), text).unwrap();
            assert_eq!(devices.activity("sda"), None, "{text:?}");
        }
        // The kernels before 4.18 count no discards.
        std::fs::write(folder.join("stat"), "1 0 0 0 0 0 0 0 9 2 3").unwrap();
        std::fs::write(folder.join("inflight"), "garbage").unwrap();
        assert_eq!(devices.activity("sda").map(|activity| activity.in_flight), Some(9));
        let largest = [u64::MAX; 17].map(|number| number.to_string()).join(" ");
        std::fs::write(folder.join("stat"), largest).unwrap();
        assert_eq!(devices.activity("sda").unwrap().read_bytes, u64::MAX);
    }
}
