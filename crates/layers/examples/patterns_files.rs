//! Examines files of the host as if a guest had read and written them, for `bench/patterns`.
//!
//! Standard input has a line for each file: `read` or `write`, the path that the file has in the
//! guest, and that on the host, separated by tabs. The first standard output line has the time and
//! the bytes; then each encrypted or random file has a line: its evidence (`-` for none), its path
//! and its source; and each copy one: `copy`, target, source and bytes.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_insight::{Facts, Kind, Names};
use fathom_layers::Patterns;
use fathom_layers::patterns::PatternsOptions;

/// The size of a request.
const REQUEST: usize = 128 << 10;

fn main() -> io::Result<()> {
    let names = Arc::new(Names::default());
    let patterns = Patterns::new(Arc::clone(&names), PatternsOptions::default());
    let (device, file_system) = (names.number("vda1"), names.number("ext4"));
    let mut inodes: HashMap<String, u64> = HashMap::new();
    let (mut spent, mut bytes, mut now_ns) = (Duration::ZERO, 0, 1_000_000_000_000);
    let mut out = io::stdout().lock();
    let (mut found, mut seen) = (Vec::new(), (0, 0));
    for line in io::stdin().lock().lines() {
        let line = line?;
        let fields: Vec<&str> = line.split('\t').collect();
        let [operation, path, host] = fields[..] else {
            return Err(io::Error::other(format!("not a file: {line}")));
        };
        let content = std::fs::read(host)?;
        let next = inodes.len() as u64 + 1;
        let inode = *inodes.entry(path.to_owned()).or_insert(next);
        let facts = Facts {
            kind: Kind::Data,
            inode,
            file_size: content.len() as u64,
            path: names.number(path),
            device,
            file_system,
            ..Facts::default()
        };
        for (number, data) in content.chunks(REQUEST).enumerate() {
            // The last page is filled with zeroes.
            let mut data = data.to_vec();
            data.resize(data.len().next_multiple_of(4096), 0);
            now_ns += 1_000_000;
            let begun = Instant::now();
            let offset = (number * REQUEST) as u64;
            patterns.examine(&facts, offset, &data, operation == "write", now_ns);
            spent += begun.elapsed();
            bytes += data.len() as u64;
        }
        // The lists are bounded, so they are read after each file.
        let snapshot = patterns.snapshot(now_ns);
        let text = |name| names.text(name).as_deref().unwrap_or_default().to_owned();
        let counts = (snapshot.counts.encrypted_files, snapshot.counts.random_files);
        let new = (counts.0 + counts.1) - (seen.0 + seen.1);
        for record in snapshot.encrypted.iter().take(new as usize).rev() {
            let evidence = record.evidence.map_or("-", |evidence| evidence.name());
            found.push(format!(
                "{evidence}\t{}\t{}",
                text(record.file.path),
                text(record.source_path)
            ));
        }
        seen = counts;
    }
    writeln!(out, "{}\t{bytes}", spent.as_nanos())?;
    for line in found {
        writeln!(out, "{line}")?;
    }
    for copy in patterns.snapshot(now_ns).copies.iter().rev() {
        let text = |name| names.text(name).as_deref().unwrap_or_default().to_owned();
        let (target, source) = (text(copy.target.path), text(copy.source.path));
        writeln!(out, "copy\t{target}\t{source}\t{}", copy.bytes)?;
    }
    Ok(())
}
