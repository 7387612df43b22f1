//! Traces of Tencent's cloud block storage: requests only, one line each of
//! `seconds,sector,sectors,operation,volume`. Operation 0 is a read, 1 a write.

use super::columns::{EventColumn, EventColumns, FIELD_MAX, count};
use super::intern::Texts;
use super::lines::Lines;
use super::text::{LineFormat, LineReader};
use super::{Batch, TimeUnit, instant, shown};

/// The state of the format's reader.
pub struct Tencent {
    columns: EventColumns,
    requests: i64,
}

/// The fields of a line.
fn fields(line: &[u8]) -> Option<[&[u8]; 5]> {
    let mut fields = line.split(|&byte| byte == b',');
    let found = [(); 5].map(|()| fields.next());
    if fields.next().is_some() {
        return None;
    }
    let [Some(time), Some(sector), Some(size), Some(operation), Some(volume)] = found else {
        return None;
    };
    Some([time, sector, size, operation, volume])
}

/// Whether a line has this format.
pub fn is_line(line: &[u8]) -> bool {
    let numbers = |fields: [&[u8]; 5]| fields.iter().all(|field| count(field).is_some());
    fields(line).is_some_and(|fields| matches!(fields[3], b"0" | b"1") && numbers(fields))
}

/// A reader of this format.
pub fn reader(name: &str, lines: Lines, columns: EventColumns) -> LineReader<Tencent> {
    LineReader::new(name, lines, Tencent { columns, requests: 0 })
}

impl LineFormat for Tencent {
    fn line(&mut self, line: &[u8], texts: &mut Texts, batch: &mut Batch) -> Result<(), String> {
        use EventColumn::{Operation, Request, Sector, Size, Type, VDisk};
        let [time, sector, size, operation, volume] =
            fields(line).ok_or("there must be five fields")?;
        let number = |field: &[u8], name: &str| {
            count(field).ok_or_else(|| format!("the {name} is {}", shown(field)))
        };
        let time_ns = instant(number(time, "time")?, TimeUnit::Seconds)
            .ok_or_else(|| format!("the time is {}", shown(time)))?;
        let (sector, size) = (number(sector, "sector")?, number(size, "size")?);
        let operation: &[u8] = match operation {
            b"0" => b"r",
            b"1" => b"w",
            other => return Err(format!("the operation is {}", shown(other))),
        };
        if volume.len() > FIELD_MAX {
            return Err("the volume's name is too long".into());
        }
        let (columns, mut row) = (&self.columns, self.columns.row(time_ns));
        columns.text(&mut row, Type, b"Q", texts);
        columns.text(&mut row, Operation, operation, texts);
        columns.integer(&mut row, Request, self.requests);
        columns.integer(&mut row, Sector, sector);
        columns.integer(&mut row, Size, size);
        columns.text(&mut row, VDisk, volume, texts);
        self.requests += 1;
        batch.push(time_ns, row);
        Ok(())
    }
}
