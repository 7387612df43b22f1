//! Builds a kernel's memory: room, page tables, and structures by the names of their members.

use std::collections::{HashMap, HashSet};

use super::description::Description;
use super::store::Store;
use super::{PAGE, Shape};

/// The virtual address of a kernel's image, and that of modules.
pub(crate) const IMAGE: u64 = 0xffff_ffff_8000_0000;
const MODULES: u64 = 0xffff_ffff_c000_0000;
/// The offset of the image in its range of addresses.
const TEXT: u64 = 0x100_0000;
/// The offset of functions in the image, beyond all data.
const FUNCTIONS: u64 = 0x400_0000;
const PRESENT: u64 = 0x63;
const LARGE: u64 = 1 << 7;

/// The meaning of the words in memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Words {
    /// The member that begins at a guest-physical address.
    members: HashMap<u64, &'static str>,
    /// All values that were written to a member, of any structure.
    values: HashMap<&'static str, HashSet<u64>>,
    /// Members that are pointers.
    pointers: HashSet<&'static str>,
    /// The kind of the object at a virtual address: a structure's name, or `function`.
    objects: HashMap<u64, &'static str>,
}

impl Words {
    fn record(&mut self, address: u64, member: &'static str, value: u64) {
        self.members.insert(address, member);
        self.values.entry(member).or_default().insert(value);
        if value >= 0xff00_0000_0000_0000 {
            self.pointers.insert(member);
        }
    }

    /// The name of the pointer at an address.
    pub fn pointer(&self, address: u64) -> Option<&'static str> {
        self.members.get(&address).copied().filter(|member| self.pointers.contains(member))
    }

    /// Whether this value is plausible for a pointer: an equal pointer exists, or one that points
    /// to an object of the same kind.
    pub fn is_plausible(&self, member: &str, value: u64) -> bool {
        let Some(values) = self.values.get(member) else { return false };
        let kind = |address: &u64| self.objects.get(address);
        let expected = kind(&value);
        values.contains(&value)
            || expected.is_some() && values.iter().any(|other| kind(other) == expected)
    }

    /// The values of all pointers, without duplicates.
    pub fn targets(&self) -> Vec<u64> {
        let pointers = self.pointers.iter().flat_map(|member| &self.values[member]);
        let distinct: HashSet<u64> = pointers.copied().filter(|value| *value != 0).collect();
        let mut targets: Vec<u64> = distinct.into_iter().collect();
        targets.sort_unstable();
        targets
    }
}

/// A kernel under construction.
pub(crate) struct Builder<'s> {
    pub store: &'s Store,
    pub shape: Shape,
    /// All types, including those of modules.
    pub types: Description,
    pub words: Words,
    /// The next free byte of the kernel's part of the memory.
    next: u64,
    /// The page tables, the root first.
    pub tables: Vec<u64>,
    /// Virtual pages that are mapped one by one.
    pages: HashMap<u64, u64>,
    /// The next free addresses in the ranges of modules and of `vmalloc`.
    next_module: u64,
    next_vmalloc: u64,
    functions: HashMap<&'static str, u64>,
}

impl<'s> Builder<'s> {
    /// A builder with an empty room. The image occupies its beginning.
    pub fn new(store: &'s Store, shape: &Shape, types: Description) -> Self {
        let vmalloc = if shape.levels == 5 { 0xffa0_0000_0000_0000 } else { 0xffff_c900_0000_0000 };
        Self {
            store,
            types,
            words: Words::default(),
            next: shape.room.0,
            tables: Vec::new(),
            pages: HashMap::new(),
            next_module: MODULES,
            next_vmalloc: vmalloc,
            functions: HashMap::new(),
            shape: shape.clone(),
        }
    }

    /// Allocates guest-physical room.
    pub fn room(&mut self, length: u64, alignment: u64) -> u64 {
        let address = self.next.next_multiple_of(alignment);
        self.next = address + length;
        assert!(self.next <= self.shape.room.0 + self.shape.room.1, "the room is too small");
        address
    }

    /// Allocates a page.
    pub fn room_page(&mut self) -> u64 {
        self.room(PAGE, PAGE)
    }

    /// The virtual address in the image of a guest-physical address.
    pub fn image(&self, physical: u64) -> u64 {
        IMAGE + TEXT + self.shape.slide + (physical - self.shape.room.0)
    }

    /// The number that is added to an offset in the image to get a guest-physical address.
    pub fn physical_base(&self) -> i64 {
        self.shape.room.0 as i64 - (TEXT + self.shape.slide) as i64
    }

    /// The virtual address in the direct map of a guest-physical address.
    pub fn direct(&self, physical: u64) -> u64 {
        self.shape.direct + physical
    }

    /// The guest-physical address of a virtual address.
    pub fn physical(&self, address: u64) -> u64 {
        let offset = address.wrapping_sub(self.shape.direct);
        if offset < 1 << 40 {
            return offset;
        }
        if let Some(page) = self.pages.get(&(address & !(PAGE - 1))) {
            return page + address % PAGE;
        }
        self.shape.room.0 + (address - IMAGE - TEXT - self.shape.slide)
    }

    /// Maps a page of `1 << shift` bytes.
    pub fn map(&mut self, address: u64, physical: u64, shift: u32) {
        let mut table = self.tables[0];
        let mut level = 12 + 9 * (self.shape.levels - 1);
        loop {
            let entry = table + (address >> level & 511) * 8;
            if level == shift {
                let large = if shift > 12 { LARGE } else { 0 };
                self.store.write_u64(entry, physical | PRESENT | large);
                break;
            }
            let next = self.pages.get(&(entry | 1)).copied().unwrap_or_else(|| {
                let next = self.room_page();
                self.tables.push(next);
                self.store.write_u64(entry, next | PRESENT);
                // An odd number, so it is never the address of a page.
                self.pages.insert(entry | 1, next);
                next
            });
            table = next;
            level -= 9;
        }
        if shift == 12 {
            self.pages.insert(address, physical);
        }
    }

