//! What an observer learns about the memory of a disk's guests.

use std::sync::Arc;

use fathom_block::{Disk, DiskOptions};
use fathom_frontend::vhost_user::{GuestObserver, Server, VhostUserOptions};
use fathom_guest_memory::GuestMemory;
use parking_lot::Mutex;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;

use crate::CAPACITY;
use crate::client::{Client, MEMORY, memfd, region};

/// Records the calls of an observer.
#[derive(Default)]
struct Record(Mutex<Vec<String>>);

impl Record {
    fn add(&self, text: String) {
        self.0.lock().push(text);
    }

    /// The calls since the last one of this method.
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock())
    }
}

impl GuestObserver for Record {
    fn started(&self, session: u64, memory: &GuestMemory) {
        let [region] = memory.regions() else { panic!("{memory:?}") };
        assert_eq!((region.length, region.is_truncated()), (MEMORY, false));
        self.add(format!("{session} started with {}", memory.length()));
    }

    fn moved(&self, session: u64, memory: &GuestMemory) {
        self.add(format!("{session} moved to {}", memory.length()));
    }

    fn stopped(&self, session: u64) {
        self.add(format!("{session} stopped"));
    }

    fn ended(&self, session: u64) {
        self.add(format!("{session} ended"));
    }
}

#[test]
fn starts_moves_stops_and_ends_are_reported_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("disk.sock");
    let backend = Arc::new(fathom_backend::Memory::new(CAPACITY));
    let disk = Disk::new(DiskOptions::default(), Vec::new(), backend).unwrap();
    let record = Arc::new(Record::default());
    let observer: Arc<dyn GuestObserver> = Arc::<Record>::clone(&record);
    let server = Server::start_observed(VhostUserOptions::new(&socket), disk, observer).unwrap();
    let mut client = Client::connect(&socket, 2, 0);
    assert_eq!(record.take(), [""; 0]);
    client.start_queue(0, 0);
    client.start_queue(1, 0);
    client.assert_works(1);
    assert_eq!(record.take(), [format!("0 started with {MEMORY}")]);
    let plugged = memfd(4096);
    client.frontend.add_mem_region(&region(&plugged, MEMORY, 4096)).unwrap();
    assert_eq!(record.take(), [format!("0 moved to {}", MEMORY + 4096)]);
    client.frontend.remove_mem_region(&region(&plugged, MEMORY, 4096)).unwrap();
    assert_eq!(record.take(), [format!("0 moved to {MEMORY}")]);
    // A reset: both rings stop and start again. A change of memory in between is not reported.
    let bases = [0, 1].map(|queue| client.frontend.get_vring_base(queue).unwrap());
    assert_eq!(record.take(), ["0 stopped"]);
    let memory = client.memory.try_clone().unwrap();
    client.frontend.set_mem_table(&[region(&memory, 0, MEMORY)]).unwrap();
    assert_eq!(record.take(), [""; 0]);
    client.start_queue(0, bases[0] as u16);
    client.assert_works(0);
    assert_eq!(record.take(), [format!("0 started with {MEMORY}")]);
    drop(client);
    while server.status().connected {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(record.take(), ["0 stopped", "0 ended"]);
    let _second = Client::start(&socket, 1, 0);
    server.shutdown();
    assert_eq!(
        record.take(),
        [format!("1 started with {MEMORY}").as_str(), "1 stopped", "1 ended"]
    );
}
