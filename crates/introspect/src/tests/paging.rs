//! Page tables of all formats.

use fathom_guest_memory::GuestMemory;

use crate::paging::AddressSpace;
use crate::synthetic::Store;
use crate::vmcoreinfo::VmcoreInfo;

const PAGE: u64 = 4096;
const IMAGE: u64 = 0xffff_ffff_8000_0000;
const NOTE: u64 = PAGE;
const ROOT: u64 = 2 * PAGE;
const PRESENT: u64 = 0x8000_0000_0000_0163;
const LARGE: u64 = 1 << 7;

struct Tables {
    store: Store,
    memory: GuestMemory,
    levels: u32,
    next: u64,
}

impl Tables {
    fn new(levels: u32) -> Self {
        let store = Store::new(&[(0, 64 * PAGE), (4 << 30, 16 * PAGE)]).unwrap();
        let memory = store.memory();
        Self { store, memory, levels, next: 4 * PAGE }
    }

    fn note(&self, text: &str) -> Option<AddressSpace> {
        self.store.write(NOTE, &[0; 4096]);
        self.store.write(NOTE, format!("OSRELEASE=7\nPAGESIZE=4096\n{text}").as_bytes());
        AddressSpace::new(&VmcoreInfo::read(&self.memory, NOTE)?)
    }

    fn space(&self) -> AddressSpace {
        let text = format!(
            "SYMBOL(init_top_pgt)={:x}\nNUMBER(phys_base)={}\nNUMBER(pgtable_l5_enabled)={}\n",
            IMAGE + 0x100_0000,
            ROOT as i64 - 0x100_0000,
            u32::from(self.levels == 5)
        );
        self.note(&text).unwrap()
    }

    /// Maps a page of `1 << shift` bytes. Returns the address of its entry.
    fn map(&mut self, address: u64, physical: u64, shift: u32) -> u64 {
        let (mut table, mut level) = (ROOT, 3 + 9 * self.levels);
        loop {
            let entry = table + (address >> level & 511) * 8;
            if level == shift {
                let large = if shift > 12 { LARGE } else { 0 };
                self.store.write_u64(entry, physical | PRESENT | large);
                return entry;
            }
            let there = self.memory.u64(entry).unwrap();
            table = if there == 0 { self.next } else { there & 0xf_ffff_ffff_f000 };
            if there == 0 {
                self.store.write_u64(entry, self.next | PRESENT);
                self.next += PAGE;
            }
            level -= 9;
        }
    }
}

#[test]
fn pages_of_all_sizes_at_all_depths() {
    for levels in [4, 5] {
        let mut tables = Tables::new(levels);
        let base = if levels == 5 { 0xff11_0000_0000_0000 } else { 0xffff_8880_0000_0000 };
        let space = tables.space();
        tables.map(base, 0x4000_0000, 30);
        tables.map(base + (1 << 30), 0x20_0000, 21);
        tables.map(base + (1 << 30) + (2 << 20), 0x5000, 12);
        tables.map(0x7000, 0x6000, 12);
        let walk = |address| space.walk(&tables.memory, address);
        assert_eq!(walk(base + 0x1234_5678), Some(0x5234_5678));
        assert_eq!(walk(base + (1 << 30) + 0x12_3456), Some(0x32_3456));
        assert_eq!(walk(base + (1 << 30) + (2 << 20) + 0x777), Some(0x5777));
        assert_eq!(walk(base + (1 << 30) + (2 << 20) + 0x1000), None, "not present");
        assert_eq!(walk(0x7001), Some(0x6001), "a process's address");
        // An address whose upper bits differ from each other is invalid.
        let bit = 11 + 9 * levels;
        assert_eq!(walk(base & !(1 << 63)), None);
        assert_eq!(walk(0x7000 | 1 << bit), None);
        assert_eq!(walk(0x7000 | 1 << 63), None);
    }
}

#[test]
fn the_flag_of_large_pages_is_an_address_bit_elsewhere() {
    // The attribute-table bit in the entry of a large page is not part of the address.
    let mut tables = Tables::new(4);
    let space = tables.space();
    let entry = tables.map(IMAGE, 0x20_0000, 21);
    tables.store.write_u64(entry, 0x20_0000 | PRESENT | LARGE | 1 << 12);
    assert_eq!(space.walk(&tables.memory, IMAGE + 0x1234), Some(0x20_1234));
}

#[test]
fn tables_that_lead_nowhere_or_back() {
    let mut tables = Tables::new(5);
    let space = tables.space();
    let address = 0xff11_0000_0000_0000;
    let entry = tables.map(address, 0x5000, 12);
    // The lowest table is outside the memory.
    for (place, what) in [(entry & !(PAGE - 1), "self"), (1 << 40, "outside"), (0, "note")] {
        let top = ROOT + (address >> 48 & 511) * 8;
        let before = tables.memory.u64(top).unwrap();
        tables.store.write_u64(top, place | PRESENT);
        let found = space.walk(&tables.memory, address);
        assert!(found.is_none_or(|found| found < 1 << 52), "{what}");
        tables.store.write_u64(top, before);
    }
    // The walk of a root that contains itself ends after the number of levels.
    for index in 0..512 {
        tables.store.write_u64(ROOT + index * 8, ROOT | PRESENT);
    }
    assert_eq!(space.walk(&tables.memory, address + 5), Some(ROOT + 5));
}

