//! The columns of events.

use std::sync::Arc;

use fathom_insight::stream::Get;
use fathom_insight::{Name, Names, Stream};
use fathom_monitor::recording::{BlockBuilder, Cell};

/// The number of texts cached outside the table of names.
const RECENT: usize = 4096;

/// The texts of the columns' values, apart from those that belong to one stream.
pub(super) struct Texts {
    names: Arc<Names>,
    recent: Vec<Option<(u32, Arc<str>)>>,
    letters: Vec<Arc<str>>,
    /// The texts of the event's names, in the order of its columns.
    of_event: Vec<Option<Arc<str>>>,
}

/// The texts of a source, by column: those that each column may have, and the text that all events
/// of the source have in common.
pub(super) struct SourceTexts<S: Stream> {
    words: Vec<Vec<Arc<str>>>,
    labels: Vec<Option<Arc<str>>>,
    stream: std::marker::PhantomData<S>,
}

impl<S: Stream> SourceTexts<S> {
    pub fn new(labels: &S::Labels) -> Self {
        let words = S::COLUMNS.iter().map(|column| {
            column.get.texts().unwrap_or_default().iter().map(|text| Arc::from(*text)).collect()
        });
        let label = S::COLUMNS.iter().map(|column| match column.get {
            Get::Label(get) => Some(get(labels)).filter(|text| !text.is_empty()).map(Arc::from),
            _ => None,
        });
        Self { words: words.collect(), labels: label.collect(), stream: std::marker::PhantomData }
    }
}

fn text(text: Option<&Arc<str>>) -> Cell<'_> {
    text.map_or(Cell::Null, Cell::Text)
}

/// The text with a number; the first has number 1, and 0 stands for none.
fn listed(texts: &[Arc<str>], number: u8) -> Cell<'_> {
    text(usize::from(number).checked_sub(1).and_then(|place| texts.get(place)))
}

impl Texts {
    pub fn new(names: Arc<Names>) -> Self {
        let letter = |byte: u8| Arc::from(char::from(byte).to_string());
        let (recent, letters) = (vec![None; RECENT], (0..128).map(letter).collect());
        Self { names, recent, letters, of_event: Vec::new() }
    }

    /// The text of a name, if there is one.
    pub fn name(&mut self, number: u32) -> Option<Arc<str>> {
        if number == 0 {
            return None;
        }
        let place = &mut self.recent[number as usize % RECENT];
        if let Some((known, text)) = place {
            if *known == number {
                return Some(Arc::clone(text));
            }
        }
        let text = self.names.text(Name(number))?;
        *place = Some((number, Arc::clone(&text)));
        Some(text)
    }

    /// Adds an event as a row of its stream.
    pub fn append<S: Stream>(
        &mut self,
        event: &S::Record,
        of_source: &SourceTexts<S>,
        collected_ns: i64,
        block: &mut BlockBuilder,
    ) {
        let mut names = std::mem::take(&mut self.of_event);
        names.clear();
        for column in S::COLUMNS {
            if let Get::Name(get) = column.get {
                names.push(self.name(get(event)));
            }
        }
        let mut of_event = names.iter();
        let cells = S::COLUMNS.iter().enumerate().map(|(index, column)| match column.get {
            Get::Time(get) => Cell::Integer(get(event) as i64),
            Get::Collected => Cell::Integer(collected_ns),
            Get::Received | Get::ReceivedTime => Cell::Null,
            Get::Number(get) => {
                get(event).map_or(Cell::Null, |number| Cell::Integer(number as i64))
            }
            Get::Letter(_, get) => text(self.letters.get(usize::from(get(event)))),
            Get::Word(_, get) | Get::OpenWord(_, get) => {
                listed(&of_source.words[index], get(event))
            }
            Get::Name(_) => text(of_event.next().and_then(Option::as_ref)),
            Get::Label(_) => text(of_source.labels[index].as_ref()),
        });
        block.append(S::time_ns(event) as i64, cells);
        self.of_event = names;
    }
}

#[cfg(test)]
mod tests {
    use fathom_cql::Value;
    use fathom_insight::event::{Event, Labels};
    use fathom_insight::stream::IoStream;
    use fathom_monitor::io_stream;
    use fathom_monitor::read::Batch;
    use fathom_monitor::recording::{BlockReader, Clock, Header, Item};

    use super::*;

    /// An event in which every field has a value. A new field must be added here.
    fn event(names: &Names) -> Event {
        Event {
            blktap_ts: 1,
            req_id: 2,
            sector: 3,
            size: 4,
            disk: 5,
            record_type: b'E',
            io_op: b'w',
            flags: 6,
            error: 1,
            kind: 3,
            class: 8,
            cache_hit: 2,
            layer: 9,
            source: 2,
            io_priority: 10,
            inode: 11,
            file_size: 12,
            path: names.number("/a").0,
            file_system: names.number("ext4").0,
            cgroup: names.number("/web").0,
            process: names.number("fio").0,
            device: names.number("vda").0,
            process_id: 13,
            queue: 14,
            parts: 15,
            confidence: 2,
            write_hint: 16,
            held_us: 14,
            held_by: 1,
            database_system: 2,
            database_part: 2,
            database_index: 17,
            process_role: 2,
            process_start: 18,
        }
    }

    #[test]
    fn every_column_has_its_value_and_no_other() {
        let names = Arc::<Names>::default();
        let event = event(&names);
        let labels = Labels {
            vm_name: "vm".into(),
            virtual_disk: "disk".into(),
            physical_disk: "/a.img".into(),
        };
        let header = Header::new(&io_stream(), Clock::Monotonic, 0);
        let row = |event: &Event, labels: &Labels| {
            let mut block = BlockBuilder::new(&header);
            Texts::new(Arc::clone(&names)).append::<IoStream>(
                event,
                &SourceTexts::new(labels),
                17,
                &mut block,
            );
            let mut reader = BlockReader::new(header.clone(), 1 << 20);
            assert_eq!(reader.open(&block.take().unwrap()), Ok(Some(Item::Rows)));
            let mut batch = Batch::default();
            assert!(reader.rows(&mut batch).unwrap());
            batch.row(0)
        };
        let expected = "1 E w 2 3 4 vm disk /a.img 17   journal 7 11 /a 12 ext4 /web fio 13 vda \
                        input/output error 6 10 hit 8 page sure 14 16 limit 14000 innodb index \
                        17 waiter 180000000";
        let shown: Vec<String> = row(&event, &labels).iter().map(Value::to_string).collect();
        assert_eq!(shown.join(" "), expected);
        // Unknown values are null.
        let blank = Event { record_type: b'Q', io_op: b'r', ..Event::default() };
        let known: Vec<&str> = row(&blank, &Labels::default())
            .iter()
            .zip(IoStream::COLUMNS)
            .filter(|(value, _)| !value.is_null())
            .map(|(_, column)| column.name)
            .collect();
        let always =
            ["BlktapTS", "Type", "IOOp", "ReqId", "Sector", "Size", "FtrTS", "Flags", "Queue"];
        assert_eq!(known, always);
        // Numbers that were never assigned are unknown.
        let odd = Event { kind: 200, error: 200, record_type: 200, path: 1 << 31, ..event };
        let values = row(&odd, &labels);
        for name in ["Kind", "Error", "Type", "Path"] {
            let index = IoStream::COLUMNS.iter().position(|column| column.name == name).unwrap();
            assert!(values[index].is_null(), "{name}");
        }
    }
}
