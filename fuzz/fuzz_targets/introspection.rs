//! Uses any bytes as changes to the memory of a guest, and runs introspection on it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_introspect::synthetic::fuzz_introspection(data));
