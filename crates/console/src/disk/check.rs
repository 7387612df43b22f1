//! `fathom disk check`: reads all data of an image.
use std::{io, os::unix::fs::FileExt, path::Path};

use fathom_control::{Bytes, count};
use fathom_image::ForeignFormat;
use rustix::fs::{Advice, fadvise};
use serde::Serialize;

use super::{CheckOptions, exact, image::Image, partitions};
use crate::{
    failure::{CommandResult, Failure, reason},
    output::{
        self,
        progress::Progress,
        style::{self, Style},
    },
};

/// The bytes of one read.
const CHUNK: usize = 1 << 20;
/// The bytes of one read when a chunk could not be read: the smallest unit that a disk loses.
const SECTOR: usize = 4096;
/// The number of bad ranges after which the check stops.
const RANGES_MAX: usize = 1000;

#[derive(Debug, PartialEq, Eq, Serialize)]
struct BadRange {
    offset: u64,
    length: u64,
    error: String,
}

#[derive(Serialize)]
struct Checked<'a> {
    path: &'a Path,
    size_bytes: u64,
    data_bytes: u64,
    unreadable: Vec<BadRange>,
    problems: Vec<String>,
}

pub(super) fn run(options: &CheckOptions) -> CommandResult {
    let image = Image::open(&options.path)?;
    let mut problems = Vec::new();
    if image.size % 512 != 0 {
        problems.push(format!(
            "its size, {} bytes, is no multiple of 512; `fathom disk resize {} {}` rounds it up",
            image.size,
            options.path.display(),
            image.size.next_multiple_of(512)
        ));
    }
    if image.size == 0 {
        problems.push("it is empty".into());
    }
    let failed = |error| Failure::io("read", &options.path, &error);
    if let Ok(Some(format)) = ForeignFormat::of(&image.file, image.size) {
        problems.push(format!(
            "it looks like a {format} image, not a raw one; convert it with `fathom disk import`"
        ));
    }
    if let Some(table) = partitions::read(&image.file, image.size).map_err(failed)? {
        problems.extend(table.problems);
    }
    let Reading { data_bytes, unreadable, stopped_at } = read_all(&image, options.format.json);
    problems.extend(stopped_at.map(|position| {
        format!("the check stopped at byte {position} of {}: too many ranges are bad", image.size)
    }));
    let checked =
        Checked { path: &options.path, size_bytes: image.size, data_bytes, unreadable, problems };
    if options.format.json {
        output::json(&checked)?;
    } else {
        output::text_line(&checked.text())?;
    }
    checked.verdict()
}

/// The data that was read.
#[derive(Default)]
struct Reading {
    data_bytes: u64,
    unreadable: Vec<BadRange>,
    /// The offset of the first data that was not read, because too many ranges were bad.
    stopped_at: Option<u64>,
}

/// Reads all extents of data, up to [`RANGES_MAX`] bad ranges.
fn read_all(image: &Image, silent: bool) -> Reading {
    // The advice is optional: an image that is read once should not evict other files from the page
    // cache.
    for advice in [Advice::Sequential, Advice::NoReuse] {
        let _ = fadvise(&image.file, 0, None, advice);
    }
    let label = format!("Reading {}", image.path.display());
    let (_, holes) = image.holes();
    let mut progress = Progress::new(label, image.size - holes).silent(silent);
    let mut buffer = vec![0; CHUNK];
    let mut reading = Reading::default();
    image.for_each_extent(|start, end| {
        for position in (start..end).step_by(CHUNK) {
            if reading.stopped_at.is_some() {
                return;
            }
            let length = (end - position).min(CHUNK as u64) as usize;
            let read = |offset, buffer: &mut [u8]| image.file.read_at(buffer, offset);
            reading.chunk(position, &mut buffer[..length], read);
            progress.update(reading.data_bytes);
        }
    });
    reading
}

impl Reading {
    /// Reads a chunk, or stops the check if there are too many bad ranges.
    fn chunk(
        &mut self,
        offset: u64,
        buffer: &mut [u8],
        read: impl Fn(u64, &mut [u8]) -> io::Result<usize>,
    ) {
        if self.unreadable.len() >= RANGES_MAX {
            self.stopped_at.get_or_insert(offset);
            return;
        }
        read_chunk(offset, buffer, read, &mut self.unreadable);
        self.data_bytes += buffer.len() as u64;
    }
}

