//! A column of a block while the block is written.

use std::sync::Arc;

use fathom_cql::{Type, Value};
use hashbrown::HashMap;

use super::TEXT_MAX;
use super::bytes::{put_varint, zigzag};

/// How a block stores the values of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Encoding {
    /// All values are null.
    Null = 0,
    /// All values are equal; the column stores one.
    Constant = 1,
    /// The value of each row is the row's instant.
    Times = 2,
    /// One value for each row.
    Values = 3,
    /// A bit for each row, then the values that are not null.
    Sparse = 4,
}

impl Encoding {
    /// The encoding with a number.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Null, Self::Constant, Self::Times, Self::Values, Self::Sparse]
            .into_iter()
            .find(|encoding| *encoding as u8 == number)
    }
}

/// A value of a row, borrowed.
#[derive(Clone, Copy, Debug)]
pub enum Cell<'a> {
    /// Null.
    Null,
    /// A boolean.
    Boolean(bool),
    /// An integer.
    Integer(i64),
    /// A float.
    Float(f64),
    /// A text. The lookup is fastest if equal texts share their memory.
    Text(&'a Arc<str>),
}

impl<'a> From<&'a Value> for Cell<'a> {
    fn from(value: &'a Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Boolean(value) => Self::Boolean(*value),
            Value::Integer(value) => Self::Integer(*value),
            Value::Float(value) => Self::Float(*value),
            Value::Text(text) => Self::Text(text),
        }
    }
}

/// The number of entries of [`Texts::recent`].
const RECENT: usize = 32;

/// The distinct texts of a column, each with its number.
#[derive(Debug, Default)]
pub struct Texts {
    entries: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, u32>,
    /// A cache by a hash of the address: 1 + the number of the last text with this hash; 0 if there
    /// is none.
    recent: [u32; RECENT],
}

impl Texts {
    /// All texts, by their numbers.
    pub fn entries(&self) -> &[Arc<str>] {
        &self.entries
    }

    /// Returns the number of a text. Adds the text if it is new.
    pub fn number(&mut self, text: &Arc<str>) -> u32 {
        let address = text.as_ptr() as usize;
        let place = (address >> 4 ^ address >> 9) % RECENT;
        let recent = self.recent[place].wrapping_sub(1);
        if self.entries.get(recent as usize).is_some_and(|known| Arc::ptr_eq(known, text)) {
            return recent;
        }
        let number = if let Some(&number) = self.numbers.get(text.as_ref()) {
            number
        } else {
            let number = self.entries.len() as u32;
            self.entries.push(Arc::clone(text));
            self.numbers.insert(Arc::clone(text), number);
            number
        };
        self.recent[place] = number + 1;
        number
    }

    /// Removes all texts.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.numbers.clear();
        self.recent = [0; RECENT];
    }
}

/// A column of the block that is being written; see the module.
#[derive(Debug)]
pub struct BlockColumn {
    kind: Type,
    rows: usize,
    values: usize,
    /// A bit for each row, if there are both nulls and values.
    present: Vec<u8>,
    data: Vec<u8>,
    texts: Texts,
    text_bytes: usize,
    first: u64,
    previous: i64,
    is_constant: bool,
    are_times: bool,
}