    /// The address of a stack of a task, of which only the last page has content.
    pub fn stack(&mut self) -> u64 {
        let start = self.next_vmalloc.next_multiple_of(4 * PAGE);
        self.next_vmalloc = start + 5 * PAGE;
        let page = self.room_page();
        self.map(start + 3 * PAGE, page, 12);
        start
    }

    /// Allocates pages that are contiguous in the virtual range of modules or of `vmalloc`, and in
    /// reverse order in memory.
    pub fn scattered(&mut self, length: u64, module: bool) -> u64 {
        let count = length.div_ceil(PAGE);
        let next = if module { &mut self.next_module } else { &mut self.next_vmalloc };
        let start = *next;
        // An unmapped page separates the allocations.
        *next += (count + 1) * PAGE;
        for index in (0..count).rev() {
            let page = self.room_page();
            self.map(start + index * PAGE, page, 12);
        }
        start
    }

    /// Copies bytes to a virtual address.
    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let at = address + done as u64;
            let count = ((PAGE - at % PAGE) as usize).min(bytes.len() - done);
            self.store.write(self.physical(at), &bytes[done..done + count]);
            done += count;
        }
    }

    /// Allocates room for a structure in the direct map.
    pub fn make(&mut self, structure: &str) -> u64 {
        let room = self.room(self.types.size(structure), 64);
        self.direct(room)
    }

    /// The address of a member: `structure.member`.
    pub fn at(&self, object: u64, path: &str) -> u64 {
        object + self.types.offset(path).unwrap_or_else(|| panic!("no {path}"))
    }

    /// Writes a member of eight bytes.
    pub fn set(&mut self, object: u64, path: &'static str, value: u64) {
        let address = self.at(object, path);
        let structure = path.split('.').next().expect("a structure");
        self.words.objects.insert(object, structure);
        self.words.record(self.physical(address), path, value);
        self.write(address, &value.to_le_bytes());
    }

    /// Writes an entry of an array of numbers. `name` is the name of the array.
    pub fn set_entry(&mut self, address: u64, name: &'static str, value: u64) {
        self.words.record(self.physical(address), name, value);
        self.write(address, &value.to_le_bytes());
    }

    /// Writes a member of four bytes.
    pub fn set_u32(&mut self, object: u64, path: &str, value: u32) {
        let address = self.at(object, path);
        self.write(address, &value.to_le_bytes());
    }

    /// Writes a text into a member.
    pub fn set_text(&mut self, object: u64, path: &str, text: &str) {
        let address = self.at(object, path);
        self.write(address, text.as_bytes());
        self.write(address + text.len() as u64, &[0]);
    }

    /// Writes a text into new room.
    pub fn text(&mut self, text: &str) -> u64 {
        let room = self.room(text.len() as u64 + 1, 8);
        let address = self.direct(room);
        self.write(address, text.as_bytes());
        address
    }

    /// Writes a variable into the image.
    pub fn variable(&mut self, value: u64) -> u64 {
        let room = self.room(8, 8);
        self.store.write_u64(room, value);
        self.image(room)
    }

    /// Links the entries to a list with its head at `head`. `name` is the name of the links.
    pub fn chain(&mut self, name: &'static str, head: u64, entries: &[u64]) {
        let ring: Vec<u64> = [head].iter().chain(entries).chain([&head]).copied().collect();
        for pair in ring.windows(2) {
            self.words.record(self.physical(pair[0]), name, pair[1]);
            self.write(pair[0], &pair[1].to_le_bytes());
            self.words.record(self.physical(pair[1]) + 8, name, pair[0]);
            self.write(pair[1] + 8, &pair[0].to_le_bytes());
        }
    }

    /// Adds a function of the kernel itself.
    pub fn add_function(&mut self, name: &'static str) -> u64 {
        let address =
            IMAGE + TEXT + self.shape.slide + FUNCTIONS + 64 * self.functions.len() as u64;
        self.functions.insert(name, address);
        self.words.objects.insert(address, "function");
        address
    }

    /// Adds a function or another symbol of a module.
    pub fn add_module_function(&mut self, name: &'static str, address: u64) {
        self.functions.insert(name, address);
        self.words.objects.insert(address, "function");
    }

    /// The address of a function; 0 for the empty name.
    pub fn function(&self, name: &str) -> u64 {
        if name.is_empty() {
            return 0;
        }
        *self.functions.get(name).unwrap_or_else(|| panic!("no function {name}"))
    }

    /// The `struct page` of a guest-physical address.
    pub fn page(&self, physical: u64) -> u64 {
        self.shape.pages + physical / PAGE * self.types.size("page")
    }

    /// Maps the page structures of `length` bytes of memory from `start` on.
    pub fn map_pages(&mut self, start: u64, length: u64) {
        let first = self.page(start) & !(PAGE - 1);
        let end = self.page(start + length);
        let mut address = first;
        while address < end {
            if !self.pages.contains_key(&address) {
                let page = self.room_page();
                self.map(address, page, 12);
            }
            address += PAGE;
        }
    }

    /// The number of bytes of the room in use.
    pub fn used(&self) -> u64 {
        self.next - self.shape.room.0
    }
}
