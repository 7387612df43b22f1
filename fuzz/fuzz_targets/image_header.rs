//! Reads any bytes as the header of an image of each format that QEMU serves.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    fathom_image::fuzz_image_header(data);
});
