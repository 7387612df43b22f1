//! The kernel's modules: their symbols and their types.

use fathom_guest_memory::GuestMemory;

use crate::btf::Btf;
use crate::layout::Types;
use crate::paging::AddressSpace;

/// The most modules that are read.
const MODULES_MAX: usize = 1024;
/// The most symbols of a module.
const SYMBOLS_MAX: u64 = 100_000;
/// The greatest total length of the names of a module's symbols, in bytes.
const NAMES_MAX: u64 = 8 << 20;
/// The longest name of a symbol, in bytes.
const NAME_MAX: usize = 512;
/// The greatest total length of the symbols and names of all modules, in bytes.
pub(crate) const SYMBOLS_TOTAL: u64 = 64 << 20;
/// The longest description of a module's types, in bytes.
const MODULE_TYPES_MAX: usize = 4 << 20;
/// The greatest total length of the descriptions of all modules, in bytes.
const TYPES_TOTAL: usize = 32 << 20;
/// The size of an ELF symbol, in bytes.
const SYMBOL: usize = 24;

/// The required members of `struct module`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModuleLayout {
    list: u64,
    name: u64,
    /// `btf_module`: its list, its module, its description; `btf`: its data and their size.
    types: Option<[u64; 5]>,
    symbols: Option<[u64; 4]>,
}

impl ModuleLayout {
    pub fn new(types: &Types<'_>) -> Option<Self> {
        let member = |structure: &str, path: &str| {
            types.kernel.member(structure, path).map(|member| member.offset)
        };
        let symbols = || {
            Some([
                member("module", "kallsyms")?,
                member("mod_kallsyms", "symtab")?,
                member("mod_kallsyms", "num_symtab")?,
                member("mod_kallsyms", "strtab")?,
            ])
        };
        let own_types = || {
            Some([
                member("btf_module", "list")?,
                member("btf_module", "module")?,
                member("btf_module", "btf")?,
                member("btf", "data")?,
                member("btf", "data_size")?,
            ])
        };
        Some(Self {
            list: member("module", "list")?,
            name: member("module", "name")?,
            types: own_types(),
            symbols: symbols(),
        })
    }
}

/// One module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Module {
    /// The address of the `struct module`.
    pub address: u64,
    pub name: String,
}

/// The modules that are loaded now.
pub(crate) fn list(
    memory: &GuestMemory,
    space: &AddressSpace,
    head: u64,
    layout: &ModuleLayout,
) -> Vec<Module> {
    let mut modules = Vec::new();
    let mut entry = head;
    while modules.len() < MODULES_MAX {
        match space.u64(memory, entry) {
            Some(next) if next != head && next != 0 => entry = next,
            _ => break,
        }
        let address = entry.wrapping_sub(layout.list);
        let Some(name) = space.text(memory, address.wrapping_add(layout.name), 56) else { break };
        if modules.iter().any(|module: &Module| module.address == address) {
            break;
        }
        modules.push(Module { address, name });
    }
    modules
}

/// The modules' own types, which extend their kernel's. `head` is the kernel's list of them,
/// `btf_modules`: a module itself refers to its description only while it is being loaded.
pub(crate) fn types<'b>(
    memory: &GuestMemory,
    space: &AddressSpace,
    head: u64,
    layout: &ModuleLayout,
    modules: &[Module],
    kernel: &'b Btf<'b>,
) -> Vec<Btf<'b>> {
    let mut found = Vec::new();
    let Some([list, module, btf, data, size]) = layout.types else { return found };
    let mut entry = head;
    let mut left = TYPES_TOTAL;
    let mut read = |entry: u64| {
        let own = entry.wrapping_sub(list);
        let module = space.u64(memory, own.wrapping_add(module))?;
        if !modules.iter().any(|known| known.address == module) {
            return None;
        }
        let btf = space.u64(memory, own.wrapping_add(btf))?;
        let data = space.u64(memory, btf.wrapping_add(data))?;
        let size = space.u32(memory, btf.wrapping_add(size))? as usize;
        if size > MODULE_TYPES_MAX {
            return None;
        }
        left = left.checked_sub(size)?;
        let mut bytes = vec![0; size];
        space.read(memory, data, &mut bytes)?;
        Btf::new(bytes, Some(kernel))
    };
    for _ in 0..MODULES_MAX {
        match space.u64(memory, entry) {
            Some(next) if next != head && next != 0 => entry = next,
            _ => break,
        }
        found.extend(read(entry));
    }
    found
}

/// Calls `report` with the name and the address of each symbol of a module. Subtracts the number of
/// bytes that it reads from `left`.
pub(crate) fn symbols(
    memory: &GuestMemory,
    space: &AddressSpace,
    module: &Module,
    layout: &ModuleLayout,
    left: &mut u64,
    mut report: impl FnMut(&[u8], u64),
) -> Option<()> {
    let [symbols, table, count, text] = layout.symbols?;
    let symbols = space.u64(memory, module.address.wrapping_add(symbols))?;
    let table = space.u64(memory, symbols.wrapping_add(table))?;
    let count = u64::from(space.u32(memory, symbols.wrapping_add(count))?);
    let text = space.u64(memory, symbols.wrapping_add(text))?;
    if count > SYMBOLS_MAX {
        return None;
    }
    *left = left.checked_sub(count * SYMBOL as u64)?;
    let mut entries = vec![0; count as usize * SYMBOL];
    space.read(memory, table, &mut entries)?;
    let word = |entry: &[u8], at: usize| {
        entry[at..at + 4].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
    };
    // The names are contiguous: they are read in one call, but for the end of the last name.
    let last = entries.chunks_exact(SYMBOL).map(|entry| word(entry, 0)).max()?;
    if last > NAMES_MAX {
        return None;
    }
    *left = left.checked_sub(last)?;
    let mut names = vec![0; last as usize + 1];
    space.read(memory, text, &mut names)?;
    let mut tail = vec![0; 256];
    // The end of the last name may lie beyond the end of a page, which need not be mapped.
    let at = text.wrapping_add(last + 1);
    let room = (4096 - at % 4096).min(256) as usize;
    if space.read(memory, at, &mut tail[..room]).is_some() {
        names.extend_from_slice(&tail[..room]);
    }
    for entry in entries.chunks_exact(SYMBOL) {
        let name = &names[word(entry, 0) as usize..];
        let name = &name[..name.len().min(NAME_MAX)];
        let Some(end) = name.iter().position(|byte| *byte == 0) else { continue };
        let address = word(entry, 8) | word(entry, 12) << 32;
        if end > 0 && address != 0 {
            report(&name[..end], address);
        }
    }
    Some(())
}
