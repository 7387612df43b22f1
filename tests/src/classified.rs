//! The reports of the daemon's `log` layer about a request and its parts.

use std::collections::HashMap;

/// A request as the daemon reported it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Classified {
    /// The operation, such as `write`.
    pub operation: String,
    /// Its offset on the disk, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Its parts, in order. There are none, or their lengths add up to the request's.
    pub parts: Vec<Part>,
}

/// A part of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Part {
    /// Its offset on the disk, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
    /// The kind of data.
    pub kind: Kind,
    /// The source of the insight.
    pub source: Option<String>,
    /// The file's inode.
    pub inode: Option<u64>,
    /// The file system's type.
    pub fs: Option<String>,
    /// The file's path, from the root of its file system.
    pub path: Option<String>,
    /// The control group that is charged for it.
    pub cgroup: Option<String>,
    /// The name of the process.
    pub process: Option<String>,
    /// The number of the process.
    pub process_id: Option<u32>,
    /// The start of the process, in hundredths of a second since the guest's boot.
    pub process_start: Option<u64>,
    /// What the process has to do with the request.
    pub role: Option<String>,
}

/// A kind of data, as the daemon names it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Not known.
    #[default]
    Unknown,
    /// A file's contents, through the page cache.
    Data,
    /// A directory's contents.
    Directory,
    /// Another part of the file system.
    Metadata,
    /// The file system's journal.
    Journal,
    /// Memory that was swapped out.
    Swap,
    /// A file's contents, by direct I/O.
    Direct,
    /// The device itself, outside any file system.
    Device,
}

impl Kind {
    fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "unknown" => Self::Unknown,
            "data" => Self::Data,
            "directory" => Self::Directory,
            "metadata" => Self::Metadata,
            "journal" => Self::Journal,
            "swap" => Self::Swap,
            "direct" => Self::Direct,
            "device" => Self::Device,
            _ => return None,
        })
    }
}

impl Classified {
    /// The requests among the lines of a log, in order; other lines are skipped.
    ///
    /// A line is `… #ID OPERATION OFFSET+LENGTH FLAG… | LENGTH KIND key=value… | …`. The line of a
    /// completed request, with the flag `done`, may have what was learned of the parts meanwhile.
    ///
    /// # Errors
    /// With the line that begins like a request but is malformed.
    pub fn parse_log(text: &str) -> crate::Result<Vec<Self>> {
        let mut requests: Vec<Self> = Vec::new();
        // The place of the last request of each number.
        let mut places = HashMap::new();
        for line in text.lines() {
            let parsed = Self::parse(line)
                .map_err(|what| crate::Error::new(format!("{what} in the line: {line}")))?;
            match parsed {
                Some((id, false, request)) => {
                    places.insert(id, requests.len());
                    requests.push(request);
                }
                Some((id, true, done)) if !done.parts.is_empty() => {
                    let request = places.get(&id).and_then(|place| requests.get_mut(*place));
                    if let Some(request) = request.filter(|request| request.offset == done.offset) {
                        request.parts = done.parts;
                    }
                }
                _ => {}
            }
        }
        Ok(requests)
    }

    /// The number of a line's request, whether it has completed, and the request; `None` if the
    /// line is not of a request, or that has failed.
    fn parse(line: &str) -> Result<Option<(u64, bool, Self)>, String> {
        let words = words(line);
        let is_id = |word: &String| {
            word.strip_prefix('#').is_some_and(|id| !id.is_empty() && id.parse::<u64>().is_ok())
        };
        let Some(start) = words.iter().position(is_id) else { return Ok(None) };
        let [operation, rest @ ..] = &words[start + 1..] else { return Ok(None) };
        let range = rest.first().and_then(|range| {
            let (offset, length) = range.split_once('+')?;
            Some((offset.parse().ok()?, length.parse().ok()?))
        });
        let (offset, length, rest) = match range {
            Some((offset, length)) => (offset, length, &rest[1..]),
            // A flush has no range.
            None if operation == "flush" => (0, 0, rest),
            None => return Ok(None),
        };
        let flags = rest.iter().take_while(|word| *word != "|");
        if flags.clone().any(|word| word == "failed") {
            return Ok(None);
        }
        let is_done = flags.clone().any(|word| word == "done");
        let id = words[start][1..].parse().map_err(|_| "a number".to_owned())?;
        let mut request = Self { operation: operation.clone(), offset, length, parts: Vec::new() };
        let mut position = offset;
        for words in rest[flags.count()..].split(|word| word == "|").skip(1) {
            let part = Part::parse(position, words)?;
            position += part.length;
            request.parts.push(part);
        }
        if !request.parts.is_empty() && position != offset + length {
            return Err(format!("parts of {} bytes", position - offset));
        }
        Ok(Some((id, is_done, request)))
    }
}

