//! The columns of an event.

use std::sync::Arc;

use fathom_block::{ErrorKind, Kind};
use fathom_insight::{Confidence, Name, Names, Source};
use fathom_layers::tap::{Event, Labels};
use fathom_monitor::recording::{BlockBuilder, Cell};

/// The texts that are found without a look into the table of names.
const RECENT: usize = 4096;

/// Texts of names and numbers.
pub(super) struct Texts {
    names: Arc<Names>,
    recent: Vec<Option<(u32, Arc<str>)>>,
    letters: Vec<Arc<str>>,
    kinds: Vec<Arc<str>>,
    errors: Vec<Arc<str>>,
    hits: Vec<Arc<str>>,
    sources: Vec<Arc<str>>,
    confidences: Vec<Arc<str>>,
}

/// The labels of a disk as texts; `None` where there is none.
pub(super) struct LabelTexts {
    vm_name: Option<Arc<str>>,
    virtual_disk: Option<Arc<str>>,
    physical_disk: Option<Arc<str>>,
}

impl LabelTexts {
    pub fn new(labels: &Labels) -> Self {
        let text = |text: &str| (!text.is_empty()).then(|| Arc::from(text));
        Self {
            vm_name: text(&labels.vm_name),
            virtual_disk: text(&labels.virtual_disk),
            physical_disk: text(&labels.physical_disk),
        }
    }
}

fn list<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<Arc<str>> {
    texts.into_iter().map(Arc::from).collect()
}

fn text(text: Option<&Arc<str>>) -> Cell<'_> {
    text.map_or(Cell::Null, Cell::Text)
}

/// A text of a list whose first has the number 1; 0 is none.
fn listed(texts: &[Arc<str>], number: u8) -> Cell<'_> {
    text(usize::from(number).checked_sub(1).and_then(|place| texts.get(place)))
}

/// A number of which 0 is none.
fn some(number: u64) -> Cell<'static> {
    if number == 0 { Cell::Null } else { Cell::Integer(number as i64) }
}

impl Texts {
    pub fn new(names: Arc<Names>) -> Self {
        let letters: Vec<String> = (0..128_u8).map(|byte| char::from(byte).to_string()).collect();
        Self {
            names,
            recent: vec![None; RECENT],
            letters: list(letters.iter().map(String::as_str)),
            kinds: list(Kind::ALL.into_iter().skip(1).map(Kind::name)),
            errors: list(ErrorKind::ALL.into_iter().map(ErrorKind::name)),
            hits: list(["miss", "hit", "part"]),
            sources: list(Source::ALL.into_iter().skip(1).map(Source::name)),
            confidences: list(Confidence::ALL.into_iter().skip(1).map(Confidence::name)),
        }
    }

    /// The text of a name, if it has one.
    fn name(&mut self, number: u32) -> Option<Arc<str>> {
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

    fn letter(&self, letter: u8) -> Cell<'_> {
        text(self.letters.get(usize::from(letter)))
    }

    /// Adds an event as a row of [`fathom_monitor::io_stream`].
    pub fn append(
        &mut self,
        event: &Event,
        labels: &LabelTexts,
        collected_ns: i64,
        block: &mut BlockBuilder,
    ) {
        let names = [event.path, event.file_system, event.cgroup, event.process, event.device];
        let names = names.map(|name| self.name(name));
        let [path, file_system, cgroup, process, device] = names.each_ref().map(Option::as_ref);
        let time_ns = event.blktap_ts as i64;
        let integer = |value: u64| Cell::Integer(value as i64);
        let cells = [
            Cell::Integer(time_ns),
            self.letter(event.record_type),
            self.letter(event.io_op),
            integer(event.req_id),
            integer(event.sector),
            integer(event.size),
            text(labels.vm_name.as_ref()),
            text(labels.virtual_disk.as_ref()),
            text(labels.physical_disk.as_ref()),
            Cell::Integer(collected_ns),
            Cell::Null,
            Cell::Null,
            listed(&self.kinds, event.kind),
            event.class.checked_sub(1).map_or(Cell::Null, |class| Cell::Integer(class.into())),
            some(event.inode),
            text(path),
            some(event.file_size),
            text(file_system),
            text(cgroup),
            text(process),
            some(event.process_id.into()),
            text(device),
            listed(&self.errors, event.error),
            integer(event.flags.into()),
            some(event.io_priority.into()),
            listed(&self.hits, event.cache_hit),
            event.layer.checked_sub(1).map_or(Cell::Null, |layer| Cell::Integer(layer.into())),
            listed(&self.sources, event.source),
            listed(&self.confidences, event.confidence),
            integer(event.queue.into()),
            some(event.write_hint.into()),
        ];
        block.append(time_ns, cells);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_those_of_the_numbers() {
        let texts = Texts::new(Arc::default());
        for source in Source::ALL.into_iter().skip(1) {
            assert_eq!(&*texts.sources[source as usize - 1], source.name());
        }
        for confidence in Confidence::ALL.into_iter().skip(1) {
            assert_eq!(&*texts.confidences[confidence as usize - 1], confidence.name());
        }
        assert_eq!(&*texts.kinds[Kind::Journal as usize - 1], Kind::Journal.name());
        assert!(matches!(listed(&texts.kinds, 0), Cell::Null));
        assert!(matches!(listed(&texts.kinds, 200), Cell::Null));
    }
}
