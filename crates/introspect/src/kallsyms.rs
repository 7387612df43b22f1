//! The kernel's table of symbols, compressed by `scripts/kallsyms.c` of Linux.

use std::collections::HashMap;
use std::ops::Range;

use fathom_guest_memory::GuestMemory;

use crate::paging::AddressSpace;
use crate::vmcoreinfo::VmcoreInfo;

/// The most symbols accepted from a kernel.
const SYMBOLS_MAX: u32 = 2_000_000;
/// The longest name of a symbol, in bytes (`KSYM_NAME_LEN`), compressed or not.
const NAME_MAX: usize = 512;
/// The greatest total length of all names, in bytes, compressed. Those of 2024's largest kernels
/// take 4 MB.
const NAMES_MAX: usize = 16 << 20;
/// The most addresses of one name that are reported.
const SAME_NAME_MAX: usize = 8;

/// Why a table of symbols cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KallsymsError {
    /// The kernel's note does not have this symbol.
    Missing(&'static str),
    /// This part of the table is inconsistent.
    Torn(&'static str),
}

/// The objects that belong to a function: a compiler adds a dot and a number to their names.
const LOCAL: &[&[u8]] = &[b"no_open_fops"];

/// The name of an object without the number that a compiler has added.
fn without_number(text: &[u8]) -> &[u8] {
    let name = || {
        let name = LOCAL.iter().find(|name| text.starts_with(name))?;
        let number = text[name.len()..].strip_prefix(b".")?;
        (!number.is_empty() && number.iter().all(u8::is_ascii_digit)).then_some(*name)
    };
    name().unwrap_or(text)
}

/// An encoding of addresses: computes an address from the base and from an entry's place and
/// offset.
type Encoding = fn(u64, (u64, u32)) -> u64;

/// Finds the addresses of the symbols with these names.
///
/// Some names occur more than once (static functions): up to eight addresses of each are returned.
///
/// # Errors
/// The part of the table that is missing or inconsistent.
pub(crate) fn find<'n>(
    memory: &GuestMemory,
    space: &AddressSpace,
    note: &VmcoreInfo,
    names: &[&'n str],
) -> Result<HashMap<&'n str, Vec<u64>>, KallsymsError> {
    let place = |name| note.symbol(name).ok_or(KallsymsError::Missing(name));
    let count = space
        .u32(memory, place("kallsyms_num_syms")?)
        .filter(|count| (1..=SYMBOLS_MAX).contains(count))
        .ok_or(KallsymsError::Torn("kallsyms_num_syms"))?;
    // From 7.0 on there is no base: an offset counts from its own address.
    let base = match note.symbol("kallsyms_relative_base") {
        Some(place) => {
            let base = space.u64(memory, place);
            Some(base.ok_or(KallsymsError::Torn("kallsyms_relative_base"))?)
        }
        None => None,
    };
    let (index, table) = (place("kallsyms_token_index")?, place("kallsyms_token_table")?);
    let tokens = Tokens::read(memory, space, index, table)
        .ok_or(KallsymsError::Torn("kallsyms_token_table"))?;
    let places = place("kallsyms_offsets")?;
    let mut offsets = vec![0; count as usize * 4];
    space.read(memory, places, &mut offsets).ok_or(KallsymsError::Torn("kallsyms_offsets"))?;
    let offset = |index: usize| {
        offsets
            .get(index * 4..index * 4 + 4)
            .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    };

    let requested: HashMap<&[u8], &'n str> =
        names.iter().map(|name| (name.as_bytes(), *name)).collect();
    // The place of each entry in the table, and its offset.
    let mut found: HashMap<&'n str, Vec<(u64, u32)>> = HashMap::new();
    let mut anchor = None;
    let mut stream = Stream::new(memory, space, place("kallsyms_names")?);
    let mut name = Vec::with_capacity(NAME_MAX);
    let mut total = 0;
    for index in 0..count as usize {
        stream.name(&tokens, &mut name, &mut total).ok_or(KallsymsError::Torn("kallsyms_names"))?;
        let entry = || Some((places.wrapping_add(4 * index as u64), offset(index)?));
        // The first character is the symbol's type.
        let text = without_number(name.get(1..).unwrap_or_default());
        if text == b"init_top_pgt" {
            anchor = entry();
        }
        if let Some(requested) = requested.get(text) {
            let addresses = found.entry(requested).or_default();
            if addresses.len() < SAME_NAME_MAX {
                addresses.extend(entry());
            }
        }
    }
    // There are three encodings: percpu symbols are absolute and all others negative, or all
    // offsets count from the base, or each counts from its own place. A symbol with a known address
    // determines the encoding.
    let table = place("init_top_pgt")?;
    let anchor = anchor.ok_or(KallsymsError::Torn("kallsyms_names"))?;
    let encodings: &[Encoding] = if base.is_some() { &[below, above] } else { &[from_place] };
    let base = base.unwrap_or(0);
    let encoding = encodings.iter().find(|address| address(base, anchor) == table);
    let address = encoding.ok_or(KallsymsError::Torn("kallsyms_offsets"))?;
    let all = |entries: Vec<_>| entries.into_iter().map(|entry| address(base, entry)).collect();
    Ok(found.into_iter().map(|(name, entries)| (name, all(entries))).collect())
}

/// The address of an entry whose offset is absolute, or negative and counted from the base.
fn below(base: u64, (_, offset): (u64, u32)) -> u64 {
    let signed = i64::from(offset as i32);
    if signed >= 0 { signed as u64 } else { base.wrapping_sub(1).wrapping_sub(signed as u64) }
}

/// The address of an entry whose offset counts from the base.
fn above(base: u64, (_, offset): (u64, u32)) -> u64 {
    base.wrapping_add(u64::from(offset))
}

/// The address of an entry whose offset counts from the entry's own place.
fn from_place(_: u64, (place, offset): (u64, u32)) -> u64 {
    place.wrapping_add_signed(i64::from(offset as i32))
}

/// The 256 tokens of which names consist.
struct Tokens {
    /// The place of each token in the table.
    places: Vec<Range<usize>>,
    table: Vec<u8>,
}

impl Tokens {
    fn read(
        memory: &GuestMemory,
        space: &AddressSpace,
        index_place: u64,
        table_place: u64,
    ) -> Option<Self> {
        let mut raw = [0; 512];
        space.read(memory, index_place, &mut raw)?;
        let index: Vec<usize> =
            raw.chunks_exact(2).map(|b| usize::from(u16::from_le_bytes([b[0], b[1]]))).collect();
        let last = index.iter().copied().max()?;
        let mut table = vec![0; last + 64];
        space.read(memory, table_place, &mut table)?;
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

/// A stream of bytes from an address on, read page by page.
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

    /// Reads the next name, which begins with the letter of its type. `total` counts the bytes of
    /// all names.
    fn name(&mut self, tokens: &Tokens, name: &mut Vec<u8>, total: &mut usize) -> Option<()> {
        let mut length = usize::from(self.next()?);
        if length & 0x80 != 0 {
            length = length & 0x7f | usize::from(self.next()?) << 7;
        }
        *total += length;
        if length > NAME_MAX || *total > NAMES_MAX {
            return None;
        }
        name.clear();
        for _ in 0..length {
            let token = tokens.get(self.next()?);
            name.extend_from_slice(&token[..token.len().min(NAME_MAX - name.len())]);
        }
        Some(())
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
