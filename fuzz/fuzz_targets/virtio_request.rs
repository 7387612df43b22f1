//! Any bytes, as a guest's memory: a ring and the requests on it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fathom_frontend::vhost_user::fuzz_requests(data));
