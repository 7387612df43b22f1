//! Hostile files: for any bytes, a reader ends with events or an error.

mod support;

use std::fmt::Write;
use std::time::{Duration, Instant};

use fastrand::Rng;
use fathom_cql::Value;
use fathom_monitor::read::{LAST_TIME_NS, ReadOptions, TimeUnit};
use support::{all, bytes, bytes_with};

/// Valid files of each format that needs no other program.
fn seeds() -> Vec<Vec<u8>> {
    let mut blkparse = String::new();
    let mut csv = "BlktapTS,Type,IOOp,ReqId,Sector,Size,Path\n".to_owned();
    let mut tencent = String::new();
    let mut vscsi = [Vec::new(), Vec::new()];
    let mut oracle_general = Vec::new();
    let mut iologs = ["fio version 2 iolog\n".to_owned(), "fio version 3 iolog\n".to_owned()];
    let [mut cambridge, mut spc, mut arc, mut disksim, mut mqsim] = [const { String::new() }; 5];
    for number in 0..60_u64 {
        let action = if number % 2 == 0 { 'Q' } else { 'C' };
        let inside = if number % 2 == 0 { "a process" } else { "0" };
        let sector = number / 2 * 8;
        let _ = writeln!(
            blkparse,
            "  8,0    3 {number:8}     0.{number:09}   697  {action}  WS {sector} + 8 [{inside}]"
        );
        let _ = writeln!(csv, "{number},Q,w,{number},{sector},8,\"/a, \"\"{number}\"\"\"");
        let _ = writeln!(tencent, "15383232{number:02},{sector},8,{},10", number % 2);
        let words = |words: [u64; 2]| words.map(u64::to_le_bytes).concat();
        vscsi[0].extend([1, 0, 0, 0, 0, 16, 0, 0, 1, 0, 0, 0, 0x2a, 0, 0, 1]);
        vscsi[0].extend(words([sector, number]));
        vscsi[1].extend([0x2a, 0, 0, 2, 1, 0, 0, 0, 0, 16, 0, 0, 1, 0, 0, 0]);
        vscsi[1].extend(words([sector, number]));
        vscsi[1].extend(words([3, 0])[..8].iter());
        oracle_general.extend([(number / 8) as u8, 0, 0, 0]);
        oracle_general.extend(words([sector, 4096])[..12].iter());
        oracle_general.extend(if number % 7 == 0 { -1 } else { number as i64 + 1 }.to_le_bytes());
        let (bit, word) = (number % 2, ["read", "write"][number as usize % 2]);
        let _ = writeln!(iologs[0], "/dev/sda {word} {sector} 4096\n/dev/sda wait {number} 0");
        let _ = writeln!(iologs[1], "{number} /dev/sda {word} {sector} 4096");
        let _ = writeln!(cambridge, "12816637200306{number:04},usr,0,Read,{sector},4096,41286");
        let _ = writeln!(spc, "0,{sector},4096,W,{}.{number:06},x", number / 50);
        let _ = writeln!(arc, "{sector} 8 0 {number}");
        let _ = writeln!(disksim, "{number}.250000 0 {sector} 8 {bit:x}");
        let _ = writeln!(mqsim, "{number} 0 {sector} 8 {bit}");
    }
    let [one, two] = vscsi;
    let [version_two, version_three] = iologs;
    vec![
        csv.clone().into(),
        csv.replace(',', "\t").into(),
        blkparse.into(),
        tencent.into(),
        one,
        two,
        oracle_general,
        version_two.into(),
        version_three.into(),
        cambridge.into(),
        spc.into(),
        arc.into(),
        disksim.into(),
        mqsim.into(),
    ]
}

/// Changes a file as a fuzzer does.
fn mutate(file: &mut Vec<u8>, other: &[u8], random: &mut Rng) {
    const SPICE: [&[u8]; 14] = [
        b"\"",
        b"\"\"",
        b",",
        b"\t",
        b"\n",
        b"\r\n",
        b"\0",
        b"\xff\xfe",
        b"[",
        b"]",
        b" + ",
        b"-9223372036854775808",
        b"9223372036854775807",
        b"4611686018427387904",
    ];
    for _ in 0..random.usize(1..8) {
        let at = random.usize(0..=file.len());
        let end = (at + random.usize(0..64)).min(file.len());
        match random.u32(0..7) {
            0 => drop(file.drain(at..end)),
            1 => {
                let spice = SPICE[random.usize(0..SPICE.len())];
                file.splice(at..at, spice.iter().copied());
            }
            2 => file[at..end].iter_mut().for_each(|byte| *byte = random.u8(..)),
            3 => file.truncate(at),
            4 => {
                let copy = file[at..end].to_vec();
                for _ in 0..random.usize(1..40) {
                    file.splice(at..at, copy.iter().copied());
                }
            }
            5 => {
                let from = random.usize(0..other.len());
                let to = (from + random.usize(0..400)).min(other.len());
                file.splice(at..at, other[from..to].iter().copied());
            }
            _ => {
                if let Some(byte) = file.get_mut(at) {
                    *byte ^= 1 << random.u32(0..8);
                }
            }
        }
    }
}

