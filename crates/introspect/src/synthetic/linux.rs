//! A complete kernel: its note, tables, types, symbols, modules and objects.

use std::fmt::Write;

use super::builder::{Builder, Words};
use super::bytes::ByteBuilder;
use super::description::{Description, Encoded};
use super::dirty;
use super::scene::{self, SyntheticRequest};
use super::store::Store;
use super::symbols::{self, Addresses};
use super::types;
use super::{PAGE, Shape, TICKS};

/// A kernel in a [`Store`].
pub struct Linux {
    /// The shape from which the kernel was built.
    pub shape: Shape,
    /// The requests in flight, with the true facts about each.
    pub requests: Vec<SyntheticRequest>,
    /// The kernel's processes in the order of its list: number and command.
    pub tasks: Vec<(u32, &'static str)>,
    /// The files with pages in memory: path and number of pages.
    pub cached: Vec<(String, u64)>,
    /// The meaning of the words in memory.
    pub(crate) words: Words,
    /// The kernel's structures.
    #[cfg_attr(not(test), expect(dead_code, reason = "only tests use it"))]
    pub(crate) types: Description,
    /// The guest-physical address and the length of the memory in use.
    pub used: (u64, u64),
    /// The link in the list of modules to the last one, `xfs`: its guest-physical address, its
    /// value without the module, and its value with it.
    xfs_link: (u64, u64, u64),
    /// The guest-physical addresses of the page tables.
    pub(crate) tables: Vec<u64>,
}

/// The values of the kernel's counters, in pages.
#[derive(Clone, Copy, Debug)]
pub struct KernelCounts {
    /// Dirty pages of files.
    pub dirty: u64,
    /// Pages in write-back.
    pub writeback: u64,
    /// Pages of files.
    pub file: u64,
    /// Free pages.
    pub free: u64,
    /// All pages that the kernel manages.
    pub total: u64,
}

/// The values of every synthetic kernel's counters.
pub const COUNTS: KernelCounts =
    KernelCounts { dirty: 5, writeback: 2, file: 40, free: 60, total: 128 };

/// The place of the pointer to the current task, in the area of each processor.
pub const CURRENT_PLACE: u64 = 0x1_fbc0;
/// The time since the boot of every synthetic kernel, in nanoseconds.
pub const UPTIME_NS: u64 = 1_005_000_000_000;

impl Linux {
    /// Builds a kernel.
    ///
    /// # Panics
    /// When the shape does not fit the memory.
    #[expect(clippy::too_many_lines, reason = "a flat list of structures")]
    pub fn build(store: &Store, shape: &Shape) -> Self {
        let (kernel, btrfs, xfs) = descriptions(shape);
        let mut all = kernel.clone();
        all.add(types::BTRFS);
        all.add(btrfs_bios(shape));
        all.add(types::XFS);
        let all_types = all.clone();
        let mut builder = Builder::new(store, shape, all);

        // The image, from the beginning of the room on: variables, types, symbols.
        let page_offset_base = builder.variable(shape.direct);
        let vmemmap_base = builder.variable(shape.pages);
        let device_super = builder.variable(0);
        let super_blocks = builder.room(16, 8);
        let module_list = builder.room(16, 8);
        let module_types = builder.room(16, 8);
        let node_counts = builder.room(8 * 32, 8);
        let zone_counts = builder.room(8 * 8, 8);
        let total = builder.variable(COUNTS.total);
        let expire = builder.variable(3000);
        let no_operations = builder.variable(0);
        let writeback = builder.variable(500);
        let init_task = builder.room(1024, 64);
        // Two pointers to nodes, or the only node.
        let nodes = builder.room(256, 64);
        let node_count = builder.room(8, 8);
        let processor_count = builder.room(8, 8);
        let processor_offsets = builder.room(8 * 2, 8);
        let bdi_list = builder.room(16, 8);
        let page_waits = builder.room(256 * 24, 64);
        let ticks = builder.variable(TICKS);
        let tick_source = builder.room(128, 64);
        let clock = builder.room(512, 64);
        let timekeeper = clock + 8;
        let of_clock = |member: &str| all_types.offset(member).expect("a member");
        store.write_u64(
            timekeeper + of_clock("timekeeper.ktime_sec"),
            UPTIME_NS / 1_000_000_000 - 5,
        );
        store.write_u64(timekeeper + of_clock("timekeeper.offs_boot"), 5_000_000_000);
        // 250 ticks a second.
        store
            .write(tick_source + of_clock("clocksource.mult"), &(4_000_000_u32 << 8).to_le_bytes());
        store.write(tick_source + of_clock("clocksource.shift"), &8_u32.to_le_bytes());
        for (place, pages) in [
            (node_counts + 8 * 20, COUNTS.dirty),
            (node_counts + 8 * 21, COUNTS.writeback),
            (node_counts + 8 * 19, COUNTS.file),
            (zone_counts, COUNTS.free),
        ] {
            store.write_u64(place, pages);
        }
        let root = builder.room_page();
        builder.tables.push(root);
        let encoded = kernel.encode(None, shape.types);
        let btf = builder.room(encoded.bytes.len() as u64, 16);
        store.write(btf, &encoded.bytes);

        let start = builder.image(shape.room.0);
        let image = |physical: u64| start + (physical - shape.room.0);
        let mut table: Vec<(String, u64, u8)> = vec![
            ("_text".into(), image(shape.room.0), b'T'),
            ("fixed_percpu_data".into(), 0, b'A'),
            ("some_percpu_counter".into(), 0x1a00, b'A'),
            // Kernels from 6.2 to 6.14 have the current task in a structure.
            if shape.recent && !shape.seven {
                ("pcpu_hot".into(), CURRENT_PLACE - 8, b'A')
            } else {
                ("current_task".into(), CURRENT_PLACE, b'A')
            },
            ("page_offset_base".into(), page_offset_base, b'D'),
            ("vmemmap_base".into(), vmemmap_base, b'D'),
            ("blockdev_superblock".into(), device_super, b'D'),
            ("super_blocks".into(), image(super_blocks), b'D'),
            ("modules".into(), image(module_list), b'd'),
            ("btf_modules".into(), image(module_types), b'd'),
            ("vm_node_stat".into(), image(node_counts), b'B'),
            ("vm_zone_stat".into(), image(zone_counts), b'B'),
            ("_totalram_pages".into(), total, b'B'),
            ("dirty_expire_interval".into(), expire, b'D'),
            // An object of a function, to whose name the compiler adds a number.
            ("no_open_fops.7".into(), no_operations, b'r'),
            (
                if shape.recent { "node_data" } else { "contig_page_data" }.into(),
                image(nodes),
                b'B',
            ),
            ("nr_node_ids".into(), image(node_count), b'D'),
            ("nr_cpu_ids".into(), image(processor_count), b'D'),
            ("__per_cpu_offset".into(), image(processor_offsets), b'D'),
            ("bdi_list".into(), image(bdi_list), b'D'),
            ("folio_wait_table".into(), image(page_waits), b'b'),
            (if shape.seven { "timekeeper_data" } else { "tk_core" }.into(), image(clock), b'd'),
            ("jiffies".into(), ticks, b'D'),
            ("clocksource_jiffies".into(), image(tick_source), b'd'),
            ("dirty_writeback_interval".into(), writeback, b'D'),
            ("init_task".into(), image(init_task), b'D'),
            ("init_top_pgt".into(), image(root), b'D'),
            ("__start_BTF".into(), image(btf), b'R'),
            ("__stop_BTF".into(), image(btf + encoded.bytes.len() as u64), b'R'),
        ];
        for name in types::FUNCTIONS {
            let address = builder.add_function(name);
            table.push(((*name).into(), address, b't'));
        }
        // Static functions of the same name, and names of a length that needs two bytes.
        table.push(("mpage_end_io".into(), builder.function("mpage_end_io") + 0x10_0000, b't'));
        for length in [127, 128, 129, 300, 510] {
            let long: String = std::iter::repeat_n("long.name.", 52).collect();
            table.push((long[..length].into(), image(shape.room.0) + 0x40_0000, b't'));
        }
        for index in 0..shape.symbols {
            table.push((format!("filler_function_{index}"), image(shape.room.0) + 0x50_0000, b'T'));
        }
        let offsets = builder.room(4 * table.len() as u64, 8);
        let tables = symbols::encode(&table, shape.addresses, builder.image(offsets));
        store.write(offsets, &tables.offsets);
        let offsets = builder.image(offsets);
        let mut part = |bytes: &[u8]| {
            let room = builder.room(bytes.len() as u64, 8);
            store.write(room, bytes);
            builder.image(room)
        };
        let mut places = vec![
            ("kallsyms_names", part(&tables.names)),
            ("kallsyms_num_syms", part(&(table.len() as u32).to_le_bytes())),
            ("kallsyms_token_table", part(&tables.token_table)),
            ("kallsyms_token_index", part(&tables.token_index)),
            ("kallsyms_offsets", offsets),
        ];
        if shape.addresses != Addresses::FromPlace {
            places.push(("kallsyms_relative_base", part(&tables.base.to_le_bytes())));
        }
        // The symbols' tables are read to the end of their last page.
        builder.room(PAGE, PAGE);
        let image_length = builder.used();
        write_note(&builder, &places);

        let mut place = 0;
        while place < image_length {
            builder.map(builder.image(shape.room.0 + place), shape.room.0 + place, 21);
            place += 2 << 20;
        }
        let regions: Vec<(u64, u64)> = store.regions().collect();
        for (start, length) in &regions {
            for gigabyte in start >> 30..=(start + length - 1) >> 30 {
                builder.map(builder.direct(gigabyte << 30), gigabyte << 30, 30);
            }
        }
        builder.map_pages(0, 4 * PAGE);
        builder.map_pages(shape.room.0, shape.room.1);

        let head = builder.image(module_list);
        let btrfs = btrfs.encode(Some(&encoded), 0);
        let xfs = xfs.encode(Some(&encoded), 0);
        let (modules, of_types): (Vec<u64>, Vec<u64>) = [
            add_module(&mut builder, "btrfs", &btrfs, types::BTRFS_SYMBOLS),
            add_module(&mut builder, "xfs", &xfs, types::XFS_SYMBOLS),
        ]
        .into_iter()
        .unzip();
        builder.chain("module.list", head, &modules);
        builder.chain("btf_module.list", builder.image(module_types), &of_types);
        let globals = scene::Globals {
            device_super: builder.physical(device_super),
            super_blocks: builder.image(super_blocks),
            init_task: builder.image(init_task),
            no_operations,
            page_waits: builder.image(page_waits),
            dirty: dirty::Globals {
                nodes,
                node_count,
                processor_count,
                offsets: processor_offsets,
                bdi_list: builder.image(bdi_list),
                shown: COUNTS.dirty,
            },
        };
        let scene = scene::build(&mut builder, &globals);
        Self {
            shape: shape.clone(),
            requests: scene.requests,
            tasks: scene.tasks,
            cached: scene.cached,
            used: (shape.room.0, builder.used()),
            xfs_link: (builder.physical(modules[0]), head, modules[1]),
            tables: builder.tables,
            words: builder.words,
            types: builder.types,
        }
    }

