//! Reads any bytes as a file of events: CSV, blkparse, or a trace of CloudPhysics or Tencent,
//! compressed or not.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_monitor::fuzz_events(data));
