//! Descriptions of types, written as short texts and encoded as BTF.

use std::collections::HashMap;

use super::bytes::ByteBuilder;

const KIND_INT: u32 = 1;
const KIND_POINTER: u32 = 2;
const KIND_STRUCT: u32 = 4;
const KIND_ENUM: u32 = 6;
const KIND_TYPEDEF: u32 = 8;
const KIND_VOLATILE: u32 = 9;
const KIND_CONST: u32 = 10;
const KIND_ENUM64: u32 = 19;

/// A set of types.
///
/// One type per line: `name SIZE: member OFFSET [TYPE], …`. A type is a structure's name, `*name`
/// for a pointer to a structure, or absent for a number. A name that begins with `-` is omitted in
/// the encoding, for a structure or for a member. A structure whose name ends with `!` has bit
/// fields. `enum name: enumerator VALUE, …` and `enum64` are enumerations.
#[derive(Clone, Debug, Default)]
pub(crate) struct Description {
    structures: Vec<Structure>,
    enumerations: Vec<Enumeration>,
}

#[derive(Clone, Debug)]
struct Structure {
    name: String,
    size: u64,
    bit_fields: bool,
    members: Vec<Member>,
}

#[derive(Clone, Debug)]
struct Member {
    name: String,
    offset: u64,
    kind: MemberKind,
}

#[derive(Clone, Debug)]
enum MemberKind {
    Number,
    Embedded(String),
    Pointer(String),
}

#[derive(Clone, Debug)]
struct Enumeration {
    name: String,
    wide: bool,
    values: Vec<(String, u64)>,
}

/// An encoded description, and the numbers that a description on top of it needs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Encoded {
    pub bytes: Vec<u8>,
    numbers: HashMap<String, u32>,
    next_type: u32,
    next_string: u32,
}

impl Description {
    /// Parses lines.
    pub fn parse(text: &str) -> Self {
        let mut description = Self::default();
        description.add(text);
        description
    }

