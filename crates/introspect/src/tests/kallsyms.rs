//! Tables of symbols: all encodings of addresses, long names, and endless tables.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::SyntheticGuest;
use crate::kallsyms::{self, KallsymsError};
use crate::kernel::{AttachError, Kernel};
use crate::paging::AddressSpace;
use crate::synthetic::{Addresses, Shape};
use crate::vmcoreinfo;

const PAGE: u64 = 4096;
/// The release of a kernel of the default shape.
const RELEASE: &str = "6.1.0-synthetic";

/// The start of the range that [`endless`] maps.
const ENDLESS: u64 = 0xffff_d000_0000_0000;

impl SyntheticGuest {
    fn find<'n>(&self, names: &[&'n str]) -> Option<HashMap<&'n str, Vec<u64>>> {
        self.try_find(names).ok()
    }

    fn try_find<'n>(&self, names: &[&'n str]) -> Result<HashMap<&'n str, Vec<u64>>, KallsymsError> {
        let note = vmcoreinfo::find(&self.memory, 0, None).notes.remove(0);
        let space = AddressSpace::new(&note).ok_or(KallsymsError::Torn("init_top_pgt"))?;
        kallsyms::find(&self.memory, &space, &note, names)
    }

    /// Changes the address of a symbol in the note. The number of digits stays the same.
    fn redirect(&self, symbol: &str, address: u64) {
        let mut text = vec![0; 4096];
        self.memory.read(self.linux.shape.note, &mut text).unwrap();
        let key = format!("SYMBOL({symbol})=");
        let at = text.windows(key.len()).position(|part| part == key.as_bytes()).unwrap();
        let place = self.linux.shape.note + (at + key.len()) as u64;
        self.store.write(place, format!("{address:016x}").as_bytes());
        // The second copy of the note is removed.
        self.store.write(self.linux.shape.note + PAGE, &[0; 64]);
    }

    /// Maps a page of `content` repeatedly, through tables that contain themselves.
    pub(super) fn endless(&self, content: &[u8]) {
        let [data, table] = [8 * PAGE, 9 * PAGE];
        self.store.write(data, content);
        for index in 0..512 {
            self.store.write_u64(table + 8 * index, data | 0x63);
        }
        for (level, table) in [(10 * PAGE, table), (11 * PAGE, 10 * PAGE)] {
            for index in 0..512 {
                self.store.write_u64(level + 8 * index, table | 0x63);
            }
        }
        let entry = self.linux.tables[0] + (ENDLESS >> 39 & 511) * 8;
        self.store.write_u64(entry, 11 * PAGE | 0x63);
    }
}

#[test]
fn all_encodings_of_addresses() {
    let image = 0xffff_ffff_8100_0000;
    for addresses in [Addresses::Below, Addresses::Above, Addresses::FromPlace] {
        for slide in [0, 0x1a0_0000, 0x3e00_0000] {
            let guest = SyntheticGuest::new(&Shape { addresses, slide, ..Shape::default() });
            let found = guest.find(&["ext4_end_bio", "_text", "init_top_pgt", "nowhere"]).unwrap();
            assert_eq!(found["ext4_end_bio"], [image + slide + 0x400_0000]);
            assert_eq!(found["_text"], [image + slide]);
            assert!(!found.contains_key("nowhere"));
        }
    }
    let guest = SyntheticGuest::new(&Shape::default());
    let found = guest.find(&["some_percpu_counter", "fixed_percpu_data"]).unwrap();
    assert_eq!(found["some_percpu_counter"], [0x1a00], "an absolute address");
    assert_eq!(found["fixed_percpu_data"], [0]);
}

#[test]
fn long_names_and_names_that_occur_twice() {
    let guest = SyntheticGuest::new(&Shape::default());
    let long = "long.name.".repeat(52);
    let names = [127, 128, 129, 300, 510].map(|length| &long[..length]);
    let found = guest.find(&names).unwrap();
    for name in names {
        assert_eq!(found[name].len(), 1, "{}", name.len());
    }
    assert_eq!(guest.find(&["mpage_end_io"]).unwrap()["mpage_end_io"].len(), 2);
}

