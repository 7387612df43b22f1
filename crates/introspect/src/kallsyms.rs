//! The kernel's table of symbols, as `scripts/kallsyms.c` of Linux compresses it.

use std::collections::HashMap;
use std::ops::Range;

use crate::memory::GuestMemory;
use crate::paging::AddressSpace;
use crate::vmcoreinfo::VmcoreInfo;

/// More symbols than this no kernel has.
const SYMBOLS_MAX: u32 = 2_000_000;
/// A symbol's name is no longer (`KSYM_NAME_LEN`), compressed or not.
const NAME_MAX: usize = 512;
/// All names together are no longer, compressed: those of 2024's largest kernels take 4 MB.
const NAMES_MAX: usize = 16 << 20;
/// No more addresses of one name are told.
const SAME_NAME_MAX: usize = 8;

/// Finds the addresses of `wanted` symbols. `None` when the table does not hold together.
///
/// Some names are there more than once (static functions): each of their addresses is told.
pub(crate) fn find<'n>(
    memory: &GuestMemory,
    space: &AddressSpace,
    note: &VmcoreInfo,
    wanted: &[&'n str],
) -> Option<HashMap<&'n str, Vec<u64>>> {
    let count = space.u32(memory, note.symbol("kallsyms_num_syms")?)?;
    if count == 0 || count > SYMBOLS_MAX {
        return None;
    }
    let base = space.u64(memory, note.symbol("kallsyms_relative_base")?)?;
    let tokens = Tokens::read(memory, space, note)?;
    let mut offsets = vec![0; count as usize * 4];
    space.read(memory, note.symbol("kallsyms_offsets")?, &mut offsets)?;
    let offset = |index: usize| {
        offsets
            .get(index * 4..index * 4 + 4)
            .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    };

    let wanted: HashMap<&[u8], &'n str> =
        wanted.iter().map(|name| (name.as_bytes(), *name)).collect();
    let mut found: HashMap<&'n str, Vec<u32>> = HashMap::new();
    let mut anchor = None;
    let mut stream = Stream::new(memory, space, note.symbol("kallsyms_names")?);
    let mut name = Vec::with_capacity(NAME_MAX);
    let mut total = 0;
    for index in 0..count as usize {
        let mut length = usize::from(stream.next()?);
        if length & 0x80 != 0 {
            length = length & 0x7f | usize::from(stream.next()?) << 7;
        }
        total += length;
        if length > NAME_MAX || total > NAMES_MAX {
            return None;
        }
        name.clear();
        for _ in 0..length {
            let token = tokens.get(stream.next()?);
            name.extend_from_slice(&token[..token.len().min(NAME_MAX - name.len())]);
        }
        // The first character is the symbol's type.
        let text = name.get(1..).unwrap_or_default();
        if text == b"init_top_pgt" {
            anchor = offset(index);
        }
        if let Some(wanted) = wanted.get(text) {
            let addresses = found.entry(wanted).or_default();
            if addresses.len() < SAME_NAME_MAX {
                addresses.push(offset(index)?);
            }
        }
    }
    // Two ways to store an address: percpu symbols are absolute and all others negative, or all
    // are above the base. A symbol that is known otherwise tells which.
    let table = note.symbol("init_top_pgt")?;
    let (anchor, above) = (anchor?, |offset: u32| base.wrapping_add(u64::from(offset)));
    let below = |offset: u32| {
        let signed = i64::from(offset as i32);
        if signed >= 0 { signed as u64 } else { base.wrapping_sub(1).wrapping_sub(signed as u64) }
    };
    let address: &dyn Fn(u32) -> u64 = if below(anchor) == table {
        &below
    } else if above(anchor) == table {
        &above
    } else {
        return None;
    };
    let all = |offsets: Vec<u32>| offsets.into_iter().map(address).collect();
    Some(found.into_iter().map(|(name, offsets)| (name, all(offsets))).collect())
}

/// The 256 pieces that names are made of.
struct Tokens {
    /// Where each is in the table.
    places: Vec<Range<usize>>,
    table: Vec<u8>,
}

impl Tokens {
    fn read(memory: &GuestMemory, space: &AddressSpace, note: &VmcoreInfo) -> Option<Self> {
        let mut raw = [0; 512];
        space.read(memory, note.symbol("kallsyms_token_index")?, &mut raw)?;
        let index: Vec<usize> =
            raw.chunks_exact(2).map(|b| usize::from(u16::from_le_bytes([b[0], b[1]]))).collect();
        let last = index.iter().copied().max()?;
        let mut table = vec![0; last + 64];
        space.read(memory, note.symbol("kallsyms_token_table")?, &mut table)?;
        let place = |start: usize| {
            let piece = &table[start..(start + NAME_MAX).min(table.len())];
            start..start + piece.iter().position(|byte| *byte == 0).unwrap_or(0)
        };
        let places = index.into_iter().map(place).collect();
        Some(Self { places, table })
    }

    fn get(&self, token: u8) -> &[u8] {
        &self.table[self.places[usize::from(token)].clone()]
    }
}

/// Bytes from an address on, read by pages.
struct Stream<'m> {
    memory: &'m GuestMemory,
    space: &'m AddressSpace,
    address: u64,
    page: [u8; 4096],
    place: usize,
    end: usize,
}

impl<'m> Stream<'m> {
    fn new(memory: &'m GuestMemory, space: &'m AddressSpace, address: u64) -> Self {
        Self { memory, space, address, page: [0; 4096], place: 0, end: 0 }
    }

    fn next(&mut self) -> Option<u8> {
        if self.place == self.end {
            let count = 4096 - self.address as usize % 4096;
            self.space.read(self.memory, self.address, &mut self.page[..count])?;
            self.address = self.address.wrapping_add(count as u64);
            (self.place, self.end) = (0, count);
        }
        let byte = self.page[self.place];
        self.place += 1;
        Some(byte)
    }
}
