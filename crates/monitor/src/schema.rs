//! The schemas of the streams.

use fathom_cql::Type;
use fathom_cql::catalog::{Catalog, StreamSchema};
use fathom_insight::STREAMS;
use fathom_insight::stream::{ColumnKind, StreamKind, position};

/// The stream `IOstream`: an event for each request and each response.
///
/// `Type` is `Q`, `R`, `E` or `N`, and `IOOp` is a letter, as `docs/events.md` lists them. `Kind`,
/// `Source`, `Error` and `Confidence` are names for the numbers listed there. `CacheHit` is `miss`,
/// `hit` or `part`. An unknown value is null.
pub fn io_stream() -> StreamSchema {
    schema_of(&STREAMS[0])
}

/// All streams that the daemon has, in the order of [`STREAMS`].
pub fn streams() -> Vec<StreamSchema> {
    STREAMS.iter().map(schema_of).collect()
}

/// A catalogue of all streams that the daemon has.
pub(crate) fn catalog() -> Catalog {
    Catalog { streams: streams() }
}

fn schema_of(stream: &StreamKind) -> StreamSchema {
    let columns = stream.columns();
    let kinds: Vec<_> = columns.iter().map(|column| (column.name, kind(column))).collect();
    let mut schema = StreamSchema::new(stream.name, &kinds);
    let own = |&(alias, of): &(&str, &str)| (alias.to_owned(), of.to_owned());
    // A comparison with any other text matches no row.
    let known = |column: &ColumnKind| {
        let texts = column.texts.filter(|_| !column.is_open)?;
        Some((column.name.to_owned(), texts.iter().map(ToString::to_string).collect()))
    };
    schema.values = columns.iter().filter_map(known).collect();
    schema.aliases = stream.aliases.iter().map(own).collect();
    schema
}

/// The type of a column's values.
fn kind(column: &ColumnKind) -> Type {
    if column.is_text { Type::Text } else { Type::Integer }
}

/// The type of the column of `IOstream` with this name; `None` if there is no such column.
pub(crate) fn kind_of(name: &str) -> Option<Type> {
    STREAMS[0].columns().iter().find(|column| column.name == name).map(kind)
}

/// Whether the column with this name holds instants of the host's clock. A stream of a script's own
/// may have columns of any stream.
pub(crate) fn is_time(stream: &str, name: &str) -> bool {
    let is_it = |kind: &StreamKind| {
        kind.columns().iter().any(|column| column.name == name && column.is_time)
    };
    match position(stream) {
        Some(known) => is_it(&STREAMS[known]),
        None => STREAMS.iter().any(is_it),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_any_case_and_by_alias() {
        let schema = io_stream();
        for name in ["IOOp", "ioop", "IOp", "IOPp", "IOP", "I00p"] {
            assert_eq!(schema.find(name), Some(2), "{name}");
        }
        assert_eq!(schema.find("BlkTapTS"), Some(0));
        assert_eq!(schema.find("IP"), Some(11));
        assert_eq!(schema.find("processid"), Some(20));
        assert_eq!(schema.find("nothing"), None);
    }

    /// The rows of the page's table of a stream's columns: for each, the columns' names and types,
    /// and the meaning.
    fn documented(stream: &str) -> Vec<(Vec<(String, String)>, String)> {
        let page = include_str!("../../../docs/queries.md");
        let title = format!("\n## The columns of {stream}\n");
        let section = page.split(&title).nth(1).expect("the page has the stream");
        let rows = section.split("\n## ").next().unwrap().lines();
        let rows = rows.filter(|line| line.starts_with("| `"));
        rows.map(|line| {
            let cells: Vec<&str> = line.split(" | ").collect();
            let names = cells[0].split('`').skip(1).step_by(2);
            let types: Vec<&str> = cells[1].split(", ").collect();
            // A single type applies to all columns of the row.
            let types = types.iter().chain(std::iter::repeat(types.last().unwrap()));
            let columns = names.zip(types).map(|(name, kind)| (name.into(), (*kind).into()));
            (columns.collect(), cells[2].to_owned())
        })
        .collect()
    }

    #[test]
    fn the_page_has_all_streams_their_columns_types_and_texts() {
        for stream in &STREAMS {
            let rows = documented(stream.name);
            let mut columns: Vec<(String, String)> =
                rows.iter().flat_map(|(columns, _)| columns.clone()).collect();
            columns.sort();
            let kinds = stream.columns();
            let mut expected: Vec<(String, String)> =
                kinds.iter().map(|c| (c.name.to_owned(), kind(c).to_string())).collect();
            expected.sort();
            assert_eq!(columns, expected);
            for column in kinds.iter().filter(|column| !column.is_open || stream.name != "IOstream")
            {
                let is_row = |(columns, _): &&(Vec<(String, _)>, _)| {
                    columns.iter().any(|(name, _)| *name == column.name)
                };
                let (_, meaning) = rows.iter().find(is_row).unwrap();
                for text in column.texts.unwrap_or_default() {
                    assert!(
                        meaning.contains(&format!("`{text}`")),
                        "{} may be {text}",
                        column.name
                    );
                }
            }
        }
    }
}
