//! Reads a recording, block by block or row by row.

use std::io::{self, Read};

use super::bytes::{ByteCursor, MalformedBytes};
use super::checksum::Sum;
use super::decode::{Rows, Target};
use super::header::Header;
use super::{BLOCK_MAX, BLOCK_ROWS_MAX, BlockKind, DropPlace, HEAD, HEADER, MARK, Packing};
use crate::read::{
    Batch, ReadError, ReadOptions, ReadReport, Reader, Tally, Texts, WantedStream, read_full,
};

/// A complete block whose checksum is correct.
#[derive(Clone, Debug)]
pub struct Block {
    bytes: Vec<u8>,
    kind: BlockKind,
    stream: u8,
    packing: Packing,
    plain: usize,
    count: u32,
    span: (i64, i64),
}

/// The content of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// Rows. They are in the batch.
    Rows,
    /// Events are missing at this position.
    Dropped {
        /// The number of missing events.
        count: u64,
        /// Where they were dropped.
        place: DropPlace,
        /// The disk; empty if they may be of any disk.
        disk: String,
    },
    /// An instant, in nanoseconds, before which no more events follow.
    Moment(i64),
    /// The end of the recording.
    End {
        /// The number of events in the recording.
        events: u64,
        /// The number of missing events.
        dropped: u64,
    },
}

impl Block {
    /// The bytes of the block, including its head.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The number of rows.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The position of its stream in the header.
    pub(super) fn stream(&self, header: &Header) -> Result<usize, MalformedBytes> {
        // Recordings of one stream do not number it.
        let stream = if header.streams.len() == 1 { 0 } else { usize::from(self.stream) };
        let is_known = stream < header.streams.len();
        is_known.then_some(stream).ok_or(MalformedBytes("its stream is not in the header"))
    }

    /// The earliest and the latest instant of its rows.
    pub(super) fn span(&self) -> (i64, i64) {
        self.span
    }

    /// Whether it is a block of rows.
    pub fn has_rows(&self) -> bool {
        self.kind == BlockKind::Rows
    }

    pub(super) fn unpacked(&self) -> Result<Vec<u8>, MalformedBytes> {
        let stored = &self.bytes[HEAD..];
        let plain = match self.packing {
            Packing::None => stored.to_vec(),
            Packing::Lz4 => {
                let mut plain = vec![0; self.plain];
                let length = lz4_flex::block::decompress_into(stored, &mut plain)
                    .map_err(|_| MalformedBytes("it cannot be decompressed"))?;
                plain.truncate(length);
                plain
            }
        };
        if plain.len() == self.plain {
            Ok(plain)
        } else {
            Err(MalformedBytes("its length is wrong"))
        }
    }

    pub(super) fn note(&self) -> Result<Item, MalformedBytes> {
        let plain = self.unpacked()?;
        let mut input = ByteCursor::new(&plain, 0);
        Ok(match self.kind {
            BlockKind::Rows => Item::Rows,
            BlockKind::Dropped => {
                let count = input.fixed::<8>()?;
                let place = DropPlace::from_number(input.byte()?);
                let length = input.length()?;
                let disk = String::from_utf8_lossy(input.take(length)?).into_owned();
                Item::Dropped { count, place, disk }
            }
            BlockKind::Moment => Item::Moment(self.span.0),
            BlockKind::End => {
                Item::End { events: input.fixed::<8>()?, dropped: input.fixed::<8>()? }
            }
        })
    }
}

/// The head of a block.
pub(super) struct BlockHead {
    kind: u8,
    packing: u8,
    stream: u8,
    /// The number of bytes that follow.
    pub stored: usize,
    /// Their number after decompression.
    pub plain: usize,
    count: u32,
    span: (i64, i64),
    sum: u32,
}

