//! Uses any bytes as a guest's memory with a ring, and processes its requests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_frontend::vhost_user::fuzz_requests(data));
