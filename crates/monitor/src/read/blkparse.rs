//! The text output of blkparse in its default format.
//!
//! ```text
//!   8,0    3        1     0.000000000   697  Q   W 223490 + 8 [kjournald]
//!   8,0    3        2     0.000512301     0  C   W 223490 + 8 [0]
//! device cpu number     time            pid  action rwbs …
//! ```
//!
//! `Q` is a request and `C` its completion; lines with other actions are skipped. The kernel merges
//! neighbouring requests into one, so a completion answers all requests within its range, each with
//! the number, the sector and the size of its `Q` line. A completion without a queued request (the
//! trace began later, or a request was split) gets a number of its own.

use std::collections::BTreeMap;

use fathom_cql::{Row, Value};

use super::columns::{EventColumn, EventColumns, FIELD_MAX, count};
use super::intern::Texts;
use super::lines::Lines;
use super::text::{LineFormat, LineReader};
use super::{Batch, LAST_TIME_NS, shown};

/// The most requests in flight. Beyond this number, the oldest are removed.
const IN_FLIGHT_MAX: usize = 64 << 10;
/// The most requests that a completion is compared with.
const MERGED_MAX: usize = 1024;

/// The state of the format's reader.
pub struct Blkparse {
    columns: EventColumns,
    requests: i64,
    /// The requests in flight, by device and operation, sector, and number.
    in_flight: BTreeMap<(Key, i64, i64), Request>,
    /// The same requests, by number.
    by_number: BTreeMap<i64, (Key, i64)>,
    /// Whether the summary at the end of the output has begun.
    summary: bool,
}

/// The device and the letter of the operation.
type Key = ((u32, u32), u8);

/// A request in flight.
struct Request {
    size: i64,
    process: Value,
    process_id: i64,
    flags: i64,
}

/// The parsed fields of a line.
struct Line<'a> {
    device: &'a [u8],
    numbers: (u32, u32),
    time_ns: i64,
    process_id: i64,
    action: &'a [u8],
    rest: &'a [u8],
}

/// The next word, and the rest of the text.
fn word(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let text = text.trim_ascii_start();
    let end = text.iter().position(u8::is_ascii_whitespace).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// A time of the form `seconds.nanoseconds`, in nanoseconds.
fn time(text: &[u8]) -> Option<i64> {
    let point = text.iter().position(|&byte| byte == b'.')?;
    let (seconds, fraction) = (count(&text[..point])?, &text[point + 1..]);
    if fraction.len() != 9 || !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let time = seconds.checked_mul(1_000_000_000)?.checked_add(count(fraction)?)?;
    (time <= LAST_TIME_NS).then_some(time)
}

fn parse(line: &[u8]) -> Option<Line<'_>> {
    let (device, rest) = word(line)?;
    let comma = device.iter().position(|&byte| byte == b',')?;
    let part = |text: &[u8]| count(text).and_then(|number| u32::try_from(number).ok());
    let numbers = (part(&device[..comma])?, part(&device[comma + 1..])?);
    let (cpu, rest) = word(rest)?;
    let (number, rest) = word(rest)?;
    let (at, rest) = word(rest)?;
    let (process, rest) = word(rest)?;
    let (action, rest) = word(rest)?;
    count(cpu).and(count(number))?;
    let (time_ns, process_id) = (time(at)?, count(process)?);
    let short = action.len() <= 3 && action.iter().all(u8::is_ascii_alphabetic);
    (short && device.len() <= 24).then_some(Line {
        device,
        numbers,
        time_ns,
        process_id,
        action,
        rest,
    })
}

/// Whether a line has this format.
pub fn is_line(line: &[u8]) -> bool {
    parse(line).is_some()
}

/// A reader of this format.
pub fn reader(name: &str, lines: Lines, columns: EventColumns) -> LineReader<Blkparse> {
    let format = Blkparse {
        columns,
        requests: 0,
        in_flight: BTreeMap::new(),
        by_number: BTreeMap::new(),
        summary: false,
    };
    LineReader::new(name, lines, format)
}

/// The letter of the operation, and its flags as in the stream's column `Flags`. The letter is
/// `None` if it is not an operation on the disk's data.
fn operation(marks: &[u8], size: i64) -> (Option<u8>, i64) {
    let (before, marks) = match marks {
        [b'F', rest @ ..] if !rest.is_empty() => (true, rest),
        _ => (false, marks),
    };
    let letter = match marks.first() {
        Some(b'R') => Some(b'r'),
        Some(b'W') if before && size == 0 => Some(b'f'),
        Some(b'W') => Some(b'w'),
        Some(b'D' | b'E') => Some(b'd'),
        Some(b'F') => Some(b'f'),
        Some(b'N') if before => Some(b'f'),
        _ => None,
    };
    let mut flags = if before { 64 } else { 0 };
    for mark in marks.iter().skip(1) {
        flags |= match mark {
            b'M' => 1,
            b'S' => 4,
            b'A' => 8,
            b'F' => 32,
            _ => 0,
        };
    }
    (letter, flags << 8)
}

