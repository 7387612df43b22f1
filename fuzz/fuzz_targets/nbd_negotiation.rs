//! Any bytes, as what an NBD client says in its handshake and behind it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    fathom_frontend::nbd::fuzz_negotiation(data);
    fathom_frontend::nbd::fuzz_requests(data);
});
