//! The messages of interceptors, and the table of writers and the ring of calls with any content.
#![no_main]

use std::io::{Seek, Write};

use fathom_intercept::{Calls, HELLO_LENGTH, Hello, Hook, PLACES_LENGTH, Places, Writers};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut hello = [0; HELLO_LENGTH];
    let length = data.len().min(HELLO_LENGTH);
    hello[..length].copy_from_slice(&data[..length]);
    if let Ok(message) = Hello::from_bytes(&hello) {
        assert_eq!(Hello::from_bytes(&message.to_bytes()).as_ref(), Ok(&message));
    }
    let mut places = [0; PLACES_LENGTH];
    let length = data.len().min(PLACES_LENGTH);
    places[..length].copy_from_slice(&data[..length]);
    if let Ok(message) = Places::from_bytes(&places) {
        assert_eq!(Places::from_bytes(&message.to_bytes()).as_ref(), Ok(&message));
    }
    // Sixteen pages, whose entries and the first slots have these bytes.
    let (writers, file) = Writers::create(16 << 12).expect("a table");
    let mut file = std::fs::File::from(file);
    for start in [4096, 4096 + (64 << 16)] {
        file.seek(std::io::SeekFrom::Start(start)).expect("a place");
        let _ = file.write(data);
    }
    for page in 0..20 {
        if let Some(writer) = writers.writer(page) {
            assert!(writer.process_id > 0 && !writer.command().is_empty());
        }
        writers.forget(page, writers.entry(page));
    }
    // The rest of the first page has the states of the hooks.
    file.seek(std::io::SeekFrom::Start(24)).expect("a place");
    let _ = file.write(&data[..data.len().min(200)]);
    for hook in Hook::ALL {
        let state = writers.hook(hook);
        assert!(state.is_away == writers.is_away(hook) && writers.stops() >= state.stops);
        writers.count_stop(hook);
        writers.take_away(hook, 1);
        assert!(writers.is_away(hook) && writers.writer(0).is_none());
        writers.put_back(hook, 2);
        assert!(!writers.is_away(hook));
    }
    for entry in [0, 1, 0x1_0001, u32::MAX] {
        writers.decline(entry, u64::MAX);
        assert!(writers.is_declined(entry, 0));
    }
    // A ring whose number of calls and first places have these bytes.
    let (calls, file) = Calls::create().expect("a ring");
    let mut position = calls.reader();
    let mut file = std::fs::File::from(file);
    let (head, places) = data.split_at(data.len().min(8));
    for (start, bytes) in [(4096, places), (64, head)] {
        file.seek(std::io::SeekFrom::Start(start)).expect("a place");
        let _ = file.write(bytes);
    }
    let mut read = Vec::new();
    for _ in 0..2 {
        calls.read(&mut position, &mut read);
        assert!(read.len() <= 2 << 15);
    }
});
