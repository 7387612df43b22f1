//! BTF, the kernel's own description of its types: `Documentation/bpf/btf.rst` of Linux.

use std::cell::Cell;
use std::collections::HashMap;

const MAGIC: u16 = 0xeb9f;
/// The longest description accepted, in bytes. A kernel's is 4 to 8 MB.
pub(crate) const LENGTH_MAX: usize = 32 << 20;
/// The most structures and enumerations kept by name. A kernel has some 20,000.
const NAMES_MAX: usize = 1 << 18;
/// The longest name, in bytes.
const NAME_MAX: usize = 512;
/// The most members and enumerators examined in all lookups together.
const STEPS_MAX: u32 = 1 << 20;
/// The deepest nesting of structures.
const DEPTH_MAX: usize = 16;

const KIND_INT: u32 = 1;
const KIND_POINTER: u32 = 2;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_TYPEDEF: u32 = 8;
const KIND_VOLATILE: u32 = 9;
const KIND_CONST: u32 = 10;
const KIND_RESTRICT: u32 = 11;
const KIND_PROTOTYPE: u32 = 13;
const KIND_VARIABLE: u32 = 14;
const KIND_SECTION: u32 = 15;
const KIND_DECLARATION_TAG: u32 = 17;
const KIND_TYPE_TAG: u32 = 18;
const KIND_ENUM64: u32 = 19;

/// The types of a kernel, or of a module on top of its kernel's.
pub(crate) struct Btf<'b> {
    bytes: Vec<u8>,
    /// The place of each type in `bytes`, from `first_type` on.
    places: Vec<u32>,
    strings: (usize, usize),
    base: Option<&'b Btf<'b>>,
    first_type: u32,
    first_string: u32,
    /// Structures, unions and enumerations with names.
    names: HashMap<Box<[u8]>, u32>,
    /// The number of members and enumerators that may still be examined. A hostile description can
    /// contain a structure that contains itself many times.
    steps: Cell<u32>,
}

/// A member of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// The offset in the structure, in bytes.
    pub offset: u64,
    /// Of a bit field, its first bit in the byte at the offset; otherwise 0.
    pub bit: u8,
    type_number: u32,
}

/// The decoded header of a type.
#[derive(Clone, Copy)]
struct Type {
    kind: u32,
    count: usize,
    /// Whether the offsets of members have a bit-field width in their upper bits.
    flag: bool,
    /// The size in bytes, or the number of the referenced type.
    operand: u32,
    /// The place of the data after the header.
    rest: usize,
}

impl<'b> Btf<'b> {
    /// Reads a description. A module's description extends its kernel's, which is `base`. `None` if
    /// it is inconsistent.
    pub fn new(bytes: Vec<u8>, base: Option<&'b Btf<'b>>) -> Option<Self> {
        let word = |at: usize| read_u32(&bytes, at).map(|word| word as usize);
        if bytes.len() > LENGTH_MAX || bytes.get(..2)? != MAGIC.to_le_bytes() {
            return None;
        }
        let (header, types, types_length, strings, strings_length) =
            (word(4)?, word(8)?, word(12)?, word(16)?, word(20)?);
        let part = |offset: usize, length: usize| {
            let start = header.checked_add(offset)?;
            let end = start.checked_add(length)?;
            (end <= bytes.len()).then_some((start, end))
        };
        let (mut place, end) = part(types, types_length)?;
        let strings = part(strings, strings_length)?;
        let (first_type, first_string) = base.map_or((1, 0), |base| {
            let types = base.first_type + base.places.len() as u32;
            (types, base.first_string + (base.strings.1 - base.strings.0) as u32)
        });
        let mut btf = Self {
            places: Vec::with_capacity(types_length / 24),
            strings,
            base,
            first_type,
            first_string,
            names: HashMap::new(),
            steps: Cell::new(STEPS_MAX),
            bytes,
        };
        while place < end {
            let name = read_u32(&btf.bytes, place)?;
            let info = btf.type_at(place)?;
            let length = info.length()?;
            let next = info.rest.checked_add(length)?;
            if next > end {
                return None;
            }
            let number = btf.first_type + btf.places.len() as u32;
            btf.places.push(place as u32);
            if matches!(info.kind, KIND_STRUCT | KIND_UNION | KIND_ENUM | KIND_ENUM64) {
                let name = btf.string(name).filter(|name| !name.is_empty());
                if let Some(name) = name.filter(|_| btf.names.len() < NAMES_MAX) {
                    let name = name.into();
                    btf.names.entry(name).or_insert(number);
                }
            }
            place = next;
        }
        Some(btf)
    }

    fn type_at(&self, place: usize) -> Option<Type> {
        let info = read_u32(&self.bytes, place + 4)?;
        Some(Type {
            kind: info >> 24 & 0x1f,
            count: (info & 0xffff) as usize,
            flag: info >> 31 != 0,
            operand: read_u32(&self.bytes, place + 8)?,
            rest: place + 12,
        })
    }

    /// A type, and the description that contains it.
    fn find(&self, number: u32) -> Option<(&Self, Type)> {
        match number.checked_sub(self.first_type) {
            Some(index) => {
                let place = *self.places.get(index as usize)?;
                Some((self, self.type_at(place as usize)?))
            }
            None => self.base?.find_base(number),
        }
    }

