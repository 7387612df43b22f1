//! Measures how fast CSV is read: `cargo run --release -p fathom-monitor --example read_speed`.

use std::fmt::Write;
use std::io::Cursor;
use std::time::Instant;

use fathom_monitor::io_stream;
use fathom_monitor::read::{self, Batch, ReadOptions};

fn main() {
    let events = 2_000_000_u64;
    let mut text = "BlktapTS,Type,IOOp,ReqId,Sector,Size,VMName,VDisk,PDisk,FtrTS\n".to_owned();
    for number in 0..events {
        let sector = number.wrapping_mul(0x9e37_79b9) % (1 << 30);
        let kind = if number % 2 == 0 { 'Q' } else { 'R' };
        let time = number * 1000;
        let _ = writeln!(
            text,
            "{time},{kind},w,{number},{sector},8,vm{},vda,/dev/sda3,{time}",
            number % 50
        );
    }
    let schema = io_stream();
    let of = |names: &[&str]| -> Vec<bool> {
        let mut wanted = vec![false; schema.columns.len()];
        names.iter().filter_map(|name| schema.find(name)).for_each(|column| wanted[column] = true);
        wanted
    };
    for (what, wanted) in [
        ("all ten columns", vec![true; schema.columns.len()]),
        ("three columns", of(&["Type", "Size", "VMName"])),
        ("the time alone", of(&[])),
    ] {
        let bytes = Cursor::new(text.clone().into_bytes());
        let options = ReadOptions::default();
        let mut reader =
            read::from_bytes("memory", bytes, &schema, &wanted, &options).expect("the text is CSV");
        let mut batch = Batch::default();
        let begun = Instant::now();
        while reader.next_batch(&mut batch).expect("every line is good") {}
        let seconds = begun.elapsed().as_secs_f64();
        assert_eq!(reader.report().events, events);
        let (rate, bytes) = (events as f64 / seconds / 1e6, text.len() as f64 / seconds / 1e6);
        println!("{what}: {rate:.2} million events/s, {bytes:.0} MB/s");
    }
}
