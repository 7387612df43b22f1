//! Formats of text in which each line is a request, each a function from a line to its request.
//!
//! | format | a line |
//! |---|---|
//! | Tencent | `seconds,sector,sectors,operation,volume`; operation 0 is a read, 1 a write |
//! | MSR Cambridge | `time,host,disk,Read,offset,bytes,time until the response`; the times are in units of 100 ns, the first since 1601 |
//! | SPC | `unit,sector,bytes,operation,seconds`, and other fields; the operation is `R` or `W` in any case |
//! | ARC | `sector sectors ignored number`; there are no times and no operations |
//! | DiskSim | `milliseconds disk sector sectors flags`; the time has a fraction, and the flags are hexadecimal, with 1 for a read |
//! | MQSim | `nanoseconds disk sector sectors operation`; operation 0 is a write, 1 a read |

use std::borrow::Cow;

use super::columns::{EventColumns, count};
use super::intern::Texts;
use super::lines::Lines;
use super::request::{TracedOperation, TracedRequest, TracedRequests, sectors_of};
use super::source::ByteSource;
use super::text::{LineFormat, LineReader};
use super::{Batch, LAST_TIME_NS, Reader, TimeUnit, instant, shown};

/// The request in a line, whose number among the requests is given. An error is the reason why it
/// is none.
pub type LineParser = fn(&[u8], i64) -> Result<TracedRequest<'_>, String>;

/// A reader of lines of such a format.
pub fn reader(
    name: &str,
    source: ByteSource,
    columns: EventColumns,
    parse: LineParser,
) -> Box<dyn Reader> {
    let format = RequestLines { parse, requests: TracedRequests::new(columns) };
    Box::new(LineReader::new(name, Lines::new(source), format))
}

/// The state of the reader.
struct RequestLines {
    parse: LineParser,
    requests: TracedRequests,
}

impl LineFormat for RequestLines {
    fn line(&mut self, line: &[u8], texts: &mut Texts, batch: &mut Batch) -> Result<(), String> {
        let request = (self.parse)(line, self.requests.count())?;
        self.requests.add(&request, texts, batch)
    }
}

/// The seconds from 1601, with which Windows' times begin, to 1970.
const WINDOWS_EPOCH_S: i64 = 11_644_473_600;
/// The unit of Windows' times, in nanoseconds, and the number of them in a second.
const WINDOWS_TICK_NS: i64 = 100;
const WINDOWS_TICKS: i64 = 10_000_000;
/// The time between two requests of a format without times, in nanoseconds.
const STEP_NS: i64 = 1000;

/// Exactly `N` fields.
fn fields<const N: usize>(
    line: &[u8],
    is_separator: impl Fn(u8) -> bool,
) -> Result<[&[u8]; N], String> {
    let fields = line.split(|&byte| is_separator(byte));
    exactly(fields)
}

/// Exactly `N` words.
fn words<const N: usize>(line: &[u8]) -> Result<[&[u8]; N], String> {
    exactly(line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()))
}

fn exactly<'l, const N: usize>(
    mut parts: impl Iterator<Item = &'l [u8]>,
) -> Result<[&'l [u8]; N], String> {
    let found = [(); N].map(|()| parts.next());
    let all = found.iter().all(Option::is_some) && parts.next().is_none();
    all.then(|| found.map(Option::unwrap_or_default))
        .ok_or_else(|| format!("there must be {N} fields"))
}

fn is_comma(byte: u8) -> bool {
    byte == b','
}

/// A number from 0 on.
fn number(field: &[u8], name: &str) -> Result<i64, String> {
    count(field.trim_ascii()).ok_or_else(|| format!("the {name} is {}", shown(field)))
}

/// A decimal number of a unit of time, in nanoseconds. Parts of a nanosecond are dropped.
fn decimal(field: &[u8], unit: TimeUnit) -> Result<i64, String> {
    let wrong = || format!("the time is {}", shown(field));
    let field = field.trim_ascii();
    let point = field.iter().position(|&byte| byte == b'.').unwrap_or(field.len());
    let whole = instant(count(&field[..point]).ok_or_else(wrong)?, unit).ok_or_else(wrong)?;
    let digits = field.get(point + 1..).unwrap_or_default();
    if !digits.iter().all(u8::is_ascii_digit) {
        return Err(wrong());
    }
    // A second has nine decimal places in nanoseconds.
    let (mut fraction_ns, mut place_ns) = (0, unit.nanoseconds());
    for digit in digits.iter().take(9) {
        place_ns /= 10;
        fraction_ns += i64::from(digit - b'0') * place_ns;
    }
    Some(whole + fraction_ns).filter(|time| *time <= LAST_TIME_NS).ok_or_else(wrong)
}

/// The sectors of a range in bytes.
fn range(offset: i64, length: i64) -> Result<(i64, i64), String> {
    sectors_of(offset, length).ok_or_else(|| "the range is too long".into())
}

/// 0 and 1 for the two operations; `read` is the one of reads.
fn bit(field: &[u8], read: &[u8]) -> Result<TracedOperation, String> {
    match field.trim_ascii() {
        operation @ (b"0" | b"1") => Ok(TracedOperation::read_if(operation == read)),
        other => Err(format!("the operation is {}", shown(other))),
    }
}

