//! Measures the cost of scripts over a file, from its bytes to counted and hashed rows:
//!
//! ```text
//! replay_cost FILE SCRIPT…
//! replay_cost --cluster ADDRESS,ADDRESS… PROCESS FILE SCRIPT
//! ```
//!
//! With `--cluster` it is one of several processes that run the script together, each over its own
//! file.
//!
//! The time is the column `BlktapTS`, in microseconds. A line of JSON is printed for each script.
//! `bench/queries` runs this example, and programs that do the same with other engines.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_cql::Value;
use fathom_cql::catalog::Column;
use fathom_monitor::cluster::ClusterOptions;
use fathom_monitor::read::{ReadOptions, TimeUnit};
use fathom_monitor::{ReplayRequest, ResultSink, replay};

/// An odd number; sums and products are modulo 2⁶⁴.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// Counts the inserted and the deleted rows of the results.
///
/// The hash is the sum of the hashes of inserted rows minus those of deleted rows, each with its
/// instant. So a row that is deleted and inserted at one instant does not change it, and the order
/// does not matter. Nulls, such as those of columns that the file does not have, are skipped.
struct Count {
    come: u64,
    go: u64,
    hash: u64,
    /// The hashes of recent texts, by address. Java keeps the hash of a text with the text.
    texts: [Option<(Arc<str>, u64)>; 64],
}

impl Default for Count {
    fn default() -> Self {
        Self { come: 0, go: 0, hash: 0, texts: [const { None }; 64] }
    }
}

impl Count {
    fn hash(&mut self, value: &Value) -> u64 {
        match value {
            Value::Null => 0,
            Value::Boolean(value) => u64::from(*value),
            Value::Integer(value) => *value as u64,
            Value::Float(value) => value.to_bits(),
            Value::Text(text) => self.hash_text(text),
        }
    }

    fn hash_text(&mut self, text: &Arc<str>) -> u64 {
        let place = &mut self.texts[text.as_ptr() as usize / 16 % 64];
        match place {
            Some((known, hash)) if Arc::ptr_eq(known, text) => *hash,
            _ => {
                // The hash function of Java.
                let step = |hash: i32, byte| hash.wrapping_mul(31).wrapping_add(i32::from(byte));
                let hash = i64::from(text.bytes().fold(0, step)) as u64;
                *place = Some((Arc::clone(text), hash));
                hash
            }
        }
    }
}

impl ResultSink for Count {
    fn begin(&mut self, _: usize, _: &[Column], _: bool) -> io::Result<()> {
        Ok(())
    }

    fn delta(&mut self, _: usize, time_ns: i64, count: i64, row: &[Value]) -> io::Result<()> {
        let time = (time_ns / 1000) as u64;
        let known = row.iter().filter(|value| !value.is_null());
        let one = known
            .fold(time, |all, value| (all.rotate_left(5) ^ self.hash(value)).wrapping_mul(FACTOR));
        self.hash = self.hash.wrapping_add(one.wrapping_mul(count as u64));
        *(if count > 0 { &mut self.come } else { &mut self.go }) += count.unsigned_abs();
        Ok(())
    }
}

/// The time for which this thread, the only one, has run on a processor, in seconds.
fn cpu_seconds() -> f64 {
    let text =
        std::fs::read_to_string("/proc/thread-self/schedstat").expect("the kernel has this file");
    text.split(' ').next().and_then(|time| time.parse::<f64>().ok()).expect("a number") / 1e9
}

fn main() {
    let mut arguments = std::env::args().skip(1).peekable();
    let cluster = arguments.next_if(|first| first == "--cluster").map(|_| {
        let addresses = arguments.next().expect("addresses");
        let index = arguments.next().and_then(|number| number.parse().ok()).expect("a process");
        ClusterOptions {
            addresses: addresses.split(',').map(str::to_owned).collect(),
            index,
            tls: None,
            patience: Duration::from_secs(60),
            own_results: true,
        }
    });
    let file = PathBuf::from(arguments.next().expect("a file of events"));
    for script in arguments {
        let request = ReplayRequest {
            script: std::fs::read_to_string(&script).expect("a script"),
            parameters: Vec::new(),
            stream_compatible: false,
            file: file.clone(),
            read: ReadOptions {
                time_column: Some("BlktapTS".into()),
                time_unit: TimeUnit::Microseconds,
                ..ReadOptions::default()
            },
            lateness_ns: None,
            held_max: None,
            cluster: cluster.clone(),
        };
        let mut count = Count::default();
        let (begun, worked) = (Instant::now(), cpu_seconds());
        let summary = replay(&request, &mut count).unwrap_or_else(|error| panic!("{error}"));
        let seconds = begun.elapsed().as_secs_f64();
        let cpu = cpu_seconds() - worked;
        let (events, bad, late) = (summary.read.events, summary.read.bad, summary.late);
        assert_eq!((bad, late), (0, 0), "every event counts");
        let Count { come, go, hash, .. } = count;
        println!(
            r#"{{"events": {events}, "seconds": {seconds}, "cpu_seconds": {cpu}, "come": {come}, "go": {go}, "hash": "{hash:016x}"}}"#
        );
    }
}
