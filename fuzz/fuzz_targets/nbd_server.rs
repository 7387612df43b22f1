//! Reads any bytes as those of an NBD server.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_nbd::fuzz_server(data));