/// `sector + size`, and the text in the brackets at the end. Without a range, sector and size are
/// 0.
fn range(text: &[u8]) -> Option<(i64, i64, &[u8])> {
    let open = text.iter().position(|&byte| byte == b'[')?;
    let close = text.iter().rposition(|&byte| byte == b']')?;
    let inside = text.get(open + 1..close)?;
    let text = &text[..open];
    let Some((sector, rest)) = word(text) else { return Some((0, 0, inside)) };
    let sector = count(sector)?;
    let (size, rest) = match word(rest) {
        Some((b"+", rest)) => {
            let (size, rest) = word(rest)?;
            (count(size)?, rest)
        }
        _ => (0, rest),
    };
    // A time in parentheses, or the bytes of a command of another kind, may follow.
    let rest = rest.trim_ascii();
    let fits = rest.is_empty() || (rest[0] == b'(' && rest.ends_with(b")"));
    let within = sector.checked_add(size).is_some() && u32::try_from(size).is_ok();
    (fits && within).then_some((sector, size, inside))
}

impl Blkparse {
    fn row(
        &self,
        line: &Line<'_>,
        kind: &[u8],
        letter: u8,
        place: (i64, i64, i64),
        texts: &mut Texts,
    ) -> Row {
        let (number, sector, size) = place;
        let (columns, mut row) = (&self.columns, self.columns.row(line.time_ns));
        columns.text(&mut row, EventColumn::Type, kind, texts);
        columns.text(&mut row, EventColumn::Operation, &[letter], texts);
        columns.integer(&mut row, EventColumn::Request, number);
        columns.integer(&mut row, EventColumn::Sector, sector);
        columns.integer(&mut row, EventColumn::Size, size);
        columns.text(&mut row, EventColumn::VDisk, line.device, texts);
        row
    }

    fn owner(&self, row: &mut Row, request: &Request) {
        self.columns.value(row, EventColumn::Process, request.process.clone());
        self.columns.integer(row, EventColumn::ProcessId, request.process_id);
        self.columns.integer(row, EventColumn::Flags, request.flags);
    }

    fn number(&mut self) -> i64 {
        self.requests += 1;
        self.requests
    }

    /// Removes the requests that a completion answers, and returns each with its number and sector.
    fn answered(&mut self, key: Key, sector: i64, size: i64) -> Vec<(i64, i64, Request)> {
        let end = sector + size.max(1);
        let found: Vec<(i64, i64)> = self
            .in_flight
            .range((key, sector, i64::MIN)..(key, end, i64::MIN))
            .take(MERGED_MAX)
            .filter(|((_, from, _), request)| from + request.size <= sector + size)
            .map(|(&(_, from, number), _)| (from, number))
            .collect();
        // If several requests have the same first sector, the completion answers the oldest.
        let mut answered: Vec<(i64, i64, Request)> = Vec::new();
        for (from, number) in found {
            if answered.last().is_some_and(|(_, last, _)| *last == from) {
                continue;
            }
            self.by_number.remove(&number);
            if let Some(request) = self.in_flight.remove(&(key, from, number)) {
                answered.push((number, from, request));
            }
        }
        answered
    }
}

impl LineFormat for Blkparse {
    fn line(&mut self, text: &[u8], texts: &mut Texts, batch: &mut Batch) -> Result<(), String> {
        let Some(line) = parse(text) else {
            let starts = |word: &str| text.starts_with(word.as_bytes());
            self.summary |= starts("CPU") || starts("Total (") || starts("Input file");
            if self.summary {
                return Ok(());
            }
            return Err(format!("not a line of blkparse: {}", shown(text)));
        };
        if !matches!(line.action, b"Q" | b"C") {
            return Ok(());
        }
        let wrong = || format!("not an event of blkparse: {}", shown(text));
        let (marks, rest) = word(line.rest).ok_or_else(wrong)?;
        let (sector, size, inside) = range(rest).ok_or_else(wrong)?;
        let (letter, flags) = operation(marks, size);
        let Some(letter) = letter else { return Ok(()) };
        let key = (line.numbers, letter);
        if line.action == b"Q" {
            if inside.len() > FIELD_MAX {
                return Err("the process's name is too long".into());
            }
            let number = self.number();
            let process = texts.value(inside);
            let request = Request { size, process, process_id: line.process_id, flags };
            let mut row = self.row(&line, b"Q", letter, (number, sector, size), texts);
            self.owner(&mut row, &request);
            if self.by_number.len() >= IN_FLIGHT_MAX {
                if let Some((number, (key, sector))) = self.by_number.pop_first() {
                    self.in_flight.remove(&(key, sector, number));
                }
            }
            self.by_number.insert(number, (key, sector));
            self.in_flight.insert((key, sector, number), request);
            batch.push(line.time_ns, row);
            return Ok(());
        }
        let error = super::columns::integer(inside).ok_or_else(wrong)?;
        let (kind, reason): (&[u8], &[u8]) = match error.unsigned_abs() {
            0 => (b"R", b""),
            // ENOSPC, EOPNOTSUPP
            28 => (b"E", b"no space left"),
            95 => (b"N", b"unsupported"),
            _ => (b"E", b"input/output error"),
        };
        let answered = self.answered(key, sector, size);
        let mut rows = Vec::with_capacity(answered.len().max(1));
        for (number, sector, request) in &answered {
            let place = (*number, *sector, request.size);
            let mut row = self.row(&line, kind, letter, place, texts);
            self.owner(&mut row, request);
            rows.push(row);
        }
        if answered.is_empty() {
            let number = self.number();
            rows.push(self.row(&line, kind, letter, (number, sector, size), texts));
        }
        for mut row in rows {
            if !reason.is_empty() {
                self.columns.text(&mut row, EventColumn::Error, reason, texts);
            }
            batch.push(line.time_ns, row);
        }
        Ok(())
    }
}