#[test]
fn inconsistent_tables() {
    let parts = [
        "kallsyms_names",
        "kallsyms_num_syms",
        "kallsyms_token_table",
        "kallsyms_token_index",
        "kallsyms_offsets",
        "kallsyms_relative_base",
    ];
    for part in parts {
        for place in [0, 0xffff_ffff_f000_0000, u64::MAX, 0xffff_8000_0000_0000] {
            let guest = SyntheticGuest::new(&Shape::default());
            guest.redirect(part, place);
            assert!(guest.find(&["ext4_end_bio"]).is_none(), "{part} at {place:x}");
        }
    }
    // Addresses elsewhere in the kernel's memory.
    for part in parts {
        for seed in 0..60 {
            let guest = SyntheticGuest::new(&Shape::default());
            let mut random = fastrand::Rng::with_seed(seed);
            let room = guest.linux.used;
            guest.redirect(part, guest.linux.shape.direct + room.0 + random.u64(0..room.1));
            let _ = guest.find(&["ext4_end_bio"]);
        }
    }
}

#[test]
fn an_error_names_the_missing_part() {
    let names = &["ext4_end_bio"];
    let guest = SyntheticGuest::new(&Shape::default());
    guest.redirect("kallsyms_offsets", u64::MAX);
    assert_eq!(guest.try_find(names), Err(KallsymsError::Torn("kallsyms_offsets")));
    let error = Kernel::attach(&guest.memory, None).unwrap_err();
    assert_eq!(error, AttachError::Torn { release: RELEASE.into(), what: "kallsyms_offsets" });
    // The note does not have one of the symbols. The error does not suggest copied I/O.
    let guest = SyntheticGuest::new(&Shape::default());
    let (mut text, place) = (vec![0; 4096], guest.linux.shape.note);
    guest.memory.read(place, &mut text).unwrap();
    let key = b"kallsyms_token_table";
    let at = text.windows(key.len()).position(|part| part == key).unwrap();
    guest.store.write(place + at as u64, b"kallsyms_other_table");
    guest.store.write(place + PAGE, &[0; 64]);
    let error = Kernel::attach(&guest.memory, None).unwrap_err();
    let missing = AttachError::Missing { release: RELEASE.into(), what: "kallsyms_token_table" };
    assert_eq!(error, missing);
    assert!(!error.to_string().contains("swiotlb"), "{error}");
}

#[test]
fn endless_tables() {
    let names: [(&str, Vec<u8>); 4] = [
        ("empty names", vec![0; 4096]),
        ("names of one letter", [1, b'x'].repeat(2048)),
        ("the longest names", [0xff; 4096].into()),
        ("names of 512 letters", {
            let mut page = vec![b'x'; 4096];
            for place in (0..4096).step_by(512) {
                // 510 tokens, in two bytes.
                (page[place], page[place + 1]) = (0xfe, 3);
            }
            page
        }),
    ];
    for (what, content) in names {
        let guest = SyntheticGuest::new(&Shape::default());
        guest.endless(&content);
        guest.redirect("kallsyms_names", ENDLESS);
        guest.redirect("kallsyms_offsets", ENDLESS);
        // The greatest possible number of symbols, in a page of its own.
        guest.store.write(12 * PAGE, &2_000_000_u32.to_le_bytes());
        guest.redirect("kallsyms_num_syms", guest.linux.shape.direct + 12 * PAGE);
        let start = Instant::now();
        assert!(guest.find(&["x", ""]).is_none(), "{what}");
        assert!(start.elapsed() < Duration::from_secs(60), "{what}: {:?}", start.elapsed());
    }
    // Endless tokens.
    let guest = SyntheticGuest::new(&Shape::default());
    guest.endless(&[b'x'; 4096]);
    guest.redirect("kallsyms_token_table", ENDLESS);
    assert!(guest.find(&["x"]).is_none());
    guest.redirect("kallsyms_token_index", ENDLESS);
    assert!(guest.find(&["x"]).is_none());
}
