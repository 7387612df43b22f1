//! Reads any bytes as the value of a block in a Valkey cluster.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_valkey::fuzz_value(data));
