//! The making of a kernel's memory: rooms, page tables, and structures by the names of their
//! members.

use std::collections::{HashMap, HashSet};

use super::description::Description;
use super::store::Store;
use super::{PAGE, Shape};

/// Where a kernel's image is mapped, and where modules are.
pub(crate) const IMAGE: u64 = 0xffff_ffff_8000_0000;
const MODULES: u64 = 0xffff_ffff_c000_0000;
/// Where the image begins in its room.
const TEXT: u64 = 0x100_0000;
/// Functions begin behind what the image has of data.
const FUNCTIONS: u64 = 0x400_0000;
const PRESENT: u64 = 0x63;
const LARGE: u64 = 1 << 7;

/// What a word in memory is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Words {
    /// The member that begins at a guest-physical address.
    members: HashMap<u64, &'static str>,
    /// All values that were written to a member, of any structure.
    values: HashMap<&'static str, HashSet<u64>>,
    /// Members that are pointers.
    pointers: HashSet<&'static str>,
    /// What is at a virtual address: a structure, or a function.
    objects: HashMap<u64, &'static str>,
}

impl Words {
    fn note(&mut self, address: u64, member: &'static str, value: u64) {
        self.members.insert(address, member);
        self.values.entry(member).or_default().insert(value);
        if value >= 0xff00_0000_0000_0000 {
            self.pointers.insert(member);
        }
    }

    /// The pointer that is at an address, by the name of its member.
    pub fn pointer(&self, address: u64) -> Option<&'static str> {
        self.members.get(&address).copied().filter(|member| self.pointers.contains(member))
    }

    /// Whether a pointer may have this value: it has it somewhere, or points to such a thing
    /// there.
    pub fn has(&self, member: &str, value: u64) -> bool {
        let Some(values) = self.values.get(member) else { return false };
        let kind = |address: &u64| self.objects.get(address);
        let wanted = kind(&value);
        values.contains(&value)
            || wanted.is_some() && values.iter().any(|other| kind(other) == wanted)
    }

    /// All pointers that there are.
    pub fn targets(&self) -> Vec<u64> {
        let pointers = self.pointers.iter().flat_map(|member| &self.values[member]);
        let distinct: HashSet<u64> = pointers.copied().filter(|value| *value != 0).collect();
        let mut targets: Vec<u64> = distinct.into_iter().collect();
        targets.sort_unstable();
        targets
    }
}

/// A kernel in the making.
pub(crate) struct Builder<'s> {
    pub store: &'s Store,
    pub shape: Shape,
    /// All types, those of modules included.
    pub types: Description,
    pub words: Words,
    /// The next free byte of the kernel's part of the memory.
    next: u64,
    /// The page tables, the root first.
    pub tables: Vec<u64>,
    /// Virtual pages that are mapped one by one.
    pages: HashMap<u64, u64>,
    /// Free addresses in the rooms of modules and of `vmalloc`.
    next_module: u64,
    next_vmalloc: u64,
    functions: HashMap<&'static str, u64>,
}

impl<'s> Builder<'s> {
    /// Nothing but the room: the image takes it from its beginning on.
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

    /// Guest-physical room.
    pub fn room(&mut self, length: u64, alignment: u64) -> u64 {
        let address = self.next.next_multiple_of(alignment);
        self.next = address + length;
        assert!(self.next <= self.shape.room.0 + self.shape.room.1, "the room is too small");
        address
    }

    /// Room for a page.
    pub fn room_page(&mut self) -> u64 {
        self.room(PAGE, PAGE)
    }

    /// The address in the image of a guest-physical one.
    pub fn image(&self, physical: u64) -> u64 {
        IMAGE + TEXT + self.shape.slide + (physical - self.shape.room.0)
    }

    /// What is added to an offset in the image's room to get a guest-physical address.
    pub fn physical_base(&self) -> i64 {
        self.shape.room.0 as i64 - (TEXT + self.shape.slide) as i64
    }

    /// The address in the direct map of a guest-physical one.
    pub fn direct(&self, physical: u64) -> u64 {
        self.shape.direct + physical
    }

    /// The guest-physical address at a virtual one.
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
                // Odd, so never a page's own address.
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

    /// Fresh pages, one behind the other in the virtual room of modules or of `vmalloc`, and in
    /// reverse order in memory.
    pub fn scattered(&mut self, length: u64, module: bool) -> u64 {
        let count = length.div_ceil(PAGE);
        let next = if module { &mut self.next_module } else { &mut self.next_vmalloc };
        let start = *next;
        // A page without memory stands between.
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

    /// Room for a structure in the direct map.
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
        self.words.note(self.physical(address), path, value);
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

    /// A text of its own.
    pub fn text(&mut self, text: &str) -> u64 {
        let room = self.room(text.len() as u64 + 1, 8);
        let address = self.direct(room);
        self.write(address, text.as_bytes());
        address
    }

    /// A variable of the image.
    pub fn variable(&mut self, value: u64) -> u64 {
        let room = self.room(8, 8);
        self.store.write_u64(room, value);
        self.image(room)
    }

    /// Makes a list of the entries, whose head is at `head`; `name` is what a link is called.
    pub fn chain(&mut self, name: &'static str, head: u64, entries: &[u64]) {
        let ring: Vec<u64> = [head].iter().chain(entries).chain([&head]).copied().collect();
        for pair in ring.windows(2) {
            self.words.note(self.physical(pair[0]), name, pair[1]);
            self.write(pair[0], &pair[1].to_le_bytes());
            self.words.note(self.physical(pair[1]) + 8, name, pair[0]);
            self.write(pair[1] + 8, &pair[0].to_le_bytes());
        }
    }

    /// A function of the kernel itself.
    pub fn add_function(&mut self, name: &'static str) -> u64 {
        let address =
            IMAGE + TEXT + self.shape.slide + FUNCTIONS + 64 * self.functions.len() as u64;
        self.functions.insert(name, address);
        self.words.objects.insert(address, "function");
        address
    }

    /// A function or other place of a module.
    pub fn add_module_function(&mut self, name: &'static str, address: u64) {
        self.functions.insert(name, address);
        self.words.objects.insert(address, "function");
    }

    /// The address of a function; 0 of the empty name.
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

    /// How much of the room is used.
    pub fn used(&self) -> u64 {
        self.next - self.shape.room.0
    }
}
