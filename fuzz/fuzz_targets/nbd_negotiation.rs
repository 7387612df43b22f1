//! Reads any bytes as an NBD client's messages, in its handshake and after it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    fathom_frontend::nbd::fuzz_negotiation(data);
    fathom_frontend::nbd::fuzz_requests(data);
});
