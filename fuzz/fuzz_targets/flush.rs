//! Reads any bytes as messages of QEMU or of the guest agent, and as a record of a flush.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_server::fuzz_flush(data));
