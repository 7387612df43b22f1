//! Reads and checks any bytes as a configuration file.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_server::fuzz_configuration(data));