impl BlockHead {
    /// Decodes the head at the beginning of some bytes.
    pub fn of(bytes: &[u8]) -> Result<Self, MalformedBytes> {
        let mut input = ByteCursor::new(bytes, 0);
        if input.take(MARK.len())? != MARK {
            return Err(MalformedBytes("its mark is missing"));
        }
        let (kind, packing, stream) = (input.byte()?, input.byte()?, input.byte()?);
        input.byte()?;
        let head = Self {
            kind,
            packing,
            stream,
            stored: input.fixed::<4>()? as usize,
            plain: input.fixed::<4>()? as usize,
            count: input.fixed::<4>()? as u32,
            span: (input.fixed::<8>()? as i64, input.fixed::<8>()? as i64),
            sum: input.fixed::<4>()? as u32,
        };
        if head.stored > BLOCK_MAX || head.plain > BLOCK_MAX {
            return Err(MalformedBytes("it is too long"));
        }
        Ok(head)
    }

    /// The block in these bytes, which include the head; `None` if its kind is unknown.
    pub fn block(&self, bytes: Vec<u8>) -> Result<Option<Block>, MalformedBytes> {
        let (head, stored) = bytes.split_at_checked(HEAD).ok_or(MalformedBytes("it is cut off"))?;
        if Sum::new().add(&head[..HEAD - 4]).add(stored).value() != self.sum {
            return Err(MalformedBytes("its checksum is wrong"));
        }
        let Some(kind) = BlockKind::from_number(self.kind) else { return Ok(None) };
        let packing = match self.packing {
            0 => Packing::None,
            1 => Packing::Lz4,
            _ => return Err(MalformedBytes("its compression is unknown")),
        };
        if self.count as usize > BLOCK_ROWS_MAX {
            return Err(MalformedBytes("it has too many rows"));
        }
        let Self { stream, plain, count, span, .. } = *self;
        Ok(Some(Block { bytes, kind, stream, packing, plain, count, span }))
    }
}

/// A recording that is being read.
pub struct Recording<R> {
    source: R,
    header: Header,
    tally: Tally,
    texts: Texts,
    /// For each stream all columns in the recording's order, or the wanted ones; `None` to skip its
    /// rows.
    targets: Vec<Option<Target>>,
    rows: Option<Rows>,
    ended: bool,
}

/// The reason why there is no next block.
enum Halt {
    /// The recording ends.
    End,
    /// The recording is cut off in a block.
    Torn,
    /// The block is damaged.
    Damaged(MalformedBytes),
    /// The beginning of the next block is unknown.
    Lost(&'static str),
    Io(io::Error),
}

impl<R: Read> Recording<R> {
    /// Reads the header. `name` is the recording's name in messages.
    ///
    /// # Errors
    /// If the source cannot be read, or is not a recording.
    pub fn open(name: &str, mut source: R) -> Result<Self, ReadError> {
        let tally = Tally::new(name);
        let mut fixed = [0; HEADER];
        let mut full = |buffer: &mut [u8]| match read_full(&mut source, buffer) {
            Ok(length) if length == buffer.len() => Ok(()),
            Ok(_) => Err(ReadError::new(format!("{name}: the recording is cut off in its header"))),
            Err(error) => Err(ReadError::io(name, &error)),
        };
        let of = |message: String| ReadError::new(format!("{name}: {message}"));
        full(&mut fixed)?;
        let mut rest = vec![0; Header::rest(&fixed).map_err(of)?];
        full(&mut rest)?;
        let header = Header::from_bytes(&fixed, &rest).map_err(|wrong| of(wrong.to_string()))?;
        let targets = (0..header.streams.len()).map(|at| Some(Target::all(&header, at))).collect();
        Ok(Self { source, header, tally, texts: Texts::new(), targets, rows: None, ended: false })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The report so far.
    pub fn report(&self) -> &ReadReport {
        &self.tally.report
    }

    /// The next block. `None` at the end; an end without an end block is noted. Damaged blocks are
    /// counted and skipped.
    ///
    /// # Errors
    /// If the source cannot be read, or its bytes are not blocks.
    pub fn next_block(&mut self) -> Result<Option<Block>, ReadError> {
        while !self.ended {
            self.tally.lines += 1;
            let number = self.tally.lines;
            match self.block() {
                Ok(Some(block)) => {
                    self.ended = block.kind == BlockKind::End;
                    return Ok(Some(block));
                }
                // A block of a later version of the format is skipped.
                Ok(None) => {}
                Err(Halt::End) => {
                    self.ended = true;
                    self.tally.note(number, "the recording has no end: it may have been cut off");
                }
                Err(Halt::Torn) => {
                    self.ended = true;
                    self.tally.note(number, "the recording is cut off in a block");
                }
                Err(Halt::Damaged(wrong)) => self.damaged(wrong)?,
                Err(Halt::Lost(message)) => {
                    self.ended = true;
                    let name = &self.tally.name;
                    return Err(ReadError::new(format!(
                        "{name}: block {number} is not a block: {message}"
                    )));
                }
                Err(Halt::Io(error)) => return Err(self.tally.io(&error)),
            }
        }
        Ok(None)
    }

    fn block(&mut self) -> Result<Option<Block>, Halt> {
        let cut = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => Halt::Torn,
            _ => Halt::Io(error),
        };
        let mut bytes = vec![0; HEAD];
        match read_full(&mut self.source, &mut bytes).map_err(cut)? {
            0 => return Err(Halt::End),
            HEAD => {}
            _ => return Err(Halt::Torn),
        }
        let head = BlockHead::of(&bytes).map_err(|wrong| Halt::Lost(wrong.0))?;
        // Does not allocate more memory than the source has bytes.
        let mut rest = (&mut self.source).take(head.stored as u64);
        if rest.read_to_end(&mut bytes).map_err(cut)? < head.stored {
            return Err(Halt::Torn);
        }
        head.block(bytes).map_err(Halt::Damaged)
    }