#[test]
fn the_tables_of_notes() {
    let tables = Tables::new(4);
    let place = format!("{:x}", IMAGE + 0x100_0000);
    let offset = ROOT as i64 - 0x100_0000;
    let good = [
        format!("SYMBOL(swapper_pg_dir)={place}\nNUMBER(phys_base)={offset}\n"),
        format!("SYMBOL(init_top_pgt)={place}\nNUMBER(phys_base)={offset}\n\0rest"),
    ];
    for text in good {
        assert!(tables.note(&text).is_some(), "{text}");
    }
    let bad = [
        format!("SYMBOL(init_top_pgt)={place}\n"),
        format!("SYMBOL(init_top_pgt)=ffff888000000000\nNUMBER(phys_base)={offset}\n"),
        format!("SYMBOL(init_top_pgt)=ffffffffd0000000\nNUMBER(phys_base)={offset}\n"),
        format!("SYMBOL(init_top_pgt)=zz\nNUMBER(phys_base)={offset}\n"),
        format!("NUMBER(phys_base)={offset}\n"),
        "SYMBOL(init_top_pgt)=ffffffff81000000\nNUMBER(phys_base)=1e9\n".into(),
    ];
    for text in bad {
        assert!(tables.note(&text).is_none(), "{text}");
    }
    // Extreme numbers wrap around, and lead to no memory.
    for edge in [i64::MIN, i64::MAX, -1] {
        let text = format!("SYMBOL(init_top_pgt)={place}\nNUMBER(phys_base)={edge}\n");
        let space = tables.note(&text).unwrap();
        assert_eq!(space.walk(&tables.memory, IMAGE), None);
    }
}

#[test]
fn the_direct_map_is_accepted_if_samples_confirm_it() {
    let direct = 0xffff_8880_0000_0000;
    let mut tables = Tables::new(4);
    let mut space = tables.space();
    let end = tables.memory.end();
    assert!(!space.set_direct(&tables.memory, direct, end), "nothing is mapped");
    tables.map(direct, 0, 30);
    assert!(
        space.set_direct(&tables.memory, direct, end),
        "memory that is plugged in may be missing"
    );
    assert_eq!(space.direct(direct + 5), Some(5));
    assert_eq!(space.direct(direct + end), None);
    assert_eq!(space.direct(direct - 1), None);
    let mut other = tables.space();
    tables.map(direct + (4 << 30), 5 << 30, 30);
    assert!(!other.set_direct(&tables.memory, direct, end), "a sample is elsewhere");
    tables.map(direct + (4 << 30), 4 << 30, 30);
    assert!(other.set_direct(&tables.memory, direct, end));
    // A direct map at these addresses would wrap around.
    for start in [u64::MAX - 4095, IMAGE, 0u64.wrapping_sub(end), u64::MAX - end] {
        assert!(!other.set_direct(&tables.memory, start, end), "{start:x}");
    }
}

#[test]
fn regions_smaller_than_a_page() {
    let memory = Store::new(&[(0, 100)]).unwrap().memory();
    let tables = Tables::new(4);
    assert!(!tables.space().set_direct(&memory, 0xffff_8880_0000_0000, 100));
}

#[test]
fn reads_continue_on_the_next_page() {
    let mut tables = Tables::new(4);
    let space = tables.space();
    let start = 0xffff_c900_0000_0000;
    tables.map(start, 0x2_0000, 12);
    tables.map(start + PAGE, 0x1_0000, 12);
    tables.store.write(0x2_0000, &[b'a'; 4096]);
    tables.store.write(0x1_0000, b"bcdefgh\0tail");
    let memory = &tables.memory;
    assert_eq!(space.u64(memory, start + PAGE - 4), Some(u64::from_le_bytes(*b"aaaabcde")));
    assert_eq!(space.u32(memory, start + PAGE - 1), Some(u32::from_le_bytes(*b"abcd")));
    assert_eq!(space.u64(memory, start + 2 * PAGE - 4), None);
    let text = |at, length| space.text(memory, at, length);
    assert_eq!(text(start + PAGE - 2, 20).as_deref(), Some("aabcdefgh"));
    assert_eq!(text(start + PAGE - 2, 3).as_deref(), Some("aab"));
    assert_eq!(text(start, 1000).map(|text| text.len()), Some(256), "texts are bounded");
    assert_eq!(text(start + PAGE, 0).as_deref(), Some(""));
    tables.store.write(0x1_0000, &[b'x'; 4096]);
    assert_eq!(
        text(start + 2 * PAGE - 3, 3).as_deref(),
        Some("xxx"),
        "no more than the requested length"
    );
    assert_eq!(text(start + 2 * PAGE - 3, 4), None);
    let mut bytes = vec![0; 8192];
    assert_eq!(space.read(memory, start, &mut bytes), Some(()));
    assert_eq!(space.read(memory, start + 1, &mut bytes), None);
    assert_eq!(space.read(memory, u64::MAX - 3, &mut bytes), None);
    assert_eq!(space.u64(memory, u64::MAX - 3), None);
}
