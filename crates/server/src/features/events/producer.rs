//! The producers of events: for each stream, the sources that the collector attaches to.
//!
//! A producer is a line in [`PRODUCERS`]. A source that nobody listens to costs nothing: it gets a
//! reader only while there is a listener.

use std::sync::Arc;

use fathom_insight::event::Event;
use fathom_insight::stream::IoStream;
use fathom_insight::{Name, Record, Stream};
use fathom_layers::Tap;
use fathom_layers::tap::TapReader;

use super::changes::ChangesOfDaemon;
use super::collector::Outgoing;
use super::columns::{SourceTexts, Texts};
use super::patterns::PatternsOfDisks;
use super::syscalls::CallsOfGuests;
use crate::daemon::Daemon;

/// The producers of all streams.
pub(super) static PRODUCERS: [&dyn Producer; 4] =
    [&Taps, &ChangesOfDaemon, &PatternsOfDisks, &CallsOfGuests];

/// What has the events of a stream.
pub(super) trait Producer: Sync {
    /// The position of the stream in [`STREAMS`](fathom_insight::STREAMS).
    fn stream(&self) -> usize;

    /// The sources that exist now.
    fn sources(&self, daemon: &Arc<Daemon>) -> Vec<Box<dyn Source>>;
}

/// A source of events, such as the tap of a disk.
pub(super) trait Source {
    /// A number that no other source of the stream has while the daemon runs.
    fn key(&self) -> u64;

    /// The name of the disk to which the events belong; empty if they may be of any disk.
    fn disk(&self) -> &str;

    /// Attaches a reader; `None` while there is another.
    fn attach(&self) -> Option<Box<dyn Attached>>;
}

/// An attached reader of a source. Dropping it ends the collection.
pub(super) trait Attached: Send {
    /// Moves the available events, in order of time, into `out`. Returns their number.
    fn collect(&mut self, texts: &mut Texts, out: &mut Outgoing<'_>) -> usize;

    /// The number of events dropped because a ring was full since the reader was attached.
    fn dropped(&self) -> u64;

    /// Whether the source wakes the collector, so that it need not be polled.
    fn wakes(&self) -> bool;
}

/// A reader of the records of a source.
pub(super) trait RecordReader<R>: Send {
    /// See [`Attached::wakes`].
    const WAKES: bool = false;

    /// Moves all available records into `records`, in any order.
    fn drain(&mut self, records: &mut Vec<R>);

    /// See [`Attached::dropped`].
    fn dropped(&self) -> u64;

    /// The name of a record's disk, if the source has records of several disks.
    fn disk(record: &R) -> Option<Name> {
        let _ = record;
        None
    }
}

/// The reader of a source of any stream.
pub(super) struct Reading<S: Stream, R> {
    reader: R,
    texts: SourceTexts<S>,
    drained: Vec<S::Record>,
}

impl<S: Stream, R: RecordReader<S::Record>> Reading<S, R> {
    pub fn new(reader: R, labels: &S::Labels) -> Self {
        Self { reader, texts: SourceTexts::new(labels), drained: Vec::new() }
    }
}

impl<S: Stream, R: RecordReader<S::Record>> Attached for Reading<S, R>
where
    S::Record: Record,
{
    fn collect(&mut self, texts: &mut Texts, out: &mut Outgoing<'_>) -> usize {
        self.drained.clear();
        self.reader.drain(&mut self.drained);
        // A reader returns the events of one ring after the other.
        if !self.drained.is_sorted_by_key(S::time_ns) {
            self.drained.sort_by_key(S::time_ns);
        }
        for event in &self.drained {
            if let Some(disk) = R::disk(event) {
                out.set_disk(texts.name(disk.0).as_deref().unwrap_or_default());
            }
            out.add(|collected_ns, block| texts.append(event, &self.texts, collected_ns, block));
        }
        self.drained.len()
    }

    fn dropped(&self) -> u64 {
        self.reader.dropped()
    }

    fn wakes(&self) -> bool {
        R::WAKES
    }
}

/// The taps of the disks, which have the events of `IOstream`.
struct Taps;

/// A disk with a tap.
struct TapSource {
    disk: String,
    tap: Tap,
}

impl Producer for Taps {
    fn stream(&self) -> usize {
        super::IO_STREAM
    }

    fn sources(&self, daemon: &Arc<Daemon>) -> Vec<Box<dyn Source>> {
        let source = |(disk, tap)| -> Box<dyn Source> { Box::new(TapSource { disk, tap }) };
        daemon.taps().into_iter().map(source).collect()
    }
}

impl Source for TapSource {
    fn key(&self) -> u64 {
        self.tap.disk().into()
    }

    fn disk(&self) -> &str {
        &self.disk
    }

    fn attach(&self) -> Option<Box<dyn Attached>> {
        let reader = self.tap.attach()?;
        let labels = reader.labels().clone();
        Some(Box::new(Reading::<IoStream, _>::new(reader, &labels)))
    }
}

impl RecordReader<Event> for TapReader {
    fn drain(&mut self, records: &mut Vec<Event>) {
        TapReader::drain(self, records);
    }

    fn dropped(&self) -> u64 {
        TapReader::dropped(self)
    }
}