    /// Returns the next item; `None` at the end. Rows replace the content of `batch`, and have the
    /// position and the columns of their stream. The rows of a long block come in several items.
    ///
    /// # Errors
    /// See [`next_block`](Self::next_block).
    pub fn next_item(&mut self, batch: &mut Batch) -> Result<Option<Item>, ReadError> {
        batch.clear();
        loop {
            match Rows::next(&mut self.rows, batch) {
                Ok(true) => {
                    self.tally.batch(batch)?;
                    return Ok(Some(Item::Rows));
                }
                Ok(false) => {}
                Err(wrong) => self.damaged(wrong)?,
            }
            let Some(block) = self.next_block()? else { return Ok(None) };
            match self.read_block(&block) {
                Ok(Item::Rows) => {}
                Ok(item) => {
                    self.note(&item);
                    return Ok(Some(item));
                }
                Err(wrong) => self.damaged(wrong)?,
            }
        }
    }

    /// Decodes a block that [`next_block`](Self::next_block) returned.
    /// [`next_item`](Self::next_item) returns its rows.
    fn read_block(&mut self, block: &Block) -> Result<Item, MalformedBytes> {
        if block.kind == BlockKind::Rows {
            let (rows, span) = (block.count as usize, block.span);
            let stream = block.stream(&self.header)?;
            let Some(target) = &self.targets[stream] else { return Ok(Item::Rows) };
            let payload = block.unpacked()?;
            let columns = self.header.columns(stream);
            let rows = Rows::new(payload, rows, span, columns, target, &mut self.texts)?;
            self.rows = Some(rows).filter(|rows| rows.left() > 0);
            return Ok(Item::Rows);
        }
        block.note()
    }

    /// Decodes a block that [`next_block`](Self::next_block) returned, so that
    /// [`next_item`](Self::next_item) or [`block_rows`](Self::block_rows) continues with its rows.
    /// Returns the block's item unless it has rows.
    ///
    /// # Errors
    /// If too many blocks are damaged.
    pub fn open_block(&mut self, block: &Block) -> Result<Option<Item>, ReadError> {
        match self.read_block(block) {
            Ok(Item::Rows) => Ok(None),
            Ok(item) => {
                self.note(&item);
                Ok(Some(item))
            }
            Err(wrong) => {
                self.damaged(wrong)?;
                Ok(None)
            }
        }
    }

    /// Reads the next rows of the opened block. Returns `false` after the last row.
    ///
    /// # Errors
    /// If too many blocks are damaged.
    pub fn block_rows(&mut self, batch: &mut Batch) -> Result<bool, ReadError> {
        batch.clear();
        if let Err(wrong) = Rows::next(&mut self.rows, batch) {
            self.damaged(wrong)?;
        }
        self.tally.report.events += batch.len() as u64;
        Ok(!batch.is_empty())
    }

