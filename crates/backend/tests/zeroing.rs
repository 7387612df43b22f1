//! Ranges that are zeroed while the page cache has earlier writes of them.

mod support;

use std::sync::Arc;

use fathom_backend::{FileBackend, FileOptions};
use fathom_sim::{LoopDevice, OneRequest};

/// The writes that a device has completed, those of zeroes among them.
fn writes(device: &LoopDevice) -> u64 {
    let name = device.0.file_name().unwrap().to_str().unwrap();
    let text = std::fs::read_to_string(format!("/sys/block/{name}/stat")).unwrap();
    text.split_whitespace().nth(4).unwrap().parse().unwrap()
}

/// The kernel drops the pages of a range of a device before it zeroes it. A flush of the write that
/// was in them would find nothing to write, and if power were lost before the range is zeroed, the
/// flushed write would be lost.
#[test]
fn an_acknowledged_write_reaches_the_device_before_its_range_is_zeroed() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let Some(device) = LoopDevice::attach(file.path()) else { return };
    let options = FileOptions { path: device.0.clone(), ..FileOptions::default() };
    let disk = support::disk(Vec::new(), Arc::new(FileBackend::open(&options).unwrap()));
    let mut queue = OneRequest::open(&disk);
    queue.write(0, &[1; 4096]).unwrap();
    queue.flush().unwrap();
    let before = writes(&device);
    queue.write(0, &[2; 4096]).unwrap();
    queue.write_zeroes(0, 4096).unwrap();
    assert_eq!(writes(&device) - before, 2, "the write, and the zeroes");
    assert_eq!(queue.read(0, 4096).unwrap(), [0; 4096]);
}
