//! Reads any bytes as trees of `/sys` and `/proc`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_devices::fuzz_devices(data));
