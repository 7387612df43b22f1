//! Reads any bytes as a part of a pool, or changes bytes of a pool.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_store::fuzz_store(data));