    /// Parses further lines.
    pub fn add(&mut self, text: &str) {
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (head, members) = line.split_once(':').expect("a colon");
            let members = members.split(',').map(|member| {
                let mut words = member.split_whitespace();
                let name = words.next().expect("a name").to_owned();
                let value = words.next().expect("a number").parse().expect("a number");
                (name, value, words.next())
            });
            let (first, second) = head.split_once(' ').expect("two words");
            if first == "enum" || first == "enum64" {
                self.enumerations.push(Enumeration {
                    name: second.to_owned(),
                    wide: first == "enum64",
                    values: members.map(|(name, value, _)| (name, value)).collect(),
                });
                continue;
            }
            self.structures.push(Structure {
                name: first.trim_end_matches('!').to_owned(),
                size: second.parse().expect("a size"),
                bit_fields: first.ends_with('!'),
                members: members
                    .map(|(name, offset, kind)| Member {
                        name,
                        offset,
                        kind: match kind.map(|kind| (kind, kind.strip_prefix('*'))) {
                            None => MemberKind::Number,
                            Some((_, Some(target))) => MemberKind::Pointer(target.to_owned()),
                            Some((whole, None)) => MemberKind::Embedded(whole.to_owned()),
                        },
                    })
                    .collect(),
            });
        }
    }

    fn structure(&self, name: &str) -> Option<&Structure> {
        self.structures.iter().find(|structure| structure.name == name)
    }

    /// The size of a structure.
    pub fn size(&self, name: &str) -> u64 {
        self.structure(name).unwrap_or_else(|| panic!("structure {name}")).size
    }

    /// The offset of a member, `structure.member.member`; `None` if there is no such member.
    pub fn offset(&self, path: &str) -> Option<u64> {
        let mut names = path.split('.');
        let mut structure = self.structure(names.next()?)?;
        let mut offset = 0;
        for name in names {
            let (place, member) = self.member(structure, name)?;
            offset += place;
            if let MemberKind::Embedded(inner) = &member.kind {
                structure = self.structure(inner)?;
            }
        }
        Some(offset)
    }

    fn member<'d>(&'d self, structure: &'d Structure, name: &str) -> Option<(u64, &'d Member)> {
        structure.members.iter().find_map(|member| {
            if member.name == name {
                return Some((member.offset, member));
            }
            match &member.kind {
                MemberKind::Embedded(inner) if member.name.starts_with('-') => {
                    let (offset, found) = self.member(self.structure(inner)?, name)?;
                    Some((member.offset + offset, found))
                }
                _ => None,
            }
        })
    }

    /// Encodes the description. A module's description extends its kernel's, which is `base`. Adds
    /// `filler` unused structures.
    pub fn encode(&self, base: Option<&Encoded>, filler: usize) -> Encoded {
        let mut writer = Writer {
            types: ByteBuilder::default(),
            strings: vec![0],
            first_string: base.map_or(0, |base| base.next_string),
            numbers: base.map(|base| base.numbers.clone()).unwrap_or_default(),
            next_type: base.map_or(1, |base| base.next_type),
        };
        let long = writer.begin("unsigned long", KIND_INT, 0, 8);
        writer.types.u32(64);
        // The structures have consecutive numbers at the beginning, so that they can refer to each
        // other. The types between a member and its structure follow.
        let mut number = writer.next_type;
        for structure in &self.structures {
            writer.numbers.insert(structure.name.clone(), number);
            number += 1;
        }
        let mut between = Vec::new();
        for structure in &self.structures {
            let count = structure.members.len() as u32 | u32::from(structure.bit_fields) << 31;
            writer.begin(&structure.name, KIND_STRUCT, count, structure.size as u32);
            for member in &structure.members {
                let name = writer.string(&member.name);
                let kind = match &member.kind {
                    MemberKind::Number => long,
                    MemberKind::Embedded(inner) if inner.starts_with('-') => writer.numbers[inner],
                    MemberKind::Embedded(target) | MemberKind::Pointer(target) => {
                        let pointer = matches!(member.kind, MemberKind::Pointer(_));
                        between.push((target.clone(), pointer));
                        // A typedef and two qualifiers, or a pointer to a qualified type.
                        number += 3;
                        number - 1
                    }
                };
                let width = if structure.bit_fields { 1 << 24 } else { 0 };
                writer.types.u32(name);
                writer.types.u32(kind);
                writer.types.u32(member.offset as u32 * 8 | width);
            }
        }
        for (target, pointer) in between {
            let inner = writer.numbers.get(&target).copied().unwrap_or(0);
            let name = format!("{target}_t");
            let inner = writer.begin(&name, KIND_TYPEDEF, 0, inner);
            let inner = writer.begin("", KIND_CONST, 0, inner);
            writer.begin("", if pointer { KIND_POINTER } else { KIND_VOLATILE }, 0, inner);
        }
        for enumeration in &self.enumerations {
            let count = enumeration.values.len() as u32;
            let kind = if enumeration.wide { KIND_ENUM64 } else { KIND_ENUM };
            writer.begin(&enumeration.name, kind, count, if enumeration.wide { 8 } else { 4 });
            for (name, value) in &enumeration.values {
                let name = writer.string(name);
                writer.types.u32(name);
                writer.types.u32(*value as u32);
                if enumeration.wide {
                    writer.types.u32((value >> 32) as u32);
                }
            }
        }
        let member = writer.string("some_member");
        for index in 0..filler {
            writer.begin(&format!("filler_structure_{index}"), KIND_STRUCT, 6, 48);
            for place in 0..6 {
                writer.types.u32(member);
                writer.types.u32(long);
                writer.types.u32(place * 64);
            }
        }
        writer.finish()
    }
}

struct Writer {
    types: ByteBuilder,
    strings: Vec<u8>,
    first_string: u32,
    numbers: HashMap<String, u32>,
    next_type: u32,
}

impl Writer {
    /// Writes the three words of a type. The caller writes the rest. Returns the type's number.
    fn begin(&mut self, name: &str, kind: u32, count: u32, operand: u32) -> u32 {
        let text = self.string(name);
        self.types.u32(text);
        self.types.u32(count & 0x8000_ffff | kind << 24);
        self.types.u32(operand);
        self.next_type += 1;
        self.next_type - 1
    }

    fn string(&mut self, text: &str) -> u32 {
        if text.is_empty() || text.starts_with('-') {
            return 0;
        }
        let place = self.strings.len() as u32;
        self.strings.extend_from_slice(text.as_bytes());
        self.strings.push(0);
        self.first_string + place
    }

    fn finish(self) -> Encoded {
        let mut out = ByteBuilder::default();
        let types = self.types.0;
        out.u32(0x0001_eb9f);
        for word in [24, 0, types.len(), types.len(), self.strings.len()] {
            out.u32(word as u32);
        }
        out.0.extend_from_slice(&types);
        out.0.extend_from_slice(&self.strings);
        Encoded {
            bytes: out.0,
            numbers: self.numbers,
            next_type: self.next_type,
            next_string: self.first_string + self.strings.len() as u32,
        }
    }
}
