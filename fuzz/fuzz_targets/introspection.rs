//! Any bytes, as what somebody does to the memory of a guest whose kernel is looked for.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_introspect::synthetic::fuzz_introspection(data));