impl Part {
    fn parse(offset: u64, words: &[String]) -> Result<Self, String> {
        let [length, kind, facts @ ..] = words else { return Err("a short part".to_owned()) };
        let number = |word: &str| word.parse().map_err(|_| format!("not a number: {word}"));
        let mut part = Self {
            offset,
            length: number(length)?,
            kind: Kind::parse(kind).ok_or_else(|| format!("not a kind of data: {kind}"))?,
            ..Self::default()
        };
        for fact in facts {
            // Words without a value, and unused keys, are skipped.
            let Some((key, value)) = fact.split_once('=') else { continue };
            match key {
                "inode" => part.inode = Some(number(value)?),
                "source" => part.source = Some(value.to_owned()),
                "fs" => part.fs = Some(value.to_owned()),
                "path" => part.path = Some(value.to_owned()),
                "cgroup" => part.cgroup = Some(value.to_owned()),
                "process" => part.process = Some(value.to_owned()),
                "pid" => part.process_id = value.parse().ok(),
                "started" => part.process_start = value.parse().ok(),
                "role" => part.role = Some(value.to_owned()),
                _ => {}
            }
        }
        Ok(part)
    }
}

/// The words of a line. A quoted text is part of its word, without its quotes and escapes.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        match character {
            ' ' => words.push(std::mem::take(&mut word)),
            '"' => quoted(&mut characters, &mut word),
            other => word.push(other),
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    words
}

/// Reads up to the closing quote. The escapes are those of Rust's `{:?}`.
fn quoted(characters: &mut std::str::Chars<'_>, word: &mut String) {
    while let Some(character) = characters.next() {
        match character {
            '"' => return,
            '\\' => match characters.next() {
                Some('n') => word.push('\n'),
                Some('t') => word.push('\t'),
                Some('r') => word.push('\r'),
                Some('0') => word.push('\0'),
                Some('u') => {
                    let digits = characters.by_ref().skip(1).take_while(|digit| *digit != '}');
                    let digits: String = digits.collect();
                    let number = u32::from_str_radix(&digits, 16).unwrap_or_default();
                    word.push(char::from_u32(number).unwrap_or(char::REPLACEMENT_CHARACTER));
                }
                Some(other) => word.push(other),
                None => return,
            },
            other => word.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_in_parts() {
        let text = r#"
2026-11-22T00:00:00Z INFO main: #7 write 4096+12288 fua | 4096 data source=page inode=12 size=30 fs="ext4" device="vda1" path="/a b | \"c\"\u{7f}\\" cgroup="/web" process="fio" pid=12 started=345 role=submitter | 8192 metadata source=flags
main #7 write 4096+12288 fua done 81250 ns
main #8 read 0+512
main #9 flush | 0 journal process="mail" pid=3
12 lines dropped
main #10 discard 0+4096 failed 3 ns: input/output error"#;
        let requests = Classified::parse_log(text).unwrap();
        let [write, read, flush] = &requests[..] else { panic!("{requests:?}") };
        assert_eq!((flush.operation.as_str(), flush.parts.len()), ("flush", 1));
        assert_eq!(flush.parts[0].process_id, Some(3));
        assert_eq!((write.operation.as_str(), write.offset, write.length), ("write", 4096, 12288));
        let data = Part {
            offset: 4096,
            length: 4096,
            kind: Kind::Data,
            source: Some("page".to_owned()),
            inode: Some(12),
            fs: Some("ext4".to_owned()),
            path: Some("/a b | \"c\"\u{7f}\\".to_owned()),
            cgroup: Some("/web".to_owned()),
            process: Some("fio".to_owned()),
            process_id: Some(12),
            process_start: Some(345),
            role: Some("submitter".into()),
        };
        let metadata = Part {
            offset: 8192,
            length: 8192,
            kind: Kind::Metadata,
            source: Some("flags".to_owned()),
            ..Part::default()
        };
        assert_eq!(write.parts, [data, metadata]);
        assert_eq!((read.operation.as_str(), read.length, read.parts.len()), ("read", 512, 0));
    }

    #[test]
    fn nonsense_is_an_error() {
        for text in [
            "x #1 read 0+4096 | 512 data",
            "x #1 read 0+512 | 512 dates",
            "x #1 read 0+512 | 512",
            "x #1 read 0+512 | 512 data inode=many",
        ] {
            assert!(Classified::parse_log(text).is_err(), "{text}");
        }
    }
}