    /// The request with a name.
    ///
    /// # Panics
    /// When there is no such request.
    pub fn request(&self, name: &str) -> &SyntheticRequest {
        self.requests.iter().find(|request| request.name == name).expect("a request")
    }

    /// Removes the module `xfs` from the list of modules, or adds it again.
    pub fn load_xfs(&self, store: &Store, loaded: bool) {
        let (place, without, with) = self.xfs_link;
        store.write_u64(place, if loaded { with } else { without });
    }
}

/// The types around the bios of the module `btrfs`.
fn btrfs_bios(shape: &Shape) -> &'static str {
    match (shape.seven, shape.recent) {
        (true, _) => types::BTRFS_SEVEN,
        (false, true) => types::BTRFS_RECENT,
        (false, false) => types::BTRFS_EARLY,
    }
}

/// The types of the kernel, of the module `btrfs` and of the module `xfs`.
fn descriptions(shape: &Shape) -> (Description, Description, Description) {
    let recent = shape.recent;
    let mut kernel = Description::parse(types::COMMON);
    kernel.add(if shape.seven { types::SEVEN } else { types::BEFORE_SEVEN });
    kernel.add(if recent { types::RECENT } else { types::EARLY });
    let mut btrfs = Description::parse(types::BTRFS);
    btrfs.add(btrfs_bios(shape));
    (kernel, btrfs, Description::parse(types::XFS))
}

