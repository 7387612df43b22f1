//! Decodes the rows of a block.

use std::ops::Range;
use std::rc::Rc;

use fathom_cql::catalog::StreamSchema;
use fathom_cql::{Type, Value};

use super::bytes::{ByteCursor, MalformedBytes, unzigzag};
use super::column::Encoding;
use super::header::{Header, RecordedColumn, RecordedStream};
use super::{TEXT_MAX, TEXTS_MAX};
use crate::columns::ColumnValues as Values;
use crate::read::{BATCH_ROWS, Batch, LAST_TIME_NS, Texts, WantedStream, place_of, width_of};

/// Where the values of a recording's columns are placed in a row.
#[derive(Clone, Debug)]
pub struct Target {
    /// The number that batches of these rows have ([`Batch::stream`]).
    pub stream: usize,
    /// The number of columns of a row.
    pub width: usize,
    /// For each column of the recording, its place in a row; `None` if the column is not needed.
    pub places: Vec<Option<usize>>,
    /// The divisor of the times in columns. It does not apply to the instants of rows.
    pub divisor: i64,
}

impl Target {
    /// All columns of a stream, in the recording's order.
    pub fn all(header: &Header, stream: usize) -> Self {
        let width = header.columns(stream).len();
        Self { stream, width, places: (0..width).map(Some).collect(), divisor: 1 }
    }

    /// For each stream of a recording the wanted columns; `None` if the stream is not wanted.
    ///
    /// A stream is that of the same name. A wanted stream that only a script knows has the rows of
    /// the first stream that is left, and so has a single wanted stream of a recording of a single
    /// stream with an unknown name.
    pub fn of_streams(header: &Header, wanted: &[WantedStream]) -> Vec<Option<Self>> {
        let mut found: Vec<Option<usize>> =
            wanted.iter().map(|stream| header.find(&stream.schema.name)).collect();
        let is_known = |name: &str| fathom_insight::stream::position(name).is_some();
        for at in 0..wanted.len() {
            let left = (0..header.streams.len()).find(|stream| !found.contains(&Some(*stream)));
            let Some(left) = left.filter(|_| found[at].is_none()) else { continue };
            let is_single = wanted.len() == 1 && header.streams.len() == 1;
            let is_own = !is_known(&wanted[at].schema.name);
            if is_own || is_single && !is_known(&header.streams[left].name) {
                found[at] = Some(left);
            }
        }
        let target = |(at, stream): (usize, &RecordedStream)| {
            let of = found.iter().position(|found| *found == Some(at))?;
            let WantedStream { schema, columns } = &wanted[of];
            Some(Self::of_columns(&stream.columns, schema, columns, of))
        };
        header.streams.iter().enumerate().map(target).collect()
    }

    /// The wanted columns of a schema, for rows with these columns in the recording. A column whose
    /// type differs in the recording is ignored. If two columns of the recording match the same
    /// column of the schema, the first is used.
    pub fn of_columns(
        columns: &[RecordedColumn],
        schema: &StreamSchema,
        wanted: &[bool],
        stream: usize,
    ) -> Self {
        let mut taken = vec![false; schema.columns.len()];
        let mut place = |column: &RecordedColumn| {
            let place = schema.find(&column.name)?;
            let fits = schema.columns[place].kind == column.kind;
            let first = !std::mem::replace(&mut taken[place], true);
            place_of(wanted, place).filter(|_| fits && first)
        };
        let places = columns.iter().map(&mut place).collect();
        Self { stream, width: width_of(wanted), places, divisor: 1 }
    }
}

/// The rows of a block that have not been read yet.
pub struct Rows {
    payload: Vec<u8>,
    left: usize,
    times: Cursor,
    columns: Vec<Column>,
    stream: usize,
    width: usize,
    span: (i64, i64),
}

/// A position in a sequence of numbers, and the previous number.
#[derive(Clone, Copy)]
struct Cursor {
    at: usize,
    end: usize,
    previous: i64,
}

/// The rest of a column.
struct Column {
    place: usize,
    kind: Type,
    divisor: i64,
    encoding: Encoding,
    /// The position of the bits for the rows that have a value.
    bits: usize,
    row: usize,
    data: Cursor,
    constant: Value,
    texts: Vec<Value>,
}

