//! Reads any bytes as a cache volume.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_cache::fuzz_volume(data));