/// Reads a chunk; if that fails, reads it sector by sector to find the exact bad ranges.
fn read_chunk(
    offset: u64,
    buffer: &mut [u8],
    read: impl Fn(u64, &mut [u8]) -> io::Result<usize>,
    bad: &mut Vec<BadRange>,
) {
    if read_whole(offset, buffer, &read).is_ok() {
        return;
    }
    let mut position = offset;
    for sector in buffer.chunks_mut(SECTOR) {
        if let Err(error) = read_whole(position, sector, &read) {
            let length = sector.len() as u64;
            let error = reason(&error);
            match bad.last_mut() {
                Some(last) if last.offset + last.length == position && last.error == error => {
                    last.length += length;
                }
                _ => bad.push(BadRange { offset: position, length, error }),
            }
        }
        position += sector.len() as u64;
    }
}

fn read_whole(
    offset: u64,
    buffer: &mut [u8],
    read: impl Fn(u64, &mut [u8]) -> io::Result<usize>,
) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        match read(offset + filled as u64, &mut buffer[filled..]) {
            Ok(0) => return Err(io::Error::other("the file ended early")),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Checked<'_> {
    fn text(&self) -> String {
        let style = Style::stdout();
        let mut lines = Vec::new();
        for range in &self.unreadable {
            lines.push(format!(
                "{} bytes {} to {} cannot be read: {}",
                style.paint(style::BAD, "✗"),
                range.offset,
                range.offset + range.length - 1,
                range.error
            ));
        }
        for problem in &self.problems {
            lines.push(format!("{} {problem}", style.paint(style::BAD, "✗")));
        }
        if lines.is_empty() {
            lines.push(format!(
                "{} {}: {}, all {} of data can be read",
                style.paint(style::GOOD, "✓"),
                self.path.display(),
                exact(self.size_bytes),
                Bytes(self.data_bytes)
            ));
        }
        lines.join("\n")
    }

    fn verdict(&self) -> CommandResult {
        let found = self.unreadable.len() + self.problems.len();
        if found == 0 {
            return Ok(());
        }
        let found = count(found, "problem");
        let failure = Failure::new(format!("{}: {found} found", self.path.display()));
        Err(if self.unreadable.is_empty() {
            failure
        } else {
            failure.advise("copy the readable data with `ddrescue`, and check the underlying disk")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_ranges_are_narrowed_and_joined() {
        let bad_bytes = [8192..16384u64, 40960..40961];
        let read = |offset: u64, buffer: &mut [u8]| {
            let end = offset + buffer.len() as u64;
            if bad_bytes.iter().any(|bad| bad.start < end && offset < bad.end) {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            Ok(buffer.len().min(5000))
        };
        let mut bad = Vec::new();
        read_chunk(0, &mut vec![0; 64 << 10], read, &mut bad);
        let ranges: Vec<_> = bad.iter().map(|range| (range.offset, range.length)).collect();
        assert_eq!(ranges, [(8192, 8192), (40960, 4096)]);
        assert_eq!(bad[0].error, "Input/output error");
    }

    #[test]
    fn a_check_that_stops_has_the_position() {
        // Every second sector is bad: 128 ranges in each chunk.
        let read = |offset: u64, buffer: &mut [u8]| {
            if buffer.len() > SECTOR || offset / SECTOR as u64 % 2 == 1 {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            Ok(buffer.len())
        };
        let mut reading = Reading::default();
        let mut buffer = vec![0; CHUNK];
        for chunk in 0..8 {
            reading.chunk(chunk * CHUNK as u64, &mut buffer, read);
        }
        assert_eq!((reading.unreadable.len(), reading.stopped_at), (1024, None));
        for chunk in 8..10 {
            reading.chunk(chunk * CHUNK as u64, &mut buffer, read);
        }
        assert_eq!((reading.data_bytes, reading.stopped_at), (8 << 20, Some(8 << 20)));
    }
}
