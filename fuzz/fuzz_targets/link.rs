//! Any bytes, as what a host says to the centre of a monitor, and the centre to a host.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    fathom_monitor::link::fuzz::fuzz_frames(data);
});
