//! The messages of interceptors, and the table of writers and the ring of calls with any content.
#![no_main]

use std::io::Write;

use fathom_intercept::{Calls, HELLO_LENGTH, Hello, PLACES_LENGTH, Places, Writers};
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
        use std::io::Seek;
        file.seek(std::io::SeekFrom::Start(start)).expect("a place");
        let _ = file.write(data);
    }
    for page in 0..20 {
        if let Some(writer) = writers.writer(page) {
            assert!(writer.process_id > 0 && !writer.command().is_empty());
        }
        writers.forget(page, writers.entry(page));
    }
    // A ring whose number of calls and first places have these bytes.
    let (calls, file) = Calls::create().expect("a ring");
    let mut position = calls.reader();
    let mut file = std::fs::File::from(file);
    let (head, places) = data.split_at(data.len().min(8));
    for (start, bytes) in [(4096, places), (64, head)] {
        use std::io::Seek;
        file.seek(std::io::SeekFrom::Start(start)).expect("a place");
        let _ = file.write(bytes);
    }
    let mut read = Vec::new();
    for _ in 0..2 {
        calls.read(&mut position, &mut read);
        assert!(read.len() <= 2 << 15);
    }
});
