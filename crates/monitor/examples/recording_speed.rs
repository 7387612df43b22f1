//! Measures how fast recordings are written and read, and their size.

use std::error::Error;
use std::io::Cursor;
use std::sync::Arc;

use fathom_cql::{Row, Type, Value};
use fathom_monitor::io_stream;
use fathom_monitor::read::{self, BATCH_ROWS, Batch, ReadOptions, ReadReport};
use fathom_monitor::recording::{
    BlockBuilder, BlockLimits, Cell, Clock, Header, ParquetWriter, RowGroupLimits, Writer,
};

const EVENTS: usize = 1_000_000;

/// Requests at random sectors of eight files, and their responses.
fn rows() -> Vec<(i64, Row)> {
    let schema = io_stream();
    let text = |text: &str| Value::Text(Arc::from(text));
    let paths: Vec<Value> = (0..8).map(|n| text(&format!("/var/lib/data/{n}.db"))).collect();
    let letters = ["Q", "R", "r", "w"].map(text);
    let constant = ["web", "web-root", "/var/lib/fathom/web.img", "data", "ext4"].map(text);
    let mut random = fastrand::Rng::with_seed(1);
    let mut time = 1_000_000_000_000;
    let mut sector = 0;
    let mut file = 0;
    (0..EVENTS)
        .map(|number| {
            time += random.i64(500..4000);
            if number % 2 == 0 {
                (sector, file) = (random.i64(0..1 << 22) * 8, random.usize(0..8));
            }
            let value = |name: &str| match name {
                "BlktapTS" => Value::Integer(time),
                "FtrTS" => Value::Integer(time / 2_000_000 * 2_000_000),
                "Type" => letters[number % 2].clone(),
                "IOOp" => letters[2 + file % 2].clone(),
                "ReqId" => Value::Integer(number as i64 / 2),
                "Sector" => Value::Integer(sector),
                "VMName" => constant[0].clone(),
                "VDisk" => constant[1].clone(),
                "PDisk" => constant[2].clone(),
                "Kind" => constant[3].clone(),
                "FileSystem" => constant[4].clone(),
                "Path" => paths[file].clone(),
                "Inode" => Value::Integer(1000 + file as i64),
                "Error" | "MtrTS" | "IP" | "CacheHit" | "Layer" | "WriteHint" => Value::Null,
                _ => Value::Integer(8),
            };
            let of = |column: &fathom_cql::catalog::Column| match value(&column.name) {
                Value::Integer(_) if column.kind == Type::Text => constant[0].clone(),
                value => value,
            };
            (time, schema.columns.iter().map(of).collect())
        })
        .collect()
}

/// The time for which this thread has run on a processor, in nanoseconds.
fn processor_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn main() -> Result<(), Box<dyn Error>> {
    let (rows, schema) = (rows(), io_stream());
    let header = Header::new(&schema, Clock::Monotonic, 0);
    let nanoseconds = |begun: u64| (processor_ns() - begun) as f64 / EVENTS as f64;
    for block in [100, 1000, 8192, 32_768] {
        let begun = processor_ns();
        let limits = BlockLimits { rows: block, ..BlockLimits::default() };
        let mut writer = Writer::new(Vec::new(), &header, limits)?;
        for (time, row) in &rows {
            writer.append_row(*time, row)?;
        }
        let (bytes, summary) = writer.finish()?;
        let written = nanoseconds(begun);
        let size = summary.bytes as f64 / EVENTS as f64;
        let begun = processor_ns();
        let wanted = vec![true; schema.columns.len()];
        let options = ReadOptions::default();
        let mut reader =
            read::from_bytes("memory", Cursor::new(bytes), &schema, &wanted, &options)?;
        let mut batch = Batch::default();
        while reader.next_batch(&mut batch)? {}
        let read = nanoseconds(begun);
        println!("blocks of {block}: {size:.1} bytes, written {written:.0} ns, read {read:.0} ns");
    }
    let begun = processor_ns();
    let mut builder = BlockBuilder::new(&header);
    for (time, row) in &rows {
        builder.append(*time, row.iter().map(Cell::from));
        if builder.len() == 60_000 {
            builder = BlockBuilder::new(&header);
        }
    }
    println!("added to a block: {:.0} ns", nanoseconds(begun));
    let mut batches = vec![Batch::default()];
    for (time, row) in rows {
        if batches.last().is_some_and(|batch| batch.len() == BATCH_ROWS) {
            batches.push(Batch::default());
        }
        if let Some(batch) = batches.last_mut() {
            batch.push(time, row);
        }
    }
    let begun = processor_ns();
    let mut bytes = Vec::new();
    let mut writer = ParquetWriter::new(&mut bytes, &header, RowGroupLimits::default())?;
    for batch in &batches {
        writer.append(batch)?;
    }
    writer.finish(&ReadReport::default())?;
    let size = bytes.len() as f64 / EVENTS as f64;
    println!("as Parquet: {size:.1} bytes, written {:.0} ns", nanoseconds(begun));
    Ok(())
}
