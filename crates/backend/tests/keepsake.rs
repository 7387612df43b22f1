//! When keepsakes are made, asked, handed over and released, with a real file whose write-back
//! fails.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fathom_backend::{FileBackend, FileOptions, Keeper, Left, report_of_keepsake, set_keeper};
use fathom_block::{Backend, Disk, DiskOptions, ErrorKind};
use fathom_sim::{DEVICE_BLOCK, FaultyDevice, OneRequest};
use parking_lot::Mutex;

const BAD: u64 = 9;

/// What a keeper was asked to do, and whether a loss was recorded then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Kept { number: usize, has_record: bool },
    Released { number: usize, has_record: bool },
}
use Event::{Kept, Released};

/// A keeper in this process.
#[derive(Default)]
struct Holder {
    image: PathBuf,
    held: Mutex<BTreeMap<usize, File>>,
    /// Those of a daemon that was killed.
    left: Mutex<Vec<usize>>,
    events: Mutex<Vec<Event>>,
    count: Mutex<usize>,
}

impl Holder {
    fn has_record(&self) -> bool {
        has_record(&self.image)
    }

    /// What has happened since the last call.
    fn events(&self) -> Vec<Event> {
        std::mem::take(&mut self.events.lock())
    }

    /// The report of a keepsake, which is only asked here.
    fn report(&self, number: usize) -> Option<i32> {
        report_of_keepsake(&self.held.lock()[&number])
    }
}

impl Keeper for Holder {
    fn left(&self, _: &File) -> Vec<Left> {
        let held = self.held.lock();
        let left = std::mem::take(&mut *self.left.lock());
        let copy = |number: &usize| held[number].try_clone().unwrap();
        left.iter().map(|number| Left { name: number.to_string(), file: copy(number) }).collect()
    }

    fn keep(&self, keepsake: File) -> io::Result<String> {
        let mut count = self.count.lock();
        *count += 1;
        self.held.lock().insert(*count, keepsake);
        self.events.lock().push(Kept { number: *count, has_record: self.has_record() });
        Ok(count.to_string())
    }

    fn note_recorded(&self, _: &str) {}

    fn release(&self, name: &str) {
        let number = name.parse().unwrap();
        assert!(self.held.lock().remove(&number).is_some(), "{name} is released twice");
        self.events.lock().push(Released { number, has_record: self.has_record() });
    }
}

fn has_record(image: &Path) -> bool {
    rustix::fs::getxattr(image, c"user.fathom.writes-lost", &mut [0; 256][..]).is_ok()
}

fn open(image: &Path) -> Arc<FileBackend> {
    let options = FileOptions { path: image.to_owned(), ..FileOptions::default() };
    Arc::new(FileBackend::open(&options).unwrap())
}

fn queue(backend: &Arc<FileBackend>) -> OneRequest {
    let backend = Arc::clone(backend) as Arc<dyn Backend>;
    OneRequest::open(&Disk::new(DiskOptions::default(), Vec::new(), backend).unwrap())
}

#[test]
fn a_keepsake_is_never_asked_and_handed_over_when_a_loss_is_recorded() {
    let Some(device) = FaultyDevice::new() else { return };
    let image = device.image("a.img", 64);
    let holder = Arc::new(Holder { image: image.clone(), ..Holder::default() });
    set_keeper(Arc::clone(&holder) as Arc<dyn Keeper>);

    // The description that is flushed, and the witnesses, take their reports; the keepsake has its
    // own.
    let backend = open(&image);
    assert_eq!(holder.events(), [Kept { number: 1, has_record: false }]);
    let mut writer = queue(&backend);
    device.break_block(&image, BAD);
    writer.write(BAD * DEVICE_BLOCK, &[7; 4096]).unwrap();
    assert_eq!(writer.flush(), Err(ErrorKind::Io));
    device.mend();
    let copy = holder.held.lock()[&1].try_clone().unwrap();
    assert!(report_of_keepsake(&copy).is_some());

    // A recovery has a fresh one held before it forgets the loss.
    assert!(has_record(&image) && holder.events().is_empty());
    backend.recover().unwrap();
    assert!(!has_record(&image));
    assert_eq!(
        holder.events(),
        [Kept { number: 2, has_record: true }, Released { number: 1, has_record: true }]
    );
    assert_eq!(holder.report(2), None);

    // It ends with its file.
    drop((writer, backend));
    assert_eq!(holder.events(), [Released { number: 2, has_record: false }]);

    // An earlier daemon has been killed, and its sync has got the report: a start records the loss
    // before it has a new keepsake held, and only then releases the old one.
    let left = File::open(&image).unwrap();
    device.break_block(&image, BAD);
    let file = File::options().write(true).open(&image).unwrap();
    file.write_all_at(&[8; 4096], BAD * DEVICE_BLOCK).unwrap();
    assert!(file.sync_data().is_err());
    drop(file);
    device.mend();
    *holder.count.lock() = 3;
    holder.held.lock().insert(3, left);
    holder.left.lock().push(3);
    let backend = open(&image);
    assert_eq!(
        holder.events(),
        [Kept { number: 4, has_record: true }, Released { number: 3, has_record: true }]
    );
    assert_eq!(queue(&backend).flush(), Err(ErrorKind::Io));
}
