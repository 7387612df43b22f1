//! CRC-32C, eight bytes at a time.

const POLYNOMIAL: u32 = 0x82f6_3b78;

/// `TABLES[n]`: the effect on the sum of a byte that is followed by `n` bytes.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut sum = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            sum = if sum & 1 == 1 { sum >> 1 ^ POLYNOMIAL } else { sum >> 1 };
            bit += 1;
        }
        tables[0][byte] = sum;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

/// A sum over bytes that may come in several pieces.
#[derive(Clone, Copy, Debug)]
pub struct Sum(u32);

impl Sum {
    /// The sum of no bytes.
    pub fn new() -> Self {
        Self(!0)
    }

    /// Extends the sum by further bytes.
    #[must_use]
    pub fn add(self, bytes: &[u8]) -> Self {
        let mut sum = self.0;
        let mut chunks = bytes.chunks_exact(8);
        for chunk in &mut chunks {
            let head = sum ^ u32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]);
            let [a, b, c, d] = head.to_le_bytes().map(usize::from);
            sum = TABLES[7][a]
                ^ TABLES[6][b]
                ^ TABLES[5][c]
                ^ TABLES[4][d]
                ^ TABLES[3][usize::from(chunk[4])]
                ^ TABLES[2][usize::from(chunk[5])]
                ^ TABLES[1][usize::from(chunk[6])]
                ^ TABLES[0][usize::from(chunk[7])];
        }
        for &byte in chunks.remainder() {
            sum = sum >> 8 ^ TABLES[0][usize::from(sum as u8 ^ byte)];
        }
        Self(sum)
    }

    /// The sum.
    pub fn value(self) -> u32 {
        !self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_sums() {
        // RFC 3720, B.4.
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(Sum::new().add(b"123456789").value(), 0xe306_9283);
        assert_eq!(Sum::new().add(&[0; 32]).value(), 0x8a91_36aa);
        assert_eq!(Sum::new().add(&[0xff; 32]).value(), 0x62a8_ab43);
        assert_eq!(Sum::new().add(&ascending).value(), 0x46dd_794e);
        for cut in 0..32 {
            let (head, tail) = ascending.split_at(cut);
            assert_eq!(Sum::new().add(head).add(tail).value(), 0x46dd_794e);
        }
    }
}
