//! A table of symbols, compressed in the kernel's format.

use super::bytes::ByteBuilder;

/// The encodings of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// Small addresses (per processor) are absolute; all others are negative and below the base.
    Below,
    /// All addresses count from the base.
    Above,
    /// Each address counts from the place of its own entry. There is no base.
    FromPlace,
}

/// The parts of names that have a token.
const PIECES: [&str; 8] = ["end_", "_io", "bio_", "btrfs_", "kallsyms_", "init_", "xfs_", "_"];

/// The encoded parts of the table.
#[derive(Clone, Debug)]
pub(crate) struct Tables {
    pub names: Vec<u8>,
    pub offsets: Vec<u8>,
    pub token_table: Vec<u8>,
    pub token_index: Vec<u8>,
    pub base: u64,
}

/// Encodes symbols: the name, the address, and the letter of the kind of each. `place` is the
/// address of the table of offsets.
pub(crate) fn encode(symbols: &[(String, u64, u8)], addresses: Addresses, place: u64) -> Tables {
    let base = symbols.iter().map(|symbol| symbol.1).filter(|address| address >> 63 != 0).min();
    let base = base.unwrap_or(0);
    let (mut names, mut offsets) = (Vec::new(), ByteBuilder::default());
    for (index, (name, address, letter)) in symbols.iter().enumerate() {
        let mut tokens = vec![*letter];
        let mut rest = name.as_str();
        while let Some(first) = rest.chars().next() {
            if let Some(piece) = PIECES.iter().position(|piece| rest.starts_with(piece)) {
                tokens.push(1 + piece as u8);
                rest = &rest[PIECES[piece].len()..];
            } else {
                tokens.push(first as u8);
                rest = &rest[1..];
            }
        }
        if tokens.len() > 0x7f {
            names.push(tokens.len() as u8 & 0x7f | 0x80);
            names.push((tokens.len() >> 7) as u8);
        } else {
            names.push(tokens.len() as u8);
        }
        names.extend_from_slice(&tokens);
        offsets.u32(match addresses {
            Addresses::FromPlace => address.wrapping_sub(place + 4 * index as u64) as u32,
            Addresses::Above => address.wrapping_sub(base) as u32,
            Addresses::Below if address >> 63 == 0 => *address as u32,
            Addresses::Below => base.wrapping_sub(1).wrapping_sub(*address) as u32,
        });
    }
    let (mut token_table, mut token_index) = (Vec::new(), ByteBuilder::default());
    for token in 0..=255_u8 {
        token_index.u16(token_table.len() as u16);
        match token {
            1..=8 => token_table.extend_from_slice(PIECES[usize::from(token) - 1].as_bytes()),
            b' '..=b'~' => token_table.push(token),
            _ => {}
        }
        token_table.push(0);
    }
    Tables { names, offsets: offsets.0, token_table, token_index: token_index.0, base }
}
