//! A reader for formats of which each line stands for itself.

use super::intern::Texts;
use super::lines::{End, LONGEST, Lines};
use super::{BATCH_ROWS, Batch, ReadError, ReadReport, Reader, Tally};

/// Such a format.
pub trait LineFormat: Send {
    /// Adds what a line tells, or says what is wrong with it.
    fn line(&mut self, line: &[u8], texts: &mut Texts, batch: &mut Batch) -> Result<(), String>;
}

/// Its reader.
pub struct LineReader<F> {
    lines: Lines,
    tally: Tally,
    texts: Texts,
    format: F,
}

impl<F: LineFormat> LineReader<F> {
    /// Reads lines in a format.
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
                        if let Err(what) = self.format.line(line, &mut self.texts, batch) {
                            self.tally.bad(self.lines.number() + 1, &what)?;
                        }
                    }
                    self.lines.consume(next, 1);
                }
                End::TooLong => {
                    self.lines.skip().map_err(|error| self.tally.io(&error))?;
                    self.tally.lines += 1;
                    let what = format!("a line of more than {LONGEST} bytes");
                    self.tally.bad(self.lines.number(), &what)?;
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
