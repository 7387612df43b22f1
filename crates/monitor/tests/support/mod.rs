//! Code that several tests share.
#![allow(dead_code, reason = "each test uses part of it")]

use std::io::Cursor;
use std::path::{Path, PathBuf};

use fathom_cql::Value;
use fathom_monitor::io_stream;
use fathom_monitor::read::{self, Batch, ReadError, ReadOptions, ReadReport, Reader};

/// All rows of a reader, and its report.
#[derive(Debug)]
pub struct Everything {
    pub events: Batch,
    pub report: ReadReport,
}

impl Everything {
    /// A column.
    pub fn column(&self, name: &str) -> Vec<Value> {
        let column = io_stream().find(name).expect("the column is there");
        self.events.rows().map(|row| row[column].clone()).collect()
    }

    /// A column of integers.
    pub fn integers(&self, name: &str) -> Vec<i64> {
        let number = |value| match value {
            Value::Integer(number) => number,
            other => panic!("{name} is {other:?}"),
        };
        self.column(name).into_iter().map(number).collect()
    }

    /// A column as texts.
    pub fn texts(&self, name: &str) -> Vec<String> {
        self.column(name).iter().map(ToString::to_string).collect()
    }
}

pub fn drain(mut reader: Box<dyn Reader>) -> Result<Everything, ReadError> {
    let (mut events, mut batch) = (Batch::default(), Batch::default());
    while reader.next_batch(&mut batch)? {
        assert!(!batch.is_empty());
        for (&time_ns, row) in batch.times_ns.iter().zip(batch.rows()) {
            events.push(time_ns, row);
        }
    }
    assert!(batch.is_empty());
    let report = reader.report().clone();
    assert_eq!(report.events, events.len() as u64);
    Ok(Everything { events, report })
}

pub fn bytes_with(
    bytes: impl AsRef<[u8]>,
    wanted: &[bool],
    options: &ReadOptions,
) -> Result<Everything, ReadError> {
    let bytes = Cursor::new(bytes.as_ref().to_vec());
    drain(read::from_bytes("test", bytes, &io_stream(), wanted, options)?)
}

pub fn bytes(bytes: impl AsRef<[u8]>) -> Result<Everything, ReadError> {
    bytes_with(bytes, &all(), &ReadOptions::default())
}

pub fn file(path: &Path, options: &ReadOptions) -> Result<Everything, ReadError> {
    drain(read::open(path, &io_stream(), &all(), options)?)
}

pub fn all() -> Vec<bool> {
    vec![true; io_stream().columns.len()]
}

pub fn paper(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/paper").join(name)
}

/// A trace; `None` if it is not installed.
pub fn trace(name: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    let folder = std::env::var_os("FATHOM_TRACES").map_or_else(beside, PathBuf::from);
    let path = folder.join(name);
    let there = path.exists();
    if !there {
        eprintln!("skipped: there is no {}", path.display());
    }
    there.then_some(path)
}