impl Rows {
    /// Starts reading the rows of a block from its decompressed bytes.
    pub fn new(
        payload: Vec<u8>,
        rows: usize,
        span: (i64, i64),
        recorded: &[RecordedColumn],
        target: &Target,
        texts: &mut Texts,
    ) -> Result<Self, MalformedBytes> {
        let mut input = ByteCursor::new(&payload, 0);
        let length = input.length()?;
        let at = input.at();
        input.take(length)?;
        let times = Cursor { at, end: at + length, previous: 0 };
        let mut columns = Vec::new();
        let mut entries = 0;
        for (column, place) in recorded.iter().zip(&target.places) {
            let number = input.byte()?;
            let length = input.length()?;
            let at = input.at();
            input.take(length)?;
            let Some(place) = *place else { continue };
            let encoding = Encoding::from_number(number)
                .ok_or(MalformedBytes("a column has an unknown encoding"))?;
            if encoding == Encoding::Null {
                continue;
            }
            let divisor = if column.is_time { target.divisor } else { 1 };
            let mut column = Column {
                place,
                kind: column.kind,
                divisor,
                encoding,
                bits: at,
                row: 0,
                data: Cursor { at, end: at + length, previous: 0 },
                constant: Value::Null,
                texts: Vec::new(),
            };
            column.begin(&payload, rows, &mut entries, texts)?;
            columns.push(column);
        }
        if input.left() > 0 {
            return Err(MalformedBytes("there are more columns than in the header"));
        }
        let (stream, width) = (target.stream, target.width);
        Ok(Self { payload, left: rows, times, columns, stream, width, span })
    }

    /// Moves the next rows of the block into an empty batch. Returns `false` if `block` is `None`.
    /// After the last row, and after an error, `block` is `None`.
    pub fn next(block: &mut Option<Self>, batch: &mut Batch) -> Result<bool, MalformedBytes> {
        let Some(rows) = block else { return Ok(false) };
        batch.reuse_for(rows.stream);
        let read = rows.read(BATCH_ROWS, batch);
        if read.is_err() || rows.left == 0 {
            *block = None;
        }
        read.map(|()| true)
    }

    /// The number of rows left.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Moves at most `most` rows into a batch. After an error the batch has no new rows.
    fn read(&mut self, most: usize, batch: &mut Batch) -> Result<(), MalformedBytes> {
        let count = most.min(self.left);
        let start = batch.len();
        self.left -= count;
        let done = self.fill(count, batch);
        if done.is_err() {
            batch.truncate(start);
        }
        done
    }

    fn fill(&mut self, count: usize, batch: &mut Batch) -> Result<(), MalformedBytes> {
        let start = batch.len();
        for _ in 0..count {
            let time = self.times.integer(&self.payload)?;
            if !(0..=LAST_TIME_NS).contains(&time) || time < self.span.0 || time > self.span.1 {
                return Err(MalformedBytes("a row has a time outside of its block"));
            }
            batch.end_row(time);
        }
        batch.widen(self.width);
        for column in &mut self.columns {
            let times = &batch.times_ns[start..];
            column.read(&self.payload, times, &mut batch.columns[column.place])?;
        }
        // Fills the columns that the block does not have.
        let rows = batch.len();
        for column in &mut batch.columns {
            column.pad(rows);
        }
        Ok(())
    }
}

/// The value of a text, from the bytes of the text.
fn text_value(bytes: &[u8], texts: &mut Texts) -> Result<Value, MalformedBytes> {
    if bytes.len() > TEXT_MAX {
        return Err(MalformedBytes("a text is too long"));
    }
    Ok(texts.value(bytes))
}

impl Cursor {
    fn input<'a>(&self, payload: &'a [u8]) -> ByteCursor<'a> {
        ByteCursor::new(&payload[..self.end], self.at)
    }

    fn number(&mut self, payload: &[u8]) -> Result<u64, MalformedBytes> {
        let mut input = self.input(payload);
        let number = input.varint()?;
        self.at = input.at();
        Ok(number)
    }

    fn integer(&mut self, payload: &[u8]) -> Result<i64, MalformedBytes> {
        self.previous = self.previous.wrapping_add(unzigzag(self.number(payload)?));
        Ok(self.previous)
    }

    fn bytes(&mut self, payload: &[u8], length: usize) -> Result<Range<usize>, MalformedBytes> {
        let mut input = self.input(payload);
        input.take(length)?;
        let taken = self.at..input.at();
        self.at = input.at();
        Ok(taken)
    }
}

