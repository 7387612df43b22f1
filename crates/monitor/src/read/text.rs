//! A reader of formats in which each line is independent of the others.

use super::intern::Texts;
use super::lines::{End, LINE_MAX, Lines};
use super::{BATCH_ROWS, Batch, ReadError, ReadReport, Reader, Tally};

/// A format of independent lines.
pub trait LineFormat: Send {
    /// Adds the events of a line to a batch. Returns the reason if the line is invalid.
    fn line(&mut self, line: &[u8], texts: &mut Texts, batch: &mut Batch) -> Result<(), String>;
}

/// A reader of such a format.
pub struct LineReader<F> {
    lines: Lines,
    tally: Tally,
    texts: Texts,
    format: F,
}

impl<F: LineFormat> LineReader<F> {
    /// Reads lines in this format.
    pub fn new(name: &str, lines: Lines, format: F) -> Self {
        Self { lines, tally: Tally::new(name), texts: Texts::new(), format }
    }
}

impl<F: LineFormat> Reader for LineReader<F> {
    fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, ReadError> {
        batch.clear();
        while batch.len() < BATCH_ROWS {
            match self.lines.find(0, batch.is_empty()).map_err(|error| self.tally.io(&error))? {
                End::Line { length, next } => {
                    let line = self.lines.bytes(0..length);
                    if !line.trim_ascii().is_empty() {
                        self.tally.lines += 1;
                        if let Err(message) = self.format.line(line, &mut self.texts, batch) {
                            self.tally.bad(self.lines.number() + 1, &message)?;
                        }
                    }
                    self.lines.consume(next, 1);
                }
                End::TooLong => {
                    self.lines.skip().map_err(|error| self.tally.io(&error))?;
                    self.tally.lines += 1;
                    let message = format!("a line of more than {LINE_MAX} bytes");
                    self.tally.bad(self.lines.number(), &message)?;
                }
                End::Input | End::Wait => break,
            }
        }
        self.tally.batch(batch)
    }

    fn report(&self) -> &ReadReport {
        &self.tally.report
    }
}