/// Writes the note twice: as text in its own page, and as the ELF note for crash dumps.
fn write_note(builder: &Builder<'_>, places: &[(&str, u64)]) {
    let shape = &builder.shape;
    let mut text = format!(
        "OSRELEASE={}\nBUILD-ID=0123456789abcdef\nPAGESIZE=4096\nSYMBOL(init_top_pgt)={:x}\n\
         NUMBER(phys_base)={}\nNUMBER(pgtable_l5_enabled)={}\nKERNELOFFSET={:x}\n",
        shape.release,
        builder.image(builder.tables[0]),
        builder.physical_base(),
        u32::from(shape.levels == 5),
        shape.slide,
    );
    for (name, address) in places {
        let _ = writeln!(text, "SYMBOL({name})={address:x}");
    }
    let mut note = ByteBuilder::default();
    note.u32(11);
    note.u32(text.len() as u32);
    note.u32(0);
    note.0.extend_from_slice(b"VMCOREINFO\0\0");
    note.0.extend_from_slice(text.as_bytes());
    builder.store.write(shape.note, text.as_bytes());
    builder.store.write(shape.note + PAGE, &note.0);
}

/// Writes a module: its structure, types and symbols, page by page. Returns its entries in the
/// lists of modules and of their types.
fn add_module(
    builder: &mut Builder<'_>,
    name: &str,
    types: &Encoded,
    symbols: &[&'static str],
) -> (u64, u64) {
    let module = builder.scattered(2 * PAGE, true);
    builder.set_text(module, "module.name", name);
    let data = builder.scattered(types.bytes.len() as u64, false);
    builder.write(data, &types.bytes);
    let btf = builder.make("btf");
    builder.set(btf, "btf.data", data);
    builder.set_u32(btf, "btf.data_size", types.bytes.len() as u32);
    let own = builder.make("btf_module");
    builder.set(own, "btf_module.btf", btf);
    builder.set(own, "btf_module.module", module);
    let (mut table, mut text) = (ByteBuilder(vec![0; 24]), vec![0]);
    for (index, symbol) in symbols.iter().enumerate() {
        let address = module + 0x800 + 32 * index as u64;
        table.u32(text.len() as u32);
        table.u32(0);
        table.u64(address);
        table.u64(16);
        text.extend_from_slice(symbol.as_bytes());
        text.push(0);
        builder.add_module_function(symbol, address);
    }
    // The names end with their page; the next page does not exist.
    let kallsyms = module + PAGE;
    let symtab = kallsyms + 64;
    let strtab = module + 2 * PAGE - text.len() as u64;
    builder.set(kallsyms, "mod_kallsyms.symtab", symtab);
    builder.set_u32(kallsyms, "mod_kallsyms.num_symtab", 1 + symbols.len() as u32);
    builder.set(kallsyms, "mod_kallsyms.strtab", strtab);
    builder.write(symtab, &table.0);
    builder.write(strtab, &text);
    builder.set(module, "module.kallsyms", kallsyms);
    (builder.at(module, "module.list"), builder.at(own, "btf_module.list"))
}