/// The longest prefix of a text of at most `TEXT_MAX` bytes.
fn shortened(text: &str) -> &str {
    let mut end = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

impl BlockColumn {
    /// An empty column.
    pub fn new(kind: Type) -> Self {
        Self {
            kind,
            rows: 0,
            values: 0,
            present: Vec::new(),
            data: Vec::new(),
            texts: Texts::default(),
            text_bytes: 0,
            first: 0,
            previous: 0,
            is_constant: true,
            are_times: kind == Type::Integer,
        }
    }

    /// The number of bytes so far, approximately.
    pub fn size(&self) -> usize {
        self.data.len() + self.text_bytes + self.present.len()
    }

    /// The number of distinct texts.
    pub fn texts(&self) -> usize {
        self.texts.entries().len()
    }

    /// Adds the value of a row with this instant. A value of another type becomes null.
    pub fn append(&mut self, cell: Cell<'_>, time_ns: i64) {
        let bits = match (self.kind, cell) {
            (Type::Integer, Cell::Integer(value)) => {
                put_varint(&mut self.data, zigzag(value.wrapping_sub(self.previous)));
                self.previous = value;
                self.are_times &= value == time_ns;
                value as u64
            }
            (Type::Text, Cell::Text(text)) => {
                let before = self.texts.entries.len();
                let number = self.texts.number(text);
                if self.texts.entries.len() > before {
                    self.text_bytes += text.len().min(TEXT_MAX) + 3;
                }
                put_varint(&mut self.data, u64::from(number));
                u64::from(number)
            }
            (Type::Float, Cell::Float(value)) => {
                self.data.extend_from_slice(&value.to_bits().to_le_bytes());
                value.to_bits()
            }
            (Type::Boolean, Cell::Boolean(value)) => {
                self.data.push(u8::from(value));
                u64::from(value)
            }
            _ => return self.null(),
        };
        if self.values == 0 {
            self.first = bits;
            if self.rows > 0 {
                self.present.resize(self.rows.div_ceil(8), 0);
            }
        }
        self.is_constant &= bits == self.first;
        if self.values < self.rows {
            self.mark(true);
        }
        self.values += 1;
        self.rows += 1;
    }

    fn null(&mut self) {
        if self.values > 0 {
            if self.values == self.rows {
                self.present.resize(self.rows / 8, 0xff);
                if self.rows % 8 > 0 {
                    self.present.push(!(0xff << (self.rows % 8)));
                }
            }
            self.mark(false);
        }
        self.rows += 1;
    }

    fn mark(&mut self, present: bool) {
        if self.rows / 8 == self.present.len() {
            self.present.push(0);
        }
        if let (true, Some(last)) = (present, self.present.last_mut()) {
            *last |= 1 << (self.rows % 8);
        }
    }

    /// Appends the column's bytes to `out`, and empties the column.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        let encoding = match self.values {
            0 => Encoding::Null,
            values if values < self.rows => Encoding::Sparse,
            _ if self.are_times => Encoding::Times,
            _ if self.is_constant => Encoding::Constant,
            _ => Encoding::Values,
        };
        out.push(encoding as u8);
        let mut head = Vec::new();
        match encoding {
            Encoding::Null | Encoding::Times => out.push(0),
            Encoding::Constant => {
                match self.kind {
                    Type::Integer => put_varint(&mut head, zigzag(self.first as i64)),
                    Type::Float => head.extend_from_slice(&self.first.to_le_bytes()),
                    Type::Boolean => head.push(self.first as u8),
                    Type::Text => {
                        head.extend_from_slice(shortened(&self.texts.entries[0]).as_bytes());
                    }
                }
                put_varint(out, head.len() as u64);
                out.append(&mut head);
            }
            Encoding::Values | Encoding::Sparse => {
                if self.kind == Type::Text {
                    put_varint(&mut head, self.texts.entries.len() as u64);
                    for text in &self.texts.entries {
                        let text = shortened(text);
                        put_varint(&mut head, text.len() as u64);
                        head.extend_from_slice(text.as_bytes());
                    }
                }
                let present: &[u8] = if encoding == Encoding::Sparse { &self.present } else { &[] };
                put_varint(out, (present.len() + head.len() + self.data.len()) as u64);
                out.extend_from_slice(present);
                out.append(&mut head);
                out.extend_from_slice(&self.data);
            }
        }
        self.clear();
    }

    fn clear(&mut self) {
        (self.rows, self.values, self.text_bytes) = (0, 0, 0);
        (self.first, self.previous) = (0, 0);
        self.present.clear();
        self.data.clear();
        self.texts.clear();
        (self.is_constant, self.are_times) = (true, self.kind == Type::Integer);
    }
}
