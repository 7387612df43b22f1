//! Ranges that are zeroed while the page cache has earlier writes of them.

mod support;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use fathom_backend::{FileBackend, FileOptions};
use fathom_sim::OneRequest;

/// A loop device; gone when it is dropped.
struct Loop(String);

impl Loop {
    /// `None` if this machine or user cannot have one.
    fn new(file: &Path) -> Option<Self> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        if !output.status.success() {
            eprintln!("skipped: no loop device: {}", String::from_utf8_lossy(&output.stderr));
            return None;
        }
        Some(Self(String::from_utf8(output.stdout).unwrap().trim().to_owned()))
    }

    /// The writes that it has completed, those of zeroes among them.
    fn writes(&self) -> u64 {
        let name = Path::new(&self.0).file_name().unwrap().to_str().unwrap();
        let text = std::fs::read_to_string(format!("/sys/block/{name}/stat")).unwrap();
        text.split_whitespace().nth(4).unwrap().parse().unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).output();
    }
}

/// The kernel drops the pages of a range of a device before it zeroes it. A flush of the write that was in them would
/// find nothing to write, and if power were lost before the range is zeroed, the flushed write would be lost.
#[test]
fn an_acknowledged_write_reaches_the_device_before_its_range_is_zeroed() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let Some(device) = Loop::new(file.path()) else { return };
    let options = FileOptions { path: device.0.clone().into(), ..FileOptions::default() };
    let disk = support::disk(Vec::new(), Arc::new(FileBackend::open(&options).unwrap()));
    let mut queue = OneRequest::open(&disk);
    queue.write(0, &[1; 4096]).unwrap();
    queue.flush().unwrap();
    let before = device.writes();
    queue.write(0, &[2; 4096]).unwrap();
    queue.write_zeroes(0, 4096).unwrap();
    assert_eq!(device.writes() - before, 2, "the write, and the zeroes");
    assert_eq!(queue.read(0, 4096).unwrap(), [0; 4096]);
}
