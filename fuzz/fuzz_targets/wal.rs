//! Reads any bytes as a log volume.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_wal::fuzz_log(data));
