//! Parses, plans, explains and evaluates any bytes as queries.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_monitor::fuzz_script(data));