    /// Counts a damaged block, the last one read. An error if too many blocks are damaged.
    fn damaged(&mut self, wrong: MalformedBytes) -> Result<(), ReadError> {
        self.tally.bad(self.tally.lines, &format!("a damaged block: {wrong}"))
    }

    fn note(&mut self, item: &Item) {
        if let Item::Dropped { count, place, disk } = item {
            self.tally.report.dropped = self.tally.report.dropped.saturating_add(*count);
            let of = if disk.is_empty() { String::new() } else { format!(" of disk {disk:?}") };
            let message = format!("{count} events{of} are missing here, {}", place.reason());
            self.tally.note(self.tally.lines, &message);
        }
    }
}

/// Reads a recording as the rows of some streams.
pub struct RowReader<R>(Recording<R>);

impl<R> RowReader<R> {
    /// Reads rows of all columns of a stream, by its position in the header.
    pub(crate) fn whole(mut recording: Recording<R>, stream: usize) -> Self {
        for (at, target) in recording.targets.iter_mut().enumerate() {
            match target {
                Some(target) if at == stream => target.stream = 0,
                target => *target = None,
            }
        }
        Self(recording)
    }
}

impl<R: Read + Send> RowReader<R> {
    /// Reads the header, and finds the wanted streams and columns. The rows of other streams are
    /// skipped. A batch has the position of its stream in `wanted`.
    ///
    /// # Errors
    /// If the source is not a recording, cannot be read, or has none of the streams.
    pub fn new(
        name: &str,
        source: R,
        wanted: &[WantedStream],
        options: &ReadOptions,
    ) -> Result<Self, ReadError> {
        let mut recording = Recording::open(name, source)?;
        let mut targets = Target::of_streams(&recording.header, wanted);
        let found = |at: usize| targets.iter().flatten().find(|target| target.stream == at);
        for (at, stream) in wanted.iter().enumerate() {
            if found(at).is_none() {
                let message = format!("the recording has no stream {}", stream.schema.name);
                if targets.iter().all(Option::is_none) {
                    return Err(ReadError::new(format!("{name}: {message}"))
                        .advise("record it again, with a daemon that has this stream"));
                }
                recording.tally.note(0, &message);
            }
        }
        for (stream, target) in recording.header.streams.iter().zip(&targets) {
            let Some(target) = target else {
                if fathom_insight::stream::position(&stream.name).is_none() {
                    let message =
                        format!("the stream {:?} is not known: its rows are skipped", stream.name);
                    recording.tally.note(0, &message);
                }
                continue;
            };
            let schema = &wanted[target.stream].schema;
            let names = stream.columns.iter().map(|column| column.name.as_str());
            let unknown: Vec<&str> =
                names.filter(|name| schema.find(name).is_none()).take(20).collect();
            if !unknown.is_empty() {
                let message =
                    format!("{} has no column {}: ignored", schema.name, unknown.join(", "));
                recording.tally.note(0, &message);
            }
        }
        for target in targets.iter_mut().flatten() {
            target.divisor = options.time_unit.nanoseconds();
        }
        recording.targets = targets;
        Ok(Self(recording))
    }
}

impl<R: Read + Send> RowReader<R> {
    /// The header.
    pub fn header(&self) -> &Header {
        self.0.header()
    }

    /// The next item, as [`Recording::next_item`] returns it. Its rows have the wanted columns.
    ///
    /// # Errors
    /// If the recording cannot be read.
    pub fn next_item(&mut self, batch: &mut Batch) -> Result<Option<Item>, ReadError> {
        self.0.next_item(batch)
    }
}

impl<R: Read + Send> Reader for RowReader<R> {
    fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError> {
        loop {
            match self.0.next_item(batch)? {
                Some(Item::Rows) => return Ok(true),
                Some(_) => {}
                None => return self.0.tally.batch(batch),
            }
        }
    }

    fn report(&self) -> &ReadReport {
        &self.0.tally.report
    }
}
