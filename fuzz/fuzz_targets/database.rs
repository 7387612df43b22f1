//! Reads any bytes as pages of databases.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_database::fuzz_pages(data));
