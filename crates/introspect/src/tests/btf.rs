//! Descriptions of types: lookups, and the limits of hostile descriptions.

use std::time::{Duration, Instant};

use crate::btf::Btf;
use crate::layout::{Layout, Types};
use crate::synthetic::Description;

/// Encoded types from words: a header, then `types`, then `strings`.
fn raw(types: &[u32], strings: &[u8]) -> Vec<u8> {
    let length = types.len() as u32 * 4;
    let words = [0x0001_eb9f, 24, 0, length, length, strings.len() as u32];
    let words = words.iter().chain(types);
    words.flat_map(|word| word.to_le_bytes()).chain(strings.iter().copied()).collect()
}

const STRUCT: u32 = 4 << 24;
const POINTER: u32 = 2 << 24;
const TYPEDEF: u32 = 8 << 24;
const CONST: u32 = 10 << 24;

#[test]
fn members_by_path() {
    let text = "
        inner 16: a 0, b 8
        -union 8: x 0, y 0
        -part 24: - 0 -union, deep 16
        outer 100: first 0, - 8 -part, in 40 inner, to 64 *inner, c 72
        bits! 16: one 0, other 9 inner
        enum small: NONE 0, SOME 7
        enum64 wide: FAR 1311768467463790320, NEAR 1
    ";
    let encoded = Description::parse(text).encode(None, 3);
    let btf = Btf::new(encoded.bytes, None).unwrap();
    let offset = |structure, path| btf.member(structure, path).map(|member| member.offset);
    let expected = [
        ("first", 0),
        ("x", 8),
        ("y", 8),
        ("deep", 24),
        ("in", 40),
        ("in.a", 40),
        ("in.b", 48),
        ("c", 72),
    ];
    for (path, place) in expected {
        assert_eq!(offset("outer", path), Some(place), "{path}");
    }
    for path in ["none", "in.none", "first.a", "x.y", "to.a", "unsigned long"] {
        assert_eq!(offset("outer", path), None, "{path}");
    }
    assert_eq!((offset("bits", "other"), offset("bits", "other.b")), (Some(9), Some(17)));
    assert_eq!((btf.size("outer"), btf.size("small"), btf.size("other")), (Some(100), None, None));
    let target = |path| btf.points_to(btf.member("outer", path)?);
    assert_eq!(target("to"), Some(&b"inner"[..]));
    assert_eq!((target("in"), target("first")), (None, None));
    assert_eq!((btf.enumerator("small", "SOME"), btf.enumerator("small", "ALL")), (Some(7), None));
    assert_eq!(btf.enumerator("wide", "FAR"), Some(0x1234_5678_9abc_def0));
    assert_eq!((btf.enumerator("wide", "NEAR"), btf.enumerator("outer", "first")), (Some(1), None));
}

#[test]
fn bits_of_a_structure() {
    let words = [
        // An integer, and a structure with bit fields: a number of 8 bits, and bit 13.
        1,
        1 << 24,
        4,
        32, //
        5,
        STRUCT | 1 << 31 | 2,
        4,
        9,
        1,
        8 << 24,
        13,
        1,
        1 << 24 | 0xd,
    ];
    let btf = Btf::new(raw(&words, b"\0int\0bit\0one\0two\0"), None).unwrap();
    let place = |name| btf.member("bit", name).map(|member| (member.offset, member.bit));
    assert_eq!((place("one"), place("two")), (Some((0, 0)), Some((1, 5))));
}

#[test]
fn a_modules_description_extends_its_kernels() {
    let kernel = Description::parse("base 8: x 0\nshared 24: one 0, two 16").encode(None, 2);
    let module =
        Description::parse("own 64: of 8 base, to 16 *shared, y 24").encode(Some(&kernel), 1);
    let kernel = Btf::new(kernel.bytes, None).unwrap();
    let module = Btf::new(module.bytes, Some(&kernel)).unwrap();
    let offset = |path| module.member("own", path).map(|member| member.offset);
    assert_eq!((offset("of"), offset("of.x"), offset("y")), (Some(8), Some(8), Some(24)));
    assert_eq!(module.points_to(module.member("own", "to").unwrap()), Some(&b"shared"[..]));
    assert_eq!(module.size("base"), Some(8), "a type that only the kernel has");
    assert!(kernel.member("own", "y").is_none());
    // With a kernel other than its own, a lookup fails or has a result within bounds.
    let other = Btf::new(raw(&[], b"\0"), None).unwrap();
    let bytes = Description::parse("own 64: of 8 own").encode(None, 0).bytes;
    let lost = Btf::new(bytes, Some(&other)).unwrap();
    assert!(lost.member("own", "of").is_none());
}

