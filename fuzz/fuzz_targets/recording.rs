//! Reads any bytes as a recording.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_monitor::recording::fuzz_recording(data));