impl Column {
    /// Reads the part of a column that precedes its values.
    fn begin(
        &mut self,
        payload: &[u8],
        rows: usize,
        entries: &mut usize,
        texts: &mut Texts,
    ) -> Result<(), MalformedBytes> {
        match self.encoding {
            Encoding::Null => {}
            Encoding::Times if self.kind == Type::Integer => {}
            Encoding::Times => {
                return Err(MalformedBytes("a column that is not of integers is encoded as times"));
            }
            Encoding::Constant => {
                self.constant = if self.kind == Type::Text {
                    text_value(&payload[self.data.at..self.data.end], texts)?
                } else {
                    self.value(payload)?
                };
            }
            Encoding::Values | Encoding::Sparse => {
                if self.encoding == Encoding::Sparse {
                    self.data.bytes(payload, rows.div_ceil(8))?;
                }
                if self.kind == Type::Text {
                    let count = self.data.number(payload)? as usize;
                    *entries = entries.saturating_add(count);
                    if count > rows || *entries > TEXTS_MAX {
                        return Err(MalformedBytes("there are too many texts"));
                    }
                    for _ in 0..count {
                        let length = self.data.number(payload)? as usize;
                        let text = self.data.bytes(payload, length)?;
                        self.texts.push(text_value(&payload[text], texts)?);
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the next row of a sparse column has a value.
    fn is_present(&mut self, payload: &[u8]) -> bool {
        let bits = payload[self.bits + self.row / 8];
        let present = bits >> (self.row % 8) & 1 == 1;
        self.row += 1;
        present
    }

    /// The number of the next text.
    fn text_number(&mut self, payload: &[u8]) -> Result<u32, MalformedBytes> {
        let number = self.data.number(payload)?;
        let known = (0..self.texts.len() as u64).contains(&number);
        known.then_some(number as u32).ok_or(MalformedBytes("the number of a text is invalid"))
    }

    /// The next value.
    fn value(&mut self, payload: &[u8]) -> Result<Value, MalformedBytes> {
        Ok(match self.kind {
            Type::Integer => Value::Integer(self.data.integer(payload)? / self.divisor),
            Type::Text => {
                let number = self.text_number(payload)?;
                self.texts[number as usize].clone()
            }
            Type::Float => {
                let bytes = self.data.bytes(payload, 8)?;
                let bits = ByteCursor::new(payload, bytes.start).fixed::<8>()?;
                Value::Float(f64::from_bits(bits))
            }
            Type::Boolean => {
                let bytes = self.data.bytes(payload, 1)?;
                Value::Boolean(payload[bytes.start] & 1 == 1)
            }
        })
    }

    /// The texts of the next rows, as indices into the distinct texts.
    fn read_texts(&mut self, payload: &[u8], count: usize) -> Result<Values, MalformedBytes> {
        let mut values = self.texts.clone();
        let rows = match self.encoding {
            Encoding::Values => (0..count).map(|_| self.text_number(payload)).collect(),
            Encoding::Sparse => {
                let null = values.len() as u32;
                values.push(Value::Null);
                let mut number = || {
                    if self.is_present(payload) { self.text_number(payload) } else { Ok(null) }
                };
                (0..count).map(|_| number()).collect()
            }
            Encoding::Constant | Encoding::Null | Encoding::Times => {
                values = vec![self.constant.clone()];
                Ok(vec![0; count])
            }
        };
        Ok(Values::Indexed(Rc::new(Values::Values(values)), Rc::new(rows?)))
    }

    /// The values of the next rows.
    fn read(
        &mut self,
        payload: &[u8],
        times: &[i64],
        column: &mut Values,
    ) -> Result<(), MalformedBytes> {
        if self.kind == Type::Text && column.is_empty() && self.texts.len() <= times.len() {
            *column = self.read_texts(payload, times.len())?;
            return Ok(());
        }
        for &time in times {
            column.push(match self.encoding {
                Encoding::Null => Value::Null,
                Encoding::Constant => self.constant.clone(),
                Encoding::Times => Value::Integer(time / self.divisor),
                Encoding::Values => self.value(payload)?,
                Encoding::Sparse => {
                    if self.is_present(payload) {
                        self.value(payload)?
                    } else {
                        Value::Null
                    }
                }
            });
        }
        Ok(())
    }
}