#[test]
fn structures_that_contain_themselves() {
    // A structure of 65,535 unnamed members, each of which is the structure itself.
    let mut types = vec![1, STRUCT | 0xffff, 8];
    for _ in 0..0xffff {
        types.extend([0, 1, 0]);
    }
    let btf = Btf::new(raw(&types, b"\0page\0"), None).unwrap();
    let start = Instant::now();
    for _ in 0..1000 {
        assert!(btf.member("page", "flags").is_none());
    }
    assert!(Layout::new(&Types { kernel: &btf, modules: Vec::new() }).is_err());
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());

    // Names, pointers and qualifiers that refer to themselves and to each other.
    let types =
        [1, TYPEDEF, 2, 0, CONST, 1, 0, POINTER, 3, 1, STRUCT | 3, 8, 6, 1, 0, 6, 3, 0, 0, 4, 0];
    let btf = Btf::new(raw(&types, b"\0page\0me\0"), None).unwrap();
    assert!(btf.member("page", "me").is_none());
    assert!(btf.member("page", "me.me").is_none());
}

#[test]
fn names_without_an_end() {
    // None of the 200,000 structures has a name with a zero byte at its end.
    let count = 200_000;
    let types: Vec<u32> = (0..count).flat_map(|index| [1 + index, STRUCT, 8]).collect();
    let strings = vec![b'x'; 4 << 20];
    let start = Instant::now();
    let btf = Btf::new(raw(&types, &strings), None).unwrap();
    assert_eq!(btf.size("x"), None);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn impossible_sizes_and_places() {
    // A requested structure must have a plausible size.
    let description = |page: &str| {
        let text =
            [crate::synthetic::COMMON, crate::synthetic::BEFORE_SEVEN, crate::synthetic::EARLY]
                .join("\n");
        let line = text.lines().find(|line| line.trim().starts_with("page ")).unwrap().to_owned();
        let text = text.replace(&line, page);
        Description::parse(&text).encode(None, 0).bytes
    };
    let layout = |page: &str| {
        let btf = Btf::new(description(page), None).unwrap();
        Layout::new(&Types { kernel: &btf, modules: Vec::new() })
    };
    let words = "flags 0, mapping 24, compound_head 8";
    assert!(layout(&format!("page 64: {words}")).is_ok());
    assert_eq!(layout(&format!("page 0: {words}")).err(), Some("page"));
    assert_eq!(layout(&format!("page 4294967295: {words}")).err(), Some("page"));
    let far = "page 64: flags 0, mapping 24, compound_head 500000000";
    assert_eq!(layout(far).err(), Some("page.compound_head or page.compound_info"));
    assert_eq!(
        layout("page 64: flags 0, mapping 24").err(),
        Some("page.compound_head or page.compound_info")
    );
}

#[test]
fn broken_descriptions_are_rejected_or_read_within_bounds() {
    let text = [crate::synthetic::COMMON, crate::synthetic::BEFORE_SEVEN, crate::synthetic::EARLY]
        .join("\n");
    let good = Description::parse(&text).encode(None, 0);
    let read = |bytes: Vec<u8>| {
        let Some(btf) = Btf::new(bytes, None) else { return false };
        let types = Types { kernel: &btf, modules: Vec::new() };
        let _ = types.enumerator("pageflags", "PG_slab");
        Layout::new(&types).is_ok()
    };
    assert!(read(good.bytes.clone()));
    for length in 0..good.bytes.len() {
        assert!(!read(good.bytes[..length].to_vec()), "{length}");
    }
    for seed in 0..20_000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bytes = good.bytes.clone();
        for _ in 0..random.usize(1..5) {
            let place =
                if random.u8(..) < 60 { random.usize(0..24) } else { random.usize(0..bytes.len()) };
            let any = random.u8(..);
            bytes[place] =
                random.choice([0, 1, 0x80, 0xff, bytes[place] ^ 1 << (any % 8), any]).unwrap();
        }
        read(bytes);
    }
}
