//! The request parser on invalid bytes, and on nearly valid ones.

use fathom_frontend::vhost_user::fuzz_requests;

/// A ring with ordinary requests, as a base for mutations.
fn valid() -> Vec<u8> {
    let mut memory = vec![0; 8192];
    let mut descriptor = |index: usize, address: u64, length: u32, flags: u16, next: u16| {
        let place = &mut memory[16 * index..];
        place[..8].copy_from_slice(&address.to_le_bytes());
        place[8..12].copy_from_slice(&length.to_le_bytes());
        place[12..14].copy_from_slice(&flags.to_le_bytes());
        place[14..16].copy_from_slice(&next.to_le_bytes());
    };
    descriptor(0, 0x1000, 16, 1, 1);
    descriptor(1, 0x1400, 512, 3, 2);
    descriptor(2, 0x1020, 1, 2, 0);
    // A discard through an indirect table.
    descriptor(3, 0x1100, 48, 4, 0);
    descriptor(0x110, 0x1040, 16, 1, 1);
    descriptor(0x111, 0x1060, 16, 1, 2);
    descriptor(0x112, 0x1020, 1, 2, 0);
    memory[0x1040] = 11;
    memory[0x402] = 2;
    memory[0x406] = 3;
    memory
}

#[test]
fn mutated_rings_do_no_harm() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let valid = valid();
    fuzz_requests(&valid);
    for _ in 0..4000 {
        let mut bytes = valid.clone();
        for _ in 0..=random() % 12 {
            // Descriptors, rings, headers and tables are below this address.
            let place = (random() % 0x1130) as usize;
            bytes[place] = match random() % 4 {
                0 => 0,
                1 => 0xff,
                2 => (random() % 64) as u8,
                _ => random() as u8,
            };
        }
        fuzz_requests(&bytes);
    }
    for length in 0..200 {
        let bytes: Vec<u8> = (0..length * 40).map(|_| random() as u8).collect();
        fuzz_requests(&bytes);
    }
}
