//! Any bytes, as queries: read, planned, explained and evaluated.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_monitor::fuzz_script(data));
