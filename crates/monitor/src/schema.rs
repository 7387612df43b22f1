//! The stream of I/O events.

use fathom_cql::Type;
use fathom_cql::catalog::StreamSchema;
use fathom_insight::event::{COLUMNS, EventColumn, Get};

/// Other names of `IOOp` in the paper, whose listings and tables differ; `I00p` is the spelling of
/// its Table 3.1.
const ALIASES: [(&str, &str); 3] = [("IOP", "IOOp"), ("IOPp", "IOOp"), ("I00p", "IOOp")];

/// The stream `IOstream`: an event for each request and each response.
///
/// `Type` is `Q`, `R`, `E` or `N`, and `IOOp` is a letter, as `docs/events.md` lists them. `Kind`,
/// `Source`, `Error` and `Confidence` are names for the numbers listed there. `CacheHit` is `miss`,
/// `hit` or `part`. An unknown value is null.
pub fn io_stream() -> StreamSchema {
    let mut schema =
        StreamSchema::new("IOstream", &COLUMNS.map(|column| (column.name, kind(&column))));
    let own = |&(alias, of): &(&str, &str)| (alias.to_owned(), of.to_owned());
    // A comparison with any other text matches no row.
    let known = |column: &EventColumn| match column.get {
        Get::Letter(texts, _) | Get::Word(texts, _) => {
            Some((column.name.to_owned(), texts.iter().map(ToString::to_string).collect()))
        }
        _ => None,
    };
    schema.values = COLUMNS.iter().filter_map(known).collect();
    schema.aliases = ALIASES.iter().map(own).collect();
    schema
}

/// The type of a column's values.
fn kind(column: &EventColumn) -> Type {
    if column.get.is_text() { Type::Text } else { Type::Integer }
}

/// The type of the column with this name; `None` if there is no such column.
pub(crate) fn kind_of(name: &str) -> Option<Type> {
    COLUMNS.iter().find(|column| column.name == name).map(kind)
}

/// Whether the column with this name holds instants of the host's clock.
pub(crate) fn is_time(name: &str) -> bool {
    COLUMNS.iter().any(|column| column.name == name && column.get.is_time())
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

    #[test]
    fn every_name_is_unique() {
        let schema = io_stream();
        for (position, column) in schema.columns.iter().enumerate() {
            assert_eq!(schema.find(&column.name), Some(position));
        }
    }

    /// The rows of the page's table of columns: for each, the columns' names and types, and the
    /// meaning.
    fn documented() -> Vec<(Vec<(String, String)>, String)> {
        let page = include_str!("../../../docs/queries.md");
        let section = page.split("\n## The columns of IOstream\n").nth(1).unwrap();
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
    fn the_page_has_all_columns_their_types_and_their_texts() {
        let rows = documented();
        let mut columns: Vec<(String, String)> =
            rows.iter().flat_map(|(columns, _)| columns.clone()).collect();
        columns.sort();
        let mut expected: Vec<(String, String)> =
            COLUMNS.iter().map(|c| (c.name.to_owned(), kind(c).to_string())).collect();
        expected.sort();
        assert_eq!(columns, expected);
        for (column, texts) in io_stream().values {
            let is_row = |(columns, _): &&(Vec<(String, _)>, _)| {
                columns.iter().any(|(name, _)| *name == column)
            };
            let (_, meaning) = rows.iter().find(is_row).unwrap();
            for text in texts {
                assert!(meaning.contains(&format!("`{text}`")), "{column} may be {text}");
            }
        }
    }
}
