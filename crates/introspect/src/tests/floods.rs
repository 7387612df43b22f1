//! Guests with excessive numbers of structures.

use std::time::{Duration, Instant};

use fathom_guest_memory::recording;
use fathom_insight::Names;

use super::SyntheticGuest;
use crate::kernel::{AttachError, Kernel};
use crate::synthetic::{Shape, Store};

const PAGE: u64 = 4096;
/// See [`SyntheticGuest::endless`].
const ENDLESS: u64 = 0xffff_d000_0000_0000;

/// Runs `act`. Returns the number of reads of the guest's memory, and the number of bytes read.
fn effort(limit: Duration, act: impl FnOnce()) -> (u64, u64) {
    let (start, count, bytes) = (Instant::now(), recording::count(), recording::bytes());
    act();
    assert!(start.elapsed() < limit, "{:?}", start.elapsed());
    (recording::count() - count, recording::bytes() - bytes)
}

#[test]
fn memory_full_of_notes() {
    let pages = 16 << 10;
    for distinct in [false, true] {
        let store = Store::new(&[(0, pages * PAGE)]).unwrap();
        for page in 0..pages {
            let number = if distinct { page } else { 0 };
            let text = format!(
                "OSRELEASE={number}\nPAGESIZE=4096\nSYMBOL(kallsyms_names)=ffffffff82000000\n\
                 SYMBOL(kallsyms_num_syms)=ffffffff82000000\nSYMBOL(init_top_pgt)=ffffffff81000000\nNUMBER(phys_base)=0\n"
            );
            store.write(page * PAGE, text.as_bytes());
        }
        let memory = store.memory();
        let (reads, bytes) = effort(Duration::from_secs(1), || {
            let error = Kernel::attach(&memory, None).unwrap_err();
            assert!(matches!(error, AttachError::Torn { .. }), "{error}");
        });
        assert!(reads < 2 * pages, "{reads}");
        assert!(bytes < 8 << 20, "{bytes}: the number of notes that are read is limited");
    }
}

#[test]
fn modules_with_endless_types_and_symbols() {
    let guest = SyntheticGuest::roomy();
    let kernel = guest.guest().kernel().unwrap();
    let direct = guest.linux.shape.direct;
    // A thousand modules, and as many descriptions of types, in two lists.
    let mut next = (guest.linux.used.0 + guest.linux.used.1).next_multiple_of(PAGE);
    let types = &guest.linux.types;
    let place = |path: &str| types.offset(path).unwrap();
    let mut make = |structure: &str| {
        let room = next;
        next += types.size(structure).next_multiple_of(64);
        room
    };
    let kallsyms = make("mod_kallsyms");
    let btf = make("btf");
    guest.endless(&[1; 4096]);
    let store = &guest.store;
    store.write_u64(kallsyms + place("mod_kallsyms.symtab"), ENDLESS);
    store.write(kallsyms + place("mod_kallsyms.num_symtab"), &100_000_u32.to_le_bytes());
    store.write_u64(kallsyms + place("mod_kallsyms.strtab"), ENDLESS);
    store.write_u64(btf + place("btf.data"), ENDLESS);
    store.write(btf + place("btf.data_size"), &(4_u32 << 20).to_le_bytes());
    let head = kernel.places.modules.unwrap();
    let physical = |address| kernel.space.translate(&guest.memory, address).unwrap();
    let mut link = physical(kernel.u64(head).unwrap());
    // The head of the list of types follows that of the list of modules.
    let mut type_link = physical(head + 16);
    for _ in 0..1000 {
        let module = make("module");
        store.write(module + place("module.name"), b"endless\0");
        store.write_u64(module + place("module.kallsyms"), direct + kallsyms);
        store.write_u64(link, direct + module + place("module.list"));
        link = module + place("module.list");
        let own = make("btf_module");
        store.write_u64(own + place("btf_module.btf"), direct + btf);
        store.write_u64(own + place("btf_module.module"), direct + module);
        store.write_u64(type_link, direct + own + place("btf_module.list"));
        type_link = own + place("btf_module.list");
    }
    store.write_u64(link, head);
    store.write_u64(type_link, head + 16);
    let (_, bytes) = effort(Duration::from_secs(5), || {
        assert_eq!(kernel.read_again().unwrap().modules().len(), 1001);
    });
    assert!(bytes < 200 << 20, "{bytes}");
}

#[test]
fn every_page_of_another_file() {
    // Every page belongs to a different inode.
    let guest = SyntheticGuest::new(&Shape { room: (2 << 20, 16 << 20), ..Shape::default() });
    let kernel = guest.guest().kernel().unwrap();
    let layout = &kernel.layout;
    let start = (guest.linux.used.0 + guest.linux.used.1).next_multiple_of(PAGE);
    let mut inode = start;
    for page in (start..guest.linux.used.0 + (16 << 20)).step_by(4096) {
        let structure = kernel.space.walk(&guest.memory, kernel.page_of(page)).unwrap();
        let own = guest.linux.shape.direct + inode;
        guest.store.write_u64(structure + layout.page_mapping, own + layout.inode_data);
        guest.store.write_u64(inode + layout.inode_data + layout.mapping_host, own);
        inode += 640;
    }
    effort(Duration::from_secs(1), || {
        let files = kernel.cached_files(&Names::default());
        assert!(files.len() >= guest.linux.cached.len());
    });
}
