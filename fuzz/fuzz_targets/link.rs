//! Reads any bytes as messages of a host to a monitor's centre, or of the centre to a host.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    fathom_monitor::link::fuzz::fuzz_frames(data);
});
