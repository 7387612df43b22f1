//! Queries over several streams of many hosts, of which some are older and have one stream.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use fathom_cql::Value;
use fathom_cql::catalog::StreamSchema;
use fathom_monitor::link::{EventItem, EventSource, Host, HostState, unix_time_ns};
use fathom_monitor::read::{Batch, WantedStream};
use fathom_monitor::streams;
use parking_lot::Mutex;

use super::support::*;

/// For each change the requests of its disk within a second before it, and each change.
const QUERIES: &str = "
    Istream(select c.Change, c.VDisk, count(*) as n
            from Changes [now] as c, IOstream [range 1 second] as i
            where c.VDisk = i.VDisk group by c.ChangeTS, c.Change, c.VDisk);
    select ChangeTS, Change from Changes";

/// Rows of the streams, by their positions, and watermarks.
#[derive(Clone)]
enum Item {
    Row(usize, i64, Vec<Value>),
    Watermark(i64),
}

type Items = Arc<Mutex<VecDeque<Item>>>;

struct Both {
    items: Items,
    wanted: Vec<WantedStream>,
}

impl EventSource for Both {
    fn streams(&self) -> Vec<StreamSchema> {
        streams()
    }

    fn clock_ns(&self) -> i64 {
        unix_time_ns()
    }

    fn unix_offset_ns(&self) -> i64 {
        0
    }

    fn begin(&mut self, wanted: &[WantedStream]) -> Result<(), String> {
        self.wanted = wanted.to_vec();
        Ok(())
    }

    fn next(&mut self, batch: &mut Batch) -> Result<Option<EventItem>, String> {
        *batch = Batch::default();
        let Some(item) = self.items.lock().pop_front() else { return Ok(None) };
        let (stream, time_ns, row) = match item {
            Item::Watermark(time_ns) => return Ok(Some(EventItem::Watermark(time_ns))),
            Item::Row(stream, time_ns, row) => (stream, time_ns, row),
        };
        let name = &streams()[stream].name;
        let place = self.wanted.iter().position(|wanted| wanted.schema.name == *name);
        let place = place.ok_or("the stream is not wanted")?;
        let columns = self.wanted[place].columns.iter();
        let row =
            row.into_iter().zip(columns).filter(|(_, wanted)| **wanted).map(|(value, _)| value);
        batch.push(time_ns, row.collect());
        batch.stream = place;
        Ok(Some(EventItem::Rows))
    }

    fn end(&mut self) {}
}

/// A row of a stream with some values by the names of their columns.
fn row(stream: usize, time_ns: i64, values: &[(&str, &str)]) -> Item {
    let schema = &streams()[stream];
    let mut row = vec![Value::Null; schema.columns.len()];
    row[0] = Value::Integer(time_ns);
    for (name, value) in values {
        row[schema.find(name).unwrap()] = Value::text(value);
    }
    Item::Row(stream, time_ns, row)
}

fn frame(kind: u8, bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_le_bytes()[..], &[kind], bytes].concat()
}

/// A host of level 0, on a thread, which accepts the fragments and has no rows. Returns the plans
/// that it got.
fn older(address: &str) -> std::thread::JoinHandle<Vec<u8>> {
    let mut input = TcpStream::connect(address).unwrap();
    let mut output = input.try_clone().unwrap();
    std::thread::spawn(move || {
        let text = |text: &str| [&(text.len() as u16).to_le_bytes()[..], text.as_bytes()].concat();
        output.write_all(b"\x8eFATLNK\n\x01\0\0\0").unwrap();
        output.write_all(&frame(1, &[text("older"), text("0")].concat())).unwrap();
        let mut exact = |count: usize| {
            let mut bytes = vec![0; count];
            input.read_exact(&mut bytes).map(|()| bytes)
        };
        exact(12).unwrap();
        let (mut plans, mut number) = (Vec::new(), 0_u64);
        while let Ok(head) = exact(5) {
            let length = u32::from_le_bytes(head[..4].try_into().unwrap()) as usize;
            let Ok(bytes) = exact(length) else { break };
            let now = unix_time_ns().to_le_bytes();
            let mut answer = match head[4] {
                67 => frame(7, &[&bytes[..4], &now].concat()),
                66 => {
                    plans = bytes[21..].to_vec();
                    frame(2, &[&bytes[..4], &[0]].concat())
                }
                _ => continue,
            };
            if !plans.is_empty() {
                // It has no rows before now.
                number += 1;
                answer.extend(frame(5, &[&number.to_le_bytes()[..], &now, &[0; 8]].concat()));
            }
            if output.write_all(&answer).is_err() {
                break;
            }
        }
        plans
    })
}

#[test]
fn a_join_of_two_streams_has_the_rows_of_the_hosts_that_have_both() {
    let mut centre = centre(QUERIES, |options| options.patience = Duration::from_secs(90));
    let address = centre.address().to_string();
    let items = Items::default();
    let source = Both { items: Arc::clone(&items), wanted: Vec::new() };
    let _newer = Host::start(plain("newer", &address), Box::new(source)).unwrap();
    let older = older(&address);
    let mut collected = Collected::default();
    let watch = centre.watch();
    run_until(&mut centre, &mut collected, |_| {
        let status = watch.status();
        let running = status.hosts.iter().filter(|host| host.state == HostState::Running);
        running.count() == 2
    });
    let problem = of(&watch.status(), "older").problem.unwrap();
    assert!(problem.contains("IOstream alone"), "{problem}");
    assert_eq!(of(&watch.status(), "newer").problem, None);
    // After the time of the centre, which has begun.
    let base = unix_time_ns() + SECOND / 2;
    let at = |tenth: i64| base + tenth * SECOND / 10;
    let io = |tenth, disk| row(0, at(tenth), &[("VDisk", disk)]);
    let change = |tenth, disk| row(1, at(tenth), &[("Change", "layer-added"), ("VDisk", disk)]);
    items.lock().extend([
        io(0, "a"),
        io(12, "a"),
        io(13, "b"),
        // Blocks of different streams are in any order between two watermarks.
        change(16, "a"),
        io(15, "a"),
        Item::Watermark(at(20)),
        change(25, "b"),
        Item::Watermark(at(26)),
    ]);
    run_to(&mut centre, &mut collected, at(26));
    let text = Value::text;
    let rows: Vec<_> = collected.to(i64::MAX).into_iter().collect();
    let joined = vec![text("layer-added"), text("a"), Value::Integer(2)];
    let listed = |tenth: i64| vec![Value::Integer(at(tenth)), text("layer-added")];
    assert_eq!(
        rows,
        [((0, at(16), joined), 1), ((1, at(16), listed(16)), 1), ((1, at(25), listed(25)), 1)]
    );
    drop(centre);
    let plans = older.join().unwrap();
    let has = |name: &[u8]| plans.windows(name.len()).any(|part| part == name);
    assert!(has(b"IOstream") && !has(b"Changes"));
}