/// Whether a file of Tencent's format begins with this line.
pub fn is_tencent(line: &[u8]) -> bool {
    tencent(line, 0).is_ok_and(|request| count(&request.disk).is_some())
}

/// A line of Tencent's format.
pub fn tencent(line: &[u8], _: i64) -> Result<TracedRequest<'_>, String> {
    let [time, sector, sectors, operation, volume] = fields(line, is_comma)?;
    let time_ns = instant(number(time, "time")?, TimeUnit::Seconds)
        .ok_or_else(|| format!("the time is {}", shown(time)))?;
    Ok(TracedRequest {
        time_ns,
        operation: bit(operation, b"0")?,
        sectors: (number(sector, "sector")?, number(sectors, "size")?),
        disk: Cow::Borrowed(volume),
    })
}

/// A line of the format of the traces of Microsoft Research in Cambridge.
pub fn cambridge(line: &[u8], _: i64) -> Result<TracedRequest<'_>, String> {
    let [time, host, disk, operation, offset, length, response] = fields(line, is_comma)?;
    number(response, "response time")?;
    let ticks = number(time, "time")?;
    let time_ns = ticks
        .checked_sub(WINDOWS_EPOCH_S * WINDOWS_TICKS)
        .and_then(|ticks| ticks.checked_mul(WINDOWS_TICK_NS))
        .filter(|time_ns| (0..=LAST_TIME_NS).contains(time_ns))
        .ok_or_else(|| format!("the time is {}", shown(time)))?;
    let operation = match operation.trim_ascii() {
        word if word.eq_ignore_ascii_case(b"Read") => TracedOperation::Read,
        word if word.eq_ignore_ascii_case(b"Write") => TracedOperation::Write,
        other => return Err(format!("the operation is {}", shown(other))),
    };
    number(disk, "disk")?;
    Ok(TracedRequest {
        time_ns,
        operation,
        sectors: range(number(offset, "offset")?, number(length, "size")?)?,
        disk: Cow::Owned([host, disk].map(<[u8]>::trim_ascii).join(&b'_')),
    })
}

/// A line of the format of the Storage Performance Council.
pub fn spc(line: &[u8], _: i64) -> Result<TracedRequest<'_>, String> {
    // Other fields may follow these five.
    let [unit, sector, length, operation, time] =
        exactly(line.split(|&byte| byte == b',').take(5))?;
    let operation = match operation.trim_ascii() {
        b"R" | b"r" => TracedOperation::Read,
        b"W" | b"w" => TracedOperation::Write,
        other => return Err(format!("the operation is {}", shown(other))),
    };
    number(unit, "unit")?;
    Ok(TracedRequest {
        time_ns: decimal(time, TimeUnit::Seconds)?,
        operation,
        sectors: (number(sector, "sector")?, range(0, number(length, "size")?)?.1),
        disk: Cow::Borrowed(unit.trim_ascii()),
    })
}

/// A line of the format of the traces of ARC. A simulator of caches takes all requests as reads.
pub fn arc(line: &[u8], before: i64) -> Result<TracedRequest<'_>, String> {
    let [sector, sectors, _, of_trace] = words(line)?;
    number(of_trace, "number")?;
    Ok(TracedRequest {
        time_ns: before.checked_mul(STEP_NS).filter(|time| *time <= LAST_TIME_NS).unwrap_or(0),
        operation: TracedOperation::Read,
        sectors: (number(sector, "sector")?, number(sectors, "size")?),
        disk: Cow::Borrowed(b""),
    })
}

/// Whether the first word of a line is a number with a fraction.
pub fn has_fraction(line: &[u8]) -> bool {
    line.split(u8::is_ascii_whitespace).next().is_some_and(|word| word.contains(&b'.'))
}

/// A line of `DiskSim`'s format `ascii`.
pub fn disksim(line: &[u8], _: i64) -> Result<TracedRequest<'_>, String> {
    let [time, disk, sector, sectors, flags] = words(line)?;
    let digits = flags.strip_prefix(b"0x").unwrap_or(flags);
    let flags = std::str::from_utf8(digits)
        .ok()
        .filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
        .and_then(|digits| u32::from_str_radix(digits, 16).ok())
        .ok_or_else(|| format!("the flags are {}", shown(flags)))?;
    number(disk, "disk")?;
    Ok(TracedRequest {
        time_ns: decimal(time, TimeUnit::Milliseconds)?,
        operation: TracedOperation::read_if(flags & 1 == 1),
        sectors: (number(sector, "sector")?, number(sectors, "size")?),
        disk: Cow::Borrowed(disk),
    })
}

/// A line of `MQSim`'s format.
pub fn mqsim(line: &[u8], _: i64) -> Result<TracedRequest<'_>, String> {
    let [time, disk, sector, sectors, operation] = words(line)?;
    let time_ns = instant(number(time, "time")?, TimeUnit::Nanoseconds)
        .ok_or_else(|| format!("the time is {}", shown(time)))?;
    number(disk, "disk")?;
    Ok(TracedRequest {
        time_ns,
        operation: bit(operation, b"1")?,
        sectors: (number(sector, "sector")?, number(sectors, "size")?),
        disk: Cow::Borrowed(disk),
    })
}
