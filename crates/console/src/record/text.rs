//! Live events as text: CSV, or a JSON object per line.
use std::{
    io::{self, BufWriter, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use fathom_monitor::{
    ResultSink,
    read::Batch,
    recording::{Header, RecordingSummary},
    write::{Form, Printer, PrinterOptions},
};

use crate::query::shown_times;

/// Counts the bytes on their way to a writer.
struct Counted<W> {
    out: W,
    bytes: Arc<AtomicU64>,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let count = self.out.write(data)?;
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Shows the times of events, if the file's clock is known.
pub(super) fn show_times<W: Write>(printer: &mut Printer<W>, header: &Header, form: Form) {
    if header.wall_offset_ns != 0 {
        printer.show_times(shown_times(form, header.wall_offset_ns, true));
    }
}

/// Writes events as text.
pub(super) struct TextWriter<W: Write> {
    printer: Printer<Counted<BufWriter<W>>>,
    bytes: Arc<AtomicU64>,
    events: u64,
    dropped: u64,
}

impl<W: Write> TextWriter<W> {
    /// Writes the header, if the format has one.
    pub(super) fn new(out: W, header: &Header, form: Form) -> io::Result<Self> {
        let bytes = Arc::<AtomicU64>::default();
        let out = Counted { out: BufWriter::new(out), bytes: Arc::clone(&bytes) };
        let mut printer = Printer::new(out, PrinterOptions { form, deltas: false });
        show_times(&mut printer, header, form);
        printer.begin(0, &header.streams[0].schema().columns, true)?;
        Ok(Self { printer, bytes, events: 0, dropped: 0 })
    }

    pub(super) fn append(&mut self, batch: &Batch) -> io::Result<()> {
        for (time_ns, row) in batch.times_ns.iter().zip(batch.rows()) {
            self.printer.delta(0, *time_ns, 1, &row)?;
            self.events += 1;
        }
        Ok(())
    }

    /// Text has no place for missing events: only the summary has them.
    pub(super) fn note_dropped(&mut self, count: u64) {
        self.dropped += count;
    }

    /// Writes the rows that are held, so that a reader of the file sees them.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.printer.flush()
    }

    pub(super) fn summary(&self) -> RecordingSummary {
        let bytes = self.bytes.load(Ordering::Relaxed);
        RecordingSummary { events: self.events, dropped: self.dropped, bytes }
    }

    pub(super) fn finish(self) -> io::Result<RecordingSummary> {
        let Self { printer, bytes, events, dropped } = self;
        // An empty recording has its header, too.
        printer.finish()?;
        Ok(RecordingSummary { events, dropped, bytes: bytes.load(Ordering::Relaxed) })
    }
}
