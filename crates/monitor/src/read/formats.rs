//! The table of the formats that traces of other programs have.

use super::columns::EventColumns;
use super::lines::Lines;
use super::requests::LineParser;
use super::source::ByteSource;
use super::{Reader, blkparse, iolog, oracle_general, requests, vscsi};

/// The beginning of a file.
pub struct Head<'h> {
    /// Its bytes, with the first line that is not blank, if it has one.
    pub bytes: &'h [u8],
    /// Whether they are the whole file.
    pub is_whole: bool,
    /// That line.
    pub line: Option<&'h [u8]>,
}

impl<'h> Head<'h> {
    /// The complete lines that are not blank.
    pub fn lines(&self) -> impl Iterator<Item = &'h [u8]> {
        let end = self.bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let whole = if self.is_whole { self.bytes } else { &self.bytes[..end] };
        whole.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty())
    }

    /// Whether there is a first line, and it is one of a format.
    fn begins(&self, is_line: impl Fn(&[u8]) -> bool) -> bool {
        self.line.is_some_and(is_line)
    }

    /// Whether the first line is a request.
    fn is_request(&self, parse: LineParser) -> bool {
        self.begins(|line| parse(line, 0).is_ok())
    }
}

/// A format of traces.
pub struct TraceFormat {
    /// Its name in messages and in `docs/commands.md`.
    pub name: &'static str,
    /// Whether a file with this beginning has the format.
    pub is: fn(&Head<'_>) -> bool,
    /// Opens such a file.
    pub open: fn(&str, &Head<'_>, ByteSource, EventColumns) -> Box<dyn Reader>,
}

/// All formats, in the order in which they are tried. A format without a mark is recognised by its
/// first lines or records, and no file has two.
pub const FORMATS: [TraceFormat; 10] = [
    TraceFormat {
        name: "CloudPhysics (vscsi)",
        is: |head| vscsi::version(head.bytes).is_some(),
        open: vscsi::reader,
    },
    TraceFormat {
        name: "libCacheSim (oracleGeneral)",
        is: oracle_general::is,
        open: oracle_general::reader,
    },
    TraceFormat {
        name: "blkparse",
        is: |head| head.begins(blkparse::is_line),
        open: |name, _, source, columns| {
            Box::new(blkparse::reader(name, Lines::new(source), columns))
        },
    },
    TraceFormat {
        name: "fio (iolog)",
        is: |head| head.begins(|line| iolog::version(line).is_some()),
        open: |name, _, source, columns| Box::new(iolog::reader(name, Lines::new(source), columns)),
    },
    TraceFormat {
        name: "Tencent",
        is: |head| head.begins(requests::is_tencent),
        open: |name, _, source, columns| requests::reader(name, source, columns, requests::tencent),
    },
    TraceFormat {
        name: "MSR Cambridge",
        is: |head| head.is_request(requests::cambridge),
        open: |name, _, source, columns| {
            requests::reader(name, source, columns, requests::cambridge)
        },
    },
    TraceFormat {
        name: "SPC",
        is: |head| head.is_request(requests::spc),
        open: |name, _, source, columns| requests::reader(name, source, columns, requests::spc),
    },
    TraceFormat {
        name: "ARC",
        is: |head| head.is_request(requests::arc),
        open: |name, _, source, columns| requests::reader(name, source, columns, requests::arc),
    },
    // The times of MQSim have no fraction, and are in another unit.
    TraceFormat {
        name: "DiskSim (ascii)",
        is: |head| head.is_request(requests::disksim) && head.lines().any(requests::has_fraction),
        open: |name, _, source, columns| requests::reader(name, source, columns, requests::disksim),
    },
    TraceFormat {
        name: "MQSim",
        is: |head| head.is_request(requests::mqsim),
        open: |name, _, source, columns| requests::reader(name, source, columns, requests::mqsim),
    },
];