#[test]
fn mutated_files_do_no_harm() {
    let seeds = seeds();
    for seed in &seeds {
        let read = bytes(seed).unwrap();
        assert_eq!((read.events.len(), read.report.bad), (60, 0));
    }
    let mut random = Rng::with_seed(0x3f41);
    let (mut read_well, mut refused) = (0, 0);
    for round in 0..24_000 {
        let mut file = seeds[round % seeds.len()].clone();
        let other = &seeds[random.usize(0..seeds.len())];
        mutate(&mut file, other, &mut random);
        let time_unit = if random.bool() { TimeUnit::Nanoseconds } else { TimeUnit::Seconds };
        let options = ReadOptions { time_unit, ..ReadOptions::default() };
        fathom_monitor::fuzz_events(&[&[random.u8(..)], &file[..]].concat());
        match bytes_with(&file, &all(), &options) {
            Ok(read) => {
                read_well += 1;
                assert!(read.report.notes.len() <= 5 && read.report.bad <= 100);
                assert!(read.events.times_ns.iter().all(|time| (0..=LAST_TIME_NS).contains(time)));
                let bounded = |value: &Value| match value {
                    Value::Text(text) => text.len() <= 3 * 8192,
                    _ => true,
                };
                assert!(read.events.rows().flatten().all(|value| bounded(&value)));
            }
            Err(error) => {
                refused += 1;
                let text = error.to_string();
                assert!(!text.is_empty() && text.len() < 2000, "{text}");
            }
        }
    }
    assert!(read_well > 6000 && refused > 1000, "{read_well} {refused}");
}

#[test]
fn mutated_queries_do_no_harm() {
    let page = include_str!("../../../docs/queries.md");
    let blocks = page.split("```sql").skip(1);
    let seeds: Vec<&str> = blocks.map(|block| block.split("```").next().unwrap()).collect();
    assert!(seeds.len() > 20);
    let mut random = Rng::with_seed(0x51);
    for round in 0..3_000 {
        let mut script = seeds[round % seeds.len()].as_bytes().to_vec();
        if round >= seeds.len() {
            let other = seeds[random.usize(0..seeds.len())];
            mutate(&mut script, other.as_bytes(), &mut random);
        }
        fathom_monitor::fuzz_script(&[&[random.u8(..)], &script[..]].concat());
    }
}

#[test]
fn files_designed_to_be_slow_are_read_quickly() {
    let begun = Instant::now();
    // Quotes that are never closed, as many as are accepted among valid lines.
    let mut quotes = "BlktapTS,Path\n".to_owned();
    for line in 0..60_000 {
        quotes += if line % 110 == 0 { "1,\"\n" } else { "1,2\n" };
    }
    let read = bytes(quotes).unwrap();
    assert!(read.report.bad > 500 && read.events.len() > 50_000);
    // Completions of a large range, over requests that they cannot answer.
    let mut wide = String::new();
    for number in 0..5_000 {
        let _ = writeln!(wide, "8,0 0 1 0.000000001 1 Q R {number} + 4000000000 [a]");
    }
    for _ in 0..5_000 {
        wide += "8,0 0 1 0.000000001 1 C R 0 + 6000 [0]\n";
    }
    assert_eq!(bytes(wide).unwrap().events.len(), 10_000);
    // Texts that all differ.
    let mut texts = "BlktapTS,Path\n".to_owned();
    for line in 0..200_000 {
        let _ = writeln!(texts, "1,{line}");
    }
    assert_eq!(bytes(texts).unwrap().events.len(), 200_000);
    // A line without an end.
    let error = bytes(vec![b'x'; 8 << 20]).unwrap_err();
    assert!(error.to_string().contains("is unknown"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

#[test]
fn the_first_line_is_bounded() {
    let many: Vec<String> = (0..2000).map(|number| format!("c{number}")).collect();
    assert!(bytes(format!("BlktapTS,{}\n1\n", many.join(","))).is_err());
    assert!(bytes(format!("BlktapTS,{}\n1,2\n", "x".repeat(70_000))).is_err());
    let unknown = bytes(format!("BlktapTS,{}\n1{}\n", many[..900].join(","), ",".repeat(900)));
    let notes = unknown.unwrap().report.notes;
    assert!(notes.len() == 1 && notes[0].len() < 500, "{notes:?}");
}