    // The lookup in a base. It is a separate function because the base has another lifetime.
    fn find_base(&self, number: u32) -> Option<(&Self, Type)> {
        let index = number.checked_sub(self.first_type)?;
        let place = *self.places.get(index as usize)?;
        Some((self, self.type_at(place as usize)?))
    }

    fn string(&self, offset: u32) -> Option<&[u8]> {
        match offset.checked_sub(self.first_string) {
            Some(offset) => {
                let table = self.bytes.get(self.strings.0..self.strings.1)?;
                let text = table.get(offset as usize..)?;
                let text = &text[..text.len().min(NAME_MAX)];
                text.get(..text.iter().position(|byte| *byte == 0)?)
            }
            None => self.base?.string(offset),
        }
    }

    /// Counts a step; `None` when there were too many.
    fn step(&self) -> Option<()> {
        self.steps.set(self.steps.get().checked_sub(1)?);
        Some(())
    }

    fn named(&self, name: &str) -> Option<u32> {
        let own = self.names.get(name.as_bytes()).copied();
        own.or_else(|| self.base.and_then(|base| base.names.get(name.as_bytes()).copied()))
    }

    /// The size of a structure or union, in bytes.
    pub fn size(&self, name: &str) -> Option<u64> {
        let (_, info) = self.find(self.named(name)?)?;
        matches!(info.kind, KIND_STRUCT | KIND_UNION).then(|| u64::from(info.operand))
    }

    /// A member of a structure by its path, such as `submit.waiter`. Members of unnamed parts count
    /// as members of the structure.
    pub fn member(&self, structure: &str, path: &str) -> Option<Member> {
        let mut number = self.named(structure)?;
        let (mut offset, mut bit) = (0, 0);
        for name in path.split('.') {
            let member = self.member_of(number, name, 0)?;
            offset += member.offset;
            bit = member.bit;
            number = self.strip(member.type_number)?;
        }
        Some(Member { offset, bit, type_number: number })
    }

    fn member_of(&self, number: u32, name: &str, depth: usize) -> Option<Member> {
        let (part, info) = self.find(number)?;
        if depth > DEPTH_MAX || !matches!(info.kind, KIND_STRUCT | KIND_UNION) {
            return None;
        }
        for index in 0..info.count {
            self.step()?;
            let place = info.rest + index * 12;
            let own = read_u32(&part.bytes, place)?;
            let type_number = read_u32(&part.bytes, place + 4)?;
            let bits = read_u32(&part.bytes, place + 8)?;
            let bits = if info.flag { bits & 0xff_ffff } else { bits };
            let offset = u64::from(bits / 8);
            let own = part.string(own)?;
            if own == name.as_bytes() {
                return Some(Member { offset, bit: (bits % 8) as u8, type_number });
            }
            if own.is_empty() {
                let inner = self.strip(type_number)?;
                if let Some(found) = self.member_of(inner, name, depth + 1) {
                    return Some(Member { offset: offset + found.offset, ..found });
                }
            }
        }
        None
    }

    /// The type without typedefs and qualifiers.
    fn strip(&self, mut number: u32) -> Option<u32> {
        for _ in 0..DEPTH_MAX {
            let (_, info) = self.find(number)?;
            match info.kind {
                KIND_TYPEDEF | KIND_VOLATILE | KIND_CONST | KIND_RESTRICT | KIND_TYPE_TAG => {
                    number = info.operand;
                }
                _ => return Some(number),
            }
        }
        None
    }

    /// The name of the structure that a member points to.
    pub fn points_to(&self, member: Member) -> Option<&[u8]> {
        let (_, info) = self.find(self.strip(member.type_number)?)?;
        if info.kind != KIND_POINTER {
            return None;
        }
        let number = self.strip(info.operand)?;
        let (part, _) = self.find(number)?;
        let place = *part.places.get((number - part.first_type) as usize)? as usize;
        part.string(read_u32(&part.bytes, place)?)
    }

    /// The value of an enumerator.
    pub fn enumerator(&self, enumeration: &str, name: &str) -> Option<u64> {
        let (part, info) = self.find(self.named(enumeration)?)?;
        let width = match info.kind {
            KIND_ENUM => 8,
            KIND_ENUM64 => 12,
            _ => return None,
        };
        for index in 0..info.count {
            self.step()?;
            let place = info.rest + index * width;
            if part.string(read_u32(&part.bytes, place)?)? == name.as_bytes() {
                let low = u64::from(read_u32(&part.bytes, place + 4)?);
                let high =
                    if width == 12 { u64::from(read_u32(&part.bytes, place + 8)?) } else { 0 };
                return Some(low | high << 32);
            }
        }
        None
    }
}

impl Type {
    /// The length of the data after the header, in bytes.
    fn length(&self) -> Option<usize> {
        Some(match self.kind {
            KIND_INT | KIND_VARIABLE | KIND_DECLARATION_TAG => 4,
            KIND_ARRAY => 12,
            KIND_STRUCT | KIND_UNION | KIND_SECTION | KIND_ENUM64 => 12 * self.count,
            KIND_ENUM | KIND_PROTOTYPE => 8 * self.count,
            2 | 7..=12 | 16 | KIND_TYPE_TAG => 0,
            _ => return None,
        })
    }
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}
