//! Streams of events: their records and columns, in one table.
//!
//! A new stream is a record, a type that implements [`Stream`] with the table of its columns, and a
//! line in [`STREAMS`]. The schemas of the queries, the tests of the pages, recordings and links
//! loop over that table.

mod changes;
mod io;
mod patterns;
mod syscalls;

pub use changes::Changes;
pub use io::IoStream;
pub use patterns::Patterns;
pub use syscalls::{GuestLabels, Syscalls};

use crate::Record;

/// A stream of events.
pub trait Stream: Copy + std::fmt::Debug + Send + Sync + 'static {
    /// An event.
    type Record: Record;
    /// The texts that all events of one source have in common.
    type Labels: Default + Send;

    /// The name, as queries use it.
    const NAME: &'static str;
    /// The columns, in order. The first holds the instants of the events.
    const COLUMNS: &'static [StreamColumn<Self::Record, Self::Labels>];
    /// Other names of columns, each with the column's name.
    const ALIASES: &'static [(&'static str, &'static str)] = &[];

    /// The instant of an event, in nanoseconds of the host's monotonic clock.
    fn time_ns(record: &Self::Record) -> u64;
}

/// How the value of a column is obtained, which also defines its type.
pub enum Get<R: 'static, L: 'static> {
    /// An integer: the instant of the event.
    Time(fn(&R) -> u64),
    /// An integer: the instant at which the event was collected.
    Collected,
    /// An integer: an instant that the receiver of the event adds.
    ReceivedTime,
    /// An integer that the receiver of the event adds.
    Received,
    /// An optional integer.
    Number(fn(&R) -> Option<u64>),
    /// A text of one letter out of a list.
    Letter(&'static [&'static str], fn(&R) -> u8),
    /// A text out of a list, by its number. The first text has the number 1; 0 is none.
    Word(&'static [&'static str], fn(&R) -> u8),
    /// The same, but events of another origin may have further texts.
    OpenWord(&'static [&'static str], fn(&R) -> u8),
    /// A text by its number in [`Names`](crate::Names); 0 is none.
    Name(fn(&R) -> u32),
    /// A text that all events of a source have in common; an empty text is none.
    Label(fn(&L) -> &str),
}

impl<R, L> Get<R, L> {
    /// Whether the column holds texts; the others hold integers.
    pub const fn is_text(&self) -> bool {
        self.texts().is_some() || matches!(self, Self::Name(_) | Self::Label(_))
    }

    /// Whether the column holds instants of the host's clock.
    pub const fn is_time(&self) -> bool {
        matches!(self, Self::Time(_) | Self::Collected | Self::ReceivedTime)
    }

    /// The texts that the column may hold in an event of the daemon, if the column has such a list.
    pub const fn texts(&self) -> Option<&'static [&'static str]> {
        match self {
            Self::Letter(texts, _) | Self::Word(texts, _) | Self::OpenWord(texts, _) => Some(texts),
            _ => None,
        }
    }
}

/// A column of a stream with these records and labels.
pub struct StreamColumn<R: 'static, L: 'static> {
    /// The name.
    pub name: &'static str,
    /// How its value is obtained.
    pub get: Get<R, L>,
}

/// The column `name` of a stream's table.
const fn column<R, L>(name: &'static str, get: Get<R, L>) -> StreamColumn<R, L> {
    StreamColumn { name, get }
}

/// A column, without the way to its value.
#[derive(Clone, Copy, Debug)]
pub struct ColumnKind {
    /// The name.
    pub name: &'static str,
    /// Whether it holds texts; the others hold integers.
    pub is_text: bool,
    /// Whether it holds instants of the host's clock.
    pub is_time: bool,
    /// The texts that it may hold in an event of the daemon, if it has such a list.
    pub texts: Option<&'static [&'static str]>,
    /// Whether events of another origin may have further texts.
    pub is_open: bool,
}

/// A row of the table of streams.
#[derive(Clone, Copy, Debug)]
pub struct StreamKind {
    /// The name, as queries use it.
    pub name: &'static str,
    /// Other names of columns, each with the column's name.
    pub aliases: &'static [(&'static str, &'static str)],
    columns: fn() -> Vec<ColumnKind>,
}

impl StreamKind {
    const fn of<S: Stream>() -> Self {
        Self { name: S::NAME, aliases: S::ALIASES, columns: columns::<S> }
    }

    /// The columns, in order.
    pub fn columns(&self) -> Vec<ColumnKind> {
        (self.columns)()
    }
}

fn columns<S: Stream>() -> Vec<ColumnKind> {
    let kind = |column: &StreamColumn<S::Record, S::Labels>| ColumnKind {
        name: column.name,
        is_text: column.get.is_text(),
        is_time: column.get.is_time(),
        texts: column.get.texts(),
        is_open: matches!(column.get, Get::OpenWord(..)),
    };
    S::COLUMNS.iter().map(kind).collect()
}

/// All streams. Blocks of live recordings have the position of their stream in this table, so a new
/// stream is added at the end. `IOstream` is first: it is the stream of files and programs that
/// know a single one.
pub static STREAMS: [StreamKind; 4] = [
    StreamKind::of::<IoStream>(),
    StreamKind::of::<Changes>(),
    StreamKind::of::<Patterns>(),
    StreamKind::of::<Syscalls>(),
];

/// The position of a stream in [`STREAMS`], by its name in any case.
pub fn position(name: &str) -> Option<usize> {
    STREAMS.iter().position(|stream| stream.name.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_the_first_column_has_the_instants() {
        for (at, stream) in STREAMS.iter().enumerate() {
            assert_eq!(position(&stream.name.to_uppercase()), Some(at));
            let columns = stream.columns();
            assert!(columns[0].is_time);
            for (at, column) in columns.iter().enumerate() {
                let is_same = |other: &ColumnKind| other.name.eq_ignore_ascii_case(column.name);
                assert_eq!(columns.iter().position(is_same), Some(at), "{}", column.name);
            }
            for (_, of) in stream.aliases {
                assert!(columns.iter().any(|column| column.name == *of), "{of}");
            }
        }
        assert_eq!((STREAMS[0].name, position("else")), ("IOstream", None));
    }
}
